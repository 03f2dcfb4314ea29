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

Precision. cos(a) near 1 rounded to float32 n times costs 4e-6 at n = 4608. So the forward product
is carried as a high and a low part, starting from 1 - 2 sin^2(a/2), whose second term has full
relative precision; at a large angle (|a| > pi/4) the cosine itself has it. (`enable_fp_fusion` is
off: a compiler that fuses a multiplication into an addition would undo the low part.) In float64
the plain product is enough. The backward uses the same product; for y, which is a sum, the high part does.

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

_QUARTER_PI = tl.constexpr(0.7853981633974483)
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
    block = min(triton.next_power_of_2(n), 1024)
    rows_per_program = max(1, 256 // block)
    return {
        "grid": (triton.cdiv(rows, rows_per_program),),
        "ROWS": rows_per_program,
        "BLOCK": block,
        "num_warps": max(1, min(8, block * rows_per_program // 128)),
        "enable_fp_fusion": False,
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
    high, low = _ones(latitude, ROWS), _zeros(latitude, ROWS)  # the product so far
    scale = tl.load(r + row, row < rows).to(high.dtype) if SCALED else high
    for start in range(0, n, BLOCK):
        k = start + lane
        inside = (row < rows) & (k < n)
        at = latitude + row * (n - 1) + k
        before = tl.load(at - 1, inside & (k > 0), 0).to(high.dtype)
        a = tl.load(at, inside & (k < n - 1), 0).to(high.dtype)
        p_high, p_low = tl.associative_scan(_cosine(before), 1, _multiply)
        p_high, p_low = _multiply(high, low, p_high, p_low)
        u = tl.where(k < n - 1, tl.sin(a), 1) * p_high
        tl.store(weight + row * n + k, (scale * u).to(weight.dtype.element_ty), inside)
        high, low = _at(p_high, lane, BLOCK - 1), _at(p_low, lane, BLOCK - 1)


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
    one = _ones(latitude, ROWS)
    scale = tl.load(r + row, row < rows).to(one.dtype) if SCALED else one
    chunks = tl.cdiv(n, BLOCK)
    if not ONE_CHUNK:
        _note_starts(latitude, starts, row, rows, lane, n, chunks, ROWS, BLOCK)

    y = _zeros(latitude, ROWS)  # y_{k+1} of the chunk's last column
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
        sin = tl.where(angle, tl.sin(a), tl.where(inside, 1.0, 0.0).to(one.dtype))
        cos = tl.where(angle, _cosine(a)[0], tl.where(inside, 0.0, 1.0).to(one.dtype))
        y_slope, y_offset, z_slope, z_offset = tl.associative_scan(
            (cos, sin * g, -sin, cos * g), 1, _compose, reverse=True
        )
        change = p * (z_slope * y + z_offset)
        if NATURAL:
            change /= tl.maximum(p * p, _SMALLEST_METRIC)
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
    high, low = _ones(latitude, ROWS), _zeros(latitude, ROWS)
    for chunk in range(0, chunks):
        tl.store(starts + row * chunks + chunk, high, row < rows)
        # From the cosine of this chunk's first column to that of the next one's.
        k = chunk * BLOCK + lane
        a = tl.load(latitude + row * (n - 1) + k, (row < rows) & (k < n - 1), 0).to(high.dtype)
        block_high, block_low = tl.reduce(_cosine(a), 1, _multiply, keep_dims=True)
        high, low = _multiply(high, low, block_high, block_low)
    tl.debug_barrier()  # the whole program reads what one of its threads wrote


@triton.jit
def _cosine(a):
    """Return cos(a) as high + low."""
    if a.dtype == tl.float64:
        return tl.cos(a), a * 0
    else:
        half = tl.sin(a * 0.5)
        minus = -2 * half * half
        high = 1 + minus
        low = minus - (high - 1)
        near = tl.abs(a) < _QUARTER_PI
        return tl.where(near, high, tl.cos(a)), tl.where(near, low, 0)


@triton.jit
def _multiply(a_high, a_low, b_high, b_low):
    """Return (a_high + a_low) (b_high + b_low) as high + low."""
    if a_high.dtype == tl.float64:
        return a_high * b_high, a_low
    else:
        product = a_high * b_high
        error = tl.fma(a_high, b_high, -product) + (a_high * b_low + a_low * b_high)
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
def _ones(like, ROWS: tl.constexpr):
    return _zeros(like, ROWS) + 1


@triton.jit
def _zeros(like, ROWS: tl.constexpr):
    """Return (ROWS, 1) zeros in the working type: float64 for float64, else float32."""
    if like.dtype.element_ty == tl.float64:
        return tl.zeros((ROWS, 1), tl.float64)
    else:
        return tl.zeros((ROWS, 1), tl.float32)
