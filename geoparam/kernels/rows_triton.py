"""The functions of `rows` as Triton kernels: one launch for all rows of a model.

A program handles one row. `layer` (rows,) has its matrix, `addresses` (operands, matrices) the
matrix's address, `first` (matrices + 1,) the matrix's first row and `width` (matrices,) its
columns. Rows are read twice in chunks of BLOCK columns: once for the sums, once, from the cache,
for the results. Sums have the matrices' own type, float32 or float64.

Functions of one value per row and of sums over a layer's rows (biases, turns) have one program per
matrix. Where processes share the rows, the plain form is used, which sums over them.

Addresses of gradients change from step to step, but a training loop soon repeats them: the newest
few tables on the GPU are cached. The host's copy of a table is kept with it, so that the transfer
never reads freed memory. Tables that a CUDA graph uses are never dropped: every replay reads them,
and repeats the transfer of those that were made while it was captured.
"""

from itertools import chain
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from geoparam.kernels.rows import SMALLEST_R, Rows, addresses

_BLOCK = 1024
_TABLES = 8  # cached address tables
_SMALLEST_R = tl.constexpr(SMALLEST_R)


class TritonRows(Rows):
    """Rows on a GPU, by the kernels below."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        counts = torch.tensor(self.counts, device="cpu")
        numbers = torch.arange(len(counts), device="cpu")
        self.layer = numbers.repeat_interleave(counts).int().to(self.device)
        self.first = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).to(self.device)
        self.width = torch.tensor(self.widths).to(self.device)
        self.tables: dict[Any, tuple[Tensor, Tensor]] = {}
        self.captured: list[tuple[Tensor, Tensor]] = []

    def turn_coefficients(self, per_row, turn, limit) -> tuple[Tensor, Tensor]:
        if turn is None or self.group is not None:
            return super().turn_coefficients(per_row, turn, limit)
        a, b = torch.empty_like(per_row[0]), torch.empty_like(per_row[0])
        self._launch(_mix, len(self.counts), self.first, *per_row, turn, limit, a, b)
        return a, b

    def enter_biases(self, *inputs) -> None:
        if self.group is not None:
            return super().enter_biases(*inputs)
        self._launch(_enter_biases, len(self.counts), self.first, *inputs, MATCH=self.match)

    def leave_biases(self, *inputs) -> None:
        if self.group is not None:
            return super().leave_biases(*inputs)
        self._launch(_leave_biases, len(self.counts), self.first, *inputs, MATCH=self.match)

    def _run(self, name, operands, per_row, **options) -> None:
        known = self._table(operands), self.layer, self.first, self.width
        self._launch(_KERNELS[name], self.total, *known, *per_row, len(self.counts), **options)

    def _launch(self, kernel: Any, programs: int, *arguments: Any, **options: bool) -> None:
        with torch.cuda.device_of(self.first):  # nothing in Triton's interpreter
            # No fused multiply-add: _leave_biases compares a product with a stored one.
            kernel[(programs,)](*arguments, BLOCK=_BLOCK, enable_fp_fusion=False, **options)

    def _table(self, operands: list) -> Tensor:
        places = tuple(map(addresses, operands))
        found = self.tables.pop(places, None)
        if found is None:
            host = torch.tensor(list(chain.from_iterable(places)), device="cpu")
            host = host.pin_memory() if self.device.type == "cuda" else host
            found = host.to(self.device, non_blocking=True), host
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self.captured.append(found)  # and out of the cache: it is filled at the first replay
            return found[0]
        if len(self.tables) == _TABLES:
            del self.tables[next(iter(self.tables))]
        self.tables[places] = found
        return found[0]


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
    addresses, layer, first, width, length, r, grad_r, grad_norm, layers,
    rescales: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # addresses is (3, layers): w, g, dL/dv. r has a sign and becomes sign |w|; grad_r and
    # grad_norm are written.
    row, matrix, offset, n = _own_row(layer, first, width)
    w = _place(addresses, matrix, 0, layers, offset, r)
    g = _place(addresses, matrix, 1, layers, offset, r)
    grad_v = _place(addresses, matrix, 2, layers, offset, r)
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
        tl.store(grad_v + at + column, by_g * y - by_w * x, inside)
        if rescales:
            tl.store(w + at + column, to_length * x, inside)
    tl.store(r + row, scale)
    tl.store(grad_r + row, along)
    tl.store(grad_norm + row, tl.max(largest, 0))


@triton.jit
def _leave(addresses, layer, first, width, r, r_before, layers, BLOCK: tl.constexpr):
    row, matrix, offset, n = _own_row(layer, first, width)
    w = _place(addresses, matrix, 0, layers, offset, r)
    column = tl.arange(0, BLOCK)
    square = tl.zeros((BLOCK,), dtype=r.dtype.element_ty)
    for at in range(0, n, BLOCK):
        x = tl.load(w + at + column, at + column < n, 0)
        square += x * x
    norm = tl.sqrt(tl.sum(square, 0))
    length = tl.where(tl.load(r_before + row) == 0, 0.0, tl.load(r + row))
    tl.store(r + row, length)
    scale = length / tl.where(norm == 0, 1.0, norm)
    for at in range(0, n, BLOCK):
        inside = at + column < n
        tl.store(w + at + column, scale * tl.load(w + at + column, inside, 0), inside)


@triton.jit
def _measure(addresses, layer, first, width, r, along, across, layers, BLOCK: tl.constexpr):
    row, matrix, offset, n = _own_row(layer, first, width)
    w = _place(addresses, matrix, 0, layers, offset, r)
    d = _place(addresses, matrix, 1, layers, offset, r)
    column = tl.arange(0, BLOCK)
    zeros = tl.zeros((BLOCK,), dtype=r.dtype.element_ty)
    scale = tl.load(r + row)
    divisor = tl.where(scale == 0, 1.0, scale)
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
def _rotate(addresses, layer, first, width, a, b, layers, BLOCK: tl.constexpr):
    row, matrix, offset, n = _own_row(layer, first, width)
    w = _place(addresses, matrix, 0, layers, offset, a)
    d = _place(addresses, matrix, 1, layers, offset, a)
    column = tl.arange(0, BLOCK)
    by_w, by_d = tl.load(a + row), tl.load(b + row)
    for at in range(0, n, BLOCK):
        inside = at + column < n
        x = tl.load(w + at + column, inside, 0)
        y = tl.load(d + at + column, inside, 0)
        tl.store(w + at + column, by_w * x + by_d * y, inside)


_KERNELS = {"enter": _enter, "leave": _leave, "measure": _measure, "rotate": _rotate}


@triton.jit
def _own_rows(first):
    """Return the first row of this program's matrix, and the row after its last."""
    return tl.load(first + tl.program_id(0)), tl.load(first + tl.program_id(0) + 1)


@triton.jit
def _mix(
    first, along, across, length, grad_norm, r_before, r, turn, limit, a, b, BLOCK: tl.constexpr
):
    # turn is (layers,), all others are (rows,); r is read and written, a and b are written
    begin, end = _own_rows(first)
    square = tl.zeros((BLOCK,), dtype=r.dtype.element_ty)
    largest = tl.zeros((BLOCK,), dtype=r.dtype.element_ty)
    for at in range(begin, end, BLOCK):
        row = at + tl.arange(0, BLOCK)
        x = tl.load(across + row, row < end, 0)
        square += x * x
        largest = tl.maximum(largest, tl.load(grad_norm + row, row < end, 0))
    count = tl.maximum(end - begin, 1).to(r.dtype.element_ty)
    rms = tl.sqrt(tl.sum(square, 0) / count)
    rate = tl.load(turn + tl.program_id(0))
    is_still = (rms == 0) | ~(tl.max(largest, 0) > 0)
    speed = tl.where(is_still, 0.0, rate / tl.where(rms == 0, 1.0, rms))
    most = tl.where(limit > 0, limit, 4 * rate)
    for at in range(begin, end, BLOCK):
        row = at + tl.arange(0, BLOCK)
        inside = row < end
        before = tl.load(r_before + row, inside, 0)
        scale = tl.load(r + row, inside, 0)
        # as `keep_signs`
        size = tl.abs(before)
        least = tl.minimum(size, _SMALLEST_R * tl.load(length + row, inside, 0))
        kept = tl.maximum(0.1 * size, least)
        scale = tl.where(scale * before < 0, tl.where(before < 0, -kept, kept), scale)
        scale = tl.where(before == 0, 0.0, scale)
        x = tl.load(across + row, inside, 0)
        angle = x * speed
        angle = tl.where(angle > most, most, angle)  # NaN stays
        by_d = tl.where(x > 0, scale * tl.sin(angle) / tl.where(x > 0, x, 1.0), 0.0)
        divisor = tl.where(before == 0, 1.0, before)
        parallel = tl.load(along + row, inside, 0)
        tl.store(r + row, scale, inside)
        tl.store(a + row, scale / divisor * tl.cos(angle) - by_d * parallel / divisor, inside)
        tl.store(b + row, by_d, inside)


@triton.jit
def _mean(first, r, BLOCK: tl.constexpr):
    """Return the mean |r| of this program's matrix; 1 where it is 0."""
    begin, end = _own_rows(first)
    sums = tl.zeros((BLOCK,), dtype=r.dtype.element_ty)
    for at in range(begin, end, BLOCK):
        row = at + tl.arange(0, BLOCK)
        sums += tl.abs(tl.load(r + row, row < end, 0))
    mean = tl.sum(sums, 0) / tl.maximum(end - begin, 1).to(r.dtype.element_ty)
    return tl.where(mean == 0, 1.0, mean)


@triton.jit
def _stretch(value, scale, mean, MATCH: tl.constexpr):
    """Return whether a bias is stepped as R' b / r, b / r where it is, and its factor."""
    is_near = scale != 0
    if MATCH:
        is_near = is_near & (tl.abs(value) <= tl.abs(scale))
    divisor = tl.where(scale == 0, 1.0, scale)
    return is_near, tl.where(is_near, value / divisor, 0.0), tl.where(is_near, mean / divisor, 1.0)


@triton.jit
def _enter_biases(
    first, b, grad_b, r, grad_r, lam, grad_lam, MATCH: tl.constexpr, BLOCK: tl.constexpr
):
    # grad_r is read and written, lam and grad_lam are written
    begin, end = _own_rows(first)
    mean = _mean(first, r, BLOCK) if MATCH else 1.0
    for at in range(begin, end, BLOCK):
        row = at + tl.arange(0, BLOCK)
        inside = row < end
        value, by_value = tl.load(b + row, inside, 0), tl.load(grad_b + row, inside, 0)
        is_near, distance, stretch = _stretch(value, tl.load(r + row, inside, 0), mean, MATCH)
        tl.store(lam + row, stretch * value, inside)
        tl.store(grad_lam + row, by_value / stretch, inside)
        tl.store(grad_r + row, tl.load(grad_r + row, inside, 0) + distance * by_value, inside)


@triton.jit
def _leave_biases(first, b, r, r_before, lam, MATCH: tl.constexpr, BLOCK: tl.constexpr):
    # b and lam are read and written
    begin, end = _own_rows(first)
    mean = _mean(first, r_before, BLOCK) if MATCH else 1.0
    for at in range(begin, end, BLOCK):
        row = at + tl.arange(0, BLOCK)
        inside = row < end
        value, stepped = tl.load(b + row, inside, 0), tl.load(lam + row, inside, 0)
        before, scale = tl.load(r_before + row, inside, 0), tl.load(r + row, inside, 0)
        is_near, _, stretch = _stretch(value, before, mean, MATCH)
        is_still = (stepped == stretch * value) & (scale == before)
        new = tl.where(is_near, scale * stepped / mean, stepped)
        new = tl.where(is_still, value, new)
        tl.store(b + row, new, inside)
        distance = new / tl.where(scale == 0, 1.0, scale)
        tl.store(lam + row, tl.where(scale == 0, 0.0, distance), inside)
