"""The functions of `rows` as Triton kernels: one launch for all rows of a model.

A program takes one row. It finds its matrix in `layer` (one number per row), the matrix's address
in `addresses` (one line per operand, one column per matrix), and its place in that matrix from
`first`. Rows are read in chunks of BLOCK columns, twice: once for the sums, once for the results;
the second read comes from the cache. Sums are in the matrices' own type, float32 or float64.
Products and sums are not fused: v - c w must be 0 where v was written as c w.

Addresses of gradients change from step to step, but a training loop soon comes back to the same
ones: the tables sent to the GPU are kept, the newest few. The host's copy of a table stays with
it, so that the transfer, or a CUDA graph that repeats it, never reads freed memory.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from geoparam.kernels.rows import Rows

_BLOCK = 1024
_TABLES = 8  # how many address tables are kept


class TritonRows(Rows):
    """Rows on a GPU, served by the kernels below."""

    def __init__(self, shapes: Sequence[tuple[int, int]], like: Tensor) -> None:
        super().__init__(shapes, like)
        numbers, counts = torch.arange(len(self.counts)), torch.tensor(self.counts)
        self.layer = numbers.repeat_interleave(counts).int().to(self.device)
        self.first = (counts.cumsum(0) - counts).to(self.device)
        self.width = torch.tensor(self.widths).to(self.device)
        self.tables: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}

    def enter(self, w, g, by_v, v, *per_row) -> None:
        assert all(x.dtype == self.dtype for x in (*w, *g)), "one type for all"
        self._launch(_enter, [w, g, by_v, w if v is None else v], *per_row, WRITES_V=v is not None)

    def leave(self, v, r) -> None:
        self._launch(_leave, [v], r)

    def measure(self, w, v, c, r) -> tuple[Tensor, Tensor]:
        along, across = torch.empty_like(r), torch.empty_like(r)
        self._launch(_measure, [w, v], c, r, along, across)
        return along, across

    def rotate(self, w, v, c, a, b) -> None:
        self._launch(_rotate, [w, v], c, a, b)

    def _launch(self, kernel: Any, operands: list, *per_row: Tensor, **options: bool) -> None:
        table = self._table(operands)
        kernel[(self.total,)](
            table, self.layer, self.first, self.width, *per_row, len(self.counts),
            BLOCK=_BLOCK, enable_fp_fusion=False, **options,
        )  # fmt: skip

    def _table(self, operands: list) -> Tensor:
        addresses = tuple([matrix.data_ptr() for matrices in operands for matrix in matrices])
        found = self.tables.pop(addresses, None)
        if found is None:
            host = torch.tensor(addresses)
            host = host.pin_memory() if self.device.type == "cuda" else host
            found = host.to(self.device, non_blocking=True), host
            if len(self.tables) == _TABLES and not _is_capturing(self.device):
                del self.tables[next(iter(self.tables))]
        self.tables[addresses] = found
        return found[0]


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@triton.jit
def _place(addresses, layer, operand, layers, offset, like):
    """Return the pointer to this row of an operand."""
    address = tl.load(addresses + operand * layers + layer)
    return address.to(like.dtype) + offset


@triton.jit
def _own_row(layer, first, width):
    """Return this program's row, its matrix, its place there and its length."""
    row = tl.program_id(0)
    matrix = tl.load(layer + row).to(tl.int64)
    n = tl.load(width + matrix)
    return row, matrix, (row - tl.load(first + matrix)) * n, n


@triton.jit
def _enter(
    addresses,  # (4, layers): w, g, dL/dv, v
    layer,  # (rows,): the matrix of each row
    first,  # (layers,): its first row
    width,  # (layers,): its columns
    length,  # (rows,)
    r,  # (rows,): a sign comes in, sign |w| goes out
    slope,  # (rows,), out
    peak,  # (rows,), out
    stretch,  # (rows,), out
    layers,
    WRITES_V: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, matrix, offset, n = _own_row(layer, first, width)
    w = _place(addresses, matrix, 0, layers, offset, r)
    g = _place(addresses, matrix, 1, layers, offset, r)
    by_v = _place(addresses, matrix, 2, layers, offset, r)
    v = _place(addresses, matrix, 3, layers, offset, r)
    column = tl.arange(0, BLOCK)
    zeros = tl.zeros((BLOCK,), dtype=r.dtype.element_ty)
    square, product, largest = zeros, zeros, zeros
    for at in range(0, n, BLOCK):
        inside = at + column < n
        x = tl.load(w + at + column, inside, 0)
        y = tl.load(g + at + column, inside, 0)
        square += x * x
        product += x * y
        largest = tl.maximum(largest, tl.abs(y))
    norm = tl.sqrt(tl.sum(square, 0))
    scale = tl.where(tl.load(r + row) < 0, -norm, norm)
    divisor = tl.where(norm == 0, 1.0, scale)
    along = tl.sum(product, 0) / divisor
    at_length = tl.load(length + row)
    by_g = scale / at_length
    by_w = tl.where(norm == 0, 0.0, along / at_length)
    to_length = at_length / divisor
    for at in range(0, n, BLOCK):
        inside = at + column < n
        x = tl.load(w + at + column, inside, 0)
        y = tl.load(g + at + column, inside, 0)
        tl.store(by_v + at + column, by_g * y - by_w * x, inside)
        if WRITES_V:
            tl.store(v + at + column, to_length * x, inside)
    tl.store(r + row, scale)
    tl.store(slope + row, along)
    tl.store(peak + row, tl.max(largest, 0))
    tl.store(stretch + row, to_length)


@triton.jit
def _leave(addresses, layer, first, width, r, layers, BLOCK: tl.constexpr):
    row, matrix, offset, n = _own_row(layer, first, width)
    v = _place(addresses, matrix, 0, layers, offset, r)
    column = tl.arange(0, BLOCK)
    square = tl.zeros((BLOCK,), dtype=r.dtype.element_ty)
    for at in range(0, n, BLOCK):
        x = tl.load(v + at + column, at + column < n, 0)
        square += x * x
    norm = tl.sqrt(tl.sum(square, 0))
    scale = tl.load(r + row) / tl.where(norm == 0, 1.0, norm)
    for at in range(0, n, BLOCK):
        inside = at + column < n
        tl.store(v + at + column, scale * tl.load(v + at + column, inside, 0), inside)


@triton.jit
def _measure(addresses, layer, first, width, c, r, along, across, layers, BLOCK: tl.constexpr):
    row, matrix, offset, n = _own_row(layer, first, width)
    w = _place(addresses, matrix, 0, layers, offset, r)
    v = _place(addresses, matrix, 1, layers, offset, r)
    column = tl.arange(0, BLOCK)
    zeros = tl.zeros((BLOCK,), dtype=r.dtype.element_ty)
    shift, scale = tl.load(c + row), tl.load(r + row)
    divisor = tl.where(scale == 0, 1.0, scale)
    product, square = zeros, zeros
    for at in range(0, n, BLOCK):
        inside = at + column < n
        x = tl.load(w + at + column, inside, 0)
        product += (tl.load(v + at + column, inside, 0) - shift * x) * x
    parallel = tl.sum(product, 0) / divisor
    for at in range(0, n, BLOCK):  # |d|^2 - along^2 would lose digits
        inside = at + column < n
        x = tl.load(w + at + column, inside, 0)
        d = tl.load(v + at + column, inside, 0) - shift * x
        rest = d - parallel / divisor * x
        square += rest * rest
    tl.store(along + row, parallel)
    tl.store(across + row, tl.sqrt(tl.sum(square, 0)))


@triton.jit
def _rotate(addresses, layer, first, width, c, a, b, layers, BLOCK: tl.constexpr):
    row, matrix, offset, n = _own_row(layer, first, width)
    w = _place(addresses, matrix, 0, layers, offset, a)
    v = _place(addresses, matrix, 1, layers, offset, a)
    column = tl.arange(0, BLOCK)
    shift, by_w, by_d = tl.load(c + row), tl.load(a + row), tl.load(b + row)
    for at in range(0, n, BLOCK):
        inside = at + column < n
        x = tl.load(w + at + column, inside, 0)
        d = tl.load(v + at + column, inside, 0) - shift * x
        tl.store(w + at + column, by_w * x + by_d * d, inside)
