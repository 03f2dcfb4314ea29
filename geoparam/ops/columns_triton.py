"""The passes of `columns` as Triton kernels: each reads and writes the activations once.

Layout. An activation is (rows, channels) with its channels last in memory (channels_last images,
Linear's inputs), or (images, channels, positions). The second is addressed as rows too, row m
being position m % S of image m // S. A program owns a tile of BC channels and a run of rows, which
it walks down BM at a time, and writes one partial sum per channel; these are added up afterwards,
in their order. So there are no atomics, and the same numbers every time.

Sizes were chosen on an H200 with the activations of a ResNet-50 and a VGG-6: a pass is then within
20 % of what the memory allows.
"""

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from geoparam.ops.columns import advance, wide
from geoparam.ops.launch import Launch, dtypes_of

_TILE = 4096  # numbers looked at together
_TILE_BACK = 2048  # of two tensors
_WARPS = 4


def rectify(
    x: Tensor,
    dim: int,
    bias: Tensor | None,
    scale: Tensor | None,
    relu: bool,
    inplace: bool,
    summed: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return scale relu(x + bias), and its sums per channel; see `columns`."""
    bias, scale = _packed(bias), _packed(scale)
    dense, positions = _dense(x, dim)
    y = dense if inplace else torch.empty_like(dense)
    partial = _forward(dense, y, dim, positions, bias, scale, relu, True)
    if inplace:
        y = x if dense is x else x.copy_(y)
    return y, partial.sum(0) if summed else None


def sums(x: Tensor, dim: int) -> Tensor:
    """Return the sum of each channel."""
    x, positions = _dense(x, dim)
    return _forward(x, x, dim, positions, None, None, False, False).sum(0)


def _forward(
    x: Tensor,
    y: Tensor,
    dim: int,
    positions: int,
    bias: Tensor | None,
    scale: Tensor | None,
    relu: bool,
    store: bool,
) -> Tensor:
    """Launch the forward kernel and return the sums of its programs."""
    channels = x.shape[dim]
    flags = bias is not None, scale is not None, relu, store
    grid, launch = _forward_launch(
        x.numel(), channels, positions, flags, dtypes_of(x, bias, scale)
    )
    partial = torch.empty((grid[0], channels), dtype=wide(x), device=x.device)
    if x.numel():
        launch(x, x if bias is None else bias, x if scale is None else scale, y, partial)
        return partial
    return partial.zero_()


def rectify_backward(
    grad: Tensor,
    a: Tensor,
    dim: int,
    grad_sums: Tensor | None,
    scale: Tensor | None,
    whole: bool = True,
    bias: Tensor | None = None,
    traced: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradients of x, bias and scale; see `columns`.

    `a` may also be what is still to be rectified, or lacks its `bias` too: both are done again. If
    `traced`, the kernel is left in the graph that a compiler is tracing.
    """
    grad_sums, scale, bias = _packed(grad_sums), _packed(scale), _packed(bias)
    a, positions = _dense(a, dim)
    if grad.stride() != a.stride() or grad.dtype != a.dtype:
        grad = torch.empty_like(a).copy_(grad)
    channels = a.shape[dim]
    flags = grad_sums is not None, scale is not None, bias is not None
    types = dtypes_of(a, grad_sums, scale, bias)
    grid, launch = _backward_launch(a.numel(), channels, positions, flags, types)
    shape = (grid[0], channels) if scale is None else (2, grid[0], channels)
    partial = torch.empty(shape, dtype=wide(a), device=a.device)
    grad_x = torch.empty_like(a)
    if a.numel():
        per_channel = [a if t is None else t for t in (grad_sums, scale, bias)]
        (launch.traced if traced else launch)(grad, a, *per_channel, grad_x, partial)
    else:
        partial.zero_()
    if scale is None:
        return grad_x, partial.sum(0) if whole else partial, None
    total = partial.sum(1)
    return grad_x, total[0], total[1]


def centre(
    x: Tensor,
    dim: int,
    total: Tensor,
    count: int,
    bias: Tensor | None,
    running: tuple[Tensor, Tensor] | None,
    momentum: float,
) -> Tensor:
    """Return x - total / count + bias, and let `running` make its step; see `columns`."""
    if running is not None and not running[0].is_contiguous():
        advance(running, total / count, momentum)
        running = None
    bias, total = _packed(bias), total.contiguous()
    x, positions = _dense(x, dim)
    mean, batches = (total, total) if running is None else running
    flags = bias is not None, running is not None
    types = dtypes_of(x, bias, total, mean)
    launch = _centre_launch(x.numel(), x.shape[dim], positions, count, momentum, flags, types)
    y = torch.empty_like(x)
    launch(x, total, total if bias is None else bias, mean, batches, y)
    if running is not None:
        torch.autograd.graph.increment_version(running)  # a kernel's writing is not seen
    return y


# --- launching ----------------------------------------------------------------------------------


def _packed(per_channel: Tensor | None) -> Tensor | None:
    """Return what lies number by number: kernels know no strides, and users set parameters."""
    return None if per_channel is None else per_channel.contiguous()


def _dense(x: Tensor, dim: int) -> tuple[Tensor, int]:
    """Return `x` without gaps in memory, and how many positions lie between two channels."""
    if x.ndim == 4 and dim == 1 and x.is_contiguous(memory_format=torch.channels_last):
        return x, 1
    if x.movedim(dim, -1).is_contiguous():
        return x, 1
    x = x.contiguous()
    return x, math.prod(x.shape[dim % x.ndim + 1 :])  # the stride of one channel may be anything


def _tile(
    size: int, channels: int, positions: int, tile: int = _TILE, programs: int | None = None
) -> tuple[tuple[int, int, int], tuple[int, ...]]:
    """Return the grid, of about so many programs, and rows, RUN, BM and BC."""
    rows = size // max(channels, 1)
    width = 1
    if positions == 1:
        width = min(triton.next_power_of_2(max(channels, 1)), 128 if size >= 1 << 25 else 64)
    height = tile // width
    across = triton.cdiv(channels, width)
    programs = programs or (1056 if across > 1 else 4224)
    down = max(1, min(programs // max(across, 1), triton.cdiv(rows, height)))
    run = max(height, triton.cdiv(triton.cdiv(rows, down), height) * height)
    return (max(1, triton.cdiv(rows, run)), across, 1), (rows, run, height, width)


@functools.lru_cache(maxsize=4096)
def _forward_launch(
    size: int, channels: int, positions: int, flags: tuple[bool, ...], types: tuple
) -> tuple[tuple[int, int, int], Launch]:
    grid, (rows, run, height, width) = _tile(size, channels, positions)
    numbers = rows, channels, positions, run
    return grid, Launch(_forward_kernel, grid, (*numbers, *flags, height, width), _WARPS)


@functools.lru_cache(maxsize=4096)
def _backward_launch(
    size: int, channels: int, positions: int, flags: tuple[bool, ...], types: tuple
) -> tuple[tuple[int, int, int], Launch]:
    grid, (rows, run, height, width) = _tile(size, channels, positions, _TILE_BACK)
    numbers = rows, channels, positions, run
    return grid, Launch(_backward_kernel, grid, (*numbers, *flags, height, width), _WARPS)


@functools.lru_cache(maxsize=4096)
def _centre_launch(
    size: int,
    channels: int,
    positions: int,
    count: int,
    momentum: float,
    flags: tuple[bool, ...],
    types: tuple,
) -> Launch:
    grid, (rows, run, height, width) = _tile(size, channels, positions)
    numbers = rows, channels, positions, run, count
    return Launch(_centre_kernel, grid, (*numbers, momentum, *flags, height, width), _WARPS)


# --- kernels ------------------------------------------------------------------------------------


@triton.jit
def _offsets(base, row, c, channels, S):
    m = base + row
    return ((m // S) * (channels * S) + m % S)[:, None] + c[None, :] * S


@triton.jit
def _forward_kernel(
    x,
    bias,  # (channels,), read only if HAS_BIAS
    scale,  # (channels,), read only if HAS_SCALE
    y,
    partial,  # (programs along rows, channels)
    rows,
    channels,
    S,
    RUN,
    HAS_BIAS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    RELU: tl.constexpr,
    STORE: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
):
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = c < channels
    sums = tl.zeros((BM, BC), partial.dtype.element_ty)
    if HAS_BIAS:
        b = tl.load(bias + c, inside, 0).to(sums.dtype)[None, :]
    if HAS_SCALE:
        s = tl.load(scale + c, inside, 0).to(sums.dtype)[None, :]
    base = tl.program_id(0).to(tl.int64) * RUN
    length = tl.minimum(RUN, rows - base)
    for start in range(0, length, BM):
        row = start + tl.arange(0, BM)
        ok = (row < length)[:, None] & inside[None, :]
        at = _offsets(base, row, c, channels, S)
        v = tl.load(x + at, ok, 0).to(sums.dtype)
        if HAS_BIAS:
            v += b
        if RELU:
            v = tl.where(v < 0, 0, v)  # NaN stays, as in torch
        if HAS_SCALE:
            v *= s
        if STORE:
            stored = v.to(y.dtype.element_ty)
            tl.store(y + at, stored, ok)
            v = stored.to(sums.dtype)
        sums += tl.where(ok, v, 0)
    tl.store(partial + tl.program_id(0) * channels + c, tl.sum(sums, 0), inside)


@triton.jit
def _backward_kernel(
    grad,
    a,
    grad_sums,  # (channels,), read only if HAS_SUMS
    scale,  # (channels,), read only if HAS_SCALE
    bias,  # (channels,), read only if HAS_BIAS
    grad_x,
    partial,  # (1 or 2, programs along rows, channels)
    rows,
    channels,
    S,
    RUN,
    HAS_SUMS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
):
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = c < channels
    sums = tl.zeros((BM, BC), partial.dtype.element_ty)
    scale_sums = tl.zeros((BM, BC), partial.dtype.element_ty)
    if HAS_SUMS:
        gs = tl.load(grad_sums + c, inside, 0).to(sums.dtype)[None, :]
    if HAS_SCALE:
        s = tl.load(scale + c, inside, 0).to(sums.dtype)[None, :]
    if HAS_BIAS:
        b = tl.load(bias + c, inside, 0).to(sums.dtype)[None, :]
    base = tl.program_id(0).to(tl.int64) * RUN
    length = tl.minimum(RUN, rows - base)
    for start in range(0, length, BM):
        row = start + tl.arange(0, BM)
        ok = (row < length)[:, None] & inside[None, :]
        at = _offsets(base, row, c, channels, S)
        g = tl.load(grad + at, ok, 0).to(sums.dtype)
        active = tl.load(a + at, ok, 0).to(sums.dtype)
        if HAS_BIAS:
            active += tl.where(ok, b, 0)
        if HAS_SUMS:
            g += gs
        if HAS_SCALE:
            scale_sums += g * tl.where(active < 0, 0, active)  # outside, active is 0
            g *= s
        stored = tl.where(active <= 0, 0, g).to(grad_x.dtype.element_ty)
        tl.store(grad_x + at, stored, ok)
        sums += stored.to(sums.dtype)  # outside, active is 0
    at = partial + tl.program_id(0) * channels + c
    tl.store(at, tl.sum(sums, 0), inside)
    if HAS_SCALE:
        tl.store(at + tl.num_programs(0) * channels, tl.sum(scale_sums, 0), inside)


@triton.jit
def _centre_kernel(
    x,
    total,  # (channels,)
    bias,  # (channels,), read only if HAS_BIAS
    running,  # (channels,), changed if TRACK
    batches,  # one number, changed if TRACK
    y,
    rows,
    channels,
    S,
    RUN,
    count,
    MOMENTUM: tl.constexpr,  # a constant: as an argument it would be float32
    HAS_BIAS: tl.constexpr,
    TRACK: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
):
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = c < channels
    mean = tl.load(total + c, inside, 0) / count
    shift = -mean
    if HAS_BIAS:
        shift += tl.load(bias + c, inside, 0).to(mean.dtype)
    if TRACK:
        if tl.program_id(0) == 0:
            old = tl.load(running + c, inside, 0).to(mean.dtype)
            new = old + MOMENTUM * (mean - old)
            tl.store(running + c, new.to(running.dtype.element_ty), inside)
            if tl.program_id(1) == 0:
                tl.store(batches, tl.load(batches) + 1)
    base = tl.program_id(0).to(tl.int64) * RUN
    length = tl.minimum(RUN, rows - base)
    for start in range(0, length, BM):
        row = start + tl.arange(0, BM)
        ok = (row < length)[:, None] & inside[None, :]
        at = _offsets(base, row, c, channels, S)
        v = tl.load(x + at, ok, 0).to(mean.dtype) + shift[None, :]
        tl.store(y + at, v.to(y.dtype.element_ty), ok)
