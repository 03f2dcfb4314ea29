"""Passes over activations that look at each channel: bias, ReLU, scale, and sums on the way.

A convolution's output is far larger than anything else in a training step, and reading it once
costs as much as many of its layers' other steps. So what IMN needs, the mean of each channel and
its gradient, is gathered in passes that are made anyway:

    rectify           y = s relu(x + b), and sum y per channel
    rectify_backward  dx = (dy + dsum) s 1[a > 0], and in the same pass db = sum dx and
                      ds = sum (dy + dsum) a, where a = relu(x + b)
    sums              sum x per channel, where nothing else has to be computed
    centre            y = x - E[x] + b, and the running mean's step
    shifted_bias      b = r lam - w^T E[x], one number per unit, and the running mean's step
    shifted_bias_backward

Here is the specification in plain torch; `columns_triton` has the same functions for GPUs, and
`columns_native` those over activations for CPUs. Sums are float32 or better, over values as they
are stored, and deterministic. `dim` is where the channels are.
"""

import functools
import importlib
from types import ModuleType

import torch
from torch import Tensor

from geoparam.ops import columns_native, implementation


def rectify(
    x: Tensor,
    dim: int,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    *,
    relu: bool = True,
    inplace: bool = False,
    summed: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Return y = scale relu(x + bias), in x's memory if `inplace`, and its sums per channel.

    Example:
        >>> rectify(torch.tensor([[1., -1.], [2., 3.]]), 1, bias=torch.tensor([0., 1.]))
        (tensor([[1., 0.],
                [2., 4.]]), tensor([3., 4.]))
    """
    if (kernels := _passes(x)) is not None:
        return kernels.rectify(x, dim, bias, scale, relu, inplace, summed)
    y = x.to(wide(x))
    y = y if bias is None else y + along(bias, x, dim)
    y = y.relu() if relu else y
    y = y if scale is None else y * along(scale, x, dim)
    y = x.copy_(y) if inplace else y.to(x.dtype)
    return y, sums(y, dim) if summed else None


def rectify_backward(
    grad: Tensor,
    a: Tensor,
    dim: int,
    grad_sums: Tensor | None,
    scale: Tensor | None = None,
    *,
    whole: bool = True,
    bias: Tensor | None = None,
    lent: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradients of x, bias and scale of y = scale relu(x + bias).

    `a` is x + bias, rectified or not, or x, and then `bias` is given. Unless `whole`, the gradient
    of the bias may be parts (parts, channels) that are still to be added up. With `lent`, that of
    x may lie in memory that the next call writes to: the caller is done with it by then, and has
    given it to nobody.
    """
    if (kernels := _passes(a)) is columns_native:
        return columns_native.rectify_backward(grad, a, dim, grad_sums, scale, whole, bias, lent)
    if kernels is not None:
        return kernels.rectify_backward(grad, a, dim, grad_sums, scale, whole, bias)
    a = a.relu() if bias is None else (a.to(wide(a)) + along(bias, a, dim)).relu().to(a.dtype)
    grad = grad.to(wide(a))
    grad = grad if grad_sums is None else grad + along(grad_sums, a, dim)
    grad_scale = None if scale is None else sums(grad * a, dim)
    grad = grad if scale is None else grad * along(scale, a, dim)
    grad_x = torch.where(a <= 0, 0, grad).to(a.dtype)  # it passes NaN, as in torch
    return grad_x, sums(grad_x, dim), grad_scale


def sums(x: Tensor, dim: int) -> Tensor:
    """Return the sum of each channel.

    Example:
        >>> sums(torch.ones(2, 3, 4), 1)
        tensor([8., 8., 8.])
    """
    if (kernels := _passes(x)) is not None:
        return kernels.sums(x, dim)
    return x.sum([d for d in range(x.ndim) if d != dim % x.ndim], dtype=wide(x))


def centre(
    x: Tensor,
    dim: int,
    total: Tensor,
    count: int,
    bias: Tensor | None = None,
    running: tuple[Tensor, Tensor] | None = None,
    momentum: float = 0.0,
) -> Tensor:
    """Return x - total / count + bias.

    `running`, the mean of all batches and their number, makes one step on the way.

    Example:
        >>> x = torch.tensor([[1., 2.], [3., 6.]])
        >>> centre(x, 1, x.sum(0), 2)
        tensor([[-1., -2.],
                [ 1.,  2.]])
    """
    if (kernels := _kernels(x)) is not None:
        return kernels.centre(x, dim, total, count, bias, running, momentum)
    mean = total / count
    if running is not None:
        advance(running, mean, momentum)
    return rectify(x, dim, -mean if bias is None else bias - mean, relu=False, summed=False)[0]


def shifted_bias(
    weight: Tensor,
    r: Tensor | None,
    lam: Tensor | None,
    total: Tensor,
    count: int,
    running: tuple[Tensor, Tensor] | None = None,
    momentum: float = 0.0,
) -> Tensor:
    """Return r lam - w^T mean for each unit, with mean = total / count.

    The mean is the same at every tap of a unit, and each group of units sees its own channels.
    `running`, the mean of all batches and their number, makes one step on the way.
    """
    mean = total / count
    if running is not None:
        advance(running, mean, momentum)
    bias = -response(weight, mean)
    if lam is not None:
        bias = bias + (lam if r is None else r * lam)
    return bias.to(weight.dtype)


def shifted_bias_backward(
    grad: Tensor,
    weight: Tensor,
    grad_weight: Tensor,
    r: Tensor | None,
    lam: Tensor | None,
    total: Tensor,
    count: int,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """Return the gradients of weight, r, lam and total; the first is added to `grad_weight`."""
    outer = grad[:, None] * per_unit(total / count, weight)
    outer = outer.view(*outer.shape, *[1] * (weight.ndim - 2))
    grad_weight = (grad_weight - outer).to(weight.dtype)
    grad_r = None if lam is None or r is None else grad * lam
    grad_lam = None if lam is None else grad if r is None else grad * r
    units = grad[:, None] * taps_of(weight, total.dtype)
    seen = units.view(total.numel() // weight.shape[1], -1, weight.shape[1]).sum(dim=1)
    return grad_weight, grad_r, grad_lam, seen.flatten() / -count


def advance(running: tuple[Tensor, Tensor], mean: Tensor, momentum: float) -> None:
    """Let the running mean, with the number of batches in it, make a step."""
    running[0].lerp_(mean.to(running[0].dtype), momentum)
    running[1].add_(1)


def response(weight: Tensor, mean: Tensor) -> Tensor:
    """Return w^T mean for each unit, where the mean is the same at every tap."""
    return (taps_of(weight, mean.dtype) * per_unit(mean, weight)).sum(dim=1)


def taps_of(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return each unit's weights added up over its kernel, (out, channels of its group)."""
    return weight.flatten(2).sum(-1, dtype=dtype) if weight.ndim > 2 else weight


def along(per_channel: Tensor, x: Tensor, dim: int) -> Tensor:
    """Bring one number per channel into a shape that spreads over `x`."""
    shape = [1] * x.ndim
    shape[dim] = -1
    return per_channel.view(shape)


def per_unit(mean: Tensor, weight: Tensor) -> Tensor:
    """Return the means (out, channels of its group) that each unit sees."""
    out, width = weight.shape[:2]
    groups = mean.numel() // width
    return mean.view(groups, 1, width).expand(-1, out // groups, -1).reshape(out, width)


def wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def worthwhile(x: Tensor) -> bool:
    """Return whether there are kernels for this tensor: plain torch gains nothing in this way."""
    return _passes(x) is not None


def _passes(x: Tensor) -> ModuleType | None:
    """Return the kernels for an activation, or None for plain torch."""
    if implementation.KERNELS in ("auto", "native") and columns_native.serves(x):
        return columns_native
    return _kernels(x)


def _kernels(x: Tensor) -> ModuleType | None:
    return _triton() if implementation.uses_triton(x) else None


@functools.cache
def _triton() -> ModuleType:
    return importlib.import_module("geoparam.ops.columns_triton")
