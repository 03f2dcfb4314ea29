"""A network's first convolution for compilers: y = r relu(conv(x) + b), where x wants no gradient.

Images have few channels, for which cuDNN has no good kernel: VGG-6's first convolution takes it
four times as long as z = conv(x) takes to be written. Backward, z's gradient is there for the
weight's alone: it need not be written at all, if one kernel makes it and adds up the weight's
(`stem_triton`). As the ops of `rectified`, those here are expanded in a compiler's graph, and
nobody else meets them:

    stem(x, weight, bias, scale, ...)     y = scale relu(z + bias), and z
    stem_backward(grad, ...)              the gradients of weight, bias and scale
"""

import importlib
import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from geoparam.ops import expansion, pooling, rectified

_LARGEST = 63  # numbers of a unit's row; one kernel has them all, and the bias as one more
_TYPES = torch.bfloat16, torch.float16  # others are multiplied too slowly

Sides = Sequence[int]  # down and across


def possible(x: Tensor, weight: Tensor, groups: int) -> bool:
    """Return whether a convolution has few numbers per unit, and images that want no gradient."""
    few = math.prod(weight.shape[1:]) <= _LARGEST and groups == 1
    return few and x.dtype == weight.dtype and x.dtype in _TYPES and not x.requires_grad


def convolved(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scale: Tensor,
    stride: Sides,
    padding: Sides,
    dilation: Sides,
) -> Tensor:
    """Return scale relu(conv(x) + bias), whose gradient does not reach x."""
    return torch.ops.geoparam.stem(x, weight, bias, scale, stride, padding, dilation)[0]


# --- as plain operations ------------------------------------------------------------------------


def _stem(
    x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor, *sides: Any
) -> tuple[Tensor, Tensor]:
    z = F.conv2d(x, weight, None, *sides)
    return rectified.rectified(z, bias, scale), z


def _stem_backward(
    grad: Tensor, x: Tensor, weight: Tensor, *others: Any, differentiable: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    z, bias, scale, *sides = others
    op: Any = torch.ops.geoparam.rectified_backward
    backward = rectified._rectified_backward if differentiable else op
    grad_z, by_bias, by_scale = backward(grad, z, bias, scale)
    return _by_weight(grad_z, x, weight, *sides), by_bias, by_scale


def _by_weight(grad_z: Tensor, x: Tensor, weight: Tensor, *sides: Any) -> Tensor:
    wanted = [False, True, False]
    backward = torch.ops.aten.convolution_backward
    return backward(grad_z, x, weight, None, *sides, False, [0, 0], 1, wanted)[1]


# --- the ops ------------------------------------------------------------------------------------

_SIDES = "int[] stride, int[] padding, int[] dilation"
torch.library.define(
    "geoparam::stem",
    f"(Tensor x, Tensor weight, Tensor? bias, Tensor scale, {_SIDES}) -> (Tensor, Tensor)",
)
torch.library.define(
    "geoparam::stem_backward",
    f"(Tensor grad, Tensor x, Tensor weight, Tensor z, Tensor? bias, Tensor scale, {_SIDES})"
    " -> (Tensor, Tensor, Tensor)",
)
for _name, _plain in (("stem", _stem), ("stem_backward", _stem_backward)):
    torch.library.impl(f"geoparam::{_name}", "CompositeExplicitAutograd", _plain)
    torch.library.register_fake(f"geoparam::{_name}", _plain)


def _context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    x, weight, bias, scale, *ctx.sides = inputs
    ctx.save_for_backward(x, weight, output[1], bias, scale)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, grad: Tensor | None, grad_z: Tensor | None) -> tuple[Tensor | None, ...]:
    x, weight, z, bias, scale = ctx.saved_tensors
    by_weight = by_bias = by_scale = None
    if grad is not None:
        given = grad, x, weight, z, bias, scale, *ctx.sides
        if torch.is_grad_enabled():  # somebody will differentiate once more
            found = _stem_backward(*given, differentiable=True)
        else:
            found = torch.ops.geoparam.stem_backward(*given)
        by_weight, by_bias, by_scale = found[0], found[1], found[2].to(scale.dtype)
        by_bias = None if bias is None else by_bias.to(bias.dtype)
    if grad_z is not None:  # somebody does: the first derivative looks at z
        more = _by_weight(grad_z, x, weight, *ctx.sides)
        by_weight = more if by_weight is None else by_weight + more
    return None, by_weight, by_bias, by_scale, None, None, None


torch.library.register_autograd("geoparam::stem", _gradients, setup_context=_context)


# --- expanded in a compiler's graph -------------------------------------------------------------


def _expanded_stem(
    x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor, *sides: Any
) -> tuple[Tensor, Tensor]:
    z = F.conv2d(x, weight, None, *sides)  # shows how z lies; if nobody uses it, it is dropped
    if rectified.has_kernel(z) and _is_countable(x, z):
        z = _kernels().forward(x, weight, tuple(z.shape), *sides, traced=True)
    return rectified.rectified(z, bias, scale), z


def _expanded_stem_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    z: Tensor,
    bias: Tensor | None,
    scale: Tensor,
    *sides: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    parts = rectified.parts_of(grad, z)
    if parts is None or not _is_countable(x, z):
        return _stem_backward(grad, x, weight, z, bias, scale, *sides)
    kernel = tuple(weight.shape[2:])
    return _kernels().backward(*parts, x, z, bias, scale, kernel, *sides, traced=True)


def _is_countable(x: Tensor, z: Tensor) -> bool:
    """Return whether 32 bits are enough to count positions of z, and numbers of an image."""
    reach = sum((n - 1) * stride for n, stride in zip(x.shape[1:], x.stride()[1:], strict=True))
    return reach < 1 << 31 and pooling.is_countable(z.shape[0], *z.shape[2:])


def _kernels() -> ModuleType:
    return importlib.import_module("geoparam.ops.stem_triton")  # needs Triton


expansion.expand("stem", _expanded_stem, always=True)
expansion.expand("stem_backward", _expanded_stem_backward, always=True)
