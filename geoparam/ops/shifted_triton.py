"""`shifted` as Triton kernels: weight and bias in one launch, their gradients in two.

The forward is that of `triton` or `rows_triton`; while a program has its rows of w, it adds up
w^T total too, of the numbers as they are stored. Of the backward

    g' = g - db total / count,     dr = <g', u> + lam db,     dlam = r db,
    dtotal = -(1 / count) sum over units and taps of db w

all but the last line belongs to one row: g' is what the weight's own backward loads. A row adds up
its own db, where that arrives in parts. The last runs across the rows, and is a small kernel of
its own, which reads w once. No atomics: the same numbers every time.

With `traced`, the kernels are left in the graph that a compiler is tracing.
"""

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from geoparam.ops.columns import advance
from geoparam.ops.implementation import Layout, layout_of, readable
from geoparam.ops.lanes_triton import full
from geoparam.ops.launch import Launch, Types, dtypes_of
from geoparam.ops.rows_triton import gradient_of_vectors, tile_of_vectors, weight_of_vectors
from geoparam.ops.shifted import How
from geoparam.ops.triton import gradient_of_angles, own_rows, tile_of_angles, weight_of_angles

_ACROSS = 8192  # numbers that a program looks at together, where it adds up over units
_CHANNELS = 16  # of them side by side: at least a sector of memory
_PARTS = 512  # of gradients of biases, looked at together
_WARPS = 8


def forward(
    stored: Tensor,
    r: Tensor,
    lam: Tensor | None,
    total: Tensor,
    running: tuple[Tensor | None, Tensor] | None,
    how: How,
    traced: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return weight and bias, and let `running` make its step; see `shifted`.

    Without a running mean in it, only the batches are counted.
    """
    mean, batches = (None, None) if running is None else running
    if mean is not None and batches is not None and not mean.is_contiguous():
        advance((mean, batches), total / how.numbers, how.momentum)
        mean = batches = None
    types = dtypes_of(stored, r, lam, total, mean, batches)
    plan = _forward_plan(stored.shape, total.shape, types, stored.get_device(), how)
    device = stored.device
    weight = torch.empty_strided(plan.size, plan.stride, dtype=how.dtype, device=device)
    bias = torch.empty(plan.size[0], dtype=how.dtype, device=device)
    total = total.contiguous()
    (plan.launch.traced if traced else plan.launch)(
        stored.contiguous(),
        r.contiguous(),
        total if lam is None else lam.contiguous(),
        total,
        total if mean is None else mean,
        total if batches is None else batches,
        weight,
        bias,
    )
    if not traced:  # a kernel's writing is not seen otherwise
        torch.autograd.graph.increment_version([x for x in (mean, batches) if x is not None])
    return weight, bias


def backward(
    grad_weight: Tensor,
    grad_bias: Tensor,
    stored: Tensor,
    r: Tensor,
    lam: Tensor | None,
    total: Tensor,
    weight: Tensor,
    how: How,
    traced: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """Return the gradients of stored, r, lam and total; see `shifted`."""
    grad_weight, taps = readable(grad_weight, 1)
    weight, own_taps = readable(weight, 1)
    types = dtypes_of(stored, r, lam, total, grad_weight, grad_bias, weight)
    parts = 1 if grad_bias.ndim == 1 else grad_bias.shape[0]
    sizes, device = (stored.shape, total.shape), stored.get_device()
    plan = _backward_plan(*sizes, taps, own_taps, parts, types, device, how)
    stored, r = stored.contiguous(), r.contiguous()
    grad_bias, total = grad_bias.contiguous(), total.contiguous()
    grad_stored, grad_total = torch.empty_like(stored), torch.empty_like(total)
    grad_r = torch.empty_like(r) if how.inside else None
    grad_lam = None if lam is None else torch.empty_like(lam, memory_format=_IN_ORDER)
    starts = stored if plan.starts is None else stored.new_empty(plan.starts, dtype=plan.working)
    finished = grad_bias
    if plan.finishes:
        finished = total.new_empty(plan.units)
    elif plan.finished_is_grad_lam and grad_lam is not None:
        finished = grad_lam
    (plan.launch.traced if traced else plan.launch)(
        grad_weight,
        grad_bias,
        stored,
        r,
        total if lam is None else lam.contiguous(),
        total,
        grad_stored,
        total if grad_r is None else grad_r,
        total if grad_lam is None else grad_lam,
        finished if plan.finishes else total,
        starts,
    )
    across = plan.across.traced if traced else plan.across
    across(finished, weight, grad_total)
    return grad_stored, grad_r, grad_lam, grad_total


# --- launching ----------------------------------------------------------------------------------

_IN_ORDER = torch.contiguous_format


class _Forward(NamedTuple):
    size: tuple[int, ...]
    stride: tuple[int, ...]
    launch: Launch


class _Backward(NamedTuple):
    """What a backward pass needs.

    Attributes:
        starts: Shape of what angles in several chunks need, in the working type.
        finishes: Whether the whole gradient of the bias is written to memory of its own.
        finished_is_grad_lam: Whether it is the gradient of lam; else it arrives whole.
    """

    units: int
    starts: tuple[int, int] | None
    working: torch.dtype
    finishes: bool
    finished_is_grad_lam: bool
    launch: Launch
    across: Launch


@functools.lru_cache(maxsize=4096)
def _forward_plan(
    size: torch.Size, channels: torch.Size, types: Types, device: int, how: How
) -> _Forward:
    stored, _, lam, _, mean, batches = types
    layout = _layout(size, how)
    units, n, kernel = _numbers(layout, how)
    grid, warps, *tile = _tile(units, n, stored, how)
    track = 0 if batches is None else 1 if mean is None else 2
    flags = how.momentum, track, _is_angles(how), how.inside, lam is not None
    groups = channels.numel() * kernel // n
    numbers = units, n, units // groups, channels.numel(), how.numbers
    arguments = (*numbers, *flags, layout.taps, kernel, *tile)
    return _Forward(layout.size, layout.stride, Launch(_shifted_kernel, grid, arguments, warps))


@functools.lru_cache(maxsize=4096)
def _backward_plan(
    size: torch.Size,
    channels: torch.Size,
    taps: int,
    own_taps: int,
    parts: int,
    types: Types,
    device: int,
    how: How,
) -> _Backward:
    stored, _, lam, total, _, grad_bias, _ = types
    units, n, kernel = _numbers(_layout(size, how), how)
    grid, warps, *tile = _tile(units, n, stored, how)
    rows, lanes, each, one_chunk = tile
    groups = channels.numel() * kernel // n
    is_grad_lam = parts > 1 and lam == total and not how.inside
    finishes = parts > 1 and not is_grad_lam
    flags = _is_angles(how), how.natural, how.inside, lam is not None, finishes, parts > 1
    numbers = units, n, units // groups, how.numbers, parts
    arguments = (*numbers, *flags, taps, kernel, max(16, _PARTS // rows), *tile)
    limit = {"maxnreg": 128} if each == 16 and torch.version.cuda else {}  # as in `triton`
    launch = Launch(_shifted_backward_kernel, grid, arguments, warps, **limit)
    chunks = None if one_chunk or not _is_angles(how) else (units, triton.cdiv(n, lanes * each))
    across = _across(units, n, kernel, groups, own_taps, how.numbers)
    working = torch.float64 if stored == torch.float64 else torch.float32
    return _Backward(units, chunks, working, finishes, is_grad_lam, launch, across)


def _across(units: int, n: int, kernel: int, groups: int, taps: int, count: int) -> Launch:
    """Return the launch that adds up over the units of each group, and their taps."""
    width, members = n // kernel, units // groups
    strides = (width, 1) if taps > 1 else (1, kernel)
    columns = min(_CHANNELS, triton.next_power_of_2(width))
    rows = max(1, min(triton.next_power_of_2(members * kernel), _ACROSS // columns))
    grid = (groups, triton.cdiv(width, columns), 1)
    arguments = (members, width, count, *strides, kernel, rows, columns)
    warps = max(1, min(_WARPS, rows * columns // 256))
    return Launch(_mean_gradient_kernel, grid, arguments, warps)


def _layout(size: torch.Size, how: How) -> Layout:
    last = size[-1] if _is_angles(how) else size[-1] - 1
    return layout_of((*size[:-1], last), how.shape, how.channels_last)


def _numbers(layout: Layout, how: How) -> tuple[int, int, int]:
    """Return how many units there are, columns in each, and columns of a channel."""
    units, width, *kernel = layout.size
    taps = torch.Size(kernel).numel()
    return units, width * taps, taps


def _tile(units: int, n: int, stored: Any, how: How) -> tuple[Any, ...]:
    """Return the grid, the warps, and ROWS, LANES, EACH and ONE_CHUNK."""
    if _is_angles(how):
        return tile_of_angles(units, n, stored)
    grid, warps, rows, block, one_chunk = tile_of_vectors(units, n)
    return grid, warps, rows, block, 1, one_chunk


def _is_angles(how: How) -> bool:
    return how.coordinates == "latitude"


# --- kernels ------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["rows", "count"])
def _shifted_kernel(
    stored,  # (rows, n - 1) angles or (rows, n)
    r,  # (rows,)
    lam,  # (rows,), read only if HAS_LAM
    total,  # (channels,)
    running,  # (channels,), changed if TRACK is 2
    batches,  # one number, changed if TRACK is 1 or 2
    weight,  # (rows, n)
    bias,  # (rows,)
    rows,
    n,
    units,  # per group
    channels,
    count,
    MOMENTUM: tl.constexpr,  # a constant: as an argument it would be float32
    TRACK: tl.constexpr,
    ANGLES: tl.constexpr,
    SCALED: tl.constexpr,
    HAS_LAM: tl.constexpr,
    TAPS: tl.constexpr,
    KERNEL: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    EACH: tl.constexpr,
    ONE_CHUNK: tl.constexpr,
):
    row = own_rows(ROWS)
    first = row.to(tl.int32) // units * (n // KERNEL)
    if ANGLES:
        seen = weight_of_angles(
            stored, r, weight, total, first, row, rows, n,
            SCALED, TAPS, KERNEL, ROWS, LANES, EACH, ONE_CHUNK,
        )  # fmt: skip
    else:
        seen = weight_of_vectors(
            stored, r, weight, total, first, row, rows, n,
            SCALED, TAPS, KERNEL, ROWS, LANES, ONE_CHUNK,
        )  # fmt: skip
    b = -seen / count
    if HAS_LAM:
        offset = tl.load(lam + row, row < rows, 0).to(b.dtype)
        if SCALED:
            offset *= tl.load(r + row, row < rows, 0).to(b.dtype)
        b += offset
    tl.store(bias + row, b.to(bias.dtype.element_ty), row < rows)
    if TRACK:
        if tl.program_id(0) == 0:
            tl.store(batches, tl.load(batches) + 1)
            if TRACK == 2:
                _step(running, total, channels, count, b.dtype, MOMENTUM)


@triton.jit
def _step(running, total, channels, count, dtype, MOMENTUM: tl.constexpr):
    """Let the running mean make its step."""
    for start in range(0, channels, 1024):
        c = start + tl.arange(0, 1024)
        mean = tl.load(total + c, c < channels, 0).to(dtype) / count
        old = tl.load(running + c, c < channels, 0).to(dtype)
        new = old + MOMENTUM * (mean - old)
        tl.store(running + c, new.to(running.dtype.element_ty), c < channels)


@triton.jit(do_not_specialize=["rows", "count", "parts"])
def _shifted_backward_kernel(
    grad,  # (rows, n): of the weight
    grad_bias,  # (parts, rows)
    stored,
    r,  # (rows,)
    lam,  # (rows,), read only if HAS_LAM
    total,  # (channels,)
    grad_stored,
    grad_r,  # (rows,), written if SCALED
    grad_lam,  # (rows,), written if HAS_LAM
    finished,  # (rows,), written if FINISHES: the sum over the parts
    starts,  # for angles, see `triton`
    rows,
    n,
    units,  # per group
    count,
    parts,
    ANGLES: tl.constexpr,
    NATURAL: tl.constexpr,
    SCALED: tl.constexpr,
    HAS_LAM: tl.constexpr,
    FINISHES: tl.constexpr,
    IN_PARTS: tl.constexpr,
    TAPS: tl.constexpr,
    KERNEL: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    EACH: tl.constexpr,
    ONE_CHUNK: tl.constexpr,
):
    row = own_rows(ROWS)
    first = row.to(tl.int32) // units * (n // KERNEL)
    zero = full(stored, ROWS, PARTS, 0)
    by_bias = _added_up(grad_bias, zero, row, rows, parts, IN_PARTS, PARTS)
    share = by_bias / count
    if ANGLES:
        y = gradient_of_angles(
            grad, stored, r, grad_stored, starts, total, first, share, row, rows, n,
            SCALED, NATURAL, TAPS, KERNEL, ROWS, LANES, EACH, ONE_CHUNK,
        )  # fmt: skip
        lane = tl.arange(0, LANES)[None, :]
        by_r = tl.sum(tl.where(lane == 0, y, 0.0), 1, keep_dims=True)
    else:
        by_r = gradient_of_vectors(
            grad, stored, r, grad_stored, total, first, share, row, rows, n,
            SCALED, TAPS, KERNEL, ROWS, LANES, ONE_CHUNK,
        )  # fmt: skip
    if HAS_LAM:
        by_lam = by_bias
        if SCALED:
            by_lam = by_bias * tl.load(r + row, row < rows, 0).to(by_bias.dtype)
            by_r += by_bias * tl.load(lam + row, row < rows, 0).to(by_bias.dtype)
        tl.store(grad_lam + row, by_lam.to(grad_lam.dtype.element_ty), row < rows)
    if SCALED:
        tl.store(grad_r + row, by_r.to(grad_r.dtype.element_ty), row < rows)
    if FINISHES:
        tl.store(finished + row, by_bias.to(finished.dtype.element_ty), row < rows)


@triton.jit
def _added_up(partial, zero, row, rows, parts, IN_PARTS: tl.constexpr, PARTS: tl.constexpr):
    """Return what all parts give for these rows, (ROWS, 1)."""
    if IN_PARTS:
        sums = zero
        for start in range(0, parts, PARTS):
            part = start + tl.arange(0, PARTS)[None, :]
            inside = (row < rows) & (part < parts)
            sums += tl.load(partial + part * rows + row, inside, 0).to(zero.dtype)
        return tl.sum(sums, 1, keep_dims=True)
    else:
        return tl.load(partial + row, row < rows, 0).to(zero.dtype)


@triton.jit(do_not_specialize=["count"])
def _mean_gradient_kernel(
    grad_bias,  # (groups * units,)
    weight,  # (groups * units, width * KERNEL)
    grad_total,  # (groups * width,)
    units,  # per group
    width,  # channels per group
    count,
    of_tap,  # stride of a tap in a row of the weight
    of_channel,
    KERNEL: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    group = tl.program_id(0)
    c = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    sums = tl.zeros((ROWS, COLUMNS), grad_total.dtype.element_ty)
    for start in range(0, units * KERNEL, ROWS):
        m = (start + tl.arange(0, ROWS))[:, None]  # a tap of a unit
        there = m < units * KERNEL
        unit = (group * units + m // KERNEL).to(tl.int64)
        at = unit * (width * KERNEL) + (m % KERNEL) * of_tap
        w = tl.load(weight + at + c * of_channel, there & (c < width), 0).to(sums.dtype)
        sums += w * tl.load(grad_bias + unit, there, 0).to(sums.dtype)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    tl.store(grad_total + group * width + c, -tl.sum(sums, 0) / count, c < width)
