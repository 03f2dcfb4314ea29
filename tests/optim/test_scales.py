"""r is free or fixed, has a rate and a decay of its own; decay reaches matrices of the rest."""

from typing import Any

import pytest
import torch
from plain_models import assert_same_weights, both_coordinates, build, cnn, mlp, rows, train
from torch import nn


def train_and_compare_lengths(model: Any, **options: Any) -> float:
    """Return by how much the length of a row has changed in ten steps."""
    before = rows(model[0]).norm(dim=1)
    optimizer = build(model, torch.optim.Adam, lr=1e-2, scale_decay=0.1, **options)
    train(model, optimizer, 10)
    ratio = rows(model[0]).norm(dim=1) / before
    return (ratio - 1).abs().max().item()


def group_norm(width: int) -> nn.Module:
    return nn.GroupNorm(1, width)


@both_coordinates
@pytest.mark.parametrize("norm", [nn.BatchNorm2d, nn.InstanceNorm2d])
def test_r_is_fixed_where_a_norm_of_channels_follows(norm: Any, coordinates: str) -> None:
    model = cnn(norm=norm)
    assert "fixed, 1 follows" in str(build(model))
    assert train_and_compare_lengths(model, coordinates=coordinates) < 1e-13


@both_coordinates
def test_r_is_fixed_if_asked(coordinates: str) -> None:
    assert train_and_compare_lengths(mlp(), scale="fixed", coordinates=coordinates) < 1e-13


@both_coordinates
@pytest.mark.parametrize(
    "make, norm, scale",
    [
        (cnn, group_norm, "auto"),
        (mlp, nn.LayerNorm, "auto"),
        (mlp, nn.Identity, "auto"),
        (cnn, nn.BatchNorm2d, "free"),
    ],
)
def test_r_is_free_elsewhere(make: Any, norm: Any, scale: Any, coordinates: str) -> None:
    model = make(norm=norm)
    assert "follows" not in str(build(model, scale=scale))
    assert train_and_compare_lengths(model, scale=scale, coordinates=coordinates) > 1e-4


def test_a_frozen_norm_leaves_r_free() -> None:
    model = mlp(norm=nn.BatchNorm1d)
    model[1].eval().requires_grad_(False)
    assert "fixed, 1 follows" not in str(build(model))
    assert "fixed, 4 follows" in str(build(model))


@pytest.mark.parametrize("norm", [nn.InstanceNorm1d(8), nn.BatchNorm1d(8, affine=False)])
def test_a_norm_without_parameters_fixes_r_in_evaluation_mode_too(norm: nn.Module) -> None:
    model = nn.Sequential(nn.Conv1d(6, 8, 1), norm, nn.Conv1d(8, 3, 1))
    assert "fixed, 1 follows" in str(build(model.eval()))


def test_without_a_run_only_a_neighbour_fixes_r() -> None:
    inner = nn.Sequential(nn.Linear(6, 8))
    model = nn.Sequential(inner, nn.BatchNorm1d(8), nn.Linear(8, 3))
    x = torch.randn(4, 6)
    assert "follows" not in str(build(model))
    assert "fixed, 1 follows" in str(build(model, example_inputs=x))


def find_change_of_r(**options: Any) -> torch.Tensor:
    model = mlp()
    before = rows(model[0]).norm(dim=1)
    train(model, build(model, **options), 1)
    return rows(model[0]).norm(dim=1) - before


def test_scale_lr_is_the_rate_of_r() -> None:
    change, slower = find_change_of_r(scale_lr=0.1), find_change_of_r()
    torch.testing.assert_close(change, 2 * slower, rtol=1e-9, atol=0)


def test_scale_decay_is_the_decay_of_r() -> None:
    r = rows(mlp()[0]).norm(dim=1)
    decay = find_change_of_r(scale_decay=0.5) - find_change_of_r()
    torch.testing.assert_close(decay, -0.05 * 0.5 * r, rtol=1e-9, atol=0)


def with_extras() -> nn.Sequential:
    """Return an MLP with norms, and beside it a vector and a matrix."""
    model = mlp(norm=nn.LayerNorm)
    model.extra = nn.ParameterList([torch.ones(3), torch.ones(2, 2)])
    return model


@pytest.mark.parametrize("base", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Muon])
@pytest.mark.parametrize("is_written", [False, True], ids=["given", "written to groups"])
def test_decay_reaches_matrices_of_the_rest_alone(base: Any, is_written: bool) -> None:
    model, expected = with_extras(), with_extras()
    options = {} if is_written else {"weight_decay": 0.5}
    optimizer = build(model[:7], base, **options)
    optimizer.add_param_group({"params": model.extra.parameters()})
    if is_written:
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.5
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()

    for p in (expected[6].weight, expected.extra[1]):
        p.data *= 1 - 0.05 * 0.5
    assert_same_weights(model, expected, 1e-15)
