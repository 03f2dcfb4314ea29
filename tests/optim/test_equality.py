"""The optimizer trains a plain model as the converted one, or with `match` as the plain one."""

import copy
from typing import Any

import pytest
import torch
from plain_models import (
    assert_same_weights,
    backward,
    bert,
    both_coordinates,
    build,
    cnn,
    gpt2,
    mlp,
    train,
)
from torch import Tensor, nn

import geoparam as gp

SGD = {"base": torch.optim.SGD, "lr": 0.02, "momentum": 0.9}
ADAM = {"base": torch.optim.Adam, "lr": 1e-3}


def is_inner(module: nn.Module, name: str) -> bool:
    is_layer = type(module).__name__ in ("Linear", "Conv2d", "Conv1D")
    return is_layer and name not in ("classifier", "lm_head", "fc", "6", "7")


def trainings(model: nn.Module, coordinates: str, base: Any, **options: Any) -> list[Any]:
    """Return the plain model with our optimizer, and its converted twin with torch's."""
    twin = gp.convert_(copy.deepcopy(model), coordinates=coordinates, filter_fn=is_inner)
    groups = gp.param_groups(twin, lr=options["lr"], match=None)
    torchs = base(groups, **options)
    torchs.register_step_post_hook(gp.retract(twin))

    as_converted = {"match": False, "scale": "free", "filter_fn": is_inner}
    ours = build(model, base, coordinates=coordinates, **options, **as_converted)
    return [(model, ours), (twin, torchs)]


def find_largest_difference(one: tuple[Any, Any], other: tuple[Any, Any], steps: int) -> float:
    """Train both; return the largest difference of their losses."""
    losses, others = train(*one, steps), train(*other, steps)
    pairs = zip(losses, others, strict=True)
    return max(abs(a - b).item() for a, b in pairs)


CASES = [
    (mlp, SGD, 50),
    (mlp, ADAM, 50),
    (cnn, SGD, 50),
    (cnn, ADAM, 50),
    (bert, ADAM, 20),
    (gpt2, SGD, 20),
]


@both_coordinates
@pytest.mark.parametrize("make, options, steps", CASES)
def test_trains_as_the_converted_model(
    make: Any, coordinates: str, options: Any, steps: int
) -> None:
    plain, twin = trainings(make(), coordinates, **options)
    assert find_largest_difference(plain, twin, steps) < 1e-12
    assert_same_weights(plain[0], gp.fold_(twin[0]), 1e-10)


@both_coordinates
def test_r_passes_zero_as_in_the_converted_model(coordinates: str) -> None:
    """A gradient along the rows takes r through zero; one against them takes it back."""
    plain, twin = trainings(mlp(), coordinates, torch.optim.SGD, lr=0.1)
    along = plain[0][3].weight.detach().clone()
    x = torch.eye(6).double()
    signs = []
    for step in range(40):
        for model, optimizer in (plain, twin):
            pull = (model[3].weight * along).sum()
            loss = model(x).square().mean()
            optimizer.zero_grad()
            (loss + pull if step < 20 else loss - pull).backward()
            optimizer.step()
        signs.append(bool((twin[0][3].r < 0).any()))
    assert signs[20] and not signs[-1]
    assert_same_weights(plain[0], gp.fold_(twin[0]), 1e-12)


@both_coordinates
@pytest.mark.parametrize("size, steps", [(2, 50), (99, 1)])
def test_a_large_bias_trains_as_in_the_converted_model(
    coordinates: str, size: float, steps: int
) -> None:
    model = mlp()
    length = model[3].weight[0].norm()
    model[3].bias.data[0] = size * length
    plain, twin = trainings(model, coordinates, **SGD)
    assert find_largest_difference(plain, twin, steps) < 1e-12


@pytest.mark.slow
@both_coordinates
def test_resnet_trains_as_the_converted_one(coordinates: str) -> None:
    """BatchNorm makes it chaotic: the bound is what a perturbation in the last digit gives."""
    model = pytest.importorskip("torchvision").models.resnet18(num_classes=10).double()
    options = {"base": torch.optim.SGD, "lr": 5e-3}
    twins = [copy.deepcopy(model) for _ in "ab"]
    for p in twins[1].parameters():
        p.data *= 1 + 1e-15
    pairs = [trainings(twin, coordinates, **options)[0] for twin in twins]
    spread = find_largest_difference(*pairs, 20)
    found = find_largest_difference(*trainings(model, coordinates, **options), 20)
    assert found < max(1e-12, 10 * spread)


def make_digits_model(kind: str) -> nn.Sequential:
    """Return an MLP or a CNN for scikit-learn's digits."""
    inner: list[nn.Module] = [nn.Linear(64, 216), nn.ReLU()]
    if kind != "mlp":
        norm: Any = nn.BatchNorm2d if kind == "batchnorm" else nn.Identity
        inner = [nn.Unflatten(1, (1, 8, 8))]
        inner += [nn.Conv2d(1, 16, 3, padding=1), norm(16)]
        inner += [nn.ReLU()]
        inner += [nn.Conv2d(16, 24, 3, stride=2), norm(24)]
        inner += [nn.ReLU(), nn.Flatten()]
    last = nn.Linear(216, 32), nn.ReLU(), nn.Linear(32, 10)
    return nn.Sequential(*inner, *last).double()


def train_on_digits(model: nn.Module, optimizer: Any) -> Tensor:
    """Return the losses of 50 steps on batches of scikit-learn's digits."""
    digits = pytest.importorskip("sklearn.datasets").load_digits()
    x = torch.tensor(digits.data / 16)
    y = torch.tensor(digits.target)
    random = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(50):
        batch = torch.randint(len(x), (64,), generator=random)
        loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
        model.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


@pytest.mark.parametrize("options, bound", [(SGD, 0.02), (ADAM, 0.1)], ids=["SGD", "Adam"])
@pytest.mark.parametrize("kind, factor", [("mlp", 1), ("cnn", 1), ("batchnorm", 3)])
def test_matched_curves_are_plain_ones(
    kind: str, factor: float, options: Any, bound: float
) -> None:
    model = make_digits_model(kind)
    plain = copy.deepcopy(model)
    found = train_on_digits(model, build(model, **options))
    base, rates = options["base"], {key: options[key] for key in options if key != "base"}
    torchs = base(plain.parameters(), **rates)
    expected = train_on_digits(plain, torchs)
    assert (found - expected).abs().max() < factor * bound


@both_coordinates
def test_small_first_weights_learn_as_fast_as_plain_ones(coordinates: str) -> None:
    """A transformer begins with rows of length 0.07: its r grows many times over."""
    model = gpt2()
    plain = copy.deepcopy(model)
    optimizer = build(model, torch.optim.AdamW, lr=1e-2, coordinates=coordinates)
    torchs = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for _ in range(80):
        found, expected = backward(model), backward(plain)
        optimizer.step()
        torchs.step()
    assert found < 1.5 * expected < 0.5
