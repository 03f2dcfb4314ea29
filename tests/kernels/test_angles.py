"""Rows whose directions are latitudes: Triton steps them as plain torch does.

Triton's kernels run on a GPU, or in Triton's interpreter with TRITON_INTERPRET=1.
"""

import copy
import importlib
import math
import os
from typing import Any

import plain_models
import pytest
import torch
from torch import Tensor, nn

from geoparam import sphere
from geoparam.kernels import selection
from geoparam.kernels.angles import AngleRows

SHAPES = [(4, 5), (0, 4), (3, 2), (3, 40), (4, 5), (2, 1030)]
WIDTHS = [width for count, width in SHAPES for _ in range(count)]
TOTAL = len(WIDTHS)
BOUNDS = {torch.float32: 4e-6, torch.float64: 1e-12}

# Rows whose w is zero, by their numbers, and rows that were written since the last step.
PRUNED, NEW, WITHOUT_GRADIENT, WRITTEN = [1, 8], [2, 9, 14], [3, 10], [0, 7, 15]

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
on_triton = pytest.mark.interpreter if INTERPRETED else pytest.mark.gpu


def find_row(flat: Tensor, row: int) -> Tensor:
    """Return a view of a row's elements."""
    return flat[sum(WIDTHS[:row]) :][: WIDTHS[row]]


def draw_rows(dtype: torch.dtype) -> dict[str, Tensor]:
    """Return random rows of all kinds before a step, as flat tensors."""
    size = sum(WIDTHS)
    latitudes = [sphere.to_latitude(torch.randn(shape)).flatten() for shape in SHAPES]
    rows = {
        "w": torch.zeros(size, dtype=dtype),
        "g": torch.randn(size, dtype=dtype),
        "stored": torch.cat(latitudes).to(dtype),
        "length": torch.rand(TOTAL, dtype=dtype) + 0.5,
        "r": torch.randn(TOTAL, dtype=dtype),
        "increment": 0.3 * torch.randn(size - TOTAL, dtype=dtype),
    }
    every = torch.ones(TOTAL, dtype=torch.bool)
    kernels = AngleRows(SHAPES, rows["length"])
    kernels.compute(rows["stored"], rows["r"], every, rows["w"])
    rows["written"] = rows["w"].clone()

    rows["r"][[*NEW, *WITHOUT_GRADIENT]] = 0
    for row in (*PRUNED, *NEW, *WITHOUT_GRADIENT):
        find_row(rows["w"], row).zero_()
    for row in WRITTEN:
        find_row(rows["w"], row).mul_(-1.5)[1] = 0.25
    for row in WITHOUT_GRADIENT:
        find_row(rows["g"], row).zero_()
    find_row(rows["g"], NEW[0]).mul_(1e-30)
    rows["increment"][:17] = 0  # of the first five rows
    return rows


def step(kernels: Any, rows: dict[str, Tensor], max_angle: float | None) -> dict[str, Tensor]:
    """Return all that the functions give in a step of these rows."""
    w, g, stored, increment = (rows[key] for key in ("w", "g", "stored", "increment"))
    r_stored = rows["r"]
    latitudes = stored.clone()
    kernels.take_up(rows["written"], rows["written"].clone(), stored, r_stored)
    assert torch.equal(stored, latitudes)  # no row was written

    before = kernels.take_up(w, rows["written"], stored, r_stored)
    assert torch.equal(rows["written"], w)

    grad = torch.full_like(increment, torch.nan)
    grad_r = kernels.differentiate(g, stored, before, r_stored, grad)

    r = before + 0.1
    r[[1, 4]] = before[[1, 4]]
    r[NEW[1]] = -0.1
    is_moved = kernels.move(increment, stored, w, g, before, r_stored, r, max_angle)
    kernels.compute(increment, r, is_moved, rows["written"])
    for row in (1, 4):
        assert torch.equal(find_row(rows["written"], row), find_row(w, row))
    found = {"before": before, "grad_r": grad_r, "grad": grad, "r": r, "is_moved": is_moved}
    return {**rows, **found}


@on_triton
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("max_angle", [None, math.radians(20.0)], ids=["free", "bounded"])
def test_kernels_step_as_plain_torch(dtype: torch.dtype, max_angle: float | None) -> None:
    pytest.importorskip("triton")
    triton_rows = importlib.import_module("geoparam.kernels.angles_triton").TritonAngleRows
    rows = draw_rows(dtype)
    on_device = {key: x.clone().to(DEVICE) for key, x in rows.items()}
    found = step(triton_rows(SHAPES, on_device["length"]), on_device, max_angle)
    expected = step(AngleRows(SHAPES, rows["length"]), rows, max_angle)
    found = {key: x.cpu() for key, x in found.items()}
    torch.testing.assert_close(found, expected, rtol=BOUNDS[dtype], atol=10 * BOUNDS[dtype])


@on_triton
@pytest.mark.parametrize("kind", ["angles", "bounded", "bfloat16 angles"])
def test_training_follows_plain_torch(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a row of zeros, a layer of zeros, and a row that is pruned and written later."""

    def train(kernels: str, device: str) -> nn.Module:
        monkeypatch.setattr(selection, "KERNELS", kernels)
        model, optimizer = copy.deepcopy(pair)
        model.to(device)
        for value in (0.0, 0.5):
            for number in range(2):
                plain_models.backward(model, number)
                optimizer.step()
            model[0].weight.data[2] = value
        return model.cpu()

    pair = plain_models.start(kind)
    pair[0][0].weight.data[4] = 0
    nn.init.zeros_(pair[0][3].weight)
    found, expected = train("triton", DEVICE), train("torch", "cpu")
    plain_models.assert_same_weights(found, expected, 1e-2 if "bfloat16" in kind else 1e-9)
