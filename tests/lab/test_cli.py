"""The command line, called as a user calls it."""

import contextlib
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


class Ended(NamedTuple):
    """How a command ended: its status, and what it printed."""

    status: Any
    out: str
    err: str


Geoparam = Callable[..., Ended]


@pytest.fixture
def geoparam(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Geoparam:
    """Runs ``geoparam WORDS`` in this process."""

    def run(*words: object) -> Ended:
        monkeypatch.setattr(sys, "argv", ["geoparam", *map(str, words)])
        with pytest.raises(SystemExit) as exit:
            cli.main()
        return Ended(exit.value.code, *capfd.readouterr())

    return run


# --- demo ---------------------------------------------------------------------------------------


class Demo(NamedTuple):
    """A demo without file and network: its command, its folder and how it ended."""

    words: list[str]
    folder: Path
    ended: Ended


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    folder = tmp_path_factory.mktemp("demo") / "new" / "folder"
    words = ["demo", "--out", str(folder), "--epochs", "2", "--seeds", "1", "--jobs", "1"]
    out = io.StringIO()
    err = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GEOPARAM_DATA", str(tmp_path_factory.mktemp("data")))
        patch.setattr("geoparam_lab.data.table_files.fetch", None)
        patch.setattr(toys, "save_figures", lambda *_: None)
        patch.setattr(sys, "argv", ["geoparam", *words])
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            with pytest.raises(SystemExit) as exit:
                cli.main()
    return Demo(words, folder, Ended(exit.value.code, out.getvalue(), err.getvalue()))


def test_demo_needs_neither_file_nor_network(demo: Demo) -> None:
    assert demo.ended.status == 0
    assert len(Run.open(demo.folder / "levy").records()) == 4 * 2


def test_no_bar_is_drawn_where_there_is_no_terminal(demo: Demo) -> None:
    assert demo.ended.err == ""


def test_demo_prints_its_results_and_what_they_do_not_show(demo: Demo) -> None:
    unwrapped = demo.ended.out.replace("\n", " ")

    assert "by 65° under SP" in unwrapped
    assert "None of this shows" in unwrapped
    assert "generated" in unwrapped


def test_demo_prints_where_its_page_is(demo: Demo) -> None:
    unwrapped = demo.ended.out.replace("\n", "")

    assert str(demo.folder / "report.html") in unwrapped


def test_demo_writes_a_page(demo: Demo) -> None:
    page = (demo.folder / "report.html").read_text()

    assert "<html" in page[:500]
    assert page.count("data-slider id=") >= 2
    assert "demo --seeds 1 --epochs 2 --out" in page
    assert "cannot be drawn" not in page


def test_the_runs_of_demo_have_commands_of_their_own(demo: Demo) -> None:
    commands = [Run.open(path).info["command"] for path in demo.folder.glob("[lb]*")]

    without_folder = sorted(command.split(" --out")[0] for command in commands)
    assert without_folder == [
        "geoparam run banana --seeds 1 --epochs 2 --source generated",
        "geoparam run levy --seeds 1 --epochs 2",
    ]


def test_a_second_demo_resumes_the_first(
    demo: Demo, geoparam: Geoparam, monkeypatch: pytest.MonkeyPatch, undrawn: None
) -> None:
    monkeypatch.setattr(toys, "train", None)  # all is trained

    assert geoparam(*demo.words).status == 0
    session = Run.open(demo.folder / "levy").sessions()[-1]
    assert session["command"].endswith("/levy --resume")


def test_a_second_demo_is_refused_without_resume(demo: Demo, geoparam: Geoparam) -> None:
    assert "--resume" in geoparam(*demo.words, "--no-resume").err


def test_demo_leaves_a_page_that_is_not_its_own(tmp_path: Path, geoparam: Geoparam) -> None:
    page = tmp_path / "report.html"
    page.write_text("precious")

    assert "--force" in geoparam("demo", "--out", tmp_path).err
    assert page.read_text() == "precious"


# --- run ----------------------------------------------------------------------------------------


def test_run_prints_the_table_and_where_everything_is(
    tmp_path: Path, geoparam: Geoparam, undrawn: None
) -> None:
    out = tmp_path / "levy"
    options = "--methods sp,gmp+imn --seeds 2 --epochs 3 --jobs 1"

    status, printed, errors = geoparam("run", "levy", "--out", out, *options.split())

    assert (status, errors) == (0, "")
    assert "| GmP+IMN | 0.1 " in printed
    assert "1.104" in printed
    assert str(out) in printed
    assert "Records, curves are in" in printed  # there are no figures
    run = Run.open(out)
    assert run.info["command"].startswith("geoparam run levy --out")
    assert run.config["lrs"] == [0.01, 0.1]
    assert len(run.records()) == 8


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
def test_mistakes_are_explained_without_a_traceback(
    command: str, message: str, tmp_path: Path, geoparam: Geoparam
) -> None:
    ended = geoparam("run", *command.split(), "--out", tmp_path / "run")

    assert ended.status == 2
    assert message in ended.err
    assert ended.err.count("\n") == 1
    assert not (tmp_path / "run").exists()


def replace_run(
    monkeypatch: pytest.MonkeyPatch, name: str, run: Callable[..., Run | None]
) -> dict[str, Any]:
    """Replace what an experiment does; return the arguments that it will be called with."""
    experiment = experiments.find(name)
    signature = inspect.signature(experiment.run)
    received: dict[str, Any] = {}

    def fake(*arguments: Any, **options: Any) -> Run | None:
        bound = signature.bind(*arguments, **options)
        bound.apply_defaults()
        received.update(bound.arguments)
        received.update(received.pop("settings", {}))
        return run()

    fake.__signature__ = signature  # type: ignore[attr-defined]
    entry = ENTRIES[name]
    module = sys.modules[f"geoparam_lab.experiments.{entry.module}"]
    monkeypatch.setattr(module, entry.record, dataclasses.replace(experiment, run=fake))
    return received


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (
            "uci --datasets energy,yacht --protocol heldout --lrs 0.1 --seeds 4 --resume",
            {
                "datasets": ["energy", "yacht"],
                "protocol": "heldout",
                "lrs": [0.1],
                "seeds": 4,
                "resume": True,
                "methods": ("sp", "wn", "bn", "gmp"),
            },
        ),
        (
            "imagenet32 --data npz --batch-sizes 256,1024 --widths 8,8 --keep-weights "
            "--methods gmp --method bn:lr=0.4,0.8 --method sp --time-to 40,45 --select 0.1",
            {
                "data": Path("npz"),
                "batch_sizes": [256, 1024],
                "keep_weights": True,
                "methods": ["gmp"],
                "method": ["bn:lr=0.4,0.8", "sp"],
                "time_to": [40, 45],
                "widths": [8, 8],
                "select": 0.1,
            },
        ),
        (
            "imagenet --data jpeg --lrs 0.1,0.3 --nesterov --accumulate 2",
            {"experiment": "imagenet", "lrs": [0.1, 0.3], "nesterov": True, "accumulate": 2},
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
    received = replace_run(monkeypatch, name, lambda: Run.open(finished))

    ended = geoparam("run", *command.split(), "--out", tmp_path)

    assert ended.status == 0
    received.setdefault("experiment", name)
    assert received["out"] == tmp_path
    assert {option: received[option] for option in expected} == expected


@pytest.mark.parametrize("name", ENTRIES)
def test_every_option_has_a_help_text(name: str) -> None:
    described = options.list_options(experiments.find(name))
    for option in described.values():
        assert len(option.help) > 10


def test_help_shows_defaults(geoparam: Geoparam) -> None:
    assert "Default: sp,wn,bn,gmp." in geoparam("run", "levy", "--help").out


def test_ctrl_c_ends_quietly(
    tmp_path: Path, geoparam: Geoparam, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_run(monkeypatch, "levy", Mock(side_effect=KeyboardInterrupt))

    ended = geoparam("run", "levy", "--out", tmp_path / "run")

    assert ended == (130, "", "\nInterrupted.\n")


def test_ctrl_c_says_how_to_continue(
    tmp_path: Path, geoparam: Geoparam, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_run(monkeypatch, "levy", Mock(side_effect=KeyboardInterrupt))
    out = tmp_path / "my run"
    out.mkdir()

    ended = geoparam("run", "levy", "--seeds", 3, "--out", out)

    assert ended.status == 130
    assert f"geoparam run levy --seeds 3 --out '{out}' --resume" in ended.err


def test_a_failure_on_the_way_has_another_status_than_a_mistake(
    tmp_path: Path, geoparam: Geoparam, monkeypatch: pytest.MonkeyPatch
) -> None:
    failure = OSError(28, "No space left on device")
    replace_run(monkeypatch, "levy", Mock(side_effect=failure))

    ended = geoparam("run", "levy", "--out", tmp_path)

    assert ended.status == 1
    assert ended.err == "[Errno 28] No space left on device\n"


def assert_images_are_trained_on(
    geoparam: Geoparam, experiment: str, data: Path, out: Path, options: str
) -> None:
    """Assert that a short run over images prints, records and draws its result."""
    words = ["run", experiment, "--data", data, "--out", out, *options.split()]
    words += "--methods gmp+imn --batch-sizes 8 --seeds 1 --epochs 1 --precision fp32".split()

    status, printed, errors = geoparam(*words)

    assert (status, errors) == (0, "")
    assert "GmP+IMN" in printed
    assert "6 classes" in printed
    assert str(out) in printed
    run = Run.open(out)
    [record] = run.records()
    assert record["lr"] == 0.1
    assert record["outcome"] == "finished"
    assert run.info["command"].startswith(f"geoparam run {experiment} --data")
    assert (out / "figures" / "figure4.png").exists()


def test_packed_images_are_trained_on(
    tmp_path: Path, geoparam: Geoparam, fresh_accelerate: None
) -> None:
    data = tiny_images.write_npz(tmp_path / "data", classes=6, train=16, val=8)
    options = "--widths 4,4,4,4,4,4"

    assert_images_are_trained_on(geoparam, "imagenet32", data, tmp_path / "run", options)


def test_images_in_folders_are_trained_on(
    tmp_path: Path, geoparam: Geoparam, fresh_accelerate: None
) -> None:
    pytest.importorskip("torchvision")
    data = tiny_images.write_folders(tmp_path / "data", classes=6, per_class=4)
    options = "--size 32 --workers 0 --widths 4"

    assert_images_are_trained_on(geoparam, "imagenet", data, tmp_path / "run", options)


def test_resnet50_learns_from_jpeg_files_and_resumes_after_ctrl_c(
    tmp_path: Path, geoparam: Geoparam, fresh_accelerate: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ImageNet's stem, which images above 64 pixels have."""
    pytest.importorskip("torchvision")
    data = tiny_images.write_folders(tmp_path / "data", classes=3, per_class=8, size=90)
    options = (
        "--network resnet50 --widths 4 --methods gmp+imn --size 80 --workers 0 --batch-sizes 8 "
        "--seeds 1 --epochs 6 --lrs 0.3 --recalibrate 3 --precision fp32"
    )
    words = ["run", "imagenet", "--data", data, *options.split(), "--out"]
    end_part = Training.end_part
    epochs: list[int] = []

    def end_epoch(training: Training) -> None:
        epochs.append(training.epoch)
        if epochs == [0, 1]:
            raise KeyboardInterrupt
        end_part(training)

    assert geoparam(*words, tmp_path / "whole").status == 0
    monkeypatch.setattr(Training, "end_part", end_epoch)
    assert geoparam(*words, tmp_path / "parts").status == 130
    assert geoparam(*words, tmp_path / "parts", "--resume").status == 0

    assert epochs == [0, 1, 1, 2, 3, 4, 5]  # the first epoch is not trained again
    [record] = Run.open(tmp_path / "parts").records()
    [expected] = Run.open(tmp_path / "whole").records()
    assert record["top1"] == expected["top1"] > 50  # there are three classes
    assert record["train_loss"] == expected["train_loss"] < 1.0


def test_only_the_first_of_several_processes_prints(
    tmp_path: Path, geoparam: Geoparam, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    received = replace_run(monkeypatch, "imagenet32", lambda: None)

    ended = geoparam("run", "imagenet32", "--data", "npz", "--out", tmp_path)

    assert ended == (0, "", "")
    assert received["progress"] is None


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
    console = Console(file=screen, force_terminal=True, width=120)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(running, "Console", lambda stderr: console)

    with running.progress() as bar:
        assert bar is not None
        bar("Levy", 10, 40)
        bar("Levy", 20, 40)
        bar("Levy figures", 1, 4)

    shown = screen.getvalue()
    assert "time left" in shown
    assert "Levy figures" in shown
    assert "25%" in shown


# --- table and report ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two small runs in one folder, as demo makes them; the path of the first."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(toys, "save_figures", lambda *_: None)
        perturbation.run(folder / "units", seeds=5)
        levy.run(folder / "levy", methods=["sp", "gmp"], seeds=2, epochs=3, jobs=1)
    return folder / "units"


def test_table_prints(finished: Path, geoparam: Geoparam) -> None:
    assert "| SP " in geoparam("table", finished).out


def test_table_writes_a_file_where_one_is_named(
    finished: Path, tmp_path: Path, geoparam: Geoparam
) -> None:
    out = tmp_path / "sub" / "table.md"

    ended = geoparam("table", finished, "--out", out)

    assert ended == (0, "", "")
    assert "| SP " in out.read_text()


def test_table_of_no_folder_is_refused(tmp_path: Path, geoparam: Geoparam) -> None:
    ended = geoparam("table", tmp_path / "nothing")

    assert ended.status == 2
    assert "does not exist" in ended.err


def test_a_terminal_without_the_signs_of_a_table_shows_the_rest(
    finished: Path, geoparam: Geoparam, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(screen, encoding="ascii"))

    assert geoparam("table", finished).status == 0
    assert b"| SP " in screen.getvalue()
    assert b"?" in screen.getvalue()


def test_report_writes_one_page_of_a_folder_of_runs(
    finished: Path, tmp_path: Path, geoparam: Geoparam
) -> None:
    out = tmp_path / "page.html"

    ended = geoparam("report", finished.parent, "--out", out)

    assert ended.status == 0
    assert str(out) in ended.out
    page = out.read_text()
    assert experiments.find("levy").title in page
    assert experiments.find("perturbation").title in page


@pytest.mark.parametrize("command", ["table", "report"])
def test_damaged_runs_are_left_out_and_named(
    command: str, tmp_path: Path, geoparam: Geoparam, finished: Path
) -> None:
    runs = tmp_path / "runs"
    for name in ("cut", "whole", "without_fields"):
        shutil.copytree(finished, runs / name)
    (runs / "cut" / "metrics.jsonl").write_text("{\n")
    (runs / "without_fields" / "metrics.jsonl").write_text('{"method": "sp"}\n\n')
    out = tmp_path / "out"

    warning = geoparam(command, runs, "--out", out).status

    assert "Left out: " in warning
    assert "cut/metrics.jsonl, line 1" in warning
    assert "without_fields/metrics" in warning
    assert "Perturbed units: whole" in out.read_text()


@pytest.mark.parametrize("command", ["report", "table"])
@pytest.mark.parametrize("name", ["metrics.jsonl", "notes.txt"])
def test_files_are_overwritten_by_force_alone(
    command: str, name: str, tmp_path: Path, geoparam: Geoparam, finished: Path
) -> None:
    path = tmp_path / name
    path.write_text("precious")

    assert "--force" in geoparam(command, finished, "--out", path).err
    assert path.read_text() == "precious"
    assert geoparam(command, finished, "--out", path, "--force").status == 0
    assert path.read_text() != "precious"


@pytest.mark.parametrize("name", ["metrics.jsonl", "notes.txt"])
def test_a_page_of_ours_may_be_overwritten(
    name: str, tmp_path: Path, geoparam: Geoparam, finished: Path
) -> None:
    words = ("report", finished, "--out", tmp_path / name)
    geoparam(*words)

    assert geoparam(*words).status == 0


@pytest.mark.parametrize("name", ["metrics.jsonl", "notes.txt"])
def test_a_table_of_ours_is_not_overwritten(
    name: str, tmp_path: Path, geoparam: Geoparam, finished: Path
) -> None:
    words = ("table", finished, "--out", tmp_path / name)
    geoparam(*words)

    assert "--force" in geoparam(*words).err


def test_a_pipe_that_is_closed_ends_the_command_quietly(finished: Path) -> None:
    command = [sys.executable, "-m", "geoparam", "table", *[str(finished)] * 100]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""


def test_a_closed_output_is_not_written_to(
    finished: Path, geoparam: Geoparam, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", None)  # as after `geoparam table RUN >&-`

    assert geoparam("table", finished).status == 0


@pytest.mark.parametrize("command", ["table", "report"])
def test_a_folder_with_a_name_that_is_not_unicode_can_be_shown(
    command: str, finished: Path, tmp_path: Path, geoparam: Geoparam
) -> None:
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    try:
        shutil.copytree(finished, folder)
    except OSError:  # macOS has no such names
        pytest.skip("file names are Unicode here")

    ended = geoparam(command, folder, "--out", tmp_path / "out")

    assert ended.status == 0, ended.err
    assert r"caf\udce9" in (tmp_path / "out").read_text()


# --- bench, help and version --------------------------------------------------------------------


def test_bench_lists_the_benchmarks(geoparam: Geoparam) -> None:
    listed = geoparam("bench").out

    assert "weight" in listed
    assert "timing" not in listed  # a module that benchmarks share


def test_bench_passes_options_to_the_benchmark(geoparam: Geoparam) -> None:
    ended = geoparam("bench", "turns", "--steps", "few")

    assert ended.status == 2
    assert "invalid int value: 'few'" in ended.err


def test_bench_refuses_an_unknown_name(geoparam: Geoparam) -> None:
    assert "one of conversion" in geoparam("bench", "fast").err


def test_bench_without_a_checkout_says_how_to_get_one(
    geoparam: Geoparam, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tools, "__file__", str(tmp_path / "a" / "b" / "c" / "tools.py"))

    message = geoparam("bench").err

    assert "a checkout" in message
    assert "pip install" in message
    assert "python -m" in message


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("--help", ["demo", "run", "table", "report", "fold", "bench"]),
        ("run --help", list(ENTRIES)),
    ],
)
def test_help_lists_the_commands(words: str, names: list[str], geoparam: Geoparam) -> None:
    text = geoparam(*words.split()).out

    assert [name for name in names if f" {name} " in text] == names


def test_version_is_the_packages_and_torchs(geoparam: Geoparam) -> None:
    torch_version = importlib.metadata.version("torch")

    assert geoparam("--version") == (0, f"geoparam {gp.__version__}, torch {torch_version}\n", "")


@pytest.mark.parametrize("words", ["--version", "--help", "run", "run --help", "demo --help"])
def test_help_and_version_do_not_import_torch(words: str) -> None:
    code = (
        "import sys; from geoparam_lab.cli import main\n"
        "try: main()\n"
        "finally: sys.exit('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code, *words.split()]
    assert subprocess.run(command, capture_output=True).returncode == 0


@pytest.mark.parametrize("columns", [60, pytest.param(80, marks=pytest.mark.slow)])
def test_help_has_panels_that_fit_a_plain_narrow_terminal(columns: int) -> None:
    command = [sys.executable, "-m", "geoparam", "run", "imagenet32", "--help"]
    terminal = {"TERM": "dumb", "COLUMNS": str(columns), "PYTHONIOENCODING": "utf-8"}

    ended = subprocess.run(
        command, env=os.environ | terminal, capture_output=True, encoding="utf-8"
    )

    text = ended.stdout
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= columns
    for title in ("Options", "Settings"):
        assert f"─ {title} ─" in text
    for option in ("--methods", "--batch-sizes", "--label-smoothing"):
        assert f" {option} " in text


# --- fold ---------------------------------------------------------------------------------------


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

    ended = geoparam("fold", gmp_file, out)

    assert ended.status == 0
    assert sorted(load_file(out)) == ["0.bias", "0.weight", "2.bias", "2.weight"]
    assert "If a layer is a convolution, give --like" in ended.out
    assert str(out) in ended.out


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("whole.pt plain.safetensors", "only safetensors files are read"),
        ("gmp.safetensors plain.pt", "NAME.safetensors"),
        ("gmp.safetensors plain.safetensors --like gmp.safetensors", "not a plain model"),
    ],
)
def test_fold_says_why_nothing_is_written(
    arguments: str,
    reason: str,
    gmp_file: Path,
    geoparam: Geoparam,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(gmp_file.parent)
    torch.save(nn.Linear(2, 2), "whole.pt")

    ended = geoparam("fold", *arguments.split())

    assert ended.status == 2
    assert ended.err.startswith("Nothing written. ")
    assert reason in ended.err
    assert not Path("plain.safetensors").exists()


EVIL = "\x1b]0;owned\x07\u202e"


@pytest.mark.parametrize(
    "command",
    [
        "fold a.safetensors b.safetensors",
        "fold a.safetensors b.safetensors --force --like a.safetensors",
        "table run",
    ],
)
def test_names_in_files_do_not_steer_the_terminal(
    command: str,
    tmp_path: Path,
    geoparam: Geoparam,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    state = {f"{EVIL}.latitude": torch.zeros(4, 3), f"{EVIL}.r": -torch.ones(4)}
    save_file(state, "a.safetensors")
    run = Run.create("run", "levy", {"methods": ["sp"]}, "geoparam run levy", key=("seed",))
    run.append({"method": EVIL, "seed": 0, "lr": 0.1, "test_rmse": 1.0})
    control_characters = [character for character in EVIL if not character.isprintable()]

    ended = geoparam(*command.split())

    shown = f"{ended.status}{ended.out}{ended.err}{caplog.text}"
    assert r"\x1b]0;owned\x07\u202e" in shown
    for character in control_characters:
        assert character not in shown


# --- missing extras -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("missing", "extra"), [("typer", "cli"), ("rich", "cli"), ("matplotlib", "plots")]
)
def test_missing_extra_is_named(
    missing: str, extra: str, tmp_path: Path, geoparam: Geoparam, monkeypatch: pytest.MonkeyPatch
) -> None:
    importers = (missing, "geoparam_lab.cli.", "geoparam.plots", "geoparam_lab.plots")
    for name in list(sys.modules):
        if f"{name}.".startswith(importers) and name != "geoparam_lab.cli":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)

    message = geoparam("demo", "--out", tmp_path).status

    assert f"pip install 'geoparam[{extra}]'" in message


@pytest.mark.parametrize(
    ("missing", "extra"),
    [
        ("accelerate", "experiments"),
        ("optuna", "experiments"),
        ("tensorboard", "experiments"),
        ("torchvision", "vision"),
        ("xlrd", "experiments"),
    ],
)
def test_extras_of_experiments_are_named(
    missing: str, extra: str, geoparam: Geoparam, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = ModuleNotFoundError(f"No module named '{missing}.part'", name=f"{missing}.part")
    replace_run(monkeypatch, "levy", Mock(side_effect=error))

    message = geoparam("run", "levy").status

    assert message.endswith(f"pip install 'geoparam[{extra}]'")
