"""Adds one value per channel to images in channels_last, as a Triton kernel.

Torch's own addition reaches a third of the memory's speed there
(results/benchmarks/training-h200.md). Rows are the positions of images, columns their channels;
the kernel is one pass over memory, in tiles of ROWS x COLUMNS.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 2048  # elements: eight for each thread, which loads them at once


def add_row_(x: Tensor, row: Tensor, factor: float = 1.0) -> None:
    """Add factor times a row of float32 to all rows of a contiguous matrix."""
    rows, columns = x.shape
    tile_columns = min(triton.next_power_of_2(columns), 128)
    tile_rows = _TILE // tile_columns
    grid = triton.cdiv(rows, tile_rows), triton.cdiv(columns, tile_columns)
    with torch.cuda.device_of(x):  # nothing in Triton's interpreter
        _add_row[grid](x, row, factor, rows, columns, tile_rows, tile_columns, num_warps=8)


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
