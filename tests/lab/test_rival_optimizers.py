"""Rivals' optimizers: what each keeps, how far it turns, and that checkpoints hold all of it."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, normalize

from geoparam.optim import RowMuon
from geoparam_lab.training.rival_optimizers import (
    EXPRESS,
    MUON,
    Airbench,
    AngularMuown,
    MuonH,
    RotationalSGD,
    Together,
    polar,
)

OPTIONS: dict[Any, dict[str, float]] = {
    RowMuon: {"lr": 0.05, "momentum": 0.95, "weight_decay": 0.2},
    Airbench: {"lr": 0.24, "momentum": 0.6},
    RotationalSGD: {"lr": 0.5, "momentum": 0.9, "weight_decay": 1e-3},
    AngularMuown: {"lr": 0.04, "momentum": 0.95},
    MuonH: {"lr": 0.018, "momentum": 0.95},
}
each_rival = pytest.mark.parametrize("kind", OPTIONS)
wide_and_tall = pytest.mark.parametrize("shape", [(12, 30), (30, 12)])


def make_network() -> nn.Sequential:
    """Two convolutions of equal shape, one wide and one tall matrix, an output layer."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(6, 6, 3, padding=1),
        nn.Conv2d(6, 6, 3, padding=1),
        nn.Conv2d(6, 4, 1),
        nn.Flatten(),
        nn.Linear(16, 24),
        nn.Linear(24, 3),
    )


def hidden_weights(model: nn.Sequential) -> list[nn.Parameter]:
    return [model[i].weight for i in (0, 1, 2, 4)]


def other_parameters(model: nn.Sequential) -> list[nn.Parameter]:
    biases = [model[i].bias for i in (0, 1, 2, 4, 5)]
    return [*biases, model[5].weight]


def make_optimizer(kind: Any, model: nn.Sequential, **changes: float) -> Together:
    """The rival for the hidden weights, AdamW for the other parameters."""
    options = OPTIONS[kind] | changes
    rival = kind(hidden_weights(model), **options)
    adamw = torch.optim.AdamW(other_parameters(model), lr=1e-3)
    return Together(rival, adamw)


def train(
    model: nn.Sequential, optimizer: torch.optim.Optimizer, steps: int = 1, seed: int = 1
) -> None:
    rng = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = torch.randn(8, 6, 2, 2, generator=rng)
        y = torch.randn(8, 3, generator=rng)
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()


def as_matrix(weight: nn.Parameter) -> Tensor:
    return weight.detach().flatten(1).clone()


def as_matrices(model: nn.Sequential) -> list[Tensor]:
    return [as_matrix(weight) for weight in hidden_weights(model)]


@pytest.mark.parametrize(
    ("coefficients", "smallest", "lower", "upper"),
    [(MUON, 0.003, 0.68, 1.20), (MUON[:3], 0.03, 0.68, 1.20), (EXPRESS, 0.001, 0.86, 1.13)],
    ids=["muon", "airbench", "express"],
)
@pytest.mark.parametrize("shape", [(12, 40), (40, 12)])
def test_singular_values_come_close_to_one(
    coefficients: Any, smallest: float, lower: float, upper: float, shape: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    u, _, vh = torch.linalg.svd(torch.randn(3, *shape), full_matrices=False)
    singular_values = torch.logspace(math.log10(smallest), 0, 12)
    matrices = 7 * u @ torch.diag(singular_values) @ vh

    result = polar(matrices, coefficients).float()

    in_basis = u.mT @ result @ vh.mT
    new_values = in_basis.diagonal(dim1=1, dim2=2)
    is_large_enough = singular_values / singular_values.norm() >= smallest
    new_values = new_values[:, is_large_enough]
    rounding = 0.02  # bfloat16's, over the iterations
    assert new_values.min() > lower - rounding
    assert new_values.max() < upper + rounding


def test_airbench_gives_filters_a_fixed_length() -> None:
    model = make_network()

    train(model, make_optimizer(Airbench, model, lr=0.0))

    for weight in hidden_weights(model):
        assert weight.norm().item() == pytest.approx(math.sqrt(len(weight)), rel=1e-5)


def test_airbench_steps_by_a_nearly_orthogonal_matrix() -> None:
    model = make_network()
    optimizer = make_optimizer(Airbench, model, lr=0.0)
    train(model, optimizer)
    before = as_matrices(model)

    optimizer.param_groups[0]["lr"] = 0.24
    train(model, optimizer)

    for old, new in zip(before, as_matrices(model), strict=True):
        step = (old - new) / 0.24
        assert torch.linalg.svdvals(step).max() < 1.22


def test_rotational_rows_keep_their_length_and_a_mean_of_zero() -> None:
    model = make_network()
    optimizer = make_optimizer(RotationalSGD, model)
    lengths = [weight.norm(dim=1) for weight in as_matrices(model)]

    train(model, optimizer, steps=60)

    for weight, length in zip(as_matrices(model), lengths, strict=True):
        torch.testing.assert_close(weight.norm(dim=1), length)
        assert weight.mean(dim=1).abs().max() < 1e-6


def test_rotational_rows_turn_by_the_angle_of_the_equilibrium() -> None:
    model = make_network()
    optimizer = make_optimizer(RotationalSGD, model)
    train(model, optimizer, steps=20)

    squares = []
    for seed in range(20, 60):
        before = as_matrices(model)
        train(model, optimizer, seed=seed)
        for old, new in zip(before, as_matrices(model), strict=True):
            squares.append(2 * (1 - cosine_similarity(new, old)))

    turn = torch.cat(squares).mean().sqrt().item()
    lr, decay, momentum = 0.5, 1e-3, 0.9
    assert turn == pytest.approx(math.sqrt(2 * lr * decay / (1 + momentum)), rel=0.2)


@pytest.mark.parametrize("shape", [(16, 8, 4, 4), (128, 32)])
def test_angular_muown_turns_units_by_its_rate(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(shape))
    optimizer = AngularMuown([weight], lr=0.04, momentum=0.95)

    for _ in range(5):
        before = as_matrix(weight)
        weight.grad = torch.randn_like(weight)
        optimizer.step()

        turn = cosine_similarity(as_matrix(weight), before).clamp(max=1).acos()
        assert turn.square().mean().sqrt().item() == pytest.approx(0.04, rel=0.1)


@pytest.mark.parametrize("shape", [(16, 8, 4, 4), (128, 32)])
def test_angular_muown_keeps_lengths_in_its_state(shape: tuple[int, ...]) -> None:
    weight = nn.Parameter(torch.randn(shape))
    optimizer = AngularMuown([weight], lr=0.04, momentum=0.95)

    for _ in range(5):
        weight.grad = torch.randn_like(weight)
        optimizer.step()

        length = as_matrix(weight).norm(dim=1)
        torch.testing.assert_close(length, optimizer.state[weight]["scale"][:, 0].abs())


def test_angular_muown_changes_lengths_by_adam() -> None:
    model = make_network()
    before = as_matrices(model)

    train(model, make_optimizer(AngularMuown, model))

    for old, new in zip(before, as_matrices(model), strict=True):
        change = (new.norm(dim=1) - old.norm(dim=1)).abs()
        torch.testing.assert_close(change, torch.full_like(change, 0.04))


def test_angular_muown_starts_a_zero_row_at_the_length_of_initialization() -> None:
    model = make_network()
    with torch.no_grad():
        model[4].weight[0] = 0

    train(model, make_optimizer(AngularMuown, model))

    assert model[4].weight[0].norm().item() == pytest.approx(math.sqrt(0.33), abs=0.05)


def exact_polar(x: Tensor) -> Tensor:
    """The nearest orthogonal matrix."""
    u, _, vh = torch.linalg.svd(x, full_matrices=False)
    return u @ vh


def well_conditioned(m: int, n: int) -> Tensor:
    """A gradient whose singular values Newton-Schulz brings near 1."""
    u, _, vh = torch.linalg.svd(torch.randn(m, n), full_matrices=False)
    return u @ torch.diag(torch.linspace(0.5, 1.5, min(m, n))) @ vh


@wide_and_tall
def test_muonh_follows_its_formula(shape: tuple[int, int]) -> None:
    lr, mu = 0.1, 0.5
    weight = nn.Parameter(torch.randn(shape))
    optimizer = MuonH([weight], lr=lr, momentum=mu)
    w = weight.detach().clone()
    length = w.norm()
    momentum = torch.zeros(shape)

    for _ in range(3):
        g = well_conditioned(*shape)
        weight.grad = g
        optimizer.step()

        momentum = mu * momentum + (1 - mu) * g
        update = exact_polar((1 - mu) * g + mu * momentum)
        w = w - lr * length * update / update.norm()
        w = length * w / w.norm()
        assert weight.norm().item() == pytest.approx(length.item(), rel=1e-5)

    # Newton-Schulz leaves singular values between 0.68 and 1.20.
    path = 3 * lr * length
    assert (weight - w).norm() < 0.25 * path


def test_muonh_moves_a_matrix_by_its_rate_times_its_length() -> None:
    weight = nn.Parameter(torch.randn(20, 20))
    before = weight.detach().clone()
    optimizer = MuonH([weight], lr=1e-3, momentum=0.95)

    weight.grad = torch.randn(20, 20)
    optimizer.step()

    step = (weight.detach() - before).norm() / before.norm()
    assert 0.9e-3 < step.item() < 1.001e-3  # a little is lost: the step is not tangent


def test_muonh_does_not_move_at_a_rate_of_zero() -> None:
    weight = nn.Parameter(torch.randn(20, 20))
    before = weight.detach().clone()
    optimizer = MuonH([weight], lr=0.0, momentum=0.95)

    weight.grad = torch.randn(20, 20)
    optimizer.step()

    torch.testing.assert_close(weight.detach(), before)


@wide_and_tall
def test_angular_muown_follows_its_formula(shape: tuple[int, int]) -> None:
    lr, mu = 0.1, 0.5
    weight = nn.Parameter(torch.randn(shape))
    optimizer = AngularMuown([weight], lr=lr, momentum=mu)
    scale = weight.detach().norm(dim=1, keepdim=True)
    u = weight.detach() / scale
    g = well_conditioned(*shape)

    weight.grad = g
    optimizer.step()
    new_length = weight.detach().norm(dim=1, keepdim=True)
    new_u = weight.detach() / new_length

    along = (g * u).sum(dim=1, keepdim=True)
    tangent = scale * (g - along * u)
    rate = lr * math.sqrt(max(1, shape[0] / shape[1]))
    update = exact_polar((1 + mu) * tangent)  # T + mu M, with M = T at first
    expected = normalize(u - rate * update, dim=1)
    assert (new_u - expected).norm() < 0.15 * (expected - u).norm()
    # Adam's first step is the rate.
    torch.testing.assert_close(new_length, (scale - lr * along.sign()).abs())


@each_rival
def test_the_other_parameters_are_updated_by_adamw(kind: Any) -> None:
    model, reference = make_network(), make_network()

    train(model, make_optimizer(kind, model))
    train(reference, torch.optim.AdamW(other_parameters(reference), lr=1e-3))

    torch.testing.assert_close(model[5].weight, reference[5].weight)
    torch.testing.assert_close(model[0].bias, reference[0].bias)


@each_rival
def test_training_goes_on_from_a_saved_state(kind: Any) -> None:
    model = make_network().to(memory_format=torch.channels_last)
    optimizer = make_optimizer(kind, model)
    train(model, optimizer, steps=3)

    resumed = copy.deepcopy(model)
    resumed_optimizer = make_optimizer(kind, resumed)
    resumed_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, optimizer, steps=3, seed=2)
    train(resumed, resumed_optimizer, steps=3, seed=2)

    expected = model.state_dict()
    for name, value in resumed.state_dict().items():
        assert torch.equal(value, expected[name]), name


@each_rival
def test_a_layer_without_a_gradient_is_not_updated(kind: Any) -> None:
    model = make_network()
    optimizer = make_optimizer(kind, model)
    before = model[1].weight.detach().clone()

    model[1].weight.requires_grad_(False)
    train(model, optimizer)

    assert torch.equal(model[1].weight, before)
    assert model[0].weight.isfinite().all()
