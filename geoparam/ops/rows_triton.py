"""d -> r d / ||d|| as Triton kernels: the weight in intrinsic coordinates, forward and backward.

    w = r d / l,  l = max(||d||, 1e-12),  dL/dr = <g, d> / l,  dL/dd = r / l (g - d <g, d> / l^2)

where the second term is 0 if ||d|| is below its bound. Each program holds its rows whole, up to
_CHUNK columns, and reads them once; longer rows are read twice. `normalise_` is the forward with
r = 1 onto d itself. TAPS > 1: the rows of w and g lie tap by tap, those of d never do. The kernels
with a layer's bias in them (`shifted_triton`) call the same two functions.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from geoparam.ops.implementation import Layout
from geoparam.ops.lanes_triton import full
from geoparam.ops.launch import Launch
from geoparam.ops.triton import own_rows, place, types_of

_CHUNK = 8192
SHORTEST = 1e-12
"""A shorter vector is divided by this instead of its length, so that one set to 0 stays finite."""
_SHORTEST = tl.constexpr(SHORTEST)


def forward(d: Tensor, r: Tensor | None, dtype: torch.dtype, layout: Layout) -> Tensor:
    """Return the weight for contiguous rows d (..., n) and scales r (...)."""
    weight = torch.empty_strided(layout.size, layout.stride, dtype=dtype, device=d.device)
    if d.numel():
        launch = _launch(_forward_kernel, d.shape, layout.taps, *types_of(d, r, weight))
        launch(d, d if r is None else r, weight)
    return weight


def backward(grad: Tensor, d: Tensor, r: Tensor | None, taps: int) -> tuple[Tensor, Tensor]:
    """Return dL/dd and dL/dr for grad = dL/dweight, whose rows lie as `taps` says."""
    grad_d = torch.empty_like(d)
    grad_r = torch.empty_like(r) if r is not None else d.new_empty(d.shape[:-1])
    if d.numel():
        launch = _launch(_backward_kernel, d.shape, taps, *types_of(d, r, grad))
        launch(grad, d, d if r is None else r, grad_d, grad_r)
    return grad_d, grad_r


def normalise_(d: Tensor) -> None:
    """Divide contiguous rows (..., n) by their lengths, in place."""
    if d.numel():
        _launch(_forward_kernel, d.shape, 1, *types_of(d, None, d))(d, d, d)
        torch.autograd.graph.increment_version(d)  # a kernel's writing is not seen otherwise


@functools.cache
def _launch(
    kernel: Any,
    size: torch.Size,
    taps: int,
    d: torch.dtype,
    r: torch.dtype | None,
    weight: torch.dtype,
    device: int,
) -> Launch:
    rows, n = size[:-1].numel(), size[-1]
    grid, warps, *tile = tile_of_vectors(rows, n)
    arguments = (rows, n, r is not None, taps, *tile)
    return Launch(kernel, grid, arguments, warps)


def tile_of_vectors(rows: int, n: int) -> tuple[tuple[int, int, int], int, int, int, bool]:
    """Return the grid, the warps, and ROWS, BLOCK and ONE_CHUNK."""
    block = max(16, min(triton.next_power_of_2(n), _CHUNK))
    rows_per_program = max(1, 512 // block)
    warps = max(1, min(16, block * rows_per_program // 256))
    grid = (triton.cdiv(rows, rows_per_program), 1, 1)
    return grid, warps, rows_per_program, block, n <= block


@triton.jit
def _forward_kernel(
    d,  # (rows, n)
    r,  # (rows,), read only if SCALED
    weight,  # (rows, n)
    rows,
    n,
    SCALED: tl.constexpr,
    TAPS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ONE_CHUNK: tl.constexpr,
):
    row = own_rows(ROWS)
    weight_of_vectors(
        d, r, weight, d, row, row, rows, n, SCALED, TAPS, 0, ROWS, BLOCK, ONE_CHUNK
    )  # fmt: skip


@triton.jit
def _backward_kernel(
    grad,  # (rows, n)
    d,  # (rows, n)
    r,  # (rows,), read only if SCALED
    grad_d,  # (rows, n)
    grad_r,  # (rows,)
    rows,
    n,
    SCALED: tl.constexpr,
    TAPS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ONE_CHUNK: tl.constexpr,
):
    row = own_rows(ROWS)
    by_r = gradient_of_vectors(
        grad, d, r, grad_d, d, row, row, row, rows, n, SCALED, TAPS, 0, ROWS, BLOCK, ONE_CHUNK
    )  # fmt: skip
    tl.store(grad_r + row, by_r.to(grad_r.dtype.element_ty), row < rows)


@triton.jit
def weight_of_vectors(
    d,
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
    BLOCK: tl.constexpr,
    ONE_CHUNK: tl.constexpr,
):
    """Write the weights of these rows, and return w^T total (ROWS, 1)."""
    column = tl.arange(0, BLOCK)[None, :]
    square, seen = full(d, ROWS, 1, 0), full(d, ROWS, 1, 0)
    scale = tl.load(r + row, row < rows, 0).to(square.dtype) if SCALED else square + 1
    end = 1 if ONE_CHUNK else n
    for start in range(0, end, BLOCK):
        k = start + column
        x = tl.load(d + row * n + k, (row < rows) & (k < n), 0).to(square.dtype)
        square += tl.sum(x * x, 1, keep_dims=True)
    scale = scale / tl.maximum(tl.sqrt(square), full(d, ROWS, 1, _SHORTEST))
    for start in range(0, end, BLOCK):
        k = start + column
        inside = (row < rows) & (k < n)
        x = tl.load(d + row * n + k, inside, 0).to(square.dtype)
        w = (scale * x).to(weight.dtype.element_ty)
        tl.store(weight + row * n + place(k, n, TAPS), w, inside)
        if KERNEL:
            x = tl.load(total + first + k // KERNEL, inside, 0).to(seen.dtype)
            seen += tl.sum(w.to(seen.dtype) * x, 1, keep_dims=True)
    return seen


@triton.jit
def gradient_of_vectors(
    grad,
    d,
    r,
    grad_d,
    total,  # (channels,), read only if KERNEL
    first,  # (ROWS, 1): the first of the channels that a row sees
    share,  # (ROWS, 1): what each row's gradient has of -total, if KERNEL
    row,
    rows,
    n,
    SCALED: tl.constexpr,
    TAPS: tl.constexpr,
    KERNEL: tl.constexpr,  # how many columns a channel has; 0: do not look at `total`
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ONE_CHUNK: tl.constexpr,
):
    """Write dL/dd of these rows, and return dL/dr (ROWS, 1)."""
    column = tl.arange(0, BLOCK)[None, :]
    square, along = full(d, ROWS, 1, 0), full(d, ROWS, 1, 0)
    scale = tl.load(r + row, row < rows, 0).to(square.dtype) if SCALED else square + 1
    end = 1 if ONE_CHUNK else n
    for start in range(0, end, BLOCK):
        k = start + column
        inside = (row < rows) & (k < n)
        x = tl.load(d + row * n + k, inside, 0).to(square.dtype)
        g = tl.load(grad + row * n + place(k, n, TAPS), inside, 0).to(square.dtype)
        if KERNEL:
            g -= share * tl.load(total + first + k // KERNEL, inside, 0).to(square.dtype)
        square += tl.sum(x * x, 1, keep_dims=True)
        along += tl.sum(x * g, 1, keep_dims=True)
    length, shortest = tl.sqrt(square), full(d, ROWS, 1, _SHORTEST)
    divisor = tl.maximum(length, shortest)
    by_r = along / divisor
    along = tl.where(length > shortest, by_r / divisor, 0.0)
    scale = scale / divisor
    for start in range(0, end, BLOCK):
        k = start + column
        inside = (row < rows) & (k < n)
        x = tl.load(d + row * n + k, inside, 0).to(square.dtype)
        g = tl.load(grad + row * n + place(k, n, TAPS), inside, 0).to(square.dtype)
        if KERNEL:
            g -= share * tl.load(total + first + k // KERNEL, inside, 0).to(square.dtype)
        change = scale * (g - along * x)
        tl.store(grad_d + row * n + k, change.to(grad_d.dtype.element_ty), inside)
    return by_r
