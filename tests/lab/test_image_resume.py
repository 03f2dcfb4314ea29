"""Training on images that is interrupted anywhere and resumed: the same bits as if it was not."""

import functools
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import forked
import numpy as np
import pytest
import torch
from image_runs import STEPS, Killed, assert_same_run, die, kill_at, save_half, settings, source

from geoparam_lab.training import run_checkpoints, tasks
from geoparam_lab.training.images.loop import Training, train
from geoparam_lab.training.images.settings import Settings
from geoparam_lab.training.network_training import Outcome

Uninterrupted = Callable[[str], tuple[Outcome, Path]]

pytest.importorskip("accelerate")
pytestmark = pytest.mark.usefixtures("fresh_accelerate")


RUNS: dict[str, dict[str, Any]] = {
    "angles": {"method": "gmp+imn"},
    "weight norm": {"method": "wn+mbn", "weight_decay": 0.01},
    "unit vectors": {"method": "intrinsic+imn"},
    "no momentum": {"method": "intrinsic", "momentum": 0.0},
    "autocast": {"method": "natural+imn", "precision": "bf16", "accumulate": 2, "crop": 1},
    "kept back": {
        "method": "gmp+imn",
        "schedule": "linear",
        "warmup": 0.2,
        "nesterov": True,
        "epochs": 5,
        "select": 0.25,
        "recalibrate": 3,
        "time_to": (10.0, 90.0),
    },
    "muon": {"method": "bn", "schedule": "cosine", "optimizer": "muon", "weight_decay": 0.1},
    "angular": {"method": "bn", "optimizer": "angularmuown", "rest": "sgd", "rest_lr": 0.01},
    "geometric": {
        "method": "bn",
        "optimizer": "geometric",
        "schedule": "linear",
        "nesterov": True,
    },
    "plateau": {"method": "bn", "schedule": "plateau-top1", "patience": 1, "epochs": 6},
    "best weights": {
        "method": "gmp+imn",
        "schedule": "plateau-top5",
        "patience": 2,
        "warmup": 0.3,
        "epochs": 8,
        "select": 0.25,
    },
    "turn": {"method": "bn", "optimizer": "geometric", "base": "muon", "turn": 2.0, "lr": 1e-3},
}


def kill_method(owner: Any, name: str, call: int) -> Callable[[pytest.MonkeyPatch], None]:
    """Return a patch that kills a run before the given call of a method."""
    return lambda patch: patch.setattr(owner, name, kill_at(call, getattr(owner, name), die))


mid_epoch = kill_method(Training, "train_on", 2 * STEPS + 3)
after_evaluation = kill_method(run_checkpoints, "write", 2)
POINTS = {
    "mid-epoch": mid_epoch,
    "before the end of an epoch": kill_method(Training, "end_part", 2),
    "after evaluation": after_evaluation,
    "after the end of an epoch": kill_method(Training, "train_part", 3),
    "while writing": lambda patch: patch.setattr(torch, "save", save_half(2, die)),
}


def interrupt(
    chosen: Settings,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    point: Callable[[pytest.MonkeyPatch], None] = mid_epoch,
    **options: Any,
) -> None:
    """Begin a run that is killed."""
    with monkeypatch.context() as patch, pytest.raises(Killed):
        point(patch)
        train(chosen, source(), folder, **options)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Uninterrupted:
    """The outcome and the folder of each run, which is trained once."""

    @functools.cache
    def run(name: str) -> tuple[Outcome, Path]:
        folder = tmp_path_factory.mktemp("whole")
        return train(settings(**RUNS[name]), source(), folder), folder

    return run


SLOW = (
    "weight norm",
    "no momentum",
    "angular",
    "unit vectors",
    "plateau",
    "kept back",
    "geometric",
)
NAMES: list[Any] = [name for name in RUNS if name not in SLOW]
NAMES += [pytest.param(name, marks=pytest.mark.slow) for name in SLOW]


def assert_resumes_to_the_same_run(
    name: str,
    point: str,
    uninterrupted: Uninterrupted,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected, whole = uninterrupted(name)
    has_schedule = len(set(expected.curves["lr"])) > 1
    assert has_schedule  # which a resumed run could lose
    chosen = settings(**RUNS[name])

    interrupt(chosen, folder, monkeypatch, POINTS[point])
    torch.manual_seed(9)  # as in another process
    outcome = train(chosen, source(), folder)

    assert_same_run(outcome, expected, folder, whole)


@pytest.mark.parametrize("name", NAMES)
def test_every_kind_of_run_resumes_to_the_same_bits(
    name: str, uninterrupted: Uninterrupted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_resumes_to_the_same_run(name, "mid-epoch", uninterrupted, tmp_path, monkeypatch)


@pytest.mark.parametrize("point", [point for point in POINTS if point != "mid-epoch"])
def test_a_run_resumes_from_every_point(
    point: str, uninterrupted: Uninterrupted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_resumes_to_the_same_run("angles", point, uninterrupted, tmp_path, monkeypatch)


def test_a_resumed_run_draws_the_same_random_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_on = Training.train_on

    def train_on_noise(self: Training, images: torch.Tensor, labels: torch.Tensor) -> None:
        train_on(self, images + torch.rand_like(images), labels)

    monkeypatch.setattr(Training, "train_on", train_on_noise)
    expected = train(settings("gmp"), source(), tmp_path / "whole")

    interrupt(settings("gmp"), tmp_path / "parts", monkeypatch)
    outcome = train(settings("gmp"), source(), tmp_path / "parts")

    assert_same_run(outcome, expected, tmp_path / "parts", tmp_path / "whole")


# --- damaged checkpoints ------------------------------------------------------------------------


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip(path: Path) -> None:
    """Change one byte in the middle of a file, which is within a tensor."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)


def assert_same_boundaries(folder: Path, other: Path) -> None:
    """Assert that the tracker recorded the same bytes in two runs, NaN included."""
    boundaries = np.load(folder / "boundaries.npy")
    expected = np.load(other / "boundaries.npy")
    assert boundaries.tobytes() == expected.tobytes()


@pytest.mark.parametrize("damage", [cut, flip, Path.unlink])
def test_a_run_resumes_from_the_checkpoint_before_a_damaged_one(
    damage: Callable[[Path], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    expected = train(settings(), source(), tmp_path / "whole", track=2)
    interrupt(settings(), tmp_path / "parts", monkeypatch, track=2)
    damage(tmp_path / "parts" / run_checkpoints.CHECKPOINT)

    outcome = train(settings(), source(), tmp_path / "parts", track=2)

    assert_same_run(outcome, expected, tmp_path / "parts", tmp_path / "whole")
    assert_same_boundaries(tmp_path / "parts", tmp_path / "whole")
    warning = "checkpoint.pt is damaged. The run goes on from checkpoint-before.pt."
    has_damaged_file = damage is not Path.unlink
    assert (warning in capsys.readouterr().err) == has_damaged_file


def test_two_damaged_checkpoints_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt(settings(), tmp_path, monkeypatch)
    cut(tmp_path / run_checkpoints.CHECKPOINT)
    cut(tmp_path / run_checkpoints.BEFORE)

    with pytest.raises(ValueError, match="damaged: .*-before.pt. Remove what is there"):
        train(settings(), source(), tmp_path)


def test_a_checkpoint_that_a_full_disk_cannot_take_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch has an error of its own for a full disk, which speaks of positions."""
    monkeypatch.setattr(torch, "save", Mock(side_effect=RuntimeError("unexpected pos 7 vs 3")))

    with pytest.raises(OSError, match="checkpoint.pt cannot be written .*pos 7.* --resume"):
        train(settings(), source(), tmp_path)


def test_the_checkpoint_of_another_run_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt(settings("sp"), tmp_path, monkeypatch)

    with pytest.raises(ValueError, match="is not of this run"):
        train(settings("gmp"), source(), tmp_path)


# --- killed processes ---------------------------------------------------------------------------


def train_until(folder: Path, point: str) -> None:
    """Train in a process that is killed at a step or in the middle of writing, or never."""

    def kill() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    torch.set_num_threads(1)
    if point == "step":
        Training.train_on = kill_at(5, Training.train_on, kill)
    elif point == "write":
        torch.save = save_half(2, kill)
    train(settings("gmp+imn"), source(), folder, track=2)
    for name in ("optuna", "rich", "matplotlib"):
        assert name not in sys.modules, name


@pytest.mark.parametrize("point", ["step", pytest.param("write", marks=pytest.mark.slow)])
def test_a_killed_process_is_resumed_by_another(point: str, tmp_path: Path) -> None:
    chosen = settings("gmp+imn")
    with tasks.limit_threads(1):  # as in the child: sums may depend on it
        expected = train(chosen, source(), tmp_path / "whole", track=2)

    killed = forked.start(train_until, tmp_path / "parts", point)
    assert forked.end(killed) == -signal.SIGKILL
    resumed = forked.start(train_until, tmp_path / "parts", "never")
    assert forked.end(resumed) == 0
    outcome = train(chosen, source(), tmp_path / "parts")  # reads what is finished

    assert_same_run(outcome, expected, tmp_path / "parts", tmp_path / "whole")
    assert_same_boundaries(tmp_path / "parts", tmp_path / "whole")


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["bn", "gmp+imn"])
@pytest.mark.filterwarnings("ignore:.*does not have a deterministic implementation")
def test_a_run_on_a_gpu_resumes_to_the_same_bits(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ACCELERATE_USE_CPU")
    chosen = settings(method, precision="bf16", deterministic=True)
    expected = train(chosen, source(), tmp_path / "whole")

    interrupt(chosen, tmp_path / "parts", monkeypatch)
    outcome = train(chosen, source(), tmp_path / "parts")

    assert_same_run(outcome, expected, tmp_path / "parts", tmp_path / "whole")


# --- the tracker --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Outcome, Path]:
    """A run that a tracker looks at in every second step, and its folder."""
    folder = tmp_path_factory.mktemp("tracked")
    return train(settings(), source(), folder, track=2), folder


@pytest.mark.parametrize("step", [2 * STEPS + 3, 3])
def test_the_tracker_resumes_to_the_same_bits(
    step: int,
    tracked: tuple[Outcome, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected, whole = tracked

    interrupt(settings(), tmp_path, monkeypatch, kill_method(Training, "train_on", step), track=2)
    outcome = train(settings(), source(), tmp_path, track=2)

    assert_same_run(outcome, expected, tmp_path, whole)
    assert_same_boundaries(tmp_path, whole)


def test_the_tracker_does_not_change_a_run(tracked: tuple[Outcome, Path], tmp_path: Path) -> None:
    outcome, folder = tracked

    plain = train(settings(), source(), tmp_path)

    assert_same_run(outcome, plain, folder, tmp_path)


def test_the_tracker_records_what_there_is_to_measure(tracked: tuple[Outcome, Path]) -> None:
    _, folder = tracked
    rows = np.load(folder / "boundaries.npy")
    network = rows[rows["layer"] == "(network)"]
    layer = rows[rows["layer"] == "conv2"]

    assert list(np.unique(rows["step"])) == [2, 4, 6, 8]
    assert (network["regions"] > 1).all()
    assert np.isfinite(layer["dead"]).all()


def test_a_tracker_that_comes_later_counts_the_steps_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(settings(), source(), tmp_path / "whole", track=1)

    interrupt(settings(), tmp_path / "parts", monkeypatch)
    train(settings(), source(), tmp_path / "parts", track=1)

    whole = np.load(tmp_path / "whole" / "boundaries.npy")
    parts = np.load(tmp_path / "parts" / "boundaries.npy")
    assert parts["step"][0] > 1
    assert parts["step"][-1] == whole["step"][-1]
    assert parts.tobytes() == whole[-len(parts) :].tobytes()
