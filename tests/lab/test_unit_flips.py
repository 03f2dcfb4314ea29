"""Propositions 2.3 to 2.5 beyond BN: a step as long as one row reverses its unit under any norm.

The papers say so of LN in the proof for BN, and in v2's section 5.2 of instance norm, group norm
and spectral norm. A norm that subtracts a mean over positions leaves each image its own offset, so
there the direction is judged by differences between positions.
"""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.nn.utils.parametrizations import spectral_norm

DELTA = 1e-2  # of the weight that is left, reversed
ROW = 1


@torch.no_grad()
@pytest.mark.parametrize("units", [2, 3, 64])
@pytest.mark.parametrize("inputs", [4, 512])
def test_ln_is_reversed_by_one_row(units: int, inputs: int) -> None:
    layer = nn.Linear(inputs, units, dtype=torch.float64)
    norm = nn.LayerNorm(units, eps=0, dtype=torch.float64)
    x = torch.randn(200, inputs, dtype=torch.float64)
    before = norm(layer(x))[:, ROW]
    length = layer.weight[ROW].norm()

    # The mean over units has a share of 1 / units of the row itself.
    factor = -(1 + DELTA) * units / (units - 1)
    step = factor * (layer.weight[ROW] - layer.weight.mean(0))
    bias_step = factor * (layer.bias[ROW] - layer.bias.mean())
    layer.weight[ROW] += step
    layer.bias[ROW] += bias_step

    after = norm(layer(x))[:, ROW]
    assert torch.equal(after.sign(), -before.sign())
    assert step.norm() < 3.5 * length  # about the row's own length


@torch.no_grad()
@pytest.mark.parametrize(
    "norm", [nn.InstanceNorm2d(8), nn.GroupNorm(2, 8), nn.GroupNorm(1, 8)], ids=str
)
def test_norms_over_positions_are_reversed_by_one_row(norm: nn.Module) -> None:
    layer = nn.Conv2d(3, 8, 3, dtype=torch.float64)
    norm = norm.double()
    x = torch.randn(5, 3, 9, 9, dtype=torch.float64)

    def differences_between_positions() -> Tensor:
        values = norm(layer(x))[:, ROW].flatten(1)
        return values.unsqueeze(1) - values.unsqueeze(2)

    before = differences_between_positions()
    layer.weight[ROW] *= -DELTA
    after = differences_between_positions()

    assert torch.equal(after.sign(), -before.sign())


@torch.no_grad()
def test_under_spectral_norm_units_keep_the_direction_of_the_stored_rows() -> None:
    layer = spectral_norm(nn.Linear(6, 8, bias=False, dtype=torch.float64)).eval()
    stored = layer.parametrizations.weight.original

    stored += 1e-3 * torch.randn_like(stored)

    torch.testing.assert_close(normalize(layer.weight), normalize(stored))


@torch.no_grad()
def test_under_spectral_norm_one_row_reverses_its_unit() -> None:
    layer = spectral_norm(nn.Linear(6, 8, bias=False, dtype=torch.float64)).eval()
    stored = layer.parametrizations.weight.original
    before = layer.weight.clone()

    stored[ROW] = -DELTA * before[ROW]

    cosine = torch.cosine_similarity(layer.weight[ROW], before[ROW], dim=0)
    assert cosine == pytest.approx(-1)
