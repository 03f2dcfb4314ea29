"""The passes of `pooling` as Triton kernels, for images with their channels last in memory.

A program owns a tile of BC channels and a run of windows, as in `columns_triton`. Backward it owns
a run of squares of x, STRIDE numbers wide, instead: which windows a number of a square is in, and
at which place of them, is then the same for all squares and known to the compiler, so that each
gathers what it needs and no two write to the same number. Windows and squares are counted in 32
bits: 64 make divisions slow.

With `traced`, the kernels are left in the graph that a compiler is tracing.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from geoparam.ops.columns import wide
from geoparam.ops.columns_triton import _WARPS, _tile
from geoparam.ops.launch import Launch, dtypes_of, image
from geoparam.ops.pooling import Window

_TILE = 1024, 4224  # numbers looked at together, and programs
_TILE_SUMMED = 512, 2112  # where all of z is added up: each program leaves a part
_TILE_RECTIFIED = 512, 1056  # where z is looked at too


def pool(
    x: Tensor, window: Window, scale: Tensor | None = None, traced: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the largest of each window, its place, and sums per channel; see `pooling`.

    In channels with a negative scale, if there is one, it is the smallest.
    """
    y, place, partial = _pool(x, window, scale, None, False, traced)
    return y, place, partial.sum(0)


def rectify(
    z: Tensor, window: Window, scale: Tensor, bias: Tensor | None, traced: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `pool` does of z, but the sums, in parts, are those of scale relu(z + bias).

    They are sums over all windows, so these must tile the image.
    """
    return _pool(z, window, scale, bias, True, traced)


def _pool(
    x: Tensor,
    window: Window,
    scale: Tensor | None,
    bias: Tensor | None,
    is_rectified: bool,
    traced: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    x = x.contiguous(memory_format=torch.channels_last)
    images, channels, height, width = x.shape
    y = image((images, channels, window.along(height), window.along(width)), x)
    place = torch.empty_like(y, dtype=torch.uint8)
    flags = scale is not None, is_rectified, bias is not None
    programs, launch = _forward_launch(x.shape, window, flags, dtypes_of(x, scale, bias))
    partial = torch.empty((programs, channels), dtype=wide(x), device=x.device)
    scale, bias = (x if t is None else t.contiguous() for t in (scale, bias))
    (launch.traced if traced else launch)(x, scale, bias, y, place, partial)
    return y, place, partial


def pool_backward(
    grad: Tensor,
    place: Tensor,
    grad_sums: Tensor | None,
    window: Window,
    size: tuple[int, int],
    traced: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the gradient of x and its sums; see `pooling`."""
    grad = grad.contiguous(memory_format=torch.channels_last)
    images, channels, *_ = grad.shape
    grad_x = image((images, channels, *size), grad)
    flags = grad_sums is not None, False, False
    programs, launch = _backward_launch(grad_x.shape, window, flags, dtypes_of(grad, grad_sums))
    partial = torch.empty((programs, channels), dtype=wide(grad), device=grad.device)
    sums = grad if grad_sums is None else grad_sums.contiguous()
    (launch.traced if traced else launch)(grad, place, sums, grad, grad, grad, grad_x, partial)
    return grad_x, partial.sum(0)


def rectify_backward(
    grad: Tensor,
    place: Tensor,
    window: Window,
    z: Tensor,
    grad_sums: Tensor | None,
    scale: Tensor,
    bias: Tensor | None,
    traced: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of z, bias and scale, where y = scale relu(z + bias) is pooled.

    `grad` and `place` are as in `pool_backward`, and `grad_sums` is the gradient of y's own sums.
    """
    grad = grad.to(z.dtype).contiguous(memory_format=torch.channels_last)
    z = z.contiguous(memory_format=torch.channels_last)
    flags = grad_sums is not None, True, bias is not None
    types = dtypes_of(z, grad_sums, scale, bias)
    programs, launch = _backward_launch(z.shape, window, flags, types)
    partial = torch.empty((2, programs, z.shape[1]), dtype=wide(z), device=z.device)
    grad_z = image(z.shape, z)
    sums, scale, bias = (z if t is None else t.contiguous() for t in (grad_sums, scale, bias))
    (launch.traced if traced else launch)(grad, place, sums, z, scale, bias, grad_z, partial)
    total = partial.sum(1)
    return grad_z, total[0], total[1]


@functools.lru_cache(maxsize=4096)
def _forward_launch(
    size: torch.Size, window: Window, flags: tuple[bool, bool, bool], types: tuple
) -> tuple[int, Launch]:
    """Return the programs along windows and the launch, for images of this size."""
    images, channels, *sides = size
    down, across = (window.along(side) for side in sides)
    count = images * down * across * channels
    _, is_rectified, _ = flags
    sizes = _TILE_SUMMED if is_rectified else _TILE
    grid, (windows, run, *tile) = _tile(count, channels, 1, *sizes)
    numbers = windows, channels, *sides, down, across, run
    arguments = *numbers, *flags, *window, *tile
    return grid[0], Launch(_forward_kernel, grid, arguments, _WARPS)


@functools.lru_cache(maxsize=4096)
def _backward_launch(
    size: torch.Size, window: Window, flags: tuple[bool, bool, bool], types: tuple
) -> tuple[int, Launch]:
    """Return the programs along squares and the launch, for images of this size."""
    images, channels, *sides = size
    down, across = (triton.cdiv(side, window.stride) for side in sides)
    count = images * down * across * channels
    _, is_rectified, _ = flags
    sizes = _TILE_RECTIFIED if is_rectified else _TILE
    grid, (squares, run, *tile) = _tile(count, channels, 1, *sizes)
    windows = [window.along(side) for side in sides]
    numbers = squares, channels, *sides, down, across, *windows, run
    furthest = (window.stride - 1 + window.padding) // window.stride  # of the windows of a square
    nearest = -((window.size - 1 - window.padding) // window.stride)
    arguments = *numbers, *flags, *window, furthest, furthest - nearest + 1, *tile
    return grid[0], Launch(_backward_kernel, grid, arguments, _WARPS)


@triton.jit
def _forward_kernel(
    x,
    scale,  # (channels,), read only if HAS_SCALE
    bias,  # (channels,), read only if HAS_BIAS
    y,
    place,
    partial,  # (programs along windows, channels)
    windows,
    channels,
    H,
    W,
    DOWN,  # windows along a column of an image
    ACROSS,
    RUN,
    HAS_SCALE: tl.constexpr,
    IS_RECTIFIED: tl.constexpr,  # the sums are those of scale relu(x + bias)
    HAS_BIAS: tl.constexpr,
    SIZE: tl.constexpr,
    STRIDE: tl.constexpr,
    PADDING: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
):
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    sums = tl.zeros((BM, BC), partial.dtype.element_ty)
    if HAS_SCALE:
        s = tl.load(scale + c, c < channels, 0).to(sums.dtype)[None, :]
        falls = s < 0
    if HAS_BIAS:
        b = tl.load(bias + c, c < channels, 0).to(sums.dtype)[None, :]
    base = tl.program_id(0) * RUN
    length = tl.minimum(RUN, windows - base)
    for start in range(0, length, BM):
        row = start + tl.arange(0, BM)
        ok = (row < length)[:, None] & (c < channels)[None, :]
        m = base + row
        top = m // ACROSS % DOWN * STRIDE - PADDING
        left = m % ACROSS * STRIDE - PADDING
        image = (m // ACROSS // DOWN).to(tl.int64)
        best = tl.full((BM, BC), float("-inf"), sums.dtype)
        first = tl.maximum(-top, 0) * SIZE + tl.maximum(-left, 0)
        which = tl.zeros((BM, BC), tl.uint8) + first[:, None].to(tl.uint8)
        for k in tl.static_range(SIZE * SIZE):
            h, w = top + k // SIZE, left + k % SIZE
            there = ok
            if PADDING:
                there = ok & ((h >= 0) & (h < H) & (w >= 0) & (w < W))[:, None]
            at = ((image * H + h) * W + w)[:, None] * channels + c[None, :]
            other = tl.load(x + at, there, float("-inf")).to(sums.dtype)
            if IS_RECTIFIED:
                active = other
                if HAS_BIAS:
                    active += b
                active = tl.where(active < 0, 0, active)  # NaN stays, as in torch
                sums += tl.where(there, active * s, 0)
            if HAS_SCALE:
                other = tl.where(falls & there, -other, other)
            larger = (other > best) | (other != other)  # NaN is larger than all
            best = tl.where(larger, other, best)
            which = tl.where(larger, k, which).to(tl.uint8)
        if HAS_SCALE:
            best = tl.where(falls, -best, best)
        to = m[:, None].to(tl.int64) * channels + c[None, :]
        tl.store(y + to, best.to(y.dtype.element_ty), ok)
        tl.store(place + to, which, ok)
        if not IS_RECTIFIED:
            sums += tl.where(ok, best, 0)
    tl.store(partial + tl.program_id(0) * channels + c, tl.sum(sums, 0), c < channels)


@triton.jit
def _window(grad, place, gs, ok, image, oh, ow, c, channels, OH, OW):
    """Return the places and gradients of windows; outside of the image, no place and 0."""
    there = ok & ((oh >= 0) & (oh < OH) & (ow >= 0) & (ow < OW))[:, None]
    at = ((image * OH + oh) * OW + ow)[:, None] * channels + c[None, :]
    which = tl.load(place + at, there, 255)
    return which, tl.load(grad + at, there, 0).to(gs.dtype) + gs


@triton.jit
def _gathered(
    grad,
    place,
    gs,  # added to the gradient of each window
    which,  # of the only window of a square, if there is but one
    own,
    ok,
    image,
    down,
    across,
    c,
    channels,
    OH,
    OW,
    k: tl.constexpr,  # place in the square
    SIZE: tl.constexpr,
    STRIDE: tl.constexpr,
    PADDING: tl.constexpr,
    FURTHEST: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Return what numbers at place k of their squares get from the windows that they are in."""
    g = tl.zeros(ok.shape, gs.dtype)
    for q in tl.static_range(SPAN * SPAN):
        i = k // STRIDE + PADDING - (FURTHEST - q // SPAN) * STRIDE
        j = k % STRIDE + PADDING - (FURTHEST - q % SPAN) * STRIDE
        if i >= 0 and i < SIZE and j >= 0 and j < SIZE:
            if SPAN > 1:
                oh, ow = down + (FURTHEST - q // SPAN), across + (FURTHEST - q % SPAN)
                which, own = _window(grad, place, gs, ok, image, oh, ow, c, channels, OH, OW)
            g += tl.where(which == i * SIZE + j, own, 0)
    return g


@triton.jit
def _backward_kernel(
    grad,
    place,
    grad_sums,  # (channels,), read only if HAS_SUMS: of the result, or if IS_RECTIFIED of y
    z,  # this and what follows are read only if IS_RECTIFIED: y = scale relu(z + bias) is pooled
    scale,  # (channels,)
    bias,  # (channels,), read only if HAS_BIAS
    grad_x,  # or z's
    partial,  # (1 or 2, programs along squares, channels)
    squares,
    channels,
    H,
    W,
    DOWN,  # squares along a column of an image
    ACROSS,
    OH,  # windows along a column of an image
    OW,
    RUN,
    HAS_SUMS: tl.constexpr,
    IS_RECTIFIED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SIZE: tl.constexpr,
    STRIDE: tl.constexpr,
    PADDING: tl.constexpr,
    FURTHEST: tl.constexpr,  # window of a square, the first being its own
    SPAN: tl.constexpr,  # number of windows of a square, in each dimension
    BM: tl.constexpr,
    BC: tl.constexpr,
):
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    sums = tl.zeros((BM, BC), partial.dtype.element_ty)
    scale_sums = tl.zeros((BM, BC), partial.dtype.element_ty)
    gs = tl.zeros((1, BC), sums.dtype)  # of each window
    gy = tl.zeros((1, BC), sums.dtype)  # of each number
    if HAS_SUMS:
        gs = tl.load(grad_sums + c, c < channels, 0).to(sums.dtype)[None, :]
    if IS_RECTIFIED:
        gs, gy = gy, gs
        s = tl.load(scale + c, c < channels, 0).to(sums.dtype)[None, :]
    if HAS_BIAS:
        b = tl.load(bias + c, c < channels, 0).to(sums.dtype)[None, :]
    base = tl.program_id(0) * RUN
    length = tl.minimum(RUN, squares - base)
    for start in range(0, length, BM):
        row = start + tl.arange(0, BM)
        ok = (row < length)[:, None] & (c < channels)[None, :]
        m = base + row
        across, down = m % ACROSS, m // ACROSS % DOWN
        image = (m // ACROSS // DOWN).to(tl.int64)
        first = _window(grad, place, gs, ok, image, down, across, c, channels, OH, OW)
        for k in tl.static_range(STRIDE * STRIDE):
            g = _gathered(
                grad, place, gs, *first, ok, image, down, across, c, channels, OH, OW,
                k, SIZE, STRIDE, PADDING, FURTHEST, SPAN,
            )  # fmt: skip
            h, w = down * STRIDE + k // STRIDE, across * STRIDE + k % STRIDE
            inside = ok & ((h < H) & (w < W))[:, None]
            at = ((image * H + h) * W + w)[:, None] * channels + c[None, :]
            if IS_RECTIFIED:
                active = tl.load(z + at, inside, 0).to(sums.dtype)
                if HAS_BIAS:
                    active += tl.where(inside, b, 0)
                g += gy
                scale_sums += g * tl.where(active < 0, 0, active)  # outside, active is 0
                g = tl.where(active <= 0, 0, g * s)
            stored = g.to(grad_x.dtype.element_ty)
            tl.store(grad_x + at, stored, inside)
            sums += tl.where(inside, stored.to(sums.dtype), 0)
    at = partial + tl.program_id(0) * channels + c
    tl.store(at, tl.sum(sums, 0), c < channels)
    if IS_RECTIFIED:
        tl.store(at + tl.num_programs(0) * channels, tl.sum(scale_sums, 0), c < channels)
