"""Sums over rows, and the addition of one row to all, as Triton kernels.

Rows are the positions of images in channels_last, columns their channels. Torch's own passes reach
a half and a third of the memory's speed there (results/benchmarks/training-h200.md).

Both are one pass over memory, in tiles of ROWS x COLUMNS. Sums are float32 whatever the type: each
program adds up some of the rows and writes a row of partial sums, and torch adds these few up. No
atomics: the same numbers every time.
"""

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 2048  # elements: eight for each thread, which loads them at once
_PROGRAMS = 1024  # that share a sum: some for each of a GPU's hundred processors


class _Tiling(NamedTuple):
    rows: int  # of a tile
    columns: int  # of a tile
    across: int  # tiles side by side that have all columns


def sum_rows(x: Tensor) -> Tensor:
    """Return the sum of the rows of a contiguous matrix, in float32."""
    rows, columns = x.shape
    tile = _tile(columns)
    programs = max(1, min(triton.cdiv(rows, tile.rows), _PROGRAMS // tile.across))
    rows_each = triton.cdiv(rows, programs * tile.rows) * tile.rows
    programs = triton.cdiv(rows, rows_each)

    sums = x.new_empty(programs, columns, dtype=torch.float32)
    sizes = rows, columns, rows_each, tile.rows, tile.columns
    _launch(_sum_rows, (programs, tile.across), x, sums, *sizes)
    return sums.sum(dim=0) if programs > 1 else sums[0]


def add_row_(x: Tensor, row: Tensor, factor: float = 1.0) -> None:
    """Add factor times a row of float32 to all rows of a contiguous matrix."""
    rows, columns = x.shape
    tile = _tile(columns)
    grid = triton.cdiv(rows, tile.rows), tile.across
    _launch(_add_row, grid, x, row, factor, rows, columns, tile.rows, tile.columns)


@functools.cache
def _tile(columns: int) -> _Tiling:
    tile_columns = min(triton.next_power_of_2(columns), 128)
    return _Tiling(_TILE // tile_columns, tile_columns, triton.cdiv(columns, tile_columns))


def _launch(kernel: Any, grid: tuple[int, int], x: Tensor, *arguments: Any) -> None:
    with torch.cuda.device_of(x):  # nothing in Triton's interpreter
        kernel[grid](x, *arguments, num_warps=8)


@triton.jit
def _sum_rows(
    x,  # (rows, columns)
    sums,  # (programs, columns)
    rows,
    columns,
    rows_each,  # rows that a program adds up
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    first = program * rows_each
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.arange(0, ROWS)
    x_ptr = x + (first + row)[:, None] * columns + column[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, rows_each, ROWS):
        is_inside = (first + start + row < rows)[:, None] & (column < columns)[None, :]
        total += tl.load(x_ptr, is_inside, 0).to(tl.float32)
        x_ptr += ROWS * columns
    tl.store(sums + program * columns + column, tl.sum(total, 0), column < columns)


@triton.jit
def _add_row(
    x,  # (rows, columns)
    added,  # (columns,)
    factor,
    rows,
    columns,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_inside = (row < rows)[:, None] & (column < columns)[None, :]
    x_ptr = x + row[:, None] * columns + column[None, :]
    change = tl.load(added + column, column < columns, 0).to(tl.float32)
    total = tl.load(x_ptr, is_inside, 0).to(tl.float32) + factor * change[None, :]
    tl.store(x_ptr, total.to(x.dtype.element_ty), is_inside)
