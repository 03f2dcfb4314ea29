"""Propositions 2.3 to 2.5 beyond BN: a step as long as one row reverses its unit under any norm.

The papers say so of LN in the proof for BN, and in v2's section 5.2 of instance norm, group norm
and spectral norm. A norm that subtracts a mean over positions leaves each image its own offset, so
there the direction is judged by differences between positions.
"""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

DELTA = 1e-2  # of the weight that is left, reversed
ROW = 1


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@torch.no_grad()
def shift_row(layer: nn.Module, step: Tensor, bias_step: float | Tensor = 0.0) -> None:
    layer.weight[ROW] += step
    if layer.bias is not None:
        layer.bias[ROW] += bias_step


@torch.no_grad()
@pytest.mark.parametrize("units", [2, 3, 64])
@pytest.mark.parametrize("inputs", [4, 512])
def test_ln_is_reversed_by_one_row(units: int, inputs: int) -> None:
    layer = nn.Linear(inputs, units, dtype=torch.float64)
    norm, x = nn.LayerNorm(units, eps=0, dtype=torch.float64), torch.randn(200, inputs).double()
    before = norm(layer(x))[:, ROW]
    # The mean over units has a share of 1 / units of the row itself.
    factor = -(1 + DELTA) * units / (units - 1)
    step = factor * (layer.weight[ROW] - layer.weight.mean(0))
    length = layer.weight[ROW].norm()
    shift_row(layer, step, factor * (layer.bias[ROW] - layer.bias.mean()))
    assert (norm(layer(x))[:, ROW].sign() == -before.sign()).all()
    assert step.norm() < 3.5 * length  # about the row's own length


@torch.no_grad()
@pytest.mark.parametrize(
    "norm", [nn.InstanceNorm2d(8), nn.GroupNorm(2, 8), nn.GroupNorm(1, 8)], ids=str
)
def test_norms_over_positions_are_reversed_by_one_row(norm: nn.Module) -> None:
    layer, x = nn.Conv2d(3, 8, 3, dtype=torch.float64), torch.randn(5, 3, 9, 9).double()

    def differences() -> Tensor:
        values = norm.double()(layer(x))[:, ROW].flatten(1)
        return values.unsqueeze(1) - values.unsqueeze(2)

    before = differences()
    shift_row(layer, -(1 + DELTA) * layer.weight[ROW])
    assert (differences().sign() == -before.sign()).all()


@torch.no_grad()
def test_under_spectral_norm_units_turn_as_under_sp() -> None:
    layer = spectral_norm(nn.Linear(6, 8, bias=False, dtype=torch.float64)).eval()
    held, before = layer.parametrizations.weight.original, layer.weight.clone()
    held += 1e-3 * torch.randn_like(held)
    torch.testing.assert_close(
        nn.functional.normalize(layer.weight), nn.functional.normalize(held)
    )
    held[ROW] = -DELTA * before[ROW]
    assert torch.cosine_similarity(layer.weight[ROW], before[ROW], dim=0) == pytest.approx(-1)
