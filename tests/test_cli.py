"""The command line, called as a user calls it."""

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import geoparam as gp
from geoparam import cli


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> object:
    """Run ``geoparam ARGUMENTS`` in this process; returns its exit status or message."""
    monkeypatch.setattr(sys, "argv", ["geoparam", *arguments])
    with pytest.raises(SystemExit) as exit_info:
        cli.main()
    return exit_info.value.code


def test_demo_prints_both_errors_and_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "folder"
    assert call(monkeypatch, "demo", "--out", str(out), "--epochs", "3") == 0
    printed = capsys.readouterr().out
    assert "1.104" in printed and "0.496" in printed
    assert str(out / "levy.png") in printed
    assert (out / "levy.png").read_bytes().startswith(b"\x89PNG")


def test_help_lists_the_commands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "--help") == 0
    assert "demo" in capsys.readouterr().out


def gmp_file(folder: Path) -> Path:
    """Write the checkpoint of a converted network."""
    model = gp.convert_(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
    torch.save(model.state_dict(), folder / "gmp.pt")
    return folder / "gmp.pt"


def test_fold_writes_a_plain_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plain[1].safetensors"
    assert call(monkeypatch, "fold", str(gmp_file(tmp_path)), "--out", str(out)) == 0
    assert sorted(load_file(out)) == ["0.bias", "0.weight", "2.bias", "2.weight"]
    printed = capsys.readouterr().out
    assert "layers folded" in printed and "Note:" in printed and str(out) in printed


def test_fold_says_why_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, out = gmp_file(tmp_path), tmp_path / "plain.safetensors"
    torch.save(nn.Linear(2, 2), tmp_path / "whole.pt")
    for arguments, reason in (
        ((str(tmp_path / "whole.pt"), "--out", str(out)), "export its state_dict"),
        ((str(file), "--out", str(file)), "NAME.safetensors"),
        ((str(file), "--out", str(out), "--like", str(file)), "not a plain model"),
        ((str(file), "--out", str(out), "--arch", "a:b", "--like", str(file)), "give one"),
        ((str(file), "--out", str(out), "--arch", "torch.nn:Identity"), "Unexpected: 0.weight"),
    ):
        message = str(call(monkeypatch, "fold", *arguments))
        assert message.startswith("Nothing written.") and reason in message
    assert not out.exists()


@pytest.mark.parametrize(
    ("missing", "advice"),
    [("torchvision", "'geoparam[vision]'"), ("transformers", "'geoparam[hf]'"), ("timm", "timm")],
)
def test_fold_names_the_missing_library(
    missing: str, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == missing]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    arguments = (str(gmp_file(tmp_path)), "--out", str(tmp_path / "plain.safetensors"))
    message = str(call(monkeypatch, "fold", *arguments, "--arch", f"{missing}:resnet18"))
    assert message.endswith(f"pip install {advice}")


@pytest.mark.parametrize(
    ("missing", "extra"), [("typer", "cli"), ("rich", "cli"), ("matplotlib", "plots")]
)
def test_missing_extra_is_named(
    missing: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == missing]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "geoparam.plots", raising=False)
    monkeypatch.setitem(sys.modules, missing, None)
    message = str(call(monkeypatch, "demo", "--out", str(tmp_path)))
    assert f"pip install 'geoparam[{extra}]'" in message


def test_other_missing_modules_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken_app() -> None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr(cli, "app", broken_app)
    with pytest.raises(ModuleNotFoundError, match="torch"):
        cli.main()
