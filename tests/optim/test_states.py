"""States: resume, copies and pickles go on bit for bit, and what does not fit is named."""

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from plain_models import assert_same_weights, backward, build, cnn, mlp, train
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

BF16 = torch.bfloat16
SETTINGS = {
    "SGD": {"momentum": 0.9},
    "Adam": {"base": torch.optim.Adam, "lr": 1e-2},
    "Muon": {"base": torch.optim.Muon, "lr": 1e-2},
    "Adagrad": {"base": torch.optim.Adagrad, "lr": 1e-2},
    "angles": {"base": torch.optim.Adam, "lr": 1e-2, "coordinates": "angles"},
    "turn": {"turn": 2.0, "momentum": 0.9},
    "max_turn": {"max_turn": 2.0, "coordinates": "angles", "momentum": 0.9},
}
CASES = [(name, torch.float32) for name in SETTINGS] + [
    ("Adam", torch.float64), ("Adam", BF16), ("angles", BF16), ("turn", BF16)
]  # fmt: skip
every_setting = pytest.mark.parametrize("name, dtype", CASES)


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def assert_same_states(found: Any, expected: Any) -> None:
    """Two state_dicts are equal bit for bit, types included."""
    assert found["param_groups"] == expected["param_groups"]
    assert found["state"].keys() == expected["state"].keys()
    for key, entries in expected["state"].items():
        assert found["state"][key].keys() == entries.keys()
        for entry, value in entries.items():
            other = found["state"][key][entry]
            if isinstance(value, torch.Tensor):
                assert other.dtype == value.dtype and torch.equal(other, value), (key, entry)
            else:
                assert other == value, (key, entry)


@every_setting
@pytest.mark.parametrize("make", [mlp, cnn])
def test_resumes_bit_for_bit(make: Any, name: str, dtype: torch.dtype) -> None:
    model, new = make(dtype), make(dtype)
    optimizer = build(model, **SETTINGS[name])
    train(model, optimizer)
    state = through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    resumed = build(new, **SETTINGS[name])
    new.load_state_dict(state["model"])
    resumed.load_state_dict(state_dict=state["optimizer"])
    assert_same_states(resumed.state_dict(), optimizer.state_dict())
    train(model, optimizer, first=3)
    train(new, resumed, first=3)
    assert_same_weights(new, model)
    assert_same_states(resumed.state_dict(), optimizer.state_dict())


@every_setting
@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_copies_go_on_bit_for_bit(way: str, name: str, dtype: torch.dtype) -> None:
    model = mlp(dtype)
    optimizer = build(model, **SETTINGS[name])
    train(model, optimizer)
    both = (model, optimizer)
    new, copied = copy.deepcopy(both) if way == "deepcopy" else pickle.loads(pickle.dumps(both))
    assert all(p is not q for p, q in zip(new.parameters(), model.parameters(), strict=True))
    train(new, copied, first=3)
    train(model, optimizer, first=3)
    assert_same_weights(new, model)
    assert str(copied) == str(optimizer)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("name", SETTINGS)
def test_distributed_checkpoints_keep_the_state(name: str, flat: bool) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, new = mlp(), mlp()
    optimizer, resumed = (build(m, **SETTINGS[name]) for m in (model, new))
    train(model, optimizer)
    state = through_a_file(get_optimizer_state_dict(model, optimizer, options=options))
    new.load_state_dict(model.state_dict())
    set_optimizer_state_dict(new, resumed, state, options=options)
    assert_same_weights(new, model)
    train(model, optimizer, first=3)
    train(new, resumed, first=3)
    assert_same_weights(new, model)


@every_setting
@pytest.mark.parametrize("steps", [0, 3])
def test_a_step_at_rate_zero_leaves_all_weights(name: str, dtype: torch.dtype, steps: int) -> None:
    model = mlp(dtype)
    optimizer = build(model, **SETTINGS[name])
    train(model, optimizer, steps)
    before = copy.deepcopy(model)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    train(model, optimizer, steps=2, first=steps)
    assert_same_weights(model, before)


def test_the_state_of_a_half_precision_model_keeps_its_float32_copy() -> None:
    model = mlp(BF16)
    optimizer = build(model)
    train(model, optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    state = optimizer.state[model[0].weight]
    assert state["direction"].dtype == state["r"].dtype == torch.float32


def wider() -> nn.Module:
    model = mlp()
    model[0], model[3] = nn.Linear(6, 9).double(), nn.Linear(9, 7).double()
    return model


@pytest.mark.parametrize(
    "make, options, words",
    [
        (mlp, {"coordinates": "angles"}, "angles.*intrinsic"),
        (mlp, {"turn": 2.0}, "intrinsic, turn"),
        (wider, {}, "'0.weight' has 9 units"),
        (mlp, {"filter_fn": lambda module, name: name == "0"}, "3.weight"),
        (lambda: nn.Sequential(*mlp(), nn.Linear(3, 3).double()), {}, "6.weight"),
    ],
    ids=["coordinates", "turn", "width", "choice", "depth"],
)
def test_a_state_that_does_not_fit_is_refused(make: Any, options: dict, words: str) -> None:
    model, other = mlp(), make()
    foreign = build(other, **options)
    train(other, foreign, steps=1)
    optimizer = build(model)
    train(model, optimizer, steps=1)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=words):
        optimizer.load_state_dict(foreign.state_dict())
    assert_same_states(optimizer.state_dict(), before)


@pytest.mark.parametrize("coordinates", ["intrinsic", "angles"])
def test_a_state_of_another_fan_in_is_refused(coordinates: str) -> None:
    model, other = cnn(), cnn()
    other[3] = nn.Conv2d(6, 8, 3).double()  # without groups: as many units, of more inputs
    foreign, optimizer = (build(m, momentum=0.9, coordinates=coordinates) for m in (other, model))
    train(other, foreign, steps=1)
    with pytest.raises(ValueError, match="'3.weight'"):
        optimizer.load_state_dict(foreign.state_dict())


@pytest.mark.parametrize("base", [torch.optim.SGD, torch.optim.AdamW])
def test_the_state_of_a_plain_optimizer_is_answered_in_a_sentence(base: Any) -> None:
    model = mlp()
    plain = base(model.parameters(), lr=0.1)
    train(model, plain, steps=1)
    with pytest.raises(ValueError, match="state of another optimizer.* start anew"):
        build(model).load_state_dict(plain.state_dict())


@pytest.mark.parametrize("coordinates", ["intrinsic", "angles"])
def test_training_goes_over_to_a_plain_optimizer_and_back(coordinates: str) -> None:
    model = mlp()
    optimizer = build(model, coordinates=coordinates, momentum=0.9)
    train(model, optimizer)
    plain = torch.optim.SGD(model.parameters(), lr=0.05)
    train(model, plain, steps=2, first=3)
    before = copy.deepcopy(model)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    train(model, optimizer, steps=1)
    assert_same_weights(model, before)


def test_zero_grad_and_gradients_are_the_models_own() -> None:
    model = mlp()
    optimizer = build(model)
    backward(model)
    expected = [p.grad.clone() for p in model.parameters()]
    optimizer.step()
    for p, g in zip(model.parameters(), expected, strict=True):
        assert torch.equal(p.grad, g)
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("name", ["SGD", "angles", "turn"])
def test_a_state_taken_before_the_first_step_is_empty_and_loads(name: str) -> None:
    model, new = mlp(), mlp()
    optimizer, other = (build(m, **SETTINGS[name]) for m in (model, new))
    other.load_state_dict(through_a_file(optimizer.state_dict()))
    train(model, optimizer)
    train(new, other)
    assert_same_weights(new, model)
