"""The functions of `rows` as Triton kernels: one launch for all rows of a model.

A program handles one row. `layer` (rows,) has its matrix, `addresses` (operands, matrices) the
matrix's address, `first` (matrices,) the matrix's first row and `width` (matrices,) its columns.
Rows are read twice in chunks of BLOCK columns: once for the sums, once, from the cache, for the
results. Sums have the matrices' own type, float32 or float64.

Addresses of gradients change from step to step, but a training loop soon repeats them: the newest
few tables on the GPU are cached. The host's copy of a table is kept with it, so that the transfer
never reads freed memory. Tables that a CUDA graph uses are never dropped: every replay reads them,
and repeats the transfer of those that were made while it was captured.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from geoparam.kernels.rows import Rows

_BLOCK = 1024
_TABLES = 8  # cached address tables


class TritonRows(Rows):
    """Rows on a GPU, by the kernels below."""

    def __init__(self, shapes: Any, like: Tensor) -> None:
        super().__init__(shapes, like)
        counts = torch.tensor([count for count, _ in shapes], device="cpu")
        numbers = torch.arange(len(counts), device="cpu")
        self.layer = numbers.repeat_interleave(counts).int().to(self.device)
        self.first = (counts.cumsum(0) - counts).to(self.device)
        self.width = torch.tensor([width for _, width in shapes], device="cpu").to(self.device)
        self.tables: dict[Any, tuple[Tensor, Tensor]] = {}
        self.captured: list[tuple[Tensor, Tensor]] = []

    def project(self, w, g, grad_d, length, r_before):
        r, grad_r, size_g = torch.empty((3, self.total), dtype=self.dtype, device=self.device)
        self._launch(_project, (w, g, grad_d), length, r_before, r, grad_r, size_g)
        return r, grad_r, size_g

    def measure(self, w, d, r, work):
        along, across = torch.empty((2, self.total), dtype=self.dtype, device=self.device)
        self._launch(_measure, (w, d), r, along, across)
        return along, across

    def combine(self, w, d, a, b):
        self._launch(_combine, (w, d), a, b)

    def _launch(self, kernel, operands, *per_row):
        places = self.layer, self.first, self.width, len(self.shapes)
        with torch.cuda.device_of(self.first):  # nothing in Triton's interpreter
            kernel[(self.total,)](self._table(operands), *places, *per_row, BLOCK=_BLOCK)

    def _table(self, operands):
        """Return the operands' addresses on the GPU: those of a cached table, or a new one."""
        places = tuple([matrix.data_ptr() for matrices in operands for matrix in matrices])
        table = self.tables.pop(places, None)
        if table is None:
            host = torch.tensor(places, device="cpu")
            host = host.pin_memory() if self.device.type == "cuda" else host
            table = host.to(self.device, non_blocking=True), host

        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self.captured.append(table)  # and out of the cache: it is filled at the first replay
            return table[0]
        if len(self.tables) == _TABLES:
            del self.tables[next(iter(self.tables))]
        self.tables[places] = table
        return table[0]


@triton.jit
def _find_row(layer, first, width):
    """Return this program's row, its matrix, its offset there and its length."""
    row = tl.program_id(0)
    matrix = tl.load(layer + row).to(tl.int64)
    n = tl.load(width + matrix)
    return row, matrix, (row - tl.load(first + matrix)) * n, n


@triton.jit
def _point(addresses, operand, layers, matrix, offset, like):
    """Return the pointer to this row of an operand."""
    address = tl.load(addresses + operand * layers + matrix)
    return address.to(like.dtype) + offset


@triton.jit
def _project(
    addresses, layer, first, width, layers, length, r_before, r, grad_r, size_g,
    BLOCK: tl.constexpr,
):  # fmt: skip
    # addresses is (3, layers): w, g, dL/dd. r, grad_r and size_g are written.
    row, matrix, offset, n = _find_row(layer, first, width)
    w = _point(addresses, 0, layers, matrix, offset, r)
    g = _point(addresses, 1, layers, matrix, offset, r)
    grad_d = _point(addresses, 2, layers, matrix, offset, r)
    column = tl.arange(0, BLOCK)

    zeros = tl.zeros((BLOCK,), dtype=r.dtype.element_ty)
    square, product, square_g = zeros, zeros, zeros
    for at in range(0, n, BLOCK):
        inside = at + column < n
        x = tl.load(w + at + column, inside, 0)
        y = tl.load(g + at + column, inside, 0)
        square += x * x
        product += x * y
        square_g += y * y

    before = tl.load(r_before + row)
    norm = tl.sqrt(tl.sum(square, 0))
    scale = tl.where(before < 0, -norm, norm)
    is_new = (norm == 0) & (before == 0)
    is_long = norm == float("inf")
    by_scale = tl.sum(product, 0) / tl.where(norm == 0, 1.0, scale)
    by_scale = tl.where(is_long, 0.0, by_scale)

    at_length = tl.load(length + row)
    by_g = tl.where(is_new, 1.0, tl.where(is_long, 0.0, scale / at_length))
    by_w = by_scale / at_length
    for at in range(0, n, BLOCK):
        inside = at + column < n
        x = tl.load(w + at + column, inside, 0)
        y = tl.load(g + at + column, inside, 0)
        tl.store(grad_d + at + column, by_g * y - by_w * x, inside)

    tl.store(r + row, scale)
    size = tl.sqrt(tl.sum(square_g, 0))
    tl.store(grad_r + row, tl.where(is_new, -size, by_scale))
    tl.store(size_g + row, size)


@triton.jit
def _measure(addresses, layer, first, width, layers, r, along, across, BLOCK: tl.constexpr):
    # addresses is (2, layers): w, d. along and across are written.
    row, matrix, offset, n = _find_row(layer, first, width)
    w = _point(addresses, 0, layers, matrix, offset, r)
    d = _point(addresses, 1, layers, matrix, offset, r)
    column = tl.arange(0, BLOCK)

    scale = tl.load(r + row)
    divisor = tl.where(scale == 0, 1.0, scale)
    zeros = tl.zeros((BLOCK,), dtype=r.dtype.element_ty)
    product, square = zeros, zeros
    for at in range(0, n, BLOCK):
        inside = at + column < n
        product += tl.load(d + at + column, inside, 0) * tl.load(w + at + column, inside, 0)
    parallel = tl.sum(product, 0) / divisor
    for at in range(0, n, BLOCK):  # |d|^2 - along^2 would lose digits
        inside = at + column < n
        x = tl.load(w + at + column, inside, 0)
        rest = tl.load(d + at + column, inside, 0) - parallel / divisor * x
        square += rest * rest

    tl.store(along + row, parallel)
    tl.store(across + row, tl.sqrt(tl.sum(square, 0)))


@triton.jit
def _combine(addresses, layer, first, width, layers, a, b, BLOCK: tl.constexpr):
    # addresses is (2, layers): w, d. d is written.
    row, matrix, offset, n = _find_row(layer, first, width)
    w = _point(addresses, 0, layers, matrix, offset, a)
    d = _point(addresses, 1, layers, matrix, offset, a)
    column = tl.arange(0, BLOCK)
    by_w, by_d = tl.load(a + row), tl.load(b + row)
    for at in range(0, n, BLOCK):
        inside = at + column < n
        x = tl.load(w + at + column, inside, 0)
        y = tl.load(d + at + column, inside, 0)
        tl.store(d + at + column, by_w * x + by_d * y, inside)
