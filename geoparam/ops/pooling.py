"""Max pooling in one pass each way, with the sums of channels on the way.

    pool           y = the largest number of each window, which one it was, and sum y per channel
    pool_backward  dx = the sum of dy + dsum over the windows where x was the largest, else 0; and
                   sum dx per channel

torch notes eight bytes for each window where one is enough, and gathers nothing. Here is the
specification in plain torch, `pooling_triton` has the same for GPUs, and `pooling_native` that of
squares for CPUs.
"""

import functools
import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from geoparam.ops import columns, implementation, pooling_native


class Window(NamedTuple):
    """Windows of size x size numbers, `stride` apart, that reach `padding` over the border."""

    size: int
    stride: int
    padding: int

    def along(self, length: int) -> int:
        """Return how many windows there are along a line of this many numbers."""
        return (length + 2 * self.padding - self.size) // self.stride + 1

    def tiles(self, height: int, width: int) -> bool:
        """Return whether each number of an image is in one window."""
        fits = height % self.size == 0 and width % self.size == 0
        return fits and self.size == self.stride and self.padding == 0


def pool(x: Tensor, window: Window) -> tuple[Tensor, Tensor, Tensor]:
    """Return the largest number of each window, its place there, and sums per channel.

    Places are counted row by row. As in torch, the first of equals counts, and NaN is larger than
    all.

    Example:
        >>> y, place, sums = pool(torch.arange(8.).view(1, 1, 2, 4), Window(2, 2, 0))
        >>> y, place, sums
        (tensor([[[[5., 7.]]]]), tensor([[[[3, 3]]]], dtype=torch.uint8), tensor([12.]))
    """
    if (kernels := _passes(x, window)) is not None:
        return kernels.pool(x, window)
    y, place = plain_pool(x, window)
    return y, place, columns.sums(y, 1)


def plain_pool(x: Tensor, window: Window) -> tuple[Tensor, Tensor]:
    """Return the largest number of each window, and its place, by plain operations."""
    y, index = F.max_pool2d(x, *window, return_indices=True)
    top, left = _corners(y, window)
    row, column = index // x.shape[3] - top, index % x.shape[3] - left
    return y, (row * window.size + column).to(torch.uint8)


def pool_backward(
    grad: Tensor,
    place: Tensor,
    grad_sums: Tensor | None,
    window: Window,
    size: tuple[int, int],
) -> tuple[Tensor, Tensor]:
    """Return the gradient of x, whose height and width are `size`, and its sums."""
    if (kernels := _passes_back(grad, window, size)) is not None:
        return kernels.pool_backward(grad, place, grad_sums, window, size)
    grad = spread(grad, grad_sums)  # each number of it goes to one of x
    return scattered(grad, place, window, size), columns.sums(grad, 1)


def spread(grad: Tensor, grad_sums: Tensor | None) -> Tensor:
    """Return the whole gradient of y, from its own and that of its sums."""
    whole = grad if grad_sums is None else grad + columns.along(grad_sums, grad, 1)
    return whole.to(grad.dtype)


def scattered(grad: Tensor, place: Tensor, window: Window, size: tuple[int, int]) -> Tensor:
    """Return x's gradient by plain operations, which can be differentiated again."""
    top, left = _corners(grad, window)
    place = place.long()
    index = (place // window.size + top) * size[1] + place % window.size + left
    images, channels, height, width = grad.shape
    flat = images, channels, height * width  # by reshape: batched gradients know no flatten
    nothing = grad.new_zeros((images, channels, size[0] * size[1]), dtype=columns.wide(grad))
    moved = nothing.scatter_add(2, index.reshape(flat), grad.reshape(flat).to(nothing.dtype))
    return moved.reshape(images, channels, *size).to(grad.dtype)


def worthwhile(x: Tensor, window: Window) -> bool:
    """Return whether there are kernels for this tensor as it lies."""
    kernels = _passes(x, window)
    last = x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last)
    return kernels is pooling_native or (last and kernels is not None)


def _corners(y: Tensor, window: Window) -> tuple[Tensor, Tensor]:
    """Return the first row of each window, and the first column."""
    top, left = (
        torch.arange(n, device=y.device) * window.stride - window.padding for n in y.shape[2:]
    )
    return top[:, None], left


def _passes(x: Tensor, window: Window) -> ModuleType | None:
    """Return the kernels for an activation, or None for plain torch."""
    if implementation.KERNELS in ("auto", "native") and pooling_native.serves(x, window):
        return pooling_native
    return _kernels(x, x.shape[2:])


def _passes_back(grad: Tensor, window: Window, size: tuple[int, int]) -> ModuleType | None:
    """Return the kernels for a gradient; it may lie in another way than the result did."""
    native = implementation.KERNELS in ("auto", "native")
    if native and pooling_native.serves_backward(grad, window, size):
        return pooling_native
    return _kernels(grad, size)


def _kernels(x: Tensor, size: Sequence[int]) -> ModuleType | None:
    """Return Triton's, for images of this height and width."""
    served = implementation.uses_triton(x) and is_countable(x.shape[0], *size)
    return _triton() if served else None


def is_countable(images: int, height: int, width: int) -> bool:
    """Return whether 32 bits are enough to count all positions, as Triton's kernels do."""
    return images * height * width <= 1 << 30


@functools.cache
def _triton() -> ModuleType:
    return importlib.import_module("geoparam.ops.pooling_triton")
