"""`means` as a Triton kernel: a program adds up some channels, one part after the other.

It is for compilers, which call it once, while they trace: so no launch is remembered.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from geoparam.ops.columns import advance
from geoparam.ops.launch import Launch

_PARTS, _CHANNELS, _WARPS = 256, 16, 8


def mean_of_parts(
    parts: Tensor,
    count: int,
    running: Tensor | None,
    batches: Tensor | None,
    momentum: float,
    traced: bool = False,
) -> Tensor:
    """Return parts.sum(0) / count, and let the running mean make its step."""
    if running is not None and batches is not None and not running.is_contiguous():
        mean = mean_of_parts(parts, count, None, None, momentum, traced)
        advance((running, batches), mean, momentum)
        return mean
    number, channels = parts.shape
    mean, parts = parts.new_empty(channels), parts.contiguous()
    tracks = running is not None and batches is not None
    grid = (triton.cdiv(channels, _CHANNELS), 1, 1)
    arguments = (number, channels, count, momentum, tracks, _PARTS, _CHANNELS)
    launch = Launch(_mean_kernel, grid, arguments, _WARPS)
    (launch.traced if traced else launch)(
        parts, parts if running is None else running, parts if batches is None else batches, mean
    )
    if not traced:  # a kernel's writing is not seen otherwise
        torch.autograd.graph.increment_version([x for x in (running, batches) if x is not None])
    return mean


@triton.jit(do_not_specialize=["parts", "count"])
def _mean_kernel(
    partial,  # (parts, channels)
    running,  # (channels,), changed if TRACK
    batches,  # one number, changed if TRACK
    mean,  # (channels,)
    parts,
    channels,
    count,
    MOMENTUM: tl.constexpr,  # a constant: as an argument it would be float32
    TRACK: tl.constexpr,
    PARTS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    c = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    sums = tl.zeros((PARTS, CHANNELS), mean.dtype.element_ty)
    for start in range(0, parts, PARTS):
        part = start + tl.arange(0, PARTS)
        inside = (part < parts)[:, None] & (c < channels)[None, :]
        sums += tl.load(partial + part[:, None] * channels + c[None, :], inside, 0)
    m = tl.sum(sums, 0) / count
    tl.store(mean + c, m, c < channels)
    if TRACK:
        old = tl.load(running + c, c < channels, 0).to(m.dtype)
        new = old + MOMENTUM * (m - old)
        tl.store(running + c, new.to(running.dtype.element_ty), c < channels)
        if tl.program_id(0) == 0:
            tl.store(batches, tl.load(batches) + 1)
