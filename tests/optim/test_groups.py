"""Parameter groups: each parameter once, with the right decay and rate."""

import math
from typing import Any

import pytest
import torch
from plain_models import both_coordinates, mlp, train
from torch import nn

from geoparam import GmPConv2d, GmPLinear, convert_, param_groups, retract, sphere


class Model(nn.Module):
    def __init__(self, coordinates: str = "angles") -> None:
        super().__init__()
        self.conv = GmPConv2d(3, 8, 3, coordinates=coordinates)
        self.norm = nn.LayerNorm([8, 4, 4])  # its weight has three dimensions
        self.hidden = GmPLinear(8, 16, coordinates=coordinates)
        self.twin = self.hidden
        self.embedding = nn.Embedding(5, 8)
        self.head = nn.Linear(16, 2)


def by_name(model: nn.Module, groups: list[dict]) -> dict[str, dict]:
    of = {id(p): group for group in groups for p in group["params"]}
    return {name: of[id(p)] for name, p in model.named_parameters()}


@both_coordinates
@pytest.mark.parametrize("angle_lr", [None, 0.5, "fan_in"])
def test_each_parameter_is_in_exactly_one_group(coordinates: str, angle_lr) -> None:  # noqa: ANN001
    model = Model(coordinates)
    grouped = []
    for group in param_groups(model, 0.1, 0.05, angle_lr):
        grouped += [id(p) for p in group["params"]]
    assert sorted(grouped) == sorted(id(p) for p in model.parameters())


@both_coordinates
def test_only_plain_weights_are_decayed(coordinates: str) -> None:
    model = Model(coordinates)
    groups = by_name(model, param_groups(model, lr=0.1, weight_decay=0.05))
    decayed = {name for name, group in groups.items() if group["weight_decay"]}
    assert decayed == {"embedding.weight", "head.weight"}


def find_rates(**options: Any) -> dict[str, float]:
    """Return the rate of each parameter."""
    model = Model()
    groups = by_name(model, param_groups(model, 0.1, **options))
    return {name: group["lr"] for name, group in groups.items()}


def test_rate_of_the_directions() -> None:
    assert find_rates(match=None)["conv.latitude"] == 0.1
    assert find_rates(angle_lr=0.5)["conv.latitude"] == 0.5


def test_the_rate_of_directions_may_go_by_their_fan_in() -> None:
    rates = find_rates(angle_lr="fan_in")
    assert rates["conv.latitude"] == pytest.approx(0.1 / math.sqrt(27))
    assert rates["hidden.latitude"] == pytest.approx(0.1 / math.sqrt(8))
    assert rates["conv.r"] == rates["head.weight"] == 0.1


@pytest.mark.parametrize("kind, power", [("adam", 1), ("sgd", 2)])
@both_coordinates
def test_matched_rates_undo_the_layers_own_scale(coordinates: str, kind: str, power: int) -> None:
    layer = GmPLinear.from_linear(nn.Linear(9, 6), coordinates=coordinates)
    groups = by_name(layer, param_groups(layer, 0.1, kind=kind))
    length = layer.r.abs().mean().item()
    stored, g = "unit", 1.0
    if coordinates == "angles":
        stored, g = "latitude", sphere.metric(layer.latitude).mean().item()
    assert groups[stored]["lr"] == pytest.approx(0.1 / (length * math.sqrt(g)) ** power)
    assert groups["lam"]["lr"] == pytest.approx(0.1 / length**power)
    assert groups["r"]["lr"] == 0.1


@both_coordinates
@pytest.mark.parametrize("kind, lr", [("SGD", 0.05), ("SGD", 0.2), ("Adam", 0.01)])
def test_layers_with_tiny_rows_stay_stable(coordinates: str, kind: str, lr: float) -> None:
    model = mlp(torch.float32)
    for p in model[3].parameters():
        p.data *= 1e-4
    model = convert_(model, coordinates=coordinates)
    groups: Any = param_groups(model, lr, kind="sgd" if kind == "SGD" else "adam")
    optimizer = getattr(torch.optim, kind)(groups)
    optimizer.register_step_post_hook(retract(model))
    losses = [train(model, optimizer, 1)[0] for _ in range(60)]
    assert max(losses) < 1.05 * losses[0] and losses[-1] < losses[0]


@pytest.mark.parametrize("name", ["NormFreeLinear", "NormalizedAttention"])
def test_norm_in_a_name_makes_no_norm(name: str) -> None:
    model = type(name, (nn.Linear,), {})(3, 4)
    groups = by_name(model, param_groups(model, 0.1, 0.05))
    assert groups["weight"]["weight_decay"] == 0.05


@pytest.mark.parametrize(
    "options, words",
    [
        ({"angle_lr": -1.0}, "angle_lr"),
        ({"angle_lr": "fan_out"}, "angle_lr"),
        ({"kind": "lion"}, "kind is 'adam' or 'sgd'"),
        ({"match": "fast"}, "match is 'plain' or"),
    ],
)
def test_unknown_options_are_refused(options: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        param_groups(Model(), 0.1, **options)
