"""The command line, called as a user calls it."""

import dataclasses
import importlib.metadata
import inspect
import io
import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest
import tiny_images
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import nn

import geoparam as gp
from geoparam_lab import cli, experiments
from geoparam_lab.cli import options, running, tools
from geoparam_lab.experiments import ENTRIES, levy, perturbation, toys
from geoparam_lab.run_folder import Run
from geoparam_lab.training.images.loop import Training


class Told(NamedTuple):
    """How a command ended: its status, and what it printed."""

    status: Any
    out: str
    err: str


Geoparam = Callable[..., Told]


@pytest.fixture
def geoparam(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Geoparam:
    """Runs ``geoparam WORDS`` in this process."""

    def run(*words: object) -> Told:
        monkeypatch.setattr(sys, "argv", ["geoparam", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return Told(ended.value.code, *capfd.readouterr())

    return run


def test_demo_needs_neither_file_nor_network_and_goes_on_with_what_is_there(
    tmp_path: Path, geoparam: Geoparam, monkeypatch: pytest.MonkeyPatch, undrawn: None
) -> None:
    monkeypatch.setenv("GEOPARAM_DATA", str(tmp_path))  # whatever lies there
    monkeypatch.setattr("geoparam_lab.data.table_files.fetch", None)
    out = tmp_path / "new" / "folder"
    short = ("demo", "--out", out, "--epochs", 2, "--seeds", 1, "--jobs", 1)
    status, printed, errors = geoparam(*short)
    assert status == 0 and errors == ""  # no bars where there is no terminal
    assert "by 65° under SP" in printed.replace("\n", " ")
    assert len(Run.open(out / "levy").records()) == 4 * 2
    assert "None of this shows" in printed and "generated" in printed
    assert str(out / "report.html") in printed.replace("\n", "")
    page = (out / "report.html").read_text()
    assert "<html" in page[:500] and page.count("data-slider id=") >= 2
    assert "demo --seeds 1 --epochs 2 --out" in page and "cannot be drawn" not in page
    monkeypatch.setattr(toys, "train", None)
    assert geoparam(*short).status == 0
    assert Run.open(out / "levy").sessions()[-1]["command"].endswith("/levy --resume")
    assert "--resume" in geoparam(*short, "--no-resume").err
    commands = [Run.open(path).info["command"] for path in out.glob("[lb]*")]
    assert sorted(command.split(" --out")[0] for command in commands) == [
        "geoparam run banana --seeds 1 --epochs 2 --source generated",
        "geoparam run levy --seeds 1 --epochs 2",
    ]


def test_run_prints_the_table_and_where_everything_is(
    tmp_path: Path, geoparam: Geoparam, undrawn: None
) -> None:
    out = tmp_path / "levy"
    options = ("--methods", "sp,gmp+imn", "--seeds", 2, "--epochs", 3, "--jobs", 1)
    status, printed, errors = geoparam("run", "levy", "--out", out, *options)
    assert "| GmP+IMN | 0.1 " in printed and "1.104" in printed and str(out) in printed
    assert (status, errors) == (0, "") and "Records, curves are in" in printed  # no figures
    run = Run.open(out)
    assert run.info["command"].startswith("geoparam run levy --out")
    assert run.config["lrs"] == [0.01, 0.1] and len(run.records()) == 8


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("levy --methods sp,spp", "sp, sp+imn, wn, wn+imn, wn+mbn, bn, bn+decay, ln, gmp"),
        ("banana --source here", "KEEL, generated"),
        (
            "perturbation --methods mbn",
            "one of sp, wn, bn, in, gn, sn, ln, gmp, intrinsic; got 'mbn'",
        ),
        ("uci --datasets boston,bostn", "boston, concrete, energy"),
        ("levy --lrs 0.1,fast", "--lrs needs numbers between commas; got '0.1,fast'"),
        (
            "text --batch-sizes 16.7",
            "--batch-sizes needs whole numbers between commas; got '16.7'",
        ),
        ("imagenet32 --data missing-folder", "missing-folder"),
        ("imagenet --data missing-folder", "missing-folder"),
    ],
)
def test_mistakes_are_told_without_a_traceback(
    command: str, message: str, tmp_path: Path, geoparam: Geoparam
) -> None:
    told = geoparam("run", *command.split(), "--out", tmp_path / "run")
    assert message in told.err and told.err.count("\n") == 1 and told.status == 2
    assert not (tmp_path / "run").exists()


def replace_run(
    monkeypatch: pytest.MonkeyPatch, name: str, run: Callable[..., Run | None]
) -> dict[str, Any]:
    """Let an experiment do this instead; returns the arguments that it will be called with."""
    experiment, given = experiments.find(name), {}

    def fake(*arguments: Any, **options: Any) -> Run | None:
        bound = inspect.signature(experiment.run).bind(*arguments, **options)
        bound.apply_defaults()
        given.update(bound.arguments)
        given.update(given.pop("settings", {}))
        return run()

    fake.__signature__ = inspect.signature(experiment.run)  # type: ignore[attr-defined]
    entry = ENTRIES[name]
    module = sys.modules[f"geoparam_lab.experiments.{entry.module}"]
    monkeypatch.setattr(module, entry.record, dataclasses.replace(experiment, run=fake))
    return given


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (
            "uci --datasets energy,yacht --protocol heldout --lrs 0.1 --seeds 4 --resume",
            {"datasets": ["energy", "yacht"], "protocol": "heldout", "lrs": [0.1], "seeds": 4}
            | {"resume": True, "methods": ("sp", "wn", "bn", "gmp")},
        ),
        (
            "imagenet32 --data npz --batch-sizes 256,1024 --widths 8,8 --keep-weights "
            "--methods gmp --method bn:lr=0.4,0.8 --method sp --time-to 40,45 --select 0.1",
            {"data": Path("npz"), "batch_sizes": [256, 1024], "keep_weights": True}
            | {"methods": ["gmp"], "method": ["bn:lr=0.4,0.8", "sp"], "time_to": [40, 45]}
            | {"widths": [8, 8], "select": 0.1},
        ),
        (
            "imagenet --data jpeg --lrs 0.1,0.3 --nesterov --accumulate 2",
            {"experiment": "imagenet", "lrs": [0.1, 0.3], "nesterov": True} | {"accumulate": 2},
        ),
    ],
)
def test_options_reach_the_experiment(
    command: str,
    expected: dict[str, Any],
    tmp_path: Path,
    geoparam: Geoparam,
    monkeypatch: pytest.MonkeyPatch,
    finished: Path,
) -> None:
    name = command.split()[0]
    given = replace_run(monkeypatch, name, lambda: Run.open(finished))
    assert geoparam("run", *command.split(), "--out", tmp_path).status == 0
    given.setdefault("experiment", name)
    assert expected.items() <= given.items() and given["out"] == tmp_path


@pytest.mark.parametrize("name", ENTRIES)
def test_every_option_has_a_help_text(name: str) -> None:
    described = options.list_options(experiments.find(name))
    assert all(len(option.help) > 10 for option in described.values())


def test_help_shows_defaults(geoparam: Geoparam) -> None:
    assert "Default: sp,wn,bn,gmp." in geoparam("run", "levy", "--help").out


def test_ctrl_c_says_how_to_go_on(
    tmp_path: Path, geoparam: Geoparam, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_run(monkeypatch, "levy", Mock(side_effect=KeyboardInterrupt))
    out = tmp_path / "my run"
    assert geoparam("run", "levy", "--out", out) == (130, "", "\nInterrupted.\n")
    out.mkdir()
    status, _, told = geoparam("run", "levy", "--seeds", 3, "--out", out)
    assert status == 130 and f"geoparam run levy --seeds 3 --out '{out}' --resume" in told


def test_a_failure_on_the_way_has_another_status_than_a_mistake(
    tmp_path: Path, geoparam: Geoparam, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_run(monkeypatch, "levy", Mock(side_effect=OSError(28, "No space left on device")))
    status, _, told = geoparam("run", "levy", "--out", tmp_path)
    assert status == 1 and told == "[Errno 28] No space left on device\n"


SMALL = ("--methods", "gmp+imn", "--batch-sizes", "8", "--seeds", "1", "--epochs", "1")
SMALL += ("--precision", "fp32")


@pytest.mark.parametrize("kind", ["imagenet32", "imagenet"])
def test_images_in_both_layouts(
    kind: str, tmp_path: Path, geoparam: Geoparam, fresh_accelerate: None
) -> None:
    if kind == "imagenet32":
        data = tiny_images.write_npz(tmp_path / "data", classes=6, train=16, val=8)
        own = ("--widths", "4,4,4,4,4,4")
    else:
        pytest.importorskip("torchvision")
        data = tiny_images.write_folders(tmp_path / "data", classes=6, per_class=4)
        own = ("--size", "32", "--workers", "0", "--widths", "4")
    out = tmp_path / "run"
    status, printed, errors = geoparam("run", kind, "--data", data, "--out", out, *SMALL, *own)
    assert (status, errors) == (0, "")
    assert "GmP+IMN" in printed and "6 classes" in printed and str(out) in printed
    [record] = Run.open(out).records()
    assert record["lr"] == 0.1 and record["outcome"] == "finished"
    assert (out / "figures" / "figure4.png").exists()
    assert Run.open(out).info["command"].startswith(f"geoparam run {kind} --data")


def test_resnet50_trains_on_jpeg_files_goes_on_and_is_evaluated(
    tmp_path: Path, geoparam: Geoparam, fresh_accelerate: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ImageNet's stem, which images above 64 pixels have."""
    pytest.importorskip("torchvision")
    data = tiny_images.write_folders(tmp_path / "data", classes=3, per_class=8, size=90)
    words = ["run", "imagenet", "--data", data, "--network", "resnet50", "--widths", 4]
    words += ["--methods", "gmp+imn", "--size", 80, "--workers", 0, "--batch-sizes", 8]
    words += ["--seeds", 1, "--epochs", 6, "--lrs", 0.3, "--recalibrate", 3]
    words += ["--precision", "fp32", "--out"]
    assert geoparam(*words, tmp_path / "whole").status == 0
    evaluate, epochs = Training.end_part, []

    def end_epoch(training: Training) -> None:
        epochs.append(training.epoch)
        if epochs == [0, 1]:
            raise KeyboardInterrupt
        evaluate(training)

    monkeypatch.setattr(Training, "end_part", end_epoch)
    assert geoparam(*words, tmp_path / "run").status == 130
    assert geoparam(*words, tmp_path / "run", "--resume").status == 0
    assert epochs == [0, 1, 1, 2, 3, 4, 5]  # the first epoch is not done again
    [record], [expected] = (Run.open(tmp_path / n).records() for n in ("run", "whole"))
    assert record["top1"] == expected["top1"] > 50  # three classes
    assert record["train_loss"] == expected["train_loss"] < 1.0


def test_followers_are_silent(
    tmp_path: Path, geoparam: Geoparam, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    given = replace_run(monkeypatch, "imagenet32", lambda: None)
    assert geoparam("run", "imagenet32", "--data", "npz", "--out", tmp_path) == (0, "", "")
    assert given["progress"] is None


def test_an_interrupt_before_a_command_begins_ends_quietly(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("geoparam_lab.cli.app", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(SystemExit, match="130"):
        cli.main()
    assert capsys.readouterr().err == "\nInterrupted.\n"


def test_the_package_is_a_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["geoparam", "run", "imagenet", "--help"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_module("geoparam", run_name="__main__")
    assert "Usage: geoparam run imagenet" in capsys.readouterr().out


def test_a_terminal_shows_a_bar_with_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setenv("TERM", "xterm")
    console = Console(file=screen, force_terminal=True, width=120)
    monkeypatch.setattr(running, "Console", lambda stderr: console)
    with running.progress() as bar:
        assert bar is not None
        bar("Levy", 10, 40)
        bar("Levy", 20, 40)
        bar("Levy figures", 1, 4)
    assert all(text in screen.getvalue() for text in ("time left", "Levy figures", "25%"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two small runs in one folder, as demo makes them; the path of the first."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(toys, "save_figures", lambda *_: None)
        perturbation.run(folder / "units", seeds=5)
        levy.run(folder / "levy", methods=["sp", "gmp"], seeds=2, epochs=3, jobs=1)
    return folder / "units"


def test_table_prints_or_writes(finished: Path, tmp_path: Path, geoparam: Geoparam) -> None:
    assert "| SP " in geoparam("table", finished).out
    out = tmp_path / "sub" / "table.md"
    assert geoparam("table", finished, "--out", out) == (0, "", "")
    assert "| SP " in out.read_text()
    told = geoparam("table", tmp_path / "nothing")
    assert "does not exist" in told.err and told.status == 2


def test_a_terminal_without_the_signs_of_a_table_shows_the_rest(
    finished: Path, geoparam: Geoparam, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding="ascii"))
    assert geoparam("table", finished).status == 0
    assert b"| SP " in printed.getvalue() and b"?" in printed.getvalue()


def test_report_writes_one_page_of_a_folder_of_runs(
    finished: Path, tmp_path: Path, geoparam: Geoparam
) -> None:
    out = tmp_path / "page.html"
    status, printed, _ = geoparam("report", finished.parent, "--out", out)
    assert status == 0 and str(out) in printed
    titles = [experiments.find(name).title for name in ("levy", "perturbation")]
    assert all(title in out.read_text() for title in titles)


@pytest.mark.parametrize("command", ["table", "report"])
def test_a_damaged_run_is_left_out_and_named(
    command: str, tmp_path: Path, geoparam: Geoparam, finished: Path
) -> None:
    shutil.copytree(finished, tmp_path / "runs" / "b")
    for name, content in (("a", "{"), ("c", '{"method": "sp"}\n')):
        shutil.copytree(finished, tmp_path / "runs" / name)
        (tmp_path / "runs" / name / "metrics.jsonl").write_text(f"{content}\n")
    out = tmp_path / "out"
    told = geoparam(command, tmp_path / "runs", "--out", out).status
    assert "Left out: " in told and "a/metrics.jsonl, line 1" in told and "c/metrics" in told
    assert "Perturbed units: b" in out.read_text()


def test_a_pipe_that_is_closed_ends_the_command_quietly(finished: Path) -> None:
    command = [sys.executable, "-m", "geoparam", "table", *[str(finished)] * 100]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""


def test_bench_lists_runs_and_refuses(
    geoparam: Geoparam, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    listed = geoparam("bench").out
    assert "weight" in listed and "timing" not in listed
    status, _, errors = geoparam("bench", "turns", "--steps", "few")
    assert status == 2 and "invalid int value: 'few'" in errors
    assert "one of conversion" in geoparam("bench", "fast").err
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tools, "__file__", str(tmp_path / "a" / "b" / "c" / "tools.py"))
    told = geoparam("bench").err
    assert "a checkout" in told and "pip install" in told and "python -m" in told


def test_help_lists_the_commands_and_version_is_the_packages(geoparam: Geoparam) -> None:
    commands = "demo run table report fold bench".split()
    assert all(f" {name} " in geoparam("--help").out for name in commands)
    assert all(f" {name} " in geoparam("run", "--help").out for name in ENTRIES)
    said = f"geoparam {gp.__version__}, torch {importlib.metadata.version('torch')}\n"
    assert geoparam("--version") == (0, said, "")


@pytest.mark.parametrize("words", ["--version", "--help", "run", "run --help", "demo --help"])
def test_help_and_version_do_not_import_torch(words: str) -> None:
    code = (
        "import sys; from geoparam_lab.cli import main\n"
        "try: main()\n"
        "finally: sys.exit('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code, *words.split()]
    assert subprocess.run(command, capture_output=True).returncode == 0


@pytest.mark.parametrize("columns", [60, 80])
def test_help_has_panels_that_fit_a_plain_narrow_terminal(columns: int) -> None:
    command = [sys.executable, "-m", "geoparam", "run", "imagenet32", "--help"]
    plain = os.environ | {"TERM": "dumb", "COLUMNS": str(columns), "PYTHONIOENCODING": "utf-8"}
    lines = subprocess.run(command, env=plain, capture_output=True, encoding="utf-8").stdout
    titles = ["Options", "Settings"]
    assert [title for title in titles if f"─ {title} ─" in lines] == titles
    assert "\x1b" not in lines and max(map(len, lines.splitlines())) <= columns
    assert all(
        f" {option} " in lines for option in ("--methods", "--batch-sizes", "--label-smoothing")
    )


@pytest.fixture
def gmp_file(tmp_path: Path) -> Path:
    """The checkpoint of a converted network."""
    model = gp.convert_(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
    save_file(model.state_dict(), tmp_path / "gmp.safetensors")
    return tmp_path / "gmp.safetensors"


def test_fold_writes_a_plain_checkpoint(
    gmp_file: Path, tmp_path: Path, geoparam: Geoparam
) -> None:
    out = tmp_path / "plain[1].safetensors"
    status, printed, _ = geoparam("fold", gmp_file, out)
    assert sorted(load_file(out)) == ["0.bias", "0.weight", "2.bias", "2.weight"]
    assert status == 0 and "If a layer is a convolution, give --like" in printed
    assert str(out) in printed


EVIL = "\x1b]0;owned\x07\u202e"


def test_names_in_files_do_not_steer_the_terminal(
    tmp_path: Path, geoparam: Geoparam, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    state = {f"{EVIL}.latitude": torch.zeros(4, 3), f"{EVIL}.r": -torch.ones(4)}
    save_file(state, "a.safetensors")
    run = Run.create("run", "levy", {"methods": ["sp"]}, "geoparam run levy", key=("seed",))
    run.append({"method": EVIL, "seed": 0, "lr": 0.1, "test_rmse": 1.0})
    fold = "fold a.safetensors b.safetensors"
    commands = (fold, f"{fold} --force --like a.safetensors", "table run")
    shown = "".join(str(part) for command in commands for part in geoparam(*command.split()))
    assert r"\x1b]0;owned\x07\u202e" in shown
    assert not any(character in shown for character in EVIL if not character.isprintable())


@pytest.mark.parametrize("command", ["report", "table"])
@pytest.mark.parametrize("name", ["metrics.jsonl", "notes.txt"])
def test_nothing_is_written_over_unasked(
    command: str, name: str, tmp_path: Path, geoparam: Geoparam, finished: Path
) -> None:
    path = tmp_path / name
    path.write_text("precious")
    arguments = (command, finished, "--out", path)
    assert "--force" in geoparam(*arguments).err and path.read_text() == "precious"
    assert geoparam(*arguments, "--force").status == 0 and path.read_text() != "precious"
    again = geoparam(*arguments)  # a page of ours may be written anew
    assert again.status == 0 if command == "report" else "--force" in again.err


def test_demo_leaves_a_page_that_is_not_its_own(tmp_path: Path, geoparam: Geoparam) -> None:
    (tmp_path / "report.html").write_text("precious")
    assert "--force" in geoparam("demo", "--out", tmp_path).err
    assert (tmp_path / "report.html").read_text() == "precious"


def test_fold_says_why_not(gmp_file: Path, tmp_path: Path, geoparam: Geoparam) -> None:
    out, whole = tmp_path / "plain.safetensors", tmp_path / "whole.pt"
    torch.save(nn.Linear(2, 2), whole)
    for arguments, reason in (
        ((whole, out), "only safetensors files are read"),
        ((gmp_file, tmp_path / "plain.pt"), "NAME.safetensors"),
        ((gmp_file, out, "--like", gmp_file), "not a plain model"),
    ):
        told = geoparam("fold", *arguments)
        assert told.err.startswith("Nothing written. ") and reason in told.err
        assert told.status == 2
    assert not out.exists()


@pytest.mark.parametrize(
    ("missing", "extra"), [("typer", "cli"), ("rich", "cli"), ("matplotlib", "plots")]
)
def test_missing_extra_is_named(
    missing: str, extra: str, tmp_path: Path, geoparam: Geoparam, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = (missing, "geoparam_lab.cli.", "geoparam.plots", "geoparam_lab.plots")
    for name in [name for name in sys.modules if f"{name}.".startswith(gone)]:
        if name != "geoparam_lab.cli":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    assert f"pip install 'geoparam[{extra}]'" in geoparam("demo", "--out", tmp_path).status


@pytest.mark.parametrize("missing", ["accelerate", "optuna", "tensorboard", "torchvision", "xlrd"])
def test_extras_of_experiments_are_named(
    missing: str, geoparam: Geoparam, monkeypatch: pytest.MonkeyPatch
) -> None:
    extra = "vision" if missing == "torchvision" else "experiments"
    error = ModuleNotFoundError(f"No module named '{missing}.part'", name=f"{missing}.part")
    replace_run(monkeypatch, "levy", Mock(side_effect=error))
    assert geoparam("run", "levy").status.endswith(f"pip install 'geoparam[{extra}]'")
