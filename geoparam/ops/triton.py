"""The operator as two Triton kernels: one pass over the memory each way.

Forward reads the latitudes and writes w; backward reads the latitudes and dL/dw and writes
dL/dlatitude. Nothing else of that size is touched: the backward recomputes its sines.

    P_k = cos(a_1) ... cos(a_{k-1}),     w_k = r sin(a_k) P_k,     w_n = r P_n
    y_n = g_n,  y_k = sin(a_k) g_k + cos(a_k) y_{k+1},    z_k = cos(a_k) g_k - sin(a_k) y_{k+1}
    dL/da_k = r P_k z_k,      dL/dr = y_1

Layout. A program owns ROWS rows and walks along them in chunks of BLOCK columns, each chunk one
associative scan; what is carried from chunk to chunk is one product (to the right) or one y (to
the left) per row. The backward starts from the right, so it first walks to the right once to note
the product at each chunk's start, in a scratch of one number per chunk; rows of one chunk skip
that. No atomics: the same numbers every time.

Precision. The cosines are near 1, where a float32 has few digits below: rounded n times, they cost
the weight 4e-6 at n = 4608, and products of such numbers are always rounded down, which costs the
gradient 3e-5 at n = 25088. So a product is carried as a high and a low part, starting from
1 - 2 sin^2(a/2), whose second term has full relative precision; at a large angle (|a| > pi/4) the
cosine itself has it. For y, which is a sum, the high part is enough; in float64 all are.

Sines are our own in float32: both kernels are bound by arithmetic with the library's, which is
built for any argument. One polynomial on [-pi/2, pi/2], reached by exact subtractions (2 pi k
in two parts, then pi or pi/2 in two parts), serves sine and cosine; largest error 1.0e-7 relative.

Exclusive scans. P_k must not contain its own cosine: the forward loads the latitudes shifted by
one, for the cosines only (a second load of a cached line). z_k needs y_{k+1}, not y_k: the scan
carries z of its left end beside y, as affine functions of the y that comes in from the right.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from geoparam.ops.cpu import SMALLEST_METRIC

_SMALLEST_METRIC = tl.constexpr(SMALLEST_METRIC)


def forward(latitude: Tensor, r: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the weight rows (rows, n) for contiguous latitudes (rows, n - 1) and r (rows,)."""
    rows, angles = latitude.shape
    weight = latitude.new_empty(rows, angles + 1, dtype=dtype)
    if rows:
        tile = _tile(rows, angles + 1)
        with torch.cuda.device_of(latitude):
            _forward_kernel[tile.pop("grid")](
                latitude,
                _or_any(r, latitude),
                weight,
                rows,
                angles + 1,
                SCALED=r is not None,
                **tile,
            )
    return weight


def backward(
    grad: Tensor, latitude: Tensor, r: Tensor | None, natural: bool
) -> tuple[Tensor, Tensor]:
    """Return dL/dlatitude (rows, n - 1) and dL/dr (rows,) for grad = dL/dweight (rows, n)."""
    rows, angles = latitude.shape
    grad_latitude = torch.empty_like(latitude)
    grad_r = latitude.new_empty(rows, dtype=latitude.dtype if r is None else r.dtype)
    if rows:
        tile = _tile(rows, angles + 1)
        chunks = triton.cdiv(angles + 1, tile["BLOCK"])
        working = torch.float64 if latitude.dtype == torch.float64 else torch.float32
        starts = latitude.new_empty(rows, chunks if chunks > 1 else 0, dtype=working)
        with torch.cuda.device_of(latitude):
            _backward_kernel[tile.pop("grid")](
                grad.contiguous(),
                latitude,
                _or_any(r, latitude),
                grad_latitude,
                grad_r,
                starts,
                rows,
                angles + 1,
                SCALED=r is not None,
                NATURAL=natural,
                ONE_CHUNK=chunks == 1,
                **tile,
            )
    return grad_latitude, grad_r


def _or_any(x: Tensor | None, other: Tensor) -> Tensor:
    return other if x is None else x  # a pointer the kernel never reads


def _tile(rows: int, n: int) -> dict[str, Any]:
    """Return the launch grid and the tile's shape."""
    block = min(
        triton.next_power_of_2(n), 1024
    )  # these numbers: the best of those tried on an H200
    rows_per_program = max(1, 128 // block)
    return {
        "grid": (triton.cdiv(rows, rows_per_program),),
        "ROWS": rows_per_program,
        "BLOCK": block,
        "num_warps": min(4, block * rows_per_program // 128),
    }


@triton.jit
def _forward_kernel(
    latitude,  # (rows, n - 1)
    r,  # (rows,), read only if SCALED
    weight,  # (rows, n)
    rows,
    n,
    SCALED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    lane = tl.arange(0, BLOCK)[None, :]
    high, low = _full(latitude, ROWS, 1), _full(latitude, ROWS, 0)  # the product so far
    scale = tl.load(r + row, row < rows).to(high.dtype) if SCALED else high
    for start in range(0, n, BLOCK):
        k = start + lane
        inside = (row < rows) & (k < n)
        at = latitude + row * (n - 1) + k
        before = tl.load(at - 1, inside & (k > 0), 0).to(high.dtype)
        a = tl.load(at, inside & (k < n - 1), 0).to(high.dtype)
        p_high, p_low = tl.associative_scan(_cosine(before), 1, _multiply)
        p = tl.fma(high, p_high, tl.fma(high, p_low, low * p_high))
        u = tl.where(k < n - 1, _sin(a), 1) * p
        tl.store(weight + row * n + k, (scale * u).to(weight.dtype.element_ty), inside)
        last_high, last_low = _at(p_high, lane, BLOCK - 1), _at(p_low, lane, BLOCK - 1)
        high, low = _multiply(high, low, last_high, last_low)


@triton.jit
def _backward_kernel(
    grad,  # (rows, n)
    latitude,  # (rows, n - 1)
    r,  # (rows,), read only if SCALED
    grad_latitude,  # (rows, n - 1)
    grad_r,  # (rows,)
    starts,  # (rows, chunks): the product at the start of each chunk, unless ONE_CHUNK
    rows,
    n,
    SCALED: tl.constexpr,
    NATURAL: tl.constexpr,
    ONE_CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    lane = tl.arange(0, BLOCK)[None, :]
    one = _full(latitude, ROWS, 1)
    scale = tl.load(r + row, row < rows).to(one.dtype) if SCALED else one
    chunks = tl.cdiv(n, BLOCK)
    if not ONE_CHUNK:
        _note_starts(latitude, starts, row, rows, lane, n, chunks, ROWS, BLOCK)

    y = _full(latitude, ROWS, 0)  # y_{k+1} of the chunk's last column
    for step in range(0, chunks):
        chunk = chunks - 1 - step
        k = chunk * BLOCK + lane
        inside = (row < rows) & (k < n)
        angle = inside & (k < n - 1)
        at = latitude + row * (n - 1) + k
        before = tl.load(at - 1, inside & (k > 0) & (lane > 0), 0).to(one.dtype)
        a = tl.load(at, angle, 0).to(one.dtype)
        g = tl.load(grad + row * n + k, inside, 0).to(one.dtype)

        p, _ = tl.associative_scan(_cosine(before), 1, _multiply)
        if not ONE_CHUNK:
            p *= tl.load(starts + row * chunks + chunk, row < rows, 1)

        # The last column has no angle: y_n = g_n. Columns outside pass y through.
        sin = tl.where(angle, _sin(a), tl.where(inside, 1.0, 0.0).to(one.dtype))
        cos = tl.where(angle, _cos(a), tl.where(inside, 0.0, 1.0).to(one.dtype))
        y_slope, y_offset, z_slope, z_offset = tl.associative_scan(
            (cos, sin * g, -sin, cos * g), 1, _compose, reverse=True
        )
        change = p * (z_slope * y + z_offset)
        if NATURAL:
            change /= tl.maximum(p * p, _full(latitude, ROWS, _SMALLEST_METRIC))
        tl.store(
            grad_latitude + row * (n - 1) + k,
            (scale * change).to(grad_latitude.dtype.element_ty),
            angle,
        )
        y = _at(y_slope * y + y_offset, lane, 0)
    tl.store(grad_r + row, y.to(grad_r.dtype.element_ty), row < rows)


@triton.jit
def _note_starts(
    latitude, starts, row, rows, lane, n, chunks, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Write the product of all cosines before each chunk, as the backward's scans need it."""
    high, low = _full(latitude, ROWS, 1), _full(latitude, ROWS, 0)
    for chunk in range(0, chunks):
        tl.store(starts + row * chunks + chunk, high, row < rows)
        # From the cosine of this chunk's first column to that of the next one's.
        k = chunk * BLOCK + lane
        a = tl.load(latitude + row * (n - 1) + k, (row < rows) & (k < n - 1), 0)
        next_high, next_low = tl.reduce(_cosine(a.to(high.dtype)), 1, _multiply, keep_dims=True)
        high, low = _multiply(high, low, next_high, next_low)
    tl.debug_barrier()  # the whole program reads what one of its threads wrote


# --- products and recurrences -----------------------------------------------------------------


@triton.jit
def _multiply(a_high, a_low, b_high, b_low):
    """Return (a_high + a_low) (b_high + b_low) as high + low."""
    if a_high.dtype == tl.float64:
        return a_high * b_high, a_low
    else:
        # An explicit fma: a product that the compiler could fuse into `high - product` would
        # count the error twice.
        product = tl.fma(a_high, b_high, 0.0)
        error = tl.fma(a_high, b_high, -product)
        error = tl.fma(a_high, b_low, tl.fma(a_low, b_high, error))
        high = product + error
        return high, error - (high - product)


@triton.jit
def _compose(y_slope, y_offset, z_slope, z_offset, y_slope_2, y_offset_2, z_slope_2, z_offset_2):
    """Let y and z of the columns at the left (2) depend on what enters those at the right (1)."""
    return (
        y_slope_2 * y_slope,
        y_slope_2 * y_offset + y_offset_2,
        z_slope_2 * y_slope,
        z_slope_2 * y_offset + z_offset_2,
    )


@triton.jit
def _at(x, lane, index: tl.constexpr):
    """Return column `index` of x, as (ROWS, 1)."""
    return tl.sum(tl.where(lane == index, x, 0), 1, keep_dims=True)


@triton.jit
def _full(like, ROWS: tl.constexpr, value: tl.constexpr):
    """Return (ROWS, 1) values in the working type: float64 for float64, else float32."""
    if like.dtype.element_ty == tl.float64:
        return tl.full((ROWS, 1), value, tl.float64)
    else:
        return tl.full((ROWS, 1), value, tl.float32)


# --- sines ------------------------------------------------------------------------------------

_PI = tl.constexpr(3.1415927410125732)  # float32 nearest to pi
_PI_REST = tl.constexpr(-8.742277657347586e-08)  # pi = _PI + _PI_REST


@triton.jit
def _sin(a):
    if a.dtype == tl.float64:
        return tl.sin(a)
    else:
        a = _within_pi(a)
        size = tl.abs(a)
        size = tl.where(size > 0.5 * _PI, (_PI - size) + _PI_REST, size)
        return _sine_polynomial(tl.where(a < 0, -size, size))


@triton.jit
def _cos(a):
    high, _ = _cosine(a)
    return high


@triton.jit
def _cosine(a):
    """Return cos(a) as high + low."""
    if a.dtype == tl.float64:
        return tl.cos(a), a * 0
    else:
        size = tl.abs(_within_pi(a))
        near = size < 0.25 * _PI
        s = _sine_polynomial(tl.where(near, 0.5 * size, (0.5 * _PI - size) + 0.5 * _PI_REST))
        minus = -2 * s * s
        high = 1 + minus
        return tl.where(near, high, s), tl.where(near, minus - (high - 1), 0)


@triton.jit
def _within_pi(a):
    """Subtract whole turns. The first step is exact: both terms are multiples of 2^-21."""
    turns = tl.floor(a * (0.5 / _PI) + 0.5)
    return tl.fma(turns, -2 * _PI_REST, tl.fma(turns, -2 * _PI, a))


@triton.jit
def _sine_polynomial(y):
    """Return sin(y) for |y| <= pi/2: y + y^3 q(y^2), q of minimal relative error."""
    z = y * y
    q = tl.fma(z, 2.605705731184571e-06, -0.0001980957022169605)
    q = tl.fma(z, q, 0.008333065547049046)
    q = tl.fma(z, q, -0.16666659712791443)
    return tl.fma(y * z, q, y)
