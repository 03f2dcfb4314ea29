"""The mean of each channel for compilers, of sums per image, and the running mean's step.

To take a mean over images and positions, a compiler reads what it has just written once more. Sums
over the positions alone it gathers on the way; what is left, one number per image and channel, is
added up here, by a kernel that moves the running mean and counts the batches too:

    mean_of_parts(parts, count, running, batches, momentum)      parts.sum(0) / count
"""

import functools
import importlib
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from geoparam.ops import expansion, shifted_op
from geoparam.ops.columns import advance

_POSITIONS = 32  # with fewer, sums per image are not much smaller than what is summed
_PARTS = 132 * 64  # with fewer, inductor divides the sums further, in a pass of their own (H200)


def in_parts(x: Tensor, channels: int) -> bool:
    """Return whether a compiler should add up this many channels of images like x in parts."""
    return (
        shifted_op.wanted(x)
        and x.ndim == 4
        and x.shape[2] * x.shape[3] >= _POSITIONS
        and x.shape[0] * channels >= _PARTS
    )


def mean_of_images(x: Tensor, running: tuple[Tensor, Tensor] | None, momentum: float) -> Tensor:
    """Return the mean of each channel of x (images, channels, height, width)."""
    parts = x.sum((2, 3), dtype=torch.promote_types(x.dtype, torch.float32))
    count = x.shape[0] * x.shape[2] * x.shape[3]
    mean, batches = (None, None) if running is None else running
    return torch.ops.geoparam.mean_of_parts(parts, count, mean, batches, momentum)


torch.library.define(
    "geoparam::mean_of_parts",
    "(Tensor parts, SymInt count, Tensor(a!)? running, Tensor(b!)? batches, float momentum) "
    "-> Tensor",
)


@torch.library.impl("geoparam::mean_of_parts", "CompositeExplicitAutograd")
def _mean(
    parts: Tensor, count: int, running: Tensor | None, batches: Tensor | None, momentum: float
) -> Tensor:
    mean = parts.sum(0) / count
    if running is not None and batches is not None:
        advance((running, batches), mean, momentum)
    return mean


@torch.library.register_fake("geoparam::mean_of_parts")
def _fake(
    parts: Tensor, count: int, running: Tensor | None, batches: Tensor | None, momentum: float
) -> Tensor:
    return parts.new_empty(parts.shape[1:])


class _Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        ctx.size, ctx.count = inputs[0].shape, inputs[1]
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.geoparam.mean_of_parts(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (grad / ctx.count).expand(ctx.size), None, None, None, None


@torch.library.impl("geoparam::mean_of_parts", "Autograd")
def _differentiable(*inputs: Any) -> Tensor:
    return _Mean.apply(*inputs)


def _kernel(
    parts: Tensor, count: int, running: Tensor | None, batches: Tensor | None, momentum: float
) -> Tensor:
    return _kernels().mean_of_parts(parts, count, running, batches, momentum, traced=True)


expansion.expand("mean_of_parts", _kernel)
expansion.note_sources("mean_of_parts", "means_triton", ("_mean_kernel",))


@functools.cache
def _kernels() -> ModuleType:
    return importlib.import_module("geoparam.ops.means_triton")  # needs Triton
