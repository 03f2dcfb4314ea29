"""Weights may be written, pruned, frozen or kept in half precision meanwhile."""

import copy
from typing import Any

import pytest
import torch
from plain_models import (
    KINDS,
    assert_finite,
    assert_same_weights,
    backward,
    both_coordinates,
    build,
    every_kind,
    mlp,
    rows,
    start,
    step_with_ones,
    train,
)
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters


def load(model: nn.Module, new: nn.Module) -> None:
    model.load_state_dict(new.state_dict())


def write_a_vector(model: nn.Module, new: nn.Module) -> None:
    vector_to_parameters(parameters_to_vector(new.parameters()), model.parameters())


def replace_data(model: nn.Module, new: nn.Module) -> None:
    for p, q in zip(model.parameters(), new.parameters(), strict=True):
        p.data = q.data.clone()


def write_in_place(model: nn.Module, new: nn.Module) -> None:
    for p, q in zip(model.parameters(), new.parameters(), strict=True):
        nn.init.zeros_(p).data.add_(q.data)


WAYS = [(write, "SGD") for write in (write_a_vector, replace_data, write_in_place)]
WAYS += [(load, kind) for kind in KINDS]


@pytest.mark.parametrize("write, kind", WAYS)
def test_writes_are_never_undone(write: Any, kind: str) -> None:
    (model, optimizer), (new, _) = start(kind), start(kind)
    train(model, optimizer)
    for p in new.parameters():
        p.data += 0.1 * torch.randn_like(p)
    write(model, new)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    train(model, optimizer, 1, first=3)
    assert_same_weights(model, new)


@both_coordinates
def test_after_a_write_the_step_is_a_fresh_optimizers(coordinates: str) -> None:
    model, options = mlp(), {"match": False, "coordinates": coordinates}
    optimizer = build(model, **options)
    train(model, optimizer)
    train(model, torch.optim.SGD(model.parameters(), lr=0.5), first=3)
    fresh = copy.deepcopy(model)
    train(model, optimizer, first=6)
    train(fresh, build(fresh, **options), first=6)
    assert_same_weights(model, fresh, 1e-12)


@every_kind
def test_a_row_pruned_later_stays_zero(kind: str) -> None:
    model, optimizer = start(kind)
    train(model, optimizer)
    model[0].weight.data[2] = 0
    train(model, optimizer, first=3)
    assert not model[0].weight[2].any()
    assert_finite(model)


@pytest.mark.parametrize("kind", ["SGD", "Adam", "angles", "bfloat16"])
def test_beside_a_pruned_row_the_others_go_on_as_they_were(kind: str) -> None:
    """With Muon, or an angle for the layer, rows depend on each other."""
    model, optimizer = start(kind)
    train(model, optimizer)
    other, same = copy.deepcopy((model, optimizer))
    model[0].weight.data[2] = 0
    for one, its in ((model, optimizer), (other, same)):
        step_with_ones(one, its)
    is_equal = (model[0].weight == other[0].weight).all(dim=1).tolist()
    assert is_equal == [row != 2 for row in range(8)]


@every_kind
def test_a_pruned_row_that_is_written_trains_again(kind: str) -> None:
    model, optimizer = start(kind)
    for value in (0.0, 0.5):
        train(model, optimizer)
        model[0].weight.data[2] = value
    train(model, optimizer, 1)
    change = (rows(model[0])[2] - 0.5).abs().max()
    assert 0 < change < 0.2


@pytest.mark.parametrize("kind", ["SGD", "Adam", "Muon", "angles", "turn"])
@pytest.mark.parametrize("dtype, tiny", [(torch.float32, 1e-41), (torch.float64, 1e-310)])
def test_a_tiny_row_does_no_harm(kind: str, dtype: torch.dtype, tiny: float) -> None:
    model, optimizer = start(kind)
    model.to(dtype)
    model[0].weight.data[2] = tiny
    train(model, optimizer)
    assert_finite(model)


@both_coordinates
@pytest.mark.parametrize("case", ["a pruned row", "a large bias"])
def test_a_bias_without_a_distance_steps_as_a_plain_one(case: str, coordinates: str) -> None:
    model = mlp()
    optimizer = build(model, coordinates=coordinates)
    train(model, optimizer)
    if case == "a pruned row":
        model[0].weight.data[2] = 0.0
    else:
        model[0].bias.data[2] = 9.0
    before = model[0].bias[2].item()
    train(model, optimizer, 1)
    expected = before - 0.05 * model[0].bias.grad[2].item()
    assert model[0].bias[2].item() == pytest.approx(expected, rel=1e-12)


@both_coordinates
def test_a_bias_that_has_come_below_r_steps_as_a_distance(coordinates: str) -> None:
    """Each step decides by what the values are then."""
    model = mlp()
    model[0].bias.data[2] = 9.0
    optimizer = build(model, coordinates=coordinates)
    train(model, optimizer)
    model[0].bias.data[2] = 0.2
    fresh = copy.deepcopy(model)
    train(model, optimizer, 1)
    train(fresh, build(fresh, coordinates=coordinates), 1)
    bias, expected = model[0].bias[2].item(), fresh[0].bias[2].item()
    as_plain = 0.2 - 0.05 * model[0].bias.grad[2].item()
    assert bias == pytest.approx(expected, rel=1e-12)
    assert bias != pytest.approx(as_plain, rel=1e-6)


@pytest.mark.parametrize("kind", ["SGD", "Muon", "angles", "turn", "bfloat16 turn"])
@pytest.mark.parametrize("missing", ["0.weight", "3.bias", "3.", "none"])
def test_what_has_no_gradient_is_never_written(kind: str, missing: str) -> None:
    """Also between steps in which it has one."""
    model, optimizer = start(kind)
    names = [name for name, _ in model.named_parameters() if missing in name]
    train(model, optimizer, 1)
    before = copy.deepcopy(model.state_dict())
    backward(model, 1)
    for name in names:
        model.get_parameter(name).grad = None
    optimizer.step()
    unchanged = [name for name, p in model.named_parameters() if torch.equal(p, before[name])]
    assert unchanged == names
    train(model, optimizer, 1)
    assert_finite(model)


def test_a_frozen_parameter_is_never_written() -> None:
    model, optimizer = start("SGD")
    model[3].requires_grad_(False)
    train(model, optimizer)
    assert_same_weights(model[3], mlp()[3])


@every_kind
def test_everything_stays_bit_for_bit_at_rate_0(kind: str) -> None:
    model, optimizer = start(kind)
    train(model, optimizer)
    before = copy.deepcopy(model)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    train(model, optimizer, first=3)
    assert_same_weights(model, before)


@every_kind
def test_units_of_fixed_r_stay_bit_for_bit_at_their_groups_rate_0(kind: str) -> None:
    model, optimizer = start(kind, scale="fixed")
    train(model, optimizer)
    before = copy.deepcopy(model)
    optimizer.param_groups[0]["lr"] = 0.0
    train(model, optimizer, first=3)
    for i in (0, 3):
        assert torch.equal(model[i].weight, before[i].weight)
    assert not torch.equal(model[6].weight, before[6].weight)


@both_coordinates
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tiny_steps_add_up_in_half_precision(dtype: torch.dtype, coordinates: str) -> None:
    first = nn.Linear(6, 5).bfloat16()
    half = copy.deepcopy(first).to(dtype)
    plain = copy.deepcopy(half)
    full = first.float()
    options = {"lr": 4e-4, "filter_fn": lambda *_: True, "coordinates": coordinates}
    optimizers: list[Any] = [build(full, **options), build(half, **options)]
    optimizers.append(torch.optim.SGD(plain.parameters(), lr=4e-4))
    for _ in range(250):
        for model, optimizer in zip((full, half, plain), optimizers, strict=True):
            step_with_ones(model, optimizer)
    assert (half.weight - full.weight).abs().max() < 0.01
    assert (plain.weight - full.weight).abs().max() > (0.05 if dtype == torch.bfloat16 else 0)


def test_layers_of_all_types_train_beside_each_other_as_alone() -> None:
    first = nn.Linear(6, 5).bfloat16()
    types = torch.bfloat16, torch.float16, torch.float32
    layers = nn.ModuleList([copy.deepcopy(first).to(dtype) for dtype in types])
    alone = copy.deepcopy(layers)
    for model in (layers, *alone):
        optimizer = build(model, filter_fn=lambda *_: True)
        for _ in range(3):
            step_with_ones(model, optimizer)
    assert_same_weights(layers, alone)


@both_coordinates
def test_a_zero_written_into_a_row_is_where_the_next_step_starts(coordinates: str) -> None:
    model = mlp()
    optimizer = build(model, lr=1e-9, coordinates=coordinates)
    train(model, optimizer)
    model[0].weight.data[1, 2] = 0
    train(model, optimizer, first=3)
    assert abs(model[0].weight[1, 2].item()) < 1e-6
