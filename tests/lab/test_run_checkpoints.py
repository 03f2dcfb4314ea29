"""Checkpoints: whole or not there, the last ones kept, and what they hold comes back."""

from pathlib import Path

import pytest
import torch

from geoparam_lab.training.images import run_checkpoints
from geoparam_lab.training.images.run_checkpoints import Store


def state(step: int) -> run_checkpoints.State:
    return {"epoch": 0, "step": step, "numbers": torch.arange(1000) + step}


def steps(store: Store) -> list[int]:
    return [int(path.stem[-8:]) for path in store.files]


def test_the_last_ones_are_kept(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for step in range(5):
        store.write(state(step))
    assert steps(store) == [3, 4]
    newest = store.read_newest()
    assert newest is not None and torch.equal(newest["numbers"], state(4)["numbers"])


def test_epochs_come_before_steps_and_there_may_be_none(tmp_path: Path) -> None:
    store = Store(tmp_path / "new")
    assert store.read_newest() is None
    for epoch, step in ((0, 123_456), (1, 0)):
        store.write({"epoch": epoch, "step": step})
    assert store.read_newest() == {"epoch": 1, "step": 0}


def halved(content: bytes) -> bytes:
    return content[: len(content) // 2]


def flipped(content: bytes) -> bytes:
    middle = len(content) // 2  # within the numbers
    return content[:middle] + bytes([content[middle] ^ 0xFF]) + content[middle + 1 :]


@pytest.mark.parametrize("damage", [halved, flipped], ids=lambda f: f.__name__)
def test_a_damaged_one_falls_back_to_the_one_before(tmp_path: Path, damage) -> None:  # noqa: ANN001
    store = Store(tmp_path)
    for step in (1, 2):
        store.write(state(step))
    for left, said in (([1], "00000002.pt is damaged .* the one before"), ([], "starts anew")):
        path = store.files[-1]
        path.write_bytes(damage(path.read_bytes()))
        with pytest.warns(UserWarning, match=said):
            newest = store.read_newest()
        assert steps(store) == left and (newest["step"] == 1 if newest else not left)
