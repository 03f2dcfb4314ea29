"""Sums over rows, and the addition of one row to all, as Triton kernels.

Rows are the positions of images in channels_last, columns their channels. Torch's own passes reach
a half and a third of the memory's speed there (results/benchmarks/training-h200.md).

Both are one pass over memory, in tiles of ROWS x COLUMNS. Sums are float32 whatever the type: each
program adds up a part of the rows and writes one row of sums; torch adds these few up. No atomics:
the same numbers every time.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 2048  # elements: eight for each thread, which it loads at once
_PROGRAMS = 1024  # that share a sum: some for each of a GPU's hundred processors


def sum_rows(x: Tensor) -> Tensor:
    """Return the sum of the rows of a contiguous matrix, in float32."""
    rows, columns = x.shape
    tall, wide, strips = _tile(columns)
    parts = max(1, min(-(-rows // tall), _PROGRAMS // strips))
    each = -(-rows // (parts * tall)) * tall
    parts = -(-rows // each)
    sums = x.new_empty(parts, columns, dtype=torch.float32)
    _launch(_sum_rows, (parts, strips), x, sums, rows, columns, each, tall, wide)
    return sums.sum(dim=0) if parts > 1 else sums[0]


def add_row_(x: Tensor, row: Tensor, factor: float = 1.0) -> None:
    """Add factor times a row of float32 to all rows of a contiguous matrix."""
    rows, columns = x.shape
    tall, wide, strips = _tile(columns)
    _launch(_add_row, (-(-rows // tall), strips), x, row, factor, rows, columns, tall, wide)


@functools.cache
def _tile(columns: int) -> tuple[int, int, int]:
    """Return a tile's rows and columns, and how many tiles have all columns."""
    wide = min(triton.next_power_of_2(columns), 128)
    return _TILE // wide, wide, -(-columns // wide)


def _launch(kernel: Any, grid: tuple[int, int], x: Tensor, *arguments: Any) -> None:
    with torch.cuda.device_of(x):  # nothing in Triton's interpreter
        kernel[grid](x, *arguments, num_warps=8)


@triton.jit
def _sum_rows(x, sums, rows, columns, each, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    part = tl.program_id(0).to(tl.int64)
    first = part * each
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.arange(0, ROWS)
    at = x + (first + row)[:, None] * columns + column[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, each, ROWS):
        inside = (first + start + row < rows)[:, None] & (column < columns)[None, :]
        total += tl.load(at, inside, 0).to(tl.float32)
        at += ROWS * columns
    tl.store(sums + part * columns + column, tl.sum(total, 0), column < columns)


@triton.jit
def _add_row(x, row, factor, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    line = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (line < rows)[:, None] & (column < columns)[None, :]
    at = x + line[:, None] * columns + column[None, :]
    change = tl.load(row + column, column < columns, 0).to(tl.float32)
    total = tl.load(at, inside, 0).to(tl.float32) + factor * change[None, :]
    tl.store(at, total.to(x.dtype.element_ty), inside)
