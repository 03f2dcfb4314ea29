"""Rows whose directions are latitudes: Triton steps them as plain torch does.

Triton's kernels run on a GPU, or in Triton's interpreter with TRITON_INTERPRET=1.
"""

import copy
import math
import os
from typing import Any, NamedTuple

import plain_models
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from geoparam import sphere
from geoparam.kernels import selection
from geoparam.kernels.angles import AngleRows

SHAPES = [(4, 5), (0, 4), (3, 2), (3, 40), (4, 5), (2, 1030)]
WIDTHS = [width for count, width in SHAPES for _ in range(count)]
TOTAL = len(WIDTHS)
TOLERANCES = {torch.float32: 4e-6, torch.float64: 1e-12}

# Numbers of rows. The w of the first three kinds is zero.
PRUNED = [1, 8]
NEW = [2, 9, 14]
WITHOUT_GRADIENT = [3, 10]
WRITTEN = [0, 7, 15]  # since the last step
STILL = [1, 4]  # neither their latitudes nor their r are stepped

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
on_triton = pytest.mark.interpreter if INTERPRETED else pytest.mark.gpu


class Rows(NamedTuple):
    """Rows of all kinds before a step, as flat tensors."""

    w: Tensor
    g: Tensor  # dL/dw
    stored: Tensor  # latitudes
    length: Tensor
    r: Tensor
    increment: Tensor
    written: Tensor  # what the last step wrote to w

    def copy_to(self, device: str) -> "Rows":
        return Rows(*[x.clone().to(device) for x in self])


def get_row(flat: Tensor, row: int) -> Tensor:
    """Return a view of a row's elements."""
    start = sum(WIDTHS[:row])
    return flat[start : start + WIDTHS[row]]


def draw_rows(dtype: torch.dtype) -> Rows:
    size = sum(WIDTHS)
    latitudes = [sphere.to_latitude(torch.randn(shape)).flatten() for shape in SHAPES]
    stored = torch.cat(latitudes).to(dtype)
    length = torch.rand(TOTAL, dtype=dtype) + 0.5
    g = torch.randn(size, dtype=dtype)
    r = torch.randn(TOTAL, dtype=dtype)
    increment = 0.3 * torch.randn(size - TOTAL, dtype=dtype)

    w = torch.zeros(size, dtype=dtype)
    all_rows = torch.ones(TOTAL, dtype=torch.bool)
    AngleRows(SHAPES, length).compute(stored, r, all_rows, w)
    written = w.clone()

    for row in (*PRUNED, *NEW, *WITHOUT_GRADIENT):
        get_row(w, row).zero_()
    for row in (*NEW, *WITHOUT_GRADIENT):
        r[row] = 0
    for row in WITHOUT_GRADIENT:
        get_row(g, row).zero_()
    for row in WRITTEN:
        get_row(w, row).mul_(-1.5)[1] = 0.25
    get_row(g, NEW[0]).mul_(1e-30)
    latitudes_of_first_five_rows = 4 * 4 + 1
    increment[:latitudes_of_first_five_rows] = 0
    return Rows(w, g, stored, length, r, increment, written)


def take_step(kernels: Any, rows: Rows, max_angle: float | None) -> dict[str, Tensor]:
    """Step the rows in place; return all that is computed or changed."""
    latitudes = rows.stored.clone()
    kernels.take_up(rows.written, rows.written.clone(), rows.stored, rows.r)
    assert torch.equal(rows.stored, latitudes)  # no row was written

    r_before = kernels.take_up(rows.w, rows.written, rows.stored, rows.r)
    assert torch.equal(rows.written, rows.w)

    grad = torch.full_like(rows.increment, torch.nan)
    grad_r = kernels.differentiate(rows.g, rows.stored, r_before, rows.r, grad)

    r = r_before + 0.1
    r[STILL] = r_before[STILL]
    r[NEW[1]] = -0.1
    is_moved = kernels.move(
        rows.increment, rows.stored, rows.w, rows.g, r_before, rows.r, r, max_angle
    )
    kernels.compute(rows.increment, r, is_moved, rows.written)

    results = {"r_before": r_before, "grad": grad, "grad_r": grad_r, "r": r, "is_moved": is_moved}
    return rows._asdict() | results


@on_triton
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("max_angle", [None, math.radians(20.0)], ids=["free", "bounded"])
def test_kernels_step_as_plain_torch(dtype: torch.dtype, max_angle: float | None) -> None:
    pytest.importorskip("triton")
    from geoparam.kernels.angles_triton import TritonAngleRows

    rows = draw_rows(dtype)
    on_device = rows.copy_to(DEVICE)

    by_triton = take_step(TritonAngleRows(SHAPES, on_device.length), on_device, max_angle)

    by_torch = take_step(AngleRows(SHAPES, rows.length), rows, max_angle)
    by_triton = {name: x.cpu() for name, x in by_triton.items()}
    rtol = TOLERANCES[dtype]
    assert_close(by_triton, by_torch, rtol=rtol, atol=10 * rtol)
    for row in STILL:
        w_after, w = get_row(by_triton["written"], row), get_row(by_triton["w"], row)
        assert torch.equal(w_after, w)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_rows_that_are_not_stepped_keep_their_weights(dtype: torch.dtype) -> None:
    rows = draw_rows(dtype)

    take_step(AngleRows(SHAPES, rows.length), rows, max_angle=None)

    for row in STILL:
        assert torch.equal(get_row(rows.written, row), get_row(rows.w, row))


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Take four steps; a row is pruned after the second and written after the last."""
    for value in (0.0, 0.5):
        for seed in range(2):
            plain_models.backward(model, seed)
            optimizer.step()
        model[0].weight.data[2] = value


@on_triton
@pytest.mark.parametrize("kind", ["angles", "bounded", "bfloat16 angles"])
def test_training_follows_plain_torch(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a row of zeros and a layer of zeros."""
    model, optimizer = plain_models.start(kind)
    model[0].weight.data[4] = 0
    nn.init.zeros_(model[3].weight)
    on_device, optimizer_on_device = copy.deepcopy((model, optimizer))
    on_device.to(DEVICE)

    monkeypatch.setattr(selection, "KERNELS", "torch")
    train(model, optimizer)
    monkeypatch.setattr(selection, "KERNELS", "triton")
    train(on_device, optimizer_on_device)

    tolerance = 1e-2 if "bfloat16" in kind else 1e-9
    plain_models.assert_same_weights(on_device.cpu(), model, tolerance)
