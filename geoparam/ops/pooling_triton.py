"""The passes of `pooling` as Triton kernels, for images with their channels last in memory.

Layout. The result is (squares, channels). A program owns a tile of BC channels and a run of
squares, as in `columns_triton`. With W squares in a row, square m is in row m // W of squares, and
its first number in row 4 W (m // W) + 2 (m % W) of x; the others are 1, 2 W, 2 W + 1 further.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from geoparam.ops.columns import wide
from geoparam.ops.columns_triton import _WARPS, _tile
from geoparam.ops.launch import Launch


def pool(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the largest of each square, its place, and sums per channel; see `pooling`."""
    x = x.contiguous(memory_format=torch.channels_last)
    images, channels, height, width = x.shape
    size = (images, channels, height // 2, width // 2)
    y = _image(size, x)
    place = torch.empty_like(y, dtype=torch.uint8)
    programs, launch = _launch(_forward_kernel, size, (), x.dtype)
    partial = torch.empty((programs, channels), dtype=wide(x), device=x.device)
    launch(x, y, place, partial)
    return y, place, partial.sum(0)


def pool_backward(grad: Tensor, place: Tensor, grad_sums: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the gradient of x and its sums; see `pooling`."""
    grad = grad.contiguous(memory_format=torch.channels_last)
    images, channels, height, width = grad.shape
    size = (images, channels, 2 * height, 2 * width)
    grad_x = _image(size, grad)
    has_sums = grad_sums is not None
    types = grad.dtype, grad_sums.dtype if grad_sums is not None else None
    programs, launch = _launch(_backward_kernel, grad.shape, (has_sums,), types)
    partial = torch.empty((programs, channels), dtype=wide(grad), device=grad.device)
    sums = grad if grad_sums is None else grad_sums.contiguous()
    launch(grad, place, sums, grad_x, partial)
    return grad_x, partial.sum(0)


def _image(size: tuple[int, ...], like: Tensor) -> Tensor:
    last = torch.channels_last
    return torch.empty(size, dtype=like.dtype, device=like.device, memory_format=last)


@functools.lru_cache(maxsize=4096)
def _launch(
    kernel: triton.JITFunction, size: tuple[int, ...], flags: tuple[bool, ...], types: object
) -> tuple[int, Launch]:
    """Return the programs along squares and the launch, for results of this size and type."""
    images, channels, height, width = size
    numbers = images * channels * height * width
    grid, (squares, run, tall, wide_) = _tile(numbers, channels, 1)
    arguments = squares, channels, width, run, *flags, tall // 4 or 1, wide_
    return grid[0], Launch(kernel, grid, arguments, _WARPS)


@triton.jit
def _corners(m, c, channels, W):
    first = 4 * W * (m // W) + 2 * (m % W)
    return first[:, None] * channels + c[None, :]


@triton.jit
def _forward_kernel(
    x,
    y,
    place,
    partial,  # (programs along squares, channels)
    squares,
    channels,
    W,
    RUN,
    BM: tl.constexpr,
    BC: tl.constexpr,
):
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = c < channels
    sums = tl.zeros((BM, BC), partial.dtype.element_ty)
    base = tl.program_id(0).to(tl.int64) * RUN
    length = tl.minimum(RUN, squares - base)
    for start in range(0, length, BM):
        row = start + tl.arange(0, BM)
        ok = (row < length)[:, None] & inside[None, :]
        at = _corners(base + row, c, channels, W)
        best = tl.load(x + at, ok, 0).to(sums.dtype)
        which = tl.zeros((BM, BC), tl.uint8)
        for k in tl.static_range(1, 4):
            further = ((k // 2) * 2 * W + k % 2) * channels
            other = tl.load(x + at + further, ok, 0).to(sums.dtype)
            larger = (other > best) | (other != other)  # NaN is larger than all
            best = tl.where(larger, other, best)
            which = tl.where(larger, k, which).to(tl.uint8)
        to = (base + row)[:, None] * channels + c[None, :]
        tl.store(y + to, best.to(y.dtype.element_ty), ok)
        tl.store(place + to, which, ok)
        sums += best  # outside, it is 0
    tl.store(partial + tl.program_id(0) * channels + c, tl.sum(sums, 0), inside)


@triton.jit
def _backward_kernel(
    grad,
    place,
    grad_sums,  # (channels,), read only if HAS_SUMS
    grad_x,
    partial,  # (programs along squares, channels)
    squares,
    channels,
    W,
    RUN,
    HAS_SUMS: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
):
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = c < channels
    sums = tl.zeros((BM, BC), partial.dtype.element_ty)
    if HAS_SUMS:
        gs = tl.load(grad_sums + c, inside, 0).to(sums.dtype)[None, :]
    base = tl.program_id(0).to(tl.int64) * RUN
    length = tl.minimum(RUN, squares - base)
    for start in range(0, length, BM):
        row = start + tl.arange(0, BM)
        ok = (row < length)[:, None] & inside[None, :]
        at = (base + row)[:, None] * channels + c[None, :]
        g = tl.load(grad + at, ok, 0).to(sums.dtype)
        which = tl.load(place + at, ok, 0)
        if HAS_SUMS:
            g += gs
        g = g.to(grad_x.dtype.element_ty).to(sums.dtype)  # as it is stored
        to = _corners(base + row, c, channels, W)
        for k in tl.static_range(4):
            further = ((k // 2) * 2 * W + k % 2) * channels
            moved = tl.where(which == k, g, 0).to(grad_x.dtype.element_ty)
            tl.store(grad_x + to + further, moved, ok)
        sums += tl.where(ok, g, 0)
    tl.store(partial + tl.program_id(0) * channels + c, tl.sum(sums, 0), inside)
