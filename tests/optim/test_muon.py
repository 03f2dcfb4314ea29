"""Muon on rows is torch's Muon, for convolutions too, and no layer mixes with another."""

import functools
import math
from typing import Any

import pytest
import torch
from plain_models import assert_same_weights, build, cnn, mlp, train
from torch import Tensor, nn

from geoparam.optim.muon import RowMuon

ROUNDING = {"rtol": 0.05, "atol": 4e-4}  # Newton-Schulz in bfloat16, times a rate of 0.02


def stepped(make: Any, weights: list[Tensor], steps: int = 3, **options: Any) -> list[Tensor]:
    """Return weights after steps on gradients that are the same in every call."""
    parameters = [nn.Parameter(w.clone()) for w in weights]
    optimizer = make(parameters, lr=0.02, **options)
    for step in range(steps):
        for i, p in enumerate(parameters):
            random = torch.Generator().manual_seed(100 * step + i)
            p.grad = torch.randn(p.flatten(1).shape, generator=random).view_as(p)
        optimizer.step()
    return [p.detach() for p in parameters]


@pytest.mark.parametrize("shape", [(6, 10), (10, 6), (8, 8), (1, 5), (5, 1)])
@pytest.mark.parametrize(
    "options",
    [
        {}, {"weight_decay": 0.0, "momentum": 0.5}, {"nesterov": False}, {"ns_steps": 3},
        {"adjust_lr_fn": "match_rms_adamw"}, {"adjust_lr_fn": "original"},
    ],
    ids=str,
)  # fmt: skip
def test_equals_torchs_muon_on_a_matrix(shape: tuple[int, int], options: dict[str, Any]) -> None:
    weights = [torch.randn(shape)]
    found = stepped(RowMuon, weights, **options)
    torch.testing.assert_close(found, stepped(torch.optim.Muon, weights, **options), **ROUNDING)


def test_has_torchs_options() -> None:
    p = [nn.Parameter(torch.zeros(2, 2))]
    ours, torchs = RowMuon(p).param_groups[0], torch.optim.Muon(p).param_groups[0]
    assert {**ours, "params": 0} == {**torchs, "params": 0}
    with pytest.raises(ValueError, match="adjust_lr_fn"):
        RowMuon(p, adjust_lr_fn="none")


def test_a_convolution_is_the_matrix_of_its_rows() -> None:
    w = torch.randn(6, 3, 2, 2)
    found = stepped(RowMuon, [w])[0].flatten(1)
    torch.testing.assert_close(found, stepped(RowMuon, [w.flatten(1)])[0])


def test_layers_in_one_batch_are_stepped_as_each_alone() -> None:
    weights = [torch.randn(5, 7), torch.randn(9, 5), 1e3 * torch.randn(5, 7), torch.randn(5, 7)]
    together = stepped(RowMuon, weights, steps=1)
    for i, found in enumerate(together):
        alone = [torch.zeros(3, 3)] * i + [weights[i]]  # keeps its gradient's seed
        torch.testing.assert_close(found, stepped(RowMuon, alone, steps=1)[-1], **ROUNDING)


@pytest.mark.parametrize("shape", [(4, 9), (9, 4), (6, 3, 1, 2)])
@pytest.mark.parametrize("scale", [1e-5, 1e5])
def test_an_update_is_nearly_orthogonal(shape: tuple[int, ...], scale: float) -> None:
    p = nn.Parameter(torch.zeros(shape))
    p.grad = scale * torch.randn(shape)
    RowMuon([p], lr=1.0, adjust_lr_fn="match_rms_adamw").step()
    update = -p.detach().flatten(1) / (0.2 * math.sqrt(max(p.flatten(1).shape)))
    values = torch.linalg.svdvals(update)
    assert values.min() > 0.4 and values.max() < 1.4
    u, _, v = torch.linalg.svd(p.grad.flatten(1), full_matrices=False)
    assert ((u @ v) * update).sum() > 0.6 * min(update.shape)


def test_layers_without_gradient_and_frozen_ones_are_left() -> None:
    still, frozen = nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(2, 3))
    still.grad = torch.zeros(2, 3)
    RowMuon([still, frozen], weight_decay=0.0).step()
    assert torch.equal(still, torch.ones(2, 3)) and torch.equal(frozen, torch.ones(2, 3))


@pytest.mark.parametrize("make", [mlp, cnn])
def test_no_layer_mixes_with_another(make: Any) -> None:
    """A change of one layer's gradient leaves the others' step as it was."""
    models = [make(), make()]
    for model in models:
        train_once = build(model, torch.optim.Muon, lr=0.02)
        torch.manual_seed(5)
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        if model is models[1]:
            model[3].weight.grad *= -1
        train_once.step()
    assert_same_weights(models[0][0], models[1][0])
    assert not torch.equal(models[0][3].weight, models[1][3].weight)


def test_muon_brings_adamw_for_the_rest() -> None:
    model, other = mlp(), mlp()
    optimizer = build(model, torch.optim.Muon, lr=0.01)
    assert "Muon; rest AdamW" in str(optimizer)
    partial = functools.partial(torch.optim.Muon, momentum=0.95)
    train(model, optimizer)
    train(other, build(other, partial, lr=0.01))
    assert_same_weights(model, other)
    assert {"r/exp_avg", "direction/momentum_buffer"} <= optimizer.state[model[0].weight].keys()
    mixed = build(mlp(), torch.optim.Muon, rest=torch.optim.SGD, momentum=0.8)
    assert [group["momentum"] for group in mixed.param_groups] == [0.8, 0]
