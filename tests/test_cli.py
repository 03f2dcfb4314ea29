"""The command line, called as a user calls it."""

import sys
from pathlib import Path

import pytest

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
