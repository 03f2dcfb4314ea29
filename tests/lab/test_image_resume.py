"""Training on images that is broken off anywhere and gone on with: the same bits as if not."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
import numpy as np
import pytest
import torch
from image_runs import STEPS, Killed, assert_same_run, die, kill_at, save_half, settings, source

from geoparam_lab.training import run_checkpoints
from geoparam_lab.training.images.loop import Training, train
from geoparam_lab.training.images.settings import Settings
from geoparam_lab.training.network_training import Outcome

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
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple]:
    """The outcome and the folder of each run, done once."""
    done: dict[str, tuple[Outcome, Path]] = {}

    def get(name: str) -> tuple[Outcome, Path]:
        if name not in done:
            folder = tmp_path_factory.mktemp("whole")
            done[name] = train(settings(**RUNS[name]), source(), folder), folder
        return done[name]

    return get


SLOW = ("weight norm", "no momentum", "angular")
CASES: list[Any] = [
    pytest.param(name, "mid-epoch", marks=[pytest.mark.slow] if name in SLOW else [])
    for name in RUNS
]
CASES += [("angles", point) for point in POINTS if point != "mid-epoch"]


@pytest.mark.parametrize(("name", "point"), CASES)
def test_goes_on_as_if_nothing_had_happened(
    name: str,
    point: str,
    uninterrupted: Callable[[str], tuple[Outcome, Path]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected, whole = uninterrupted(name)
    assert len(set(expected.curves["lr"])) > 1  # there is a schedule to lose
    chosen = settings(**RUNS[name])
    interrupt(chosen, tmp_path, monkeypatch, POINTS[point])
    torch.manual_seed(9)  # another process
    outcome = train(chosen, source(), tmp_path)
    assert_same_run(outcome, expected, tmp_path, whole)


def test_random_numbers_go_on_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Training.train_on

    def noisy(self: Training, images: torch.Tensor, labels: torch.Tensor) -> None:
        step(self, images + torch.rand_like(images), labels)

    monkeypatch.setattr(Training, "train_on", noisy)
    expected = train(settings("gmp"), source(), tmp_path / "whole")
    interrupt(settings("gmp"), tmp_path / "parts", monkeypatch)
    outcome = train(settings("gmp"), source(), tmp_path / "parts")
    assert_same_run(outcome, expected, tmp_path / "parts", tmp_path / "whole")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip(path: Path) -> None:
    """Change one byte in the middle of a file, which is within a tensor."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [cut, flip, Path.unlink])
def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one(
    damage: Callable[[Path], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    expected = train(settings(), source(), tmp_path / "whole", track=2)
    interrupt(settings(), tmp_path / "parts", monkeypatch, track=2)
    damage(tmp_path / "parts" / run_checkpoints.CHECKPOINT)
    outcome = train(settings(), source(), tmp_path / "parts", track=2)
    said = "checkpoint.pt is damaged. The run goes on from checkpoint-before.pt."
    assert (said in capsys.readouterr().err) == (damage is not Path.unlink)
    assert_same_run(outcome, expected, tmp_path / "parts", tmp_path / "whole")
    whole, parts = (np.load(tmp_path / name / "boundaries.npy") for name in ("whole", "parts"))
    assert whole.tobytes() == parts.tobytes()


def test_two_damaged_checkpoints_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt(settings(), tmp_path, monkeypatch)
    cut(tmp_path / run_checkpoints.CHECKPOINT)
    cut(tmp_path / run_checkpoints.BEFORE)
    with pytest.raises(ValueError, match="damaged: .*-before.pt. Remove what is there"):
        train(settings(), source(), tmp_path)


def test_the_checkpoint_of_another_run_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt(settings("sp"), tmp_path, monkeypatch)
    with pytest.raises(ValueError, match="is not of this run"):
        train(settings("gmp"), source(), tmp_path)


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
def test_goes_on_after_a_kill(point: str, tmp_path: Path) -> None:
    torch_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the child: sums may depend on it
    expected = train(settings("gmp+imn"), source(), tmp_path / "whole", track=2)
    torch.set_num_threads(torch_threads)
    folder = tmp_path / "parts"
    for kill, code in ((point, -signal.SIGKILL), ("never", 0)):
        assert forked.end(forked.start(train_until, folder, kill)) == code
    outcome = train(settings("gmp+imn"), source(), folder)  # it is finished
    assert_same_run(outcome, expected, folder, tmp_path / "whole")
    whole, parts = (np.load(path / "boundaries.npy") for path in (tmp_path / "whole", folder))
    assert whole.tobytes() == parts.tobytes()


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["bn", "gmp+imn"])
@pytest.mark.filterwarnings("ignore:.*does not have a deterministic implementation")
def test_goes_on_to_the_bit_on_a_gpu(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ACCELERATE_USE_CPU")
    chosen = settings(method, precision="bf16", deterministic=True)
    expected = train(chosen, source(), tmp_path / "whole")
    interrupt(chosen, tmp_path / "parts", monkeypatch)
    outcome = train(chosen, source(), tmp_path / "parts")
    assert_same_run(outcome, expected, tmp_path / "parts", tmp_path / "whole")


@pytest.mark.parametrize("step", [2 * STEPS + 3, 3])
def test_the_tracker_goes_on_too(
    step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = train(settings(), source(), tmp_path / "plain")
    expected = train(settings(), source(), tmp_path / "whole", track=2)
    point = kill_method(Training, "train_on", step)
    interrupt(settings(), tmp_path / "parts", monkeypatch, point, track=2)
    outcome = train(settings(), source(), tmp_path / "parts", track=2)
    assert_same_run(outcome, expected, tmp_path / "parts", tmp_path / "whole")
    assert_same_run(outcome, plain, tmp_path / "parts", tmp_path / "plain")
    whole, parts = (np.load(tmp_path / name / "boundaries.npy") for name in ("whole", "parts"))
    assert list(np.unique(whole["step"])) == [2, 4, 6, 8]
    assert whole.tobytes() == parts.tobytes()  # NaN where there is nothing to measure
    assert (whole[whole["layer"] == "(network)"]["regions"] > 1).all()
    assert np.isfinite(whole[whole["layer"] == "conv2"]["dead"]).all()


def test_a_tracker_that_comes_later_counts_the_steps_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(settings(), source(), tmp_path / "whole", track=1)
    interrupt(settings(), tmp_path / "parts", monkeypatch)
    train(settings(), source(), tmp_path / "parts", track=1)
    whole, parts = (np.load(tmp_path / name / "boundaries.npy") for name in ("whole", "parts"))
    assert 1 < parts["step"][0] and parts["step"][-1] == whole["step"][-1]
    assert parts.tobytes() == whole[-len(parts) :].tobytes()
