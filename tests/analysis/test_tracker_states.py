"""A tracker's checkpoints and files: runs that are resumed, interrupted, or out of disk space."""

import copy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from function_model import FunctionModel
from numpy.testing import assert_array_equal
from torch import Tensor, nn
from torch.testing import assert_close
from tracked_networks import TYPE, ZEROS, network, train

from geoparam import BoundaryTracker
from geoparam.analysis import Interval, UnitQuantity

X = torch.zeros(4, 3)


def draw_probe() -> Tensor:
    """Return a random batch for the networks of `tracked_networks`."""
    return torch.randn(8, 3, dtype=TYPE)


def train_epochs(model: nn.Module, tracker: BoundaryTracker, epochs: range) -> None:
    """Take one step for each epoch, seeded by its number."""
    for epoch in epochs:
        train(model, 1, tracker.step, seed=epoch)


@pytest.mark.parametrize(("name", "every"), [("bn", 1), ("gmp inside", 2)])
def test_a_resumed_run_has_the_history_of_an_uninterrupted_one(
    tmp_path: Path, name: str, every: int
) -> None:
    options: dict = {"every": every, "probe": draw_probe(), "keep": "full"}
    whole = network(name)
    whole_tracker = BoundaryTracker(whole, file=tmp_path / "whole.npy", **options)
    train_epochs(whole, whole_tracker, range(6))

    killed = network(name)
    killed_tracker = BoundaryTracker(killed, file=tmp_path / "parts.npy", **options)
    train_epochs(killed, killed_tracker, range(3))
    weights = copy.deepcopy(killed.state_dict())
    state = copy.deepcopy(killed_tracker.state_dict())
    train(killed, 2, killed_tracker.step, seed=99)  # after the checkpoint: lost

    resumed = network(name)
    resumed.load_state_dict(weights)
    resumed_tracker = BoundaryTracker(resumed, file=tmp_path / "parts.npy", resume=True, **options)
    resumed_tracker.load_state_dict(state)
    train_epochs(resumed, resumed_tracker, range(3, 6))

    # Bytes, as NaN is not equal to itself.
    whole_rows = whole_tracker.history.rows
    assert resumed_tracker.history.rows.tobytes() == whole_rows.tobytes()
    for ending in (".npy", ".units.npy"):
        whole_file = np.load(tmp_path / f"whole{ending}")
        resumed_file = np.load(tmp_path / f"parts{ending}")
        assert resumed_file.tobytes() == whole_file.tobytes()


def test_a_lost_history_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="the history begins here"):
        BoundaryTracker(network("sp"), resume=True)


# States.


def test_a_state_just_after_a_record_holds_no_directions() -> None:
    """They are those of the model's own checkpoint."""
    model = network("sp")
    tracker = BoundaryTracker(model, every=2, probe=draw_probe())

    train(model, 2, tracker.step)

    assert tracker.state_dict() == {"step": 2, "units": {"0": [8, 3], "2": [1, 8]}}


def test_a_state_between_records_holds_the_last_snapshot() -> None:
    model = network("sp")
    tracker = BoundaryTracker(model, every=2, probe=draw_probe())

    train(model, 3, tracker.step)

    assert set(tracker.state_dict()) == {"step", "units", "measured_at", "snapshot"}


def test_later_records_do_not_overwrite_a_state() -> None:
    model = network("sp")
    tracker = BoundaryTracker(model, schedule=lambda step: step != 2)
    train(model, 2, tracker.step)
    directions = tracker.state_dict()["snapshot"]["directions"]
    before = copy.deepcopy(directions)

    train(model, 4, tracker.step)

    assert_close(directions, before, rtol=0, atol=0)


def test_what_is_no_state_is_refused() -> None:
    tracker = BoundaryTracker(nn.Linear(3, 2), example_inputs=X, every=2)

    with pytest.raises(ValueError, match="what its state_dict"):
        tracker.load_state_dict({})


@pytest.mark.parametrize("steps", [1, 2])
def test_a_state_of_another_model_is_refused(steps: int) -> None:
    """After one step it holds directions, after two it does not."""
    tracker = BoundaryTracker(nn.Linear(3, 2), every=2, example_inputs=X)
    other = BoundaryTracker(nn.Linear(3, 4), every=2, example_inputs=X)
    for _ in range(steps):
        other.step()

    with pytest.raises(ValueError, match="of another model .* 4 x 3 units, .* 2 x 3"):
        tracker.load_state_dict(other.state_dict())
    assert tracker.state_dict()["step"] == 0


DAMAGES: dict[str, Callable[[dict], object]] = {
    "no directions": lambda state: state.pop("directions"),
    "directions that are text": lambda state: state.update(directions="0"),
    "a row for all": lambda state: state["directions"].update({"": torch.zeros(1, 3)}),
    "a sign for all": lambda state: state.update(sign=torch.zeros(1)),
    "no distances": lambda state: state.pop("distances"),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_state_is_refused(damage: Callable[[dict], object]) -> None:
    model = nn.Linear(3, 2)
    tracker = BoundaryTracker(model, every=2, example_inputs=X)
    tracker.step()
    state = tracker.state_dict()
    damage(state["snapshot"])

    fresh = BoundaryTracker(model, every=2, example_inputs=X)
    with pytest.raises(ValueError, match="state is damaged: .* a tensor of shape"):
        fresh.load_state_dict(state)


def test_a_damaged_state_changes_neither_the_tracker_nor_its_file(tmp_path: Path) -> None:
    model = network("sp")
    file = tmp_path / "run.npy"
    tracker = BoundaryTracker(model, every=2, probe=ZEROS, file=file)
    undisturbed = BoundaryTracker(model, every=2, probe=ZEROS)

    def step_both() -> None:
        tracker.step()
        undisturbed.step()

    train(model, 3, step_both)
    state = tracker.state_dict()
    state["snapshot"]["sign"] = torch.zeros(1)
    train(model, 1, step_both)
    with pytest.raises(ValueError, match="state is damaged"):
        tracker.load_state_dict(state)
    train(model, 2, step_both)

    expected = undisturbed.history.rows.tobytes()
    assert tracker.history.rows.tobytes() == expected
    assert np.load(file).tobytes() == expected


# Files.


def test_a_record_that_could_not_be_written_is_written_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = network("sp")
    options: dict = {"probe": draw_probe(), "keep": "full", "file": tmp_path / "run.npy"}
    tracker = BoundaryTracker(model, **options)
    train(model, 2, tracker.step)

    def fail_to_open(*args: object) -> None:
        raise OSError("full")

    with monkeypatch.context() as full_disk:
        full_disk.setattr(Path, "open", fail_to_open)
        with pytest.raises(OSError, match="full"):
            train(model, 1, tracker.step)
    train(model, 1, tracker.step)

    resumed = BoundaryTracker(model, **options, resume=True).history
    assert resumed.steps.tolist() == [1, 2, 3, 4]
    largest = resumed["0"]["rotation"].max(axis=1)
    assert_array_equal(resumed["0"]["rotation_max"], largest)


def test_a_refused_tracker_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="log is an object"):
        BoundaryTracker(network("sp"), probe=ZEROS, file=tmp_path / "a.npy", log="run.csv")

    assert list(tmp_path.iterdir()) == []


def test_where_one_of_two_files_exists_the_other_is_not_left_behind(tmp_path: Path) -> None:
    existing = tmp_path / "a.units.npy"
    existing.touch()

    with pytest.raises(FileExistsError):
        BoundaryTracker(network("sp"), probe=ZEROS, keep="full", file=tmp_path / "a.npy")

    assert list(tmp_path.iterdir()) == [existing]


def test_a_file_that_appeared_before_the_first_batch_may_be_removed(tmp_path: Path) -> None:
    model = network("sp")
    file = tmp_path / "run.npy"
    tracker = BoundaryTracker(model, file=file)
    file.touch()
    with pytest.raises(FileExistsError):
        model(ZEROS)

    file.unlink()
    train(model, 2, tracker.step)

    records, layers_and_network = 2, 3
    assert len(np.load(file)) == records * layers_and_network


# Interrupted records.


class Failing(UnitQuantity):
    """Fails in its second record."""

    name = "failing"
    calls = 0

    def measure(self, interval: Interval) -> Tensor:
        self.calls += 1
        if self.calls == 2:
            raise KeyboardInterrupt
        return interval.now.scale


@pytest.mark.parametrize("quantity", ["rotation", "displacement"])
def test_after_an_interrupted_record_the_next_movements_are_unknown(quantity: str) -> None:
    """The interrupted record has replaced the directions that the next one would compare with."""
    model = network("sp")
    tracker = BoundaryTracker(model, example_inputs=ZEROS, quantities=[quantity, Failing()])

    train(model, 1, tracker.step)
    with pytest.raises(KeyboardInterrupt):
        train(model, 1, tracker.step)
    train(model, 2, tracker.step)

    movements = tracker.history["0"][f"{quantity}_max"]
    assert np.isnan(movements).tolist() == [False, True, False]


def test_a_tracker_whose_first_batch_was_interrupted_begins_with_the_next() -> None:
    errors = [KeyboardInterrupt()]

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        if errors:
            raise errors.pop()
        return m.layers(x)

    model = FunctionModel(forward, layers=network("sp"))
    tracker = BoundaryTracker(model)

    with pytest.raises(KeyboardInterrupt):
        model(ZEROS)
    train(model, 2, tracker.step)

    assert tracker.history.steps.tolist() == [1, 2]
    assert not model._forward_pre_hooks
