"""Max pooling of 2x2 squares in one pass each way, with the sums of channels on the way.

    pool           y = the largest of each square, which one it was, and sum y per channel
    pool_backward  dx = dy + dsum where it was the largest, else 0; sum dx per channel is that of
                   dy + dsum, so it costs a quarter of a pass and is gathered in this one

torch notes eight bytes for each square where one is enough, and gathers nothing. Here is the
specification in plain torch, `pooling_triton` has the same for GPUs. Sizes are even.
"""

import functools
import importlib
from types import ModuleType

import torch
from torch import Tensor

from geoparam.ops import columns, implementation


def pool(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the largest number of each square, its place there (0 to 3), and sums per channel.

    As in torch, the first of equals counts, and NaN is larger than all.

    Example:
        >>> y, place, sums = pool(torch.arange(8.).view(1, 1, 2, 4))
        >>> y, place, sums
        (tensor([[[[5., 7.]]]]), tensor([[[[3, 3]]]], dtype=torch.uint8), tensor([12.]))
    """
    if (kernels := _kernels(x)) is not None:
        return kernels.pool(x)
    y, place = x[..., ::2, ::2], torch.zeros_like(x[..., ::2, ::2], dtype=torch.uint8)
    for number, other in enumerate((x[..., ::2, 1::2], x[..., 1::2, ::2], x[..., 1::2, 1::2]), 1):
        larger = (other > y) | other.isnan()
        y, place = torch.where(larger, other, y), place.masked_fill(larger, number)
    return y, place, columns.sums(y, 1)


def pool_backward(grad: Tensor, place: Tensor, grad_sums: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the gradient of x, and its sums."""
    if (kernels := _kernels(grad)) is not None:
        return kernels.pool_backward(grad, place, grad_sums)
    grad = spread(grad, grad_sums)
    return scattered(grad, place), columns.sums(grad, 1)


def spread(grad: Tensor, grad_sums: Tensor | None) -> Tensor:
    """Return the whole gradient of y, from its own and that of its sums."""
    whole = grad if grad_sums is None else grad + columns.along(grad_sums, grad, 1)
    return whole.to(grad.dtype)


def scattered(grad: Tensor, place: Tensor) -> Tensor:
    """Return x's gradient by plain operations, which can be differentiated again."""
    images, channels, height, width = grad.shape
    squares = torch.stack([torch.where(place == k, grad, 0) for k in range(4)], -1)
    squares = squares.view(images, channels, height, width, 2, 2).transpose(3, 4)
    return squares.reshape(images, channels, 2 * height, 2 * width)


def worthwhile(x: Tensor) -> bool:
    """Return whether there are kernels for this tensor as it lies."""
    last = x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last)
    return last and _kernels(x) is not None


def _kernels(x: Tensor) -> ModuleType | None:
    return _triton() if implementation.uses_triton(x) else None


@functools.cache
def _triton() -> ModuleType:
    return importlib.import_module("geoparam.ops.pooling_triton")
