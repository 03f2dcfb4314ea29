"""The mean of each channel for compilers, of sums in parts, and the running mean's step.

To take a mean over images and positions, a compiler reads what it has just written once more. Sums
over the positions alone, or over the images alone, it gathers on the way; what is left, one number
per image and channel, or per position and channel, is added up here, by a kernel that moves the
running mean and counts the batches too:

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

_NUMBERS = 32  # in a part; with fewer, the parts are not much smaller than what is summed
_PARTS = 132 * 64  # with fewer, inductor divides the sums further, in a pass of their own (H200)
_FEW = 128  # positions: with more, sums over the images are slower than over the positions (H200)


def number_of_parts(x: Tensor, channels: int, positions: int) -> int:
    """Return in how many parts a compiler should add up channels of as many images as x; 0: none.

    It is the number of positions or that of images, see `sums`.
    """
    if not shifted_op.wanted(x) or x.ndim != 4:
        return 0
    images = x.shape[0]
    if _over_images(images, positions, channels):
        return positions
    return images if positions >= _NUMBERS and images * channels >= _PARTS else 0


def sums(x: Tensor) -> Tensor:
    """Return the sums of x (images, channels, height, width) in parts, (parts, channels)."""
    images, channels, height, width = x.shape
    dtype, x = torch.promote_types(x.dtype, torch.float32), x.permute(0, 2, 3, 1)
    if _over_images(images, height * width, channels):
        return x.sum(0, dtype=dtype).flatten(0, 1)
    return x.sum((1, 2), dtype=dtype)


def _over_images(images: int, positions: int, channels: int) -> bool:
    return positions < _FEW and images >= _NUMBERS and positions * channels >= _PARTS


def mean_of_images(x: Tensor, running: tuple[Tensor, Tensor] | None, momentum: float) -> Tensor:
    """Return the mean of each channel of x (images, channels, height, width)."""
    count = x.shape[0] * x.shape[2] * x.shape[3]
    mean, batches = (None, None) if running is None else running
    return torch.ops.geoparam.mean_of_parts(sums(x), count, mean, batches, momentum)


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


# --- in a compiler's graph ----------------------------------------------------------------------

_taken = expansion.Notes()  # a mean: what is tracked, that before its step, and the numbers


def _kernel(
    parts: Tensor, count: int, running: Tensor | None, batches: Tensor | None, momentum: float
) -> Tensor:
    before = expansion.nodes(running, batches)
    mean = _kernels().mean_of_parts(parts, count, running, batches, momentum, traced=True)
    _taken.write(mean, running, batches, before, count, momentum)
    return mean


def may_be_taken_again(mean: Tensor) -> bool:
    """Return whether `mean` was taken by sums in parts, and what it moved is where it left it."""
    return _taken.read(mean) is not None


def taken_again(mean: Tensor, parts: Tensor) -> Tensor:
    """Return `mean` by other parts, as if it had not been taken before.

    In a graph nothing has happened yet: the running mean goes back to what it was, and the first
    step, whose result nobody uses any more, is dropped.
    """
    note = _taken.read(mean)
    assert note is not None
    running, batches, before, count, momentum = note
    for tracked, value in zip((running, batches), before, strict=False):
        tracked.replace_(value)
        tracked.commit_update()
        tracked.sync()
    return _kernel(parts, count, running, batches, momentum)


expansion.expand("mean_of_parts", _kernel)


@functools.cache
def _kernels() -> ModuleType:
    return importlib.import_module("geoparam.ops.means_triton")  # needs Triton
