"""The passes of `stem` as Triton kernels, for images with their channels last in memory.

A program owns a tile of BC units and a run of positions, which it walks down BM at a time. What a
position looks at is a row of few numbers of x, TAPS of them; the product of BM such rows with the
weight is z. Backward a row has a 1 behind its numbers: the product of all rows with the gradient
of z, which is made on the way and written nowhere, has the gradient of the weight and, for the 1,
that of the bias.
"""

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from geoparam.ops.columns import wide
from geoparam.ops.launch import Launch, dtypes_of, image

_FORWARD = 128, 1056, 8  # positions looked at together, programs, warps (H200)
_BACKWARD = 32, 264, 4
_UNITS = 128  # looked at together
_LEAST = 16  # rows and columns of a product


def forward(
    x: Tensor, weight: Tensor, size: tuple[int, ...], *sides: Sequence[int], traced: bool = False
) -> Tensor:
    """Return the convolution, which has this size; `sides` are stride, padding and dilation."""
    _, _, *kernel = weight.shape
    z, rows = image(size, x), weight.permute(0, 2, 3, 1).contiguous()
    where = x.stride(), tuple(kernel), _flat(sides)
    launch, _ = _launch(_forward_kernel, z.shape, x.shape, *where, (), dtypes_of(x, weight))
    (launch.traced if traced else launch)(x, rows, z)
    return z


def backward(
    grad: Tensor,
    shift: Tensor | None,
    x: Tensor,
    z: Tensor,
    bias: Tensor | None,
    scale: Tensor,
    kernel: tuple[int, int],
    *sides: Sequence[int],
    traced: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of weight, bias and scale; see `stem`.

    The gradient of y is `grad`, with `shift` added to each number of a channel.
    """
    grad = grad.to(z.dtype).contiguous(memory_format=torch.channels_last)
    z = z.contiguous(memory_format=torch.channels_last)
    channels, units = x.shape[1], z.shape[1]
    taps = channels * kernel[0] * kernel[1]
    flags, types = (shift is not None, bias is not None), dtypes_of(x, z, shift, bias, scale)
    where = x.stride(), kernel, _flat(sides)
    launch, programs = _launch(_backward_kernel, z.shape, x.shape, *where, flags, types)
    partial = torch.empty((programs, taps + 2, units), dtype=wide(z), device=z.device)
    shift, bias, scale = (z if t is None else t.contiguous() for t in (shift, bias, scale))
    (launch.traced if traced else launch)(x, grad, z, shift, bias, scale, partial)
    total = partial.sum(0)
    weight = total[:taps].t().reshape(units, *kernel, channels).permute(0, 3, 1, 2)
    return weight.to(x.dtype), total[taps], total[taps + 1]


def _flat(sides: Sequence[Sequence[int]]) -> tuple[int, ...]:
    return tuple([number for side in sides for number in side])


@functools.lru_cache(maxsize=4096)
def _launch(
    function: triton.JITFunction,
    size: torch.Size,
    images: torch.Size,
    strides: tuple[int, ...],
    kernel: tuple[int, int],
    sides: tuple[int, ...],
    flags: tuple[bool, ...],
    types: tuple,
) -> tuple[Launch, int]:
    """Return the launch for z of this `size`, and how many programs there are along positions."""
    height, programs, warps = _FORWARD if function is _forward_kernel else _BACKWARD
    count, units, *places = size
    _, channels, *inputs = images
    taps, rows = channels * kernel[0] * kernel[1], count * places[0] * places[1]
    row, width = (max(triton.next_power_of_2(n), _LEAST) for n in (taps + 1, min(units, _UNITS)))
    across = triton.cdiv(units, width)
    run = triton.cdiv(triton.cdiv(rows, max(1, programs // across)), height) * height
    grid = triton.cdiv(rows, run), across, 1
    numbers = rows, units, *inputs, *places, *strides, run
    constants = *flags, channels, kernel[1], taps, *sides, height, row, width
    return Launch(function, grid, (*numbers, *constants), warps), grid[0]


@triton.jit
def _rows_of(
    x,
    m,  # positions
    there,  # which of them there are
    H,
    W,
    OH,  # positions along a column of an image
    OW,
    image_stride,
    channel_stride,
    row_stride,
    column_stride,
    CHANNELS: tl.constexpr,
    KERNEL_WIDTH: tl.constexpr,
    TAPS: tl.constexpr,
    STRIDE_DOWN: tl.constexpr,
    STRIDE_ACROSS: tl.constexpr,
    PADDING_DOWN: tl.constexpr,
    PADDING_ACROSS: tl.constexpr,
    DILATION_DOWN: tl.constexpr,
    DILATION_ACROSS: tl.constexpr,
    BK: tl.constexpr,
):
    """Return what positions look at, and zeros up to BK."""
    tap = tl.arange(0, BK)
    down = tap // (CHANNELS * KERNEL_WIDTH) * DILATION_DOWN - PADDING_DOWN
    across = tap // CHANNELS % KERNEL_WIDTH * DILATION_ACROSS - PADDING_ACROSS
    h = (m // OW % OH * STRIDE_DOWN)[:, None] + down[None, :]
    w = (m % OW * STRIDE_ACROSS)[:, None] + across[None, :]
    seen = (h >= 0) & (h < H) & (w >= 0) & (w < W) & there[:, None] & (tap < TAPS)[None, :]
    at = h * row_stride + w * column_stride + (tap % CHANNELS * channel_stride)[None, :]
    image = (m // OW // OH).to(tl.int64) * image_stride
    return tl.load(x + image[:, None] + at, seen, 0)


@triton.jit
def _forward_kernel(
    x,
    weight,  # (units, TAPS)
    z,
    rows,
    units,
    H,
    W,
    OH,
    OW,
    image_stride,
    channel_stride,
    row_stride,
    column_stride,
    RUN,
    CHANNELS: tl.constexpr,
    KERNEL_WIDTH: tl.constexpr,
    TAPS: tl.constexpr,
    STRIDE_DOWN: tl.constexpr,
    STRIDE_ACROSS: tl.constexpr,
    PADDING_DOWN: tl.constexpr,
    PADDING_ACROSS: tl.constexpr,
    DILATION_DOWN: tl.constexpr,
    DILATION_ACROSS: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    BC: tl.constexpr,
):
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = c < units
    tap = tl.arange(0, BK)
    ok = (tap < TAPS)[:, None] & inside[None, :]
    own = tl.load(weight + c[None, :] * TAPS + tap[:, None], ok, 0)
    base = tl.program_id(0) * RUN
    length = tl.minimum(RUN, rows - base)
    for start in range(0, length, BM):
        row = start + tl.arange(0, BM)
        there, m = row < length, base + row
        seen = _rows_of(
            x, m, there, H, W, OH, OW, image_stride, channel_stride, row_stride, column_stride,
            CHANNELS, KERNEL_WIDTH, TAPS, STRIDE_DOWN, STRIDE_ACROSS, PADDING_DOWN,
            PADDING_ACROSS, DILATION_DOWN, DILATION_ACROSS, BK,
        )  # fmt: skip
        made = tl.dot(seen, own, input_precision="ieee").to(z.dtype.element_ty)
        to = m[:, None].to(tl.int64) * units + c[None, :]
        tl.store(z + to, made, there[:, None] & inside[None, :])


@triton.jit
def _backward_kernel(
    x,
    grad,
    z,
    shift,  # (units,), read only if HAS_SHIFT
    bias,  # (units,), read only if HAS_BIAS
    scale,  # (units,)
    partial,  # (programs along positions, TAPS + 2, units)
    rows,
    units,
    H,
    W,
    OH,
    OW,
    image_stride,
    channel_stride,
    row_stride,
    column_stride,
    RUN,
    HAS_SHIFT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CHANNELS: tl.constexpr,
    KERNEL_WIDTH: tl.constexpr,
    TAPS: tl.constexpr,
    STRIDE_DOWN: tl.constexpr,
    STRIDE_ACROSS: tl.constexpr,
    PADDING_DOWN: tl.constexpr,
    PADDING_ACROSS: tl.constexpr,
    DILATION_DOWN: tl.constexpr,
    DILATION_ACROSS: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    BC: tl.constexpr,
):
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = c < units
    tap = tl.arange(0, BK)
    total = tl.zeros((BK, BC), partial.dtype.element_ty)
    scale_sums = tl.zeros((BM, BC), partial.dtype.element_ty)
    s = tl.load(scale + c, inside, 0).to(total.dtype)[None, :]
    if HAS_SHIFT:
        gs = tl.load(shift + c, inside, 0).to(total.dtype)[None, :]
    if HAS_BIAS:
        b = tl.load(bias + c, inside, 0).to(total.dtype)[None, :]
    base = tl.program_id(0) * RUN
    length = tl.minimum(RUN, rows - base)
    for start in range(0, length, BM):
        row = start + tl.arange(0, BM)
        there, m = row < length, base + row
        ok = there[:, None] & inside[None, :]
        at = m[:, None].to(tl.int64) * units + c[None, :]
        g = tl.load(grad + at, ok, 0).to(total.dtype)
        active = tl.load(z + at, ok, 0).to(total.dtype)
        if HAS_BIAS:
            active += tl.where(ok, b, 0)
        if HAS_SHIFT:
            g += gs
        scale_sums += g * tl.where(active < 0, 0, active)  # outside, active is 0
        by_z = tl.where(active <= 0, 0, g * s).to(z.dtype.element_ty)
        seen = _rows_of(
            x, m, there, H, W, OH, OW, image_stride, channel_stride, row_stride, column_stride,
            CHANNELS, KERNEL_WIDTH, TAPS, STRIDE_DOWN, STRIDE_ACROSS, PADDING_DOWN,
            PADDING_ACROSS, DILATION_DOWN, DILATION_ACROSS, BK,
        )  # fmt: skip
        seen = tl.where((tap == TAPS)[None, :], 1, seen).to(x.dtype.element_ty)
        total = tl.dot(tl.trans(seen), by_z, total, input_precision="ieee")
    to = partial + (tl.program_id(0) * (TAPS + 2) + tap[:, None]) * units + c[None, :]
    tl.store(to, total, (tap <= TAPS)[:, None] & inside[None, :])
    to = partial + (tl.program_id(0) * (TAPS + 2) + TAPS + 1) * units + c
    tl.store(to, tl.sum(scale_sums, 0), inside)
