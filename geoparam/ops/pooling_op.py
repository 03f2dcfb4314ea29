"""Max pooling for compilers: two ops, which become the kernels of `pooling_triton`.

    max_pool(x, size, stride, padding)                               y, place
    max_pool_backward(grad, place, size, stride, padding, h, w)      the gradient of x

Inductor gathers the gradient of each number from windows that it looks up by divisions, at a
fraction of the memory's speed; the sums it needs it adds up by itself.
"""

import importlib
from typing import Any

import torch
from torch import Tensor

from geoparam.ops import expansion, pooling, rectified
from geoparam.ops.pooling import Window


def wanted(x: Tensor) -> bool:
    """Return whether a compiler is to find the op in a training step on `x`."""
    return rectified.possible(x) and x.is_contiguous(memory_format=torch.channels_last)


torch.library.define(
    "geoparam::max_pool", "(Tensor x, int size, int stride, int padding) -> (Tensor, Tensor)"
)
torch.library.define(
    "geoparam::max_pool_backward",
    "(Tensor grad, Tensor place, int size, int stride, int padding, SymInt height, SymInt width)"
    " -> Tensor",
)


@torch.library.impl("geoparam::max_pool", "CompositeExplicitAutograd")
def _pool(x: Tensor, *window: int) -> tuple[Tensor, Tensor]:
    return pooling.pool(x, Window(*window))[:2]


@torch.library.impl("geoparam::max_pool_backward", "CompositeExplicitAutograd")
def _pool_backward(grad: Tensor, place: Tensor, *numbers: int) -> Tensor:
    *window, height, width = numbers
    found, _ = pooling.pool_backward(grad, place, None, Window(*window), (height, width))
    return found.contiguous(memory_format=torch.channels_last)


@torch.library.register_fake("geoparam::max_pool")
def _pool_fake(x: Tensor, *numbers: int) -> tuple[Tensor, Tensor]:
    images, channels, height, width = x.shape
    window = Window(*numbers)
    size = images, channels, window.along(height), window.along(width)
    y = x.new_empty(size).to(memory_format=torch.channels_last)
    return y, torch.empty_like(y, dtype=torch.uint8)


@torch.library.register_fake("geoparam::max_pool_backward")
def _pool_backward_fake(grad: Tensor, place: Tensor, *numbers: int) -> Tensor:
    *_, height, width = numbers
    size = *grad.shape[:2], height, width
    return grad.new_empty(size).to(memory_format=torch.channels_last)


def _context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    x, *ctx.window = inputs
    ctx.size = x.shape[2:]
    ctx.save_for_backward(output[1])


def _gradients(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    (place,) = ctx.saved_tensors
    if torch.is_grad_enabled():  # somebody will differentiate once more
        found = pooling.scattered(grad, place, Window(*ctx.window), tuple(ctx.size))
    else:
        found = torch.ops.geoparam.max_pool_backward(grad, place, *ctx.window, *ctx.size)
    return found, None, None, None


torch.library.register_autograd("geoparam::max_pool", _gradients, setup_context=_context)


# --- for compilers on a GPU ---------------------------------------------------------------------


def _pool_kernel(x: Tensor, *numbers: int) -> tuple[Tensor, Tensor]:
    window = Window(*numbers)
    if not pooling.is_countable(x.shape[0], *x.shape[2:]):
        return pooling.plain_pool(x, window)
    return rectified.pooled(x, window)


def _pool_backward_kernel(grad: Tensor, place: Tensor, *numbers: int) -> Tensor:
    *sides, height, width = numbers
    window, size = Window(*sides), (height, width)
    if not pooling.is_countable(grad.shape[0], *size):
        return pooling.scattered(grad, place, window, size)
    found, _ = _kernels().pool_backward(grad, place, None, window, size, traced=True)
    return rectified.note_moved(found, grad, place, window)


expansion.expand("max_pool", _pool_kernel)
expansion.expand("max_pool_backward", _pool_backward_kernel)


def _kernels() -> Any:
    return importlib.import_module("geoparam.ops.pooling_triton")  # needs Triton
