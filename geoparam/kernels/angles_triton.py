"""The functions of `angles` as Triton kernels: one launch for all rows of a model.

A program handles one row. `start` (rows + 1,) says where the rows' elements begin; row i has i
latitudes less before it than elements. Rows that were not written, stepped or turned back are only
read. What few rows need is computed in float64, in small chunks, so that its registers do not slow
down all others.
"""

import torch
import triton
import triton.language as tl

from geoparam.kernels.angles import AngleRows
from geoparam.kernels.weight_triton import write_gradient, write_row

_BLOCK = 1024  # columns of a chunk, at most
_CHUNK = tl.constexpr(256)  # in float64


class TritonAngleRows(AngleRows):
    """Rows on a GPU, by the kernels below."""

    def __init__(self, shapes, length):
        super().__init__(shapes, length)
        counts, widths = torch.tensor(shapes, device="cpu").unbind(dim=1)
        ends = widths.repeat_interleave(counts).cumsum(0)
        self.start = torch.cat([ends.new_zeros(1), ends]).to(length.device)
        self.total = len(ends)

        widest = int(widths.max())
        block = max(16, min(triton.next_power_of_2(widest), _BLOCK))
        self.chunks = triton.cdiv(widest, block)
        self.warps = max(1, block // 256)
        working_type = tl.float64 if length.dtype == torch.float64 else tl.float32
        self.constants = {"TYPE": working_type, "BLOCK": block, "ONE_CHUNK": self.chunks == 1}

    def take_up(self, w, written, stored, r):
        r_read = torch.empty_like(r)
        self._launch(_take_up, w, written, stored, r, r_read)
        return r_read

    def differentiate(self, g, stored, r, r_stored, grad):
        grad_r = torch.empty_like(r)
        starts = torch.empty((self.total, self.chunks), dtype=r.dtype, device=r.device)
        tensors = g, stored, r, r_stored, grad, grad_r, starts
        self._launch(_differentiate, *tensors, self.chunks)
        return grad_r

    def move(self, increment, stored, w, g, r_before, r_stored, r, max_angle):
        is_moved = torch.empty_like(r, dtype=torch.bool)
        v, most = w, r  # pointers are needed, also if they are not read
        if max_angle is not None:
            v = torch.empty_like(w)
            most = torch.full((1,), max_angle, dtype=torch.float64, device=r.device)
        tensors = increment, stored, w, g, r_before, r_stored, r, is_moved, v, most
        self._launch(_move, *tensors, BOUNDED=max_angle is not None)
        return is_moved

    def compute(self, stored, r, is_chosen, w):
        self._launch(_compute, stored, r, is_chosen, w)

    def _launch(self, kernel, *arguments, **options):
        arguments = self.start, self.length, *arguments
        with torch.cuda.device_of(self.start):  # nothing in Triton's interpreter
            kernel[(self.total,)](*arguments, **self.constants, **options, num_warps=self.warps)


@triton.jit
def _find_row(start):
    """Return this program's row, where its elements begin, where its latitudes, and its width."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.load(start + row)
    n = (tl.load(start + row + 1) - first).to(tl.int32)
    return row, first, first - row, n


@triton.jit
def _take_up(
    start, length, w, written, stored, r, r_read,
    TYPE: tl.constexpr, BLOCK: tl.constexpr, ONE_CHUNK: tl.constexpr,
):  # fmt: skip
    row, first, first_angle, n = _find_row(start)
    w += first
    written += first
    column = tl.arange(0, BLOCK)
    differ, filled = tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.int32)
    for at in range(0, n, BLOCK):
        inside = at + column < n
        x = tl.load(w + at + column, inside, 0)
        differ |= (x != tl.load(written + at + column, inside, 0)).to(tl.int32)
        filled |= (x != 0).to(tl.int32)
    is_zero = tl.max(filled, 0) == 0

    scale = tl.load(r + row)
    if tl.max(differ, 0) != 0:
        for at in range(0, n, BLOCK):
            inside = at + column < n
            tl.store(written + at + column, tl.load(w + at + column, inside, 0), inside)
        if not is_zero:
            sign = tl.where(scale < 0, -1.0, 1.0)
            size = _write_latitudes(w, sign, w, 0.0, n, stored + first_angle, length + row)
            scale = (sign * size).to(scale.dtype)
            tl.store(r + row, scale)
    tl.store(r_read + row, tl.where(is_zero, 0.0, scale))


@triton.jit
def _differentiate(
    start, length, g, stored, r, r_stored, grad, grad_r, starts, chunks,
    TYPE: tl.constexpr, BLOCK: tl.constexpr, ONE_CHUNK: tl.constexpr,
):  # fmt: skip
    row, first, first_angle, n = _find_row(start)
    scale, at_length = tl.load(r + row), tl.load(length + row)
    g += first
    by_r = write_gradient(
        stored + first_angle, at_length, scale, g, grad + first_angle, starts + row * chunks, n,
        TYPE, BLOCK, ONE_CHUNK, False,
    )  # fmt: skip
    if scale == 0:
        size = _find_norm(g, n, BLOCK)
        by_r = tl.where(tl.load(r_stored + row) == 0, -size, 0.0)
    tl.store(grad_r + row, by_r)


@triton.jit
def _move(
    start, length, increment, stored, w, g, r_before, r_stored, r, is_moved, v, most,
    TYPE: tl.constexpr, BLOCK: tl.constexpr, ONE_CHUNK: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    # v (elements,) is memory for the moved units. increment, r and is_moved are written.
    row, first, first_angle, n = _find_row(start)
    increment += first_angle
    stored += first_angle
    g += first
    length += row
    column = tl.arange(0, BLOCK)
    stepped = tl.zeros((BLOCK,), tl.int32)
    for at in range(0, n - 1, BLOCK):
        inside = at + column < n - 1
        step = tl.load(increment + at + column, inside, 0)
        stepped |= (step != 0).to(tl.int32)
        tl.store(increment + at + column, step + tl.load(stored + at + column, inside, 0), inside)
    tl.debug_barrier()  # below, other threads read and write these

    before, scale = tl.load(r_before + row), tl.load(r + row)
    tl.store(is_moved + row, (tl.max(stepped, 0) != 0) | (scale != before))
    if BOUNDED:
        if before != 0:
            v += first
            write_row(increment, tl.load(length), 1, v, n, TYPE, BLOCK, ONE_CHUNK)
            tl.debug_barrier()
            sign = tl.where(before < 0, -1.0, 1.0)
            _turn_back(w + first, sign, v, tl.load(most), n, increment, length)

    if (before == 0) & (tl.load(r_stored + row) == 0):
        is_born = _find_largest(g, 1.0, g, 0.0, n) != 0
        if is_born:
            sign = tl.where(scale < 0, 1.0, -1.0)
            _write_latitudes(g, sign, g, 0.0, n, increment, length)
        tl.store(r + row, tl.where(is_born, tl.abs(scale), 0.0))


@triton.jit
def _compute(
    start, length, stored, r, is_chosen, w,
    TYPE: tl.constexpr, BLOCK: tl.constexpr, ONE_CHUNK: tl.constexpr,
):  # fmt: skip
    row, first, first_angle, n = _find_row(start)
    if tl.load(is_chosen + row):
        at_length, scale = tl.load(length + row), tl.load(r + row)
        write_row(stored + first_angle, at_length, scale, w + first, n, TYPE, BLOCK, ONE_CHUNK)


@triton.jit
def _find_norm(x, n, BLOCK: tl.constexpr):
    square = tl.zeros((BLOCK,), x.dtype.element_ty)
    for at in range(0, n, BLOCK):
        inside = at + tl.arange(0, BLOCK) < n
        part = tl.load(x + at + tl.arange(0, BLOCK), inside, 0)
        square += part * part
    return tl.sqrt(tl.sum(square, 0))


# ---- in float64, for few rows


@triton.jit
def _turn_back(w, sign, v, most, n, stored, length):
    """Store cos(most) u + sin(most) e, e across u, where v is further from u = sign w / |w|."""
    column = tl.arange(0, _CHUNK)
    zeros = tl.zeros((_CHUNK,), tl.float64)
    by_w = sign / _find_largest(w, 1.0, w, 0.0, n)  # its squares neither under- nor overflow

    square_w, square_v, product = zeros, zeros, zeros
    for at in range(0, n, _CHUNK):
        x, y = _load(w, by_w, w, 0.0, at + column, n), _load(v, 1.0, v, 0.0, at + column, n)
        square_w += x * x
        square_v += y * y
        product += x * y
    norm_w, by_v = tl.sqrt(tl.sum(square_w, 0)), 1 / tl.sqrt(tl.sum(square_v, 0))
    by_w /= norm_w
    along = tl.sum(product, 0) * by_v / norm_w

    across, difference, total = zeros, zeros, zeros
    for at in range(0, n, _CHUNK):
        x, y = _load(w, by_w, w, 0.0, at + column, n), _load(v, by_v, v, 0.0, at + column, n)
        across += (y - along * x) * (y - along * x)
        difference += (x - y) * (x - y)
        total += (x + y) * (x + y)
    half = _find_angle(tl.sqrt(tl.sum(difference, 0)), tl.sqrt(tl.sum(total, 0)))
    if 2 * half > most:
        size = tl.sqrt(tl.sum(across, 0))
        by_e = tl.sin(most) / tl.where(size == 0, 1.0, size)
        by_u = tl.cos(most) - along * by_e
        _write_latitudes(w, by_u * by_w, v, by_e * by_v, n, stored, length)


@triton.jit
def _write_latitudes(x, by_x, y, by_y, n, stored, length):
    """Store the latitudes of the vector by_x x + by_y y, times its length; return |vector|."""
    column = tl.arange(0, _CHUNK)
    unit = _find_largest(x, by_x, y, by_y, n)  # squares neither underflow nor overflow
    at_length = tl.load(length).to(tl.float64)
    beyond = tl.full((), 0, tl.float64)  # the sum of squares right of the chunk
    chunks = tl.cdiv(n, _CHUNK)
    for step in range(0, chunks):
        k = (chunks - 1 - step) * _CHUNK + column
        here = _load(x, by_x, y, by_y, k, n) / unit
        after = _load(x, by_x, y, by_y, k + 1, n) / unit
        rest = tl.sqrt(tl.cumsum(after * after, 0, reverse=True) + beyond)
        latitude = _find_angle(here, tl.where(k == n - 2, after, rest))
        tl.store(stored + k, (at_length * latitude).to(stored.dtype.element_ty), k < n - 1)
        beyond += tl.sum(after * after, 0)

    first = tl.sum(tl.where(column == 0, _load(x, by_x, y, by_y, column, n), 0.0), 0) / unit
    return unit * tl.sqrt(beyond + first * first)


@triton.jit
def _find_largest(x, by_x, y, by_y, n):
    """Return the largest element's size of by_x x + by_y y."""
    largest = tl.zeros((_CHUNK,), tl.float64)
    for at in range(0, n, _CHUNK):
        k = at + tl.arange(0, _CHUNK)
        largest = tl.maximum(largest, tl.abs(_load(x, by_x, y, by_y, k, n)))
    return tl.max(largest, 0)


@triton.jit
def _load(x, by_x, y, by_y, k, n):
    """Return elements k of by_x x + by_y y."""
    part = by_x * tl.load(x + k, k < n, 0).to(tl.float64)
    return part + by_y * tl.load(y + k, k < n, 0).to(tl.float64)


_PI = tl.constexpr(3.141592653589793)


@triton.jit
def _find_angle(y, x):
    """Return atan2(y, x), and 0 for zeros; Triton's interpreter has no atan2.

    A polynomial (Abramowitz and Stegun, 4.4.49) is within 1e-5, and the sine of the angle that is
    left, which differs from it by the cube, is computed from sines and cosines.
    """
    size = tl.maximum(tl.abs(y), tl.abs(x))
    size = tl.where(size == 0, 1.0, size)
    y /= size
    x /= size
    ratio = tl.minimum(tl.abs(y), tl.abs(x))
    z = ratio * ratio
    a = 0.0208351 * z - 0.0851330
    a = a * z + 0.1801410
    a = a * z - 0.3302995
    a = (a * z + 0.9998660) * ratio
    a = tl.where(tl.abs(y) > tl.abs(x), 0.5 * _PI - a, a)
    a = tl.where(x < 0, _PI - a, a)
    a = tl.where(y < 0, -a, a)
    norm = tl.sqrt(x * x + y * y)
    return a + (y * tl.cos(a) - x * tl.sin(a)) / tl.where(norm == 0, 1.0, norm)
