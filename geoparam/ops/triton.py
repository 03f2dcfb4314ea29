"""The operator as two Triton kernels: one pass over the memory each way.

Forward reads the latitudes and writes w; backward reads the latitudes and dL/dw and writes
dL/dlatitude. Nothing else of that size is touched: the backward recomputes its sines.

    P_k = cos(a_1) ... cos(a_{k-1}),     w_k = r sin(a_k) P_k,     w_n = r P_n
    y_n = g_n,  y_k = sin(a_k) g_k + cos(a_k) y_{k+1},    z_k = cos(a_k) g_k - sin(a_k) y_{k+1}
    dL/da_k = r P_k z_k,      dL/dr = y_1

Layout. A program owns ROWS rows and walks along them in chunks of LANES * EACH columns: a thread
owns EACH neighbours, goes through them one after the other, and only what it has gathered takes
part in one associative scan over the threads; so most of the arithmetic is free of exchanges, and
P_k and y_{k+1}, which must not contain their own column, cost nothing inside a thread. Memory is
read and written along the row and changes hands once (`lanes_triton`). Rows up to 4096 are one
chunk. Longer ones carry one product (to the right) or one y (to the left) per row; the backward
starts from the right, so it first walks to the right once to note the product at each chunk's
start. No atomics: the same numbers every time.

Precision. The cosines are near 1, where a float32 has few digits below: rounded n times, they cost
the weight 4e-6 at n = 4608, and products of such numbers are always rounded down, which costs the
gradient 3e-5 at n = 25088. So a product is gathered as (1 - near) far. `near` is made of
1 - cos(a) = 2 sin^2(a/2), which has full relative precision where the cosine is near 1; products
then add up, 1 - (1 - p) (1 - q) = p + q - p q. `far` is the plain product of the cosines at poles,
below 0.2, which have theirs. In float64 the same.

Sines are our own in float32: the library's are built for any argument. sin(a/2) and cos(a/2) are
two polynomials on [-pi/2, pi/2], reached by exact subtractions (pi k, in two parts); sin(a) is
twice their product. The last column has no angle: its sine is 1, or what comes back is y_n.

Order. With TAPS > 1 a row of the weight lies tap by tap, as channels_last wants it.

The kernels with a layer's bias in them (`shifted_triton`) call the same two functions, which then
look at one number per channel on the way.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from geoparam.ops.cpu import SMALLEST_METRIC
from geoparam.ops.implementation import Layout, layout_of
from geoparam.ops.lanes_triton import (
    compose,
    from_lane,
    full,
    gather,
    gather_both,
    in_a_row,
    pieces_of,
    product,
    sine_and_cosine,
    trigonometry,
)
from geoparam.ops.launch import Launch

_SMALLEST_METRIC = tl.constexpr(SMALLEST_METRIC)


def forward(
    latitude: Tensor,
    r: Tensor | None,
    dtype: torch.dtype,
    layout: Layout | None = None,
    traced: bool = False,
) -> Tensor:
    """Return the weight for contiguous latitudes (..., n - 1) and r (...), rows if no layout.

    If `traced`, the kernel is not run but left in the graph that a compiler is tracing.
    """
    layout = layout or layout_of(latitude.shape, None, False)
    weight = torch.empty_strided(layout.size, layout.stride, dtype=dtype, device=latitude.device)
    if weight.numel():
        launch = _forward_launch(latitude.shape, layout.taps, *types_of(latitude, r, weight))
        run = launch.traced if traced else launch
        run(latitude, _any_if_none(r, latitude, weight), weight)
    return weight


def backward(
    grad: Tensor,
    latitude: Tensor,
    r: Tensor | None,
    natural: bool,
    taps: int = 1,
    traced: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return dL/dlatitude and dL/dr for grad = dL/dweight, whose rows lie as `taps` says."""
    grad_latitude = torch.empty_like(latitude)
    grad_r = torch.empty_like(r) if r is not None else latitude.new_empty(latitude.shape[:-1])
    if grad.numel():
        launch, scratch = _backward_launch(
            latitude.shape, natural, taps, *types_of(latitude, r, grad)
        )
        starts = latitude
        if scratch is not None:
            working = torch.float64 if latitude.dtype == torch.float64 else torch.float32
            starts = latitude.new_empty(scratch, dtype=working)
        r = _any_if_none(r, latitude, grad)
        run = launch.traced if traced else launch
        run(grad, latitude, r, grad_latitude, grad_r, starts)
    return grad_latitude, grad_r


def _any_if_none(r: Tensor | None, latitude: Tensor, weight: Tensor) -> Tensor:
    """Return r, or memory with a number for each row, which the kernel loads and drops."""
    if r is not None:
        return r
    return latitude if latitude.shape[-1] else weight


def types_of(stored: Tensor, r: Tensor | None, weight: Tensor) -> tuple:
    """Return what a kernel is compiled for, beside its numbers."""
    return stored.dtype, None if r is None else r.dtype, weight.dtype, weight.get_device()


@functools.cache
def _forward_launch(
    size: torch.Size,
    taps: int,
    latitude: torch.dtype,
    r: torch.dtype | None,
    weight: torch.dtype,
    device: int,
) -> Launch:
    rows, n = size[:-1].numel(), size[-1] + 1
    grid, warps, *tile = tile_of_angles(rows, n, latitude)
    arguments = (rows, n, r is not None, taps, *tile)
    _, lanes, each, _ = tile
    if lanes * each == 4096 and torch.version.cuda:  # more programs fit, of half the threads
        return Launch(_forward_kernel, grid, arguments, warps // 2, maxnreg=96)
    return Launch(_forward_kernel, grid, arguments, warps)


@functools.cache
def _backward_launch(
    size: torch.Size,
    natural: bool,
    taps: int,
    latitude: torch.dtype,
    r: torch.dtype | None,
    weight: torch.dtype,
    device: int,
) -> tuple[Launch, tuple[int, int] | None]:
    """Return the launch and the shape of `starts`, if it needs any."""
    rows, n = size[:-1].numel(), size[-1] + 1
    grid, warps, *tile = tile_of_angles(rows, n, latitude)
    _, lanes, each, one_chunk = tile
    arguments = (rows, n, r is not None, natural, taps, *tile)
    # With a few more registers, half as many programs would fit.
    limit = {"maxnreg": 128} if each == 16 and torch.version.cuda else {}
    launch = Launch(_backward_kernel, grid, arguments, warps, **limit)
    return launch, None if one_chunk else (rows, triton.cdiv(n, lanes * each))


def tile_of_angles(
    rows: int, n: int, latitude: torch.dtype
) -> tuple[tuple[int, int, int], int, int, int, int, bool]:
    """Return the grid, the warps, and ROWS, LANES, EACH and ONE_CHUNK. Numbers: tried on an H200.

    A chunk of 4096 is the longest that fits into the registers, so shorter rows are one; longer
    ones, walked along, do better in shorter chunks, of which the last must not be nearly empty.
    In float64 all is bound by the library's sines, whose code should not be there many times.
    """
    longest = 1024 if latitude == torch.float64 else 4096
    if n > 4096:
        longest = min(longest, 2048 if -n % 2048 <= n // 8 else 1024)
    block = max(16, min(triton.next_power_of_2(n), longest))
    each = 4 if block <= 128 or latitude == torch.float64 else 8 if block <= 1024 else 16
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
    TAPS: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    EACH: tl.constexpr,
    ONE_CHUNK: tl.constexpr,
):
    row = own_rows(ROWS)
    weight_of_angles(
        latitude, r, weight, latitude, row, row, rows, n,
        SCALED, TAPS, 0, ROWS, LANES, EACH, ONE_CHUNK,
    )  # fmt: skip


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
    TAPS: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    EACH: tl.constexpr,
    ONE_CHUNK: tl.constexpr,
):
    row = own_rows(ROWS)
    y = gradient_of_angles(
        grad, latitude, r, grad_latitude, starts, latitude, row, row, row, rows, n,
        SCALED, NATURAL, TAPS, 0, ROWS, LANES, EACH, ONE_CHUNK,
    )  # fmt: skip
    lane = tl.arange(0, LANES)[None, :]
    to = tl.broadcast_to(grad_r + row, (ROWS, LANES))
    tl.store(to, y.to(grad_r.dtype.element_ty), (row < rows) & (lane == 0))


@triton.jit
def own_rows(ROWS: tl.constexpr):
    """Return the rows of this program, (ROWS, 1)."""
    return (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]


@triton.jit
def weight_of_angles(
    latitude,
    r,
    weight,
    total,  # (channels,), read only if KERNEL
    first,  # (ROWS, 1): the first of the channels that a row sees
    row,
    rows,
    n,
    SCALED: tl.constexpr,
    TAPS: tl.constexpr,
    KERNEL: tl.constexpr,  # how many columns a channel has; 0: do not look at `total`
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    EACH: tl.constexpr,
    ONE_CHUNK: tl.constexpr,
):
    """Write the weights of these rows, and return w^T total (ROWS, 1)."""
    column = tl.arange(0, LANES * EACH)[None, :]
    lane = tl.arange(0, LANES)[None, :]
    scale, zero = _scale_and_zero(latitude, r, row, rows, SCALED, ROWS, LANES)
    near, far = zero, zero + 1  # so far
    seen = full(latitude, ROWS, 1, 0)
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
        tl.store(weight + row * n + place(k, n, TAPS), w, inside)
        if KERNEL:
            x = tl.load(total + first + k // KERNEL, inside, 0).to(seen.dtype)
            seen += tl.sum(w.to(seen.dtype) * x, 1, keep_dims=True)
        if not ONE_CHUNK:
            near, far = gather(near, far, near_here, far_here)
            near, far = from_lane(LANES - 1, near, lane), from_lane(LANES - 1, far, lane)
    return seen


@triton.jit
def gradient_of_angles(
    grad,
    latitude,
    r,
    grad_latitude,
    starts,
    total,  # (channels,), read only if KERNEL
    first,  # (ROWS, 1): the first of the channels that a row sees
    share,  # (ROWS, 1): what each row's gradient has of -total, if KERNEL
    row,
    rows,
    n,
    SCALED: tl.constexpr,
    NATURAL: tl.constexpr,
    TAPS: tl.constexpr,
    KERNEL: tl.constexpr,  # how many columns a channel has; 0: do not look at `total`
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    EACH: tl.constexpr,
    ONE_CHUNK: tl.constexpr,
):
    """Write dL/dlatitude of these rows; return dL/dr (ROWS, LANES), right in the first lane."""
    column = tl.arange(0, LANES * EACH)[None, :]
    lane = tl.arange(0, LANES)[None, :]
    scale, zero = _scale_and_zero(latitude, r, row, rows, SCALED, ROWS, LANES)
    chunks = 1 if ONE_CHUNK else tl.cdiv(n, LANES * EACH)
    if not ONE_CHUNK:
        _note_starts(latitude, starts, row, rows, column, n, chunks, ROWS, LANES * EACH)

    # y_{k+1} of the chunk's last column. Columns without an angle, with sine 0, let it pass.
    last = grad + row * n + place(n - 1, n, TAPS)
    y = _of_each_lane(last, row < rows, zero.dtype, ROWS, LANES)
    if KERNEL:
        last = total + first + (n - 1) // KERNEL
        y -= share * _of_each_lane(last, row < rows, zero.dtype, ROWS, LANES)
    for step in range(0, chunks):
        chunk = chunks - 1 - step
        k = chunk * LANES * EACH + column
        angle, inside = _inside(row, rows, k, n - 1, ROWS), _inside(row, rows, k, n, ROWS)
        a = tl.load(latitude + row * (n - 1) + k, angle, 0)
        g = tl.load(grad + row * n + place(k, n, TAPS), inside, 0)
        if KERNEL:
            x = tl.load(total + first + k // KERNEL, inside, 0).to(zero.dtype)
            g = g.to(zero.dtype) - share * x
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
    return y


@triton.jit
def _note_starts(
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


@triton.jit
def place(k, n, TAPS: tl.constexpr):
    """Return where column k of a row lies."""
    if TAPS == 1:
        return k
    else:
        return (k % TAPS) * (n // TAPS) + k // TAPS
