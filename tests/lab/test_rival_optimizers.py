"""Rivals' optimizers: what each keeps, how far it turns, and that checkpoints hold all of it."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from geoparam.optim import RowMuon
from geoparam_lab.training import rival_optimizers
from geoparam_lab.training.rival_optimizers import EXPRESS, MUON, Together, polar

OPTIONS: dict[Any, dict[str, float]] = {
    RowMuon: {"lr": 0.05, "momentum": 0.95, "weight_decay": 0.2},
    rival_optimizers.Airbench: {"lr": 0.24, "momentum": 0.6},
    rival_optimizers.RotationalSGD: {"lr": 0.5, "momentum": 0.9, "weight_decay": 1e-3},
    rival_optimizers.AngularMuown: {"lr": 0.04, "momentum": 0.95},
    rival_optimizers.MuonH: {"lr": 0.018, "momentum": 0.95},
}


def network() -> nn.Sequential:
    """Two convolutions of equal shape, one wide and one tall matrix, an output layer."""
    torch.manual_seed(0)
    convs = (nn.Conv2d(6, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1), nn.Conv2d(6, 4, 1))
    return nn.Sequential(*convs, nn.Flatten(), nn.Linear(16, 24), nn.Linear(24, 3))


def rows(model: nn.Sequential) -> list[nn.Parameter]:
    return [model[i].weight for i in (0, 1, 2, 4)]


def optimizer(kind: Any, model: nn.Sequential, **changes: float) -> Together:
    own = rows(model)
    others = [p for p in model.parameters() if not any(p is q for q in own)]
    rest = torch.optim.AdamW(others, lr=1e-3)
    return Together(kind(own, **{**OPTIONS[kind], **changes}), rest)


def train(model: nn.Sequential, by: torch.optim.Optimizer, steps: int = 1, seed: int = 1) -> None:
    rng = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = torch.randn(8, 6, 2, 2, generator=rng)
        by.zero_grad()
        (model(x) - torch.randn(8, 3, generator=rng)).square().mean().backward()
        by.step()


def flat(weights: list[nn.Parameter]) -> list[Tensor]:
    return [weight.detach().flatten(1).clone() for weight in weights]


@pytest.mark.parametrize(
    ("coefficients", "least", "bounds"),
    [(MUON, 0.003, (0.68, 1.20)), (MUON[:3], 0.03, (0.68, 1.20)), (EXPRESS, 0.001, (0.86, 1.13))],
    ids=["muon", "airbench", "express"],
)
@pytest.mark.parametrize("shape", [(12, 40), (40, 12)])
def test_singular_values_come_close_to_one(
    coefficients: Any, least: float, bounds: tuple[float, float], shape: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    u, _, vh = torch.linalg.svd(torch.randn(3, *shape), full_matrices=False)
    values = torch.logspace(math.log10(least), 0, 12).expand(3, -1)
    x = 7 * u @ torch.diag_embed(values) @ vh
    kept = values[0] / values[0].norm() >= least
    found = u.mT @ polar(x, coefficients).float() @ vh.mT
    middle = found.diagonal(dim1=1, dim2=2)[:, kept]
    rounding = 0.02  # bfloat16's, over the iterations
    assert middle.min() > bounds[0] - rounding and middle.max() < bounds[1] + rounding


def test_airbench_steps_from_filters_of_fixed_length() -> None:
    model = network()
    by = optimizer(rival_optimizers.Airbench, model, lr=0.0)
    train(model, by)
    for weight in rows(model):
        assert weight.norm().item() == pytest.approx(math.sqrt(len(weight)), rel=1e-5)
    before = flat(rows(model))
    by.param_groups[0]["lr"] = 0.24
    train(model, by)
    for weight, start in zip(flat(rows(model)), before, strict=True):
        values = torch.linalg.svdvals((start - weight) / 0.24)
        assert values.max() < 1.22


def test_rotational_rows_keep_their_length_and_turn_by_the_equilibriums_angle() -> None:
    model, expected = network(), math.sqrt(2 * 0.5 * 1e-3 / 1.9)
    weights, by = rows(model), optimizer(rival_optimizers.RotationalSGD, model)
    lengths = [weight.norm(dim=1) for weight in flat(weights)]
    squares = []
    for seed in range(60):
        before = flat(weights)
        train(model, by, seed=seed)
        turned = [1 - cosine_similarity(*two) for two in zip(flat(weights), before, strict=True)]
        squares.append(2 * torch.cat(turned).mean())
    for weight, length in zip(flat(weights), lengths, strict=True):
        torch.testing.assert_close(weight.norm(dim=1), length)
        assert weight.mean(dim=1).abs().max() < 1e-6
    turn = torch.stack(squares[20:]).mean().sqrt().item()
    assert turn == pytest.approx(expected, rel=0.2)


@pytest.mark.parametrize("shape", [(16, 8, 4, 4), (128, 32)])
def test_angular_muown_turns_units_by_its_rate(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(shape))
    by = rival_optimizers.AngularMuown([weight], lr=0.04, momentum=0.95)
    for _ in range(5):
        [before] = flat([weight])
        weight.grad = torch.randn_like(weight)
        by.step()
        [after] = flat([weight])
        turn = cosine_similarity(after, before).clamp(max=1).acos()
        assert turn.square().mean().sqrt().item() == pytest.approx(0.04, rel=0.1)
        torch.testing.assert_close(after.norm(dim=1), by.state[weight]["scale"][:, 0].abs())


def test_angular_muown_learns_lengths_by_adam_and_takes_up_zero_rows() -> None:
    model = network()
    with torch.no_grad():
        model[4].weight[0] = 0
    before, by = flat(rows(model)), optimizer(rival_optimizers.AngularMuown, model)
    train(model, by)
    for weight, start in zip(flat(rows(model)), before, strict=True):
        change = weight.norm(dim=1) - start.norm(dim=1)
        known = start.norm(dim=1) > 0
        torch.testing.assert_close(change[known].abs(), torch.full_like(change[known], 0.04))
    assert model[4].weight[0].norm().item() == pytest.approx(math.sqrt(0.33), abs=0.05)


def exact_polar(x: Tensor) -> Tensor:
    u, _, vh = torch.linalg.svd(x, full_matrices=False)
    return u @ vh


def well_conditioned(m: int, n: int) -> Tensor:
    """Return a gradient whose singular values Newton-Schulz brings near 1."""
    u, _, vh = torch.linalg.svd(torch.randn(m, n), full_matrices=False)
    return u @ torch.diag(torch.linspace(0.5, 1.5, min(m, n))) @ vh


@pytest.mark.parametrize("shape", [(12, 30), (30, 12)])
def test_muonh_follows_its_formula(shape: tuple[int, int]) -> None:
    weight = nn.Parameter(torch.randn(shape))
    by = rival_optimizers.MuonH([weight], lr=0.1, momentum=0.5)
    w, length, momentum = weight.detach().clone(), weight.detach().norm(), torch.zeros(shape)
    for _ in range(3):
        weight.grad = well_conditioned(*shape)
        momentum = 0.5 * momentum + 0.5 * weight.grad
        update = exact_polar(0.5 * weight.grad + 0.5 * momentum)
        w = w - 0.1 * length * update / update.norm()
        w = length * w / w.norm()
        by.step()
        assert weight.norm().item() == pytest.approx(length.item(), rel=1e-5)
    # Newton-Schulz leaves singular values between 0.68 and 1.20.
    assert (weight - w).norm() < 0.25 * 3 * 0.1 * length


def test_muonh_moves_a_matrix_by_its_rate_times_its_length() -> None:
    weight = nn.Parameter(torch.randn(20, 20))
    before = weight.detach().clone()
    by = rival_optimizers.MuonH([weight], lr=0.0, momentum=0.95)
    weight.grad = torch.randn(20, 20)
    by.step()
    torch.testing.assert_close(weight.detach(), before)
    by.param_groups[0]["lr"] = 1e-3
    by.step()
    step = (weight.detach() - before).norm() / before.norm()
    assert 0.9e-3 < step.item() < 1.001e-3  # a little is lost: the step is not tangent


@pytest.mark.parametrize("shape", [(12, 30), (30, 12)])
def test_angular_muown_follows_its_formula(shape: tuple[int, int]) -> None:
    weight = nn.Parameter(torch.randn(shape))
    by = rival_optimizers.AngularMuown([weight], lr=0.1, momentum=0.5)
    scale = weight.detach().norm(dim=1, keepdim=True)
    u, g = weight.detach() / scale, well_conditioned(*shape)
    weight.grad = g
    by.step()
    along = (g * u).sum(dim=1, keepdim=True)
    tangent = scale * (g - along * u)
    rate = 0.1 * math.sqrt(max(1, shape[0] / shape[1]))
    expected = u - rate * exact_polar(1.5 * tangent)  # T + mu M, with M = T at first
    turned = nn.functional.normalize(expected, dim=1)
    found = weight.detach() / weight.detach().norm(dim=1, keepdim=True)
    assert (found - turned).norm() < 0.15 * (turned - u).norm()
    lengths = (scale - 0.1 * along.sign()).abs()  # Adam's first step is the rate
    torch.testing.assert_close(weight.detach().norm(dim=1, keepdim=True), lengths)


@pytest.mark.parametrize("kind", OPTIONS)
def test_the_rest_is_stepped_by_its_own_optimizer(kind: Any) -> None:
    model, twin = network(), network()
    train(model, optimizer(kind, model))
    others = [twin[i].bias for i in (0, 1, 2, 4, 5)] + [twin[5].weight]
    train(twin, torch.optim.AdamW(others, lr=1e-3))
    torch.testing.assert_close(model[5].weight, twin[5].weight)
    torch.testing.assert_close(model[0].bias, twin[0].bias)


@pytest.mark.parametrize("kind", OPTIONS)
def test_goes_on_from_its_state(kind: Any) -> None:
    model = network().to(memory_format=torch.channels_last)
    by = optimizer(kind, model)
    train(model, by, 3)
    twin = copy.deepcopy(model)
    other = optimizer(kind, twin)
    other.load_state_dict(copy.deepcopy(by.state_dict()))
    for each, its in ((model, by), (twin, other)):
        train(each, its, 3, seed=2)
    for name, value in model.state_dict().items():
        assert torch.equal(value, twin.state_dict()[name]), name


@pytest.mark.parametrize("kind", OPTIONS)
def test_layers_without_a_gradient_stay(kind: Any) -> None:
    model = network()
    by, before = optimizer(kind, model), model[1].weight.detach().clone()
    model[1].weight.requires_grad_(False)
    train(model, by)
    assert torch.equal(model[1].weight, before) and model[0].weight.isfinite().all()
