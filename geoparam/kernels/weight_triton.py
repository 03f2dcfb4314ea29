"""The operator as two Triton kernels: one pass over the memory each way.

Forward reads the latitudes and writes w; backward reads the latitudes and dL/dw and writes
dL/dlatitude. Nothing else of that size is touched: the backward recomputes its sines.

    P_k = cos(a_1) ... cos(a_{k-1}),     w_k = r sin(a_k) P_k,     w_n = r P_n
    y_n = g_n,  y_k = sin(a_k) g_k + cos(a_k) y_{k+1},    z_k = cos(a_k) g_k - sin(a_k) y_{k+1}
    dL/da_k = r P_k z_k,      dL/dr = y_1

Layout. A program owns ROWS rows and walks along them in chunks of LANES * EACH columns. A thread
owns EACH neighbours and goes through them one after the other; one associative scan over the
threads combines their results, so most of the arithmetic needs no exchange. Memory is read and
written along the row and is rearranged once (`pieces_of`). Rows up to 4096 are one chunk. Longer
ones carry one product (to the right) or one y (to the left) per row; the backward starts from the
right, so it first walks to the right to store the product at each chunk's start. No atomics: the
same numbers every time.

Precision. Cosines near 1 have few digits below: rounded n times in float32, they cost the weight
4e-6 at n = 4608 and the gradient 3e-5 at n = 25088. So a product is stored as (1 - near) far.
`near` comes from 1 - cos(a) = 2 sin^2(a/2), which is precise where the cosine is near 1, and
1 - (1 - p) (1 - q) = p + q - p q; `far` is the plain product of the cosines at poles, below 0.2.

Sines are our own in float32: the library's are built for any argument. sin(a/2) and cos(a/2) are
two polynomials on [-pi/2, pi/2], reached by exact subtractions (pi k, in two parts); sin(a) is
twice their product. The last column has no angle: its sine is 1, or what comes back is y_n.
"""

import contextlib
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from geoparam.kernels.weight import SMALLEST_METRIC

_SMALLEST_METRIC = tl.constexpr(SMALLEST_METRIC)


def forward(latitude: Tensor, r: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the weight rows (rows, n) for contiguous latitudes (rows, n - 1) and r (rows,)."""
    rows, n = len(latitude), latitude.shape[1] + 1
    weight = latitude.new_empty(rows, n, dtype=dtype)
    if weight.numel():
        grid, warps, *tile = _tile(rows, n, latitude.dtype == torch.float64)
        options = {"num_warps": warps}
        if tile[1] * tile[2] == 4096 and torch.version.cuda:  # half the threads: more programs fit
            options = {"num_warps": warps // 2, "maxnreg": 96}
        tensors = latitude, _any_if_none(r, latitude, weight), weight
        _launch(_forward_kernel, grid, (*tensors, rows, n, r is not None, *tile), options)
    return weight


def backward(
    grad: Tensor, latitude: Tensor, r: Tensor | None, natural: bool
) -> tuple[Tensor, Tensor]:
    """Return dL/dlatitude (rows, n - 1) and dL/dr (rows,) for grad = dL/dweight (rows, n)."""
    rows, n = len(latitude), latitude.shape[1] + 1
    wide = latitude.dtype == torch.float64
    grad, grad_latitude = grad.contiguous(), torch.empty_like(latitude)
    grad_r = latitude.new_empty(rows) if r is None else torch.empty_like(r)
    if grad.numel():
        grid, warps, *tile = _tile(rows, n, wide)
        _, lanes, each, one_chunk = tile
        starts = latitude  # not read if there is one chunk
        if not one_chunk:
            working = torch.float64 if wide else torch.float32
            starts = latitude.new_empty(rows, triton.cdiv(n, lanes * each), dtype=working)
        options = {"num_warps": warps}
        if each == 16 and torch.version.cuda:  # with more registers, half as many programs fit
            options["maxnreg"] = 128
        tensors = grad, latitude, _any_if_none(r, latitude, grad), grad_latitude, grad_r, starts
        arguments = rows, n, r is not None, natural, *tile
        _launch(_backward_kernel, grid, (*tensors, *arguments), options)
    return grad_latitude, grad_r


def _launch(kernel: Any, grid: tuple[int, int, int], arguments: tuple, options: dict) -> None:
    on_gpu = arguments[0].is_cuda  # else Triton's interpreter
    with torch.cuda.device(arguments[0].device) if on_gpu else contextlib.nullcontext():
        kernel[grid](*arguments, **options)


def _any_if_none(r: Tensor | None, latitude: Tensor, weight: Tensor) -> Tensor:
    """Return r, or memory with an element for each row, which the kernel loads and drops."""
    if r is not None:
        return r
    return latitude if latitude.shape[-1] else weight


def _tile(rows: int, n: int, wide: bool) -> tuple[tuple[int, int, int], int, int, int, int, bool]:
    """Return the grid, the warps, and ROWS, LANES, EACH and ONE_CHUNK. Tried on an H200.

    A chunk of 4096 is the longest that fits into the registers, so shorter rows are one; longer
    ones, walked along, do better in shorter chunks, of which the last must not be nearly empty.
    In float64 all is bound by the library's sines, whose code should not be there many times.
    """
    longest = 1024 if wide else 4096
    if n > 4096:
        longest = min(longest, 2048 if -n % 2048 <= n // 8 else 1024)
    block = max(16, min(triton.next_power_of_2(n), longest))
    each = 4 if block <= 128 or wide else 8 if block <= 1024 else 16
    lanes = block // each
    warps = max(1, lanes // 32)
    rows_per_program = max(1, 32 * warps // lanes)
    grid = (triton.cdiv(rows, rows_per_program), 1, 1)
    return grid, warps, rows_per_program, lanes, each, n <= block


@triton.jit(do_not_specialize=["rows"])
def _forward_kernel(
    latitude,  # (rows, n - 1)
    r,  # (rows,), or anything unless SCALED
    weight,  # (rows, n)
    rows,
    n,
    SCALED: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    EACH: tl.constexpr,
    ONE_CHUNK: tl.constexpr,
):
    row = _own_rows(ROWS)
    column = tl.arange(0, LANES * EACH)[None, :]
    lane = tl.arange(0, LANES)[None, :]
    scale, zero = _scale_and_zero(latitude, r, row, rows, SCALED, ROWS, LANES)
    near, far = zero, zero + 1  # so far
    for start in range(0, 1 if ONE_CHUNK else n, LANES * EACH):
        k = start + column
        a = tl.load(latitude + row * (n - 1) + k, _inside(row, rows, k, n - 1, ROWS), 0)
        sines, _, before, near_here, far_here = trigonometry(a, zero, ROWS, LANES, EACH)
        near_here, far_here, near_before, far_before = tl.associative_scan(
            (near_here, far_here, zero, zero + 1), 1, gather_both
        )
        p = scale * product(*gather(near, far, near_before, far_before))
        pieces = ()
        for j in tl.static_range(EACH):
            sine = tl.where(start + lane * EACH + j == n - 1, 1.0, sines[j])
            pieces = pieces + (p * (sine * before[j]),)
        w = in_a_row(pieces, ROWS, LANES, EACH).to(weight.dtype.element_ty)
        # The mask of the store, unlike the load's, can be seen to be whole vectors.
        inside = _inside(row, rows, k, n, ROWS)
        tl.store(weight + row * n + k, w, inside)
        if not ONE_CHUNK:
            near, far = gather(near, far, near_here, far_here)
            near, far = from_lane(LANES - 1, near, lane), from_lane(LANES - 1, far, lane)


@triton.jit(do_not_specialize=["rows"])
def _backward_kernel(
    grad,  # (rows, n)
    latitude,  # (rows, n - 1)
    r,  # (rows,), or anything unless SCALED
    grad_latitude,  # (rows, n - 1)
    grad_r,  # (rows,)
    starts,  # (rows, chunks): the product at the start of each chunk, unless ONE_CHUNK
    rows,
    n,
    SCALED: tl.constexpr,
    NATURAL: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    EACH: tl.constexpr,
    ONE_CHUNK: tl.constexpr,
):
    row = _own_rows(ROWS)
    column = tl.arange(0, LANES * EACH)[None, :]
    lane = tl.arange(0, LANES)[None, :]
    scale, zero = _scale_and_zero(latitude, r, row, rows, SCALED, ROWS, LANES)
    chunks = 1 if ONE_CHUNK else tl.cdiv(n, LANES * EACH)
    if not ONE_CHUNK:
        _write_starts(latitude, starts, row, rows, column, n, chunks, ROWS, LANES * EACH)

    # y_{k+1} of the chunk's last column. Columns without an angle, with sine 0, let it pass.
    last = grad + row * n + n - 1
    y = _of_each_lane(last, row < rows, zero.dtype, ROWS, LANES)
    for step in range(0, chunks):
        chunk = chunks - 1 - step
        k = chunk * LANES * EACH + column
        angle, inside = _inside(row, rows, k, n - 1, ROWS), _inside(row, rows, k, n, ROWS)
        a = tl.load(latitude + row * (n - 1) + k, angle, 0)
        g = tl.load(grad + row * n + k, inside, 0)
        sines, cosines, before, near, far = trigonometry(a, zero, ROWS, LANES, EACH)
        g = pieces_of(g.to(zero.dtype), ROWS, LANES, EACH)

        _, _, near_before, far_before = tl.associative_scan(
            (near, far, zero, zero + 1), 1, gather_both
        )
        p = product(near_before, far_before)
        if not ONE_CHUNK:
            p *= tl.load(starts + row * chunks + chunk, row < rows, 0)

        # y of a lane's first column, and y_{k+1} of its last, as functions of y from the right.
        offset = sines[EACH - 1] * g[EACH - 1]
        for j in tl.static_range(EACH - 2, -1, -1):
            offset = tl.fma(cosines[j], offset, sines[j] * g[j])
        slope, offset, after_slope, after_offset = tl.associative_scan(
            (product(near, far), offset, zero + 1, zero), 1, compose, reverse=True
        )
        after = tl.fma(after_slope, y, after_offset)
        y = tl.fma(slope, y, offset)  # right in the first lane
        if not ONE_CHUNK:
            y = from_lane(0, y, lane)

        pieces = ()
        scaled = scale * p
        for j in tl.static_range(EACH - 1, -1, -1):
            change = tl.fma(cosines[j], g[j], -sines[j] * after)
            after = tl.fma(cosines[j], after, sines[j] * g[j])
            if NATURAL:
                metric = p * before[j] * p * before[j]
                change /= tl.maximum(metric, full(latitude, 1, 1, _SMALLEST_METRIC))
            pieces = (scaled * before[j] * change,) + pieces
        out = in_a_row(pieces, ROWS, LANES, EACH).to(grad_latitude.dtype.element_ty)
        tl.store(grad_latitude + row * (n - 1) + k, out, angle)
    to = tl.broadcast_to(grad_r + row, (ROWS, LANES))
    tl.store(to, y.to(grad_r.dtype.element_ty), (row < rows) & (lane == 0))


@triton.jit
def _own_rows(ROWS: tl.constexpr):
    """Return the rows of this program, (ROWS, 1)."""
    return (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]


@triton.jit
def _write_starts(
    latitude, starts, row, rows, column, n, chunks, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Write the product of all cosines before each chunk."""
    near, far = full(latitude, ROWS, 1, 0), full(latitude, ROWS, 1, 1)
    for chunk in range(0, chunks):
        tl.store(starts + row * chunks + chunk, product(near, far), row < rows)
        k = chunk * BLOCK + column
        a = tl.load(latitude + row * (n - 1) + k, _inside(row, rows, k, n - 1, ROWS), 0)
        _, near_here, far_here = sine_and_cosine(a.to(near.dtype))
        near_here, far_here = tl.reduce((near_here, far_here), 1, gather, keep_dims=True)
        near, far = gather(near, far, near_here, far_here)
    tl.debug_barrier()  # the whole program reads what one of its threads wrote


@triton.jit
def _scale_and_zero(
    like, r, row, rows, SCALED: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr
):
    """Return r, or 1, and 0 for each lane, in the working type, all in the layout of a load."""
    loaded = _of_each_lane(r + row, row < rows, full(like, 1, 1, 0).dtype, ROWS, LANES)
    scale = loaded if SCALED else tl.where(row < rows, 1.0, loaded)
    return scale, tl.where(row < rows, 0.0, loaded)


@triton.jit
def _of_each_lane(pointers, inside, dtype, ROWS: tl.constexpr, LANES: tl.constexpr):
    """Load a number per row for each of its lanes.

    Although one load per row would do: the compiler takes a load's layout for given, and only so
    keeps a thread's columns in the thread until all are in a row again.
    """
    pointers = tl.broadcast_to(pointers, (ROWS, LANES))
    return tl.load(pointers, tl.broadcast_to(inside, (ROWS, LANES)), 0).to(dtype)


@triton.jit
def _inside(row, rows, k, end, ROWS: tl.constexpr):
    """Return which columns there are. A program of one row has always one."""
    if ROWS == 1:
        return k < end
    else:
        return (row < rows) & (k < end)


# --- what a thread does with its own columns of a row -------------------------------------------
#
# A tile is (ROWS, LANES * EACH); a thread's lane owns EACH neighbours of a row. `pieces_of` cuts
# the tile into a tuple of EACH tensors (ROWS, LANES), each lane's first column, second, and so on,
# and `in_a_row` puts them together again; between the two, nothing leaves a thread but by a scan.


@triton.jit
def trigonometry(a, zero, ROWS: tl.constexpr, LANES: tl.constexpr, EACH: tl.constexpr):
    """Return each column's sine, cosine and product before it in its lane, and what all gather."""
    a = pieces_of(a.to(zero.dtype), ROWS, LANES, EACH)
    near, far = zero, zero + 1
    sines, cosines, before = (), (), ()
    for j in tl.static_range(EACH):
        sine, near_here, far_here = sine_and_cosine(a[j])
        sines = sines + (sine,)
        cosines = cosines + (product(near_here, far_here),)
        before = before + (product(near, far),)
        near, far = gather(near, far, near_here, far_here)
    return sines, cosines, before, near, far


@triton.jit
def pieces_of(x, ROWS: tl.constexpr, LANES: tl.constexpr, EACH: tl.constexpr):
    """Cut (ROWS, LANES * EACH) into EACH tensors (ROWS, LANES): each lane's first column, ..."""
    pieces = (tl.reshape(x, (ROWS, LANES, EACH)),)
    pieces = _split_pairs(pieces, 1, ROWS, LANES, EACH)  # EACH is 4, 8 or 16
    pieces = _split_pairs(pieces, 2, ROWS, LANES, EACH // 2)
    if EACH >= 8:
        pieces = _split_pairs(pieces, 4, ROWS, LANES, EACH // 4)
    if EACH >= 16:
        pieces = _split_pairs(pieces, 8, ROWS, LANES, EACH // 8)
    columns = ()
    for j in tl.static_range(EACH):
        columns = columns + (tl.reshape(pieces[j], (ROWS, LANES)),)
    return columns


@triton.jit
def _split_pairs(
    pieces, COUNT: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr, EACH: tl.constexpr
):
    halves = ()
    for i in tl.static_range(COUNT):
        x = tl.reshape(pieces[i], (ROWS, LANES, 2, EACH // 2))
        left, right = tl.split(tl.permute(x, (0, 1, 3, 2)))
        halves = halves + (left, right)
    return halves


@triton.jit
def in_a_row(columns, ROWS: tl.constexpr, LANES: tl.constexpr, EACH: tl.constexpr):
    """Undo `pieces_of`."""
    pieces = ()
    for j in tl.static_range(EACH):
        pieces = pieces + (tl.reshape(columns[j], (ROWS, LANES, 1)),)
    if EACH >= 16:
        pieces = _join_pairs(pieces, 8, ROWS, LANES, EACH // 8)
    if EACH >= 8:
        pieces = _join_pairs(pieces, 4, ROWS, LANES, EACH // 4)
    pieces = _join_pairs(pieces, 2, ROWS, LANES, EACH // 2)
    pieces = _join_pairs(pieces, 1, ROWS, LANES, EACH)
    return tl.reshape(pieces[0], (ROWS, LANES * EACH))


@triton.jit
def _join_pairs(
    pieces, COUNT: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr, EACH: tl.constexpr
):
    joined = ()
    for i in tl.static_range(COUNT):
        x = tl.join(pieces[2 * i], pieces[2 * i + 1])
        joined = joined + (tl.reshape(tl.permute(x, (0, 1, 3, 2)), (ROWS, LANES, EACH)),)
    return joined


# --- products and recurrences -----------------------------------------------------------------


@triton.jit
def gather(near, far, near_2, far_2):
    """Return the product of (1 - near) far and (1 - near_2) far_2 in this form."""
    return tl.fma(-near, near_2, near + near_2), far * far_2


@triton.jit
def gather_both(near, far, near_before, far_before, near_2, far_2, near_before_2, far_before_2):
    """Gather up to the last lane, and up to the one before it: an exclusive scan."""
    near_before, far_before = gather(near, far, near_before_2, far_before_2)
    near, far = gather(near, far, near_2, far_2)
    return near, far, near_before, far_before


@triton.jit
def product(near, far):
    return tl.fma(-near, far, far)


@triton.jit
def compose(slope, offset, after_slope, after_offset, slope_2, offset_2, after_slope_2, after_2):
    """Let y and y_{k+1} of the lanes at the left (2) depend on what enters those at the right."""
    return (
        slope_2 * slope,
        tl.fma(slope_2, offset, offset_2),
        after_slope_2 * slope,
        tl.fma(after_slope_2, offset, after_2),
    )


@triton.jit
def from_lane(index: tl.constexpr, x, lane):
    """Return lane `index` of x for all lanes.

    As one number per row, carried along, the compiler would compute it once more in another
    layout, and all that it depends on.
    """
    return tl.broadcast_to(tl.sum(tl.where(lane == index, x, 0), 1, keep_dims=True), x.shape)


@triton.jit
def full(like, ROWS: tl.constexpr, COLUMNS: tl.constexpr, value: tl.constexpr):
    """Return (ROWS, COLUMNS) values in the working type: float64 for float64, else float32."""
    if like.dtype.element_ty == tl.float64:
        return tl.full((ROWS, COLUMNS), value, tl.float64)
    else:
        return tl.full((ROWS, COLUMNS), value, tl.float32)


# --- sines ------------------------------------------------------------------------------------

_PI = tl.constexpr(3.1415927410125732)  # float32 nearest to pi
_PI_REST = tl.constexpr(-8.742277657347586e-08)  # pi = _PI + _PI_REST
_TO_INTEGER = tl.constexpr(12582912.0)  # 1.5 * 2^23: added and subtracted, it rounds


@triton.jit
def sine_and_cosine(a):
    """Return sin(a), and cos(a) as (1 - near) far."""
    if a.dtype == tl.float64:
        half = tl.sin(0.5 * a)
        at_pole = tl.abs(half * half - 0.5) < 0.1
        return (
            tl.sin(a),
            tl.where(at_pole, 0.0, 2 * half * half),
            tl.where(at_pole, tl.cos(a), 1.0),
        )
    else:
        turns = tl.fma(a, 0.5 / _PI, _TO_INTEGER) - _TO_INTEGER
        # Within pi. The first step is exact: both terms are multiples of 2^-21.
        a = tl.fma(turns, -2 * _PI_REST, tl.fma(turns, -2 * _PI, a))
        z = a * a
        # 2 sin(a/2) = a + a^3 q(z), of relative error 6e-9
        q = tl.fma(z, 1.0178830223139812e-08, -3.0952503493608674e-06)
        q = tl.fma(z, q, 0.0005208166548982263)
        q = tl.fma(z, q, -0.04166664928197861)
        chord = tl.fma(a * z, q, a)
        # cos(a/2) = 1 + z q(z), of error 2e-10
        q = tl.fma(z, -2.546592381413859e-10, 9.672611867017622e-08)
        q = tl.fma(z, q, -2.1700630895793438e-05)
        q = tl.fma(z, q, 0.0026041651144623756)
        half_cos = tl.fma(z, tl.fma(z, q, -0.125), 1.0)
        # cos(a) = sin(d), d = pi/2 - |a|: exact where it is small, of relative error 1e-8
        d = 0.5 * _PI - tl.abs(a)
        at_pole = tl.abs(d) < 0.2
        d += 0.5 * _PI_REST
        square = d * d
        cos = tl.fma(d * square, tl.fma(square, 1 / 120, -1 / 6), d)
        return (
            chord * half_cos,
            tl.where(at_pole, 0.0, 0.5 * chord * chord),
            tl.where(at_pole, cos, 1.0),
        )
