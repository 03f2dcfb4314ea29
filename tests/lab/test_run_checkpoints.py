"""Checkpoints: whole or not there, the last ones kept, and what they hold comes back."""

from pathlib import Path

import pytest
import torch
from image_runs import Killed, die, save_half
from torch import nn

import geoparam as gp
from geoparam_lab.training.images import run_checkpoints
from geoparam_lab.training.images.run_checkpoints import Store


def state(step: int) -> run_checkpoints.State:
    return {"epoch": 0, "step": step, "numbers": torch.arange(1000) + step}


def steps(store: Store) -> list[int]:
    return [int(path.stem[-8:]) for path in store.files]


def test_the_last_ones_are_kept(tmp_path: Path) -> None:
    store = Store(tmp_path, keep=3)
    for step in range(5):
        store.write(state(step))
    assert steps(store) == [2, 3, 4]
    newest = store.read_newest()
    assert newest is not None and torch.equal(newest["numbers"], state(4)["numbers"])


def test_epochs_come_before_steps_and_there_may_be_none(tmp_path: Path) -> None:
    store = Store(tmp_path / "new")
    assert store.read_newest() is None
    for epoch, step in ((0, 123_456), (1, 0)):
        store.write({"epoch": epoch, "step": step})
    assert store.read_newest() == {"epoch": 1, "step": 0}


def test_a_kill_while_writing_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path)
    store.write(state(1))
    monkeypatch.setattr(torch, "save", save_half(1, die))
    with pytest.raises(Killed):
        store.write(state(2))
    assert steps(store) == [1]
    newest = store.read_newest()
    assert newest is not None and newest["step"] == 1


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


def model_and_optimizer(momentum: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(
        gp.GmPConv2d(3, 4, 3, coordinates="intrinsic", activation=torch.relu),
        gp.InputMeanNorm(4),
        nn.Flatten(),
        nn.Linear(16, 2),
    )
    groups = gp.param_groups(model, lr=0.1, kind="sgd")
    optimizer = torch.optim.SGD(groups, momentum=momentum)
    optimizer.register_step_post_hook(gp.retract(model))
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 3, 4, 4)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_model_and_optimizer_come_back(tmp_path: Path, momentum: float) -> None:
    model, optimizer = model_and_optimizer(momentum)
    step(model, optimizer)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    saved = {
        "epoch": 0,
        "step": 0,
        "model": run_checkpoints.get_weights(model),
        "optimizer": run_checkpoints.get_moments(model, optimizer),
    }
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    store = Store(tmp_path)
    store.write(saved)
    found = store.read_newest()
    assert found is not None
    other, its_optimizer = model_and_optimizer(momentum)
    run_checkpoints.load_moments(other, its_optimizer, found["optimizer"])
    run_checkpoints.load_weights(other, found["model"])
    for _ in range(2):
        step(model, optimizer)
        step(other, its_optimizer)
    for name, value in model.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name
