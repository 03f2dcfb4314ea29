"""Centring in training: y = x - E[x] + b per channel, in one pass each way.

The mean's gradient is the same for all of a channel, -(sum dy) / N. Where one step made x and its
sums, that goes past x to this step, which adds it up in its own pass (`sums`), and the gradient of
x is that of y as it is. Elsewhere one pass adds it.
"""

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor

from geoparam.ops import columns
from geoparam.sums import bystander, gradient_sums, hooks_of, is_beside, is_plain, is_watched


class Mean(NamedTuple):
    """The mean of `numbers` per channel, and the running mean of batches that it moves."""

    numbers: int
    running: tuple[Tensor, Tensor] | None
    momentum: float


def centred(x: Tensor, total: Tensor, mean: Mean, bias: Tensor | None, dim: int) -> Tensor:
    """Return x - total / count + bias, where `total` are the sums of x's channels.

    Their gradient is x's own, whether or not they have a graph.

    Example:
        >>> x = torch.tensor([[1., 2.], [3., 6.]])
        >>> centred(x, x.sum(0), Mean(2, None, 0.), None, 1)
        tensor([[-1., -2.],
                [ 1.,  2.]])
    """
    if is_beside(total, x):
        return _centre(x, total, bystander().leaf, bias, mean, dim)
    return _centre(x, total.detach(), None, bias, mean, dim)


def less(x: Tensor, mean: Tensor, bias: Tensor | None, dim: int) -> Tensor:
    """Return x - mean + bias, where the mean's gradient is for the mean."""
    assert mean.requires_grad or not x.requires_grad  # else it would count as x's own
    return _centre(x, mean, None, bias, Mean(1, None, 0.0), dim)


class _Centre(torch.autograd.Function):
    """x - total / count + bias; sums that have no gradient are x's own, and x gets theirs."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        total: Tensor,
        leaf: Tensor | None,
        bias: Tensor | None,
        mean: Mean,
        dim: int,
    ) -> Tensor:
        ctx.past = leaf is not None
        if ctx.past:  # x is not kept: the next layer needs y alone
            ctx.input, ctx.hooks = weakref.ref(x), hooks_of(x)
        ctx.count, ctx.dim, ctx.wide = mean.numbers, dim, total.dtype
        ctx.bias = None if bias is None else bias.dtype
        return columns.centre(x, dim, total, mean.numbers, bias, mean.running, mean.momentum)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        dim, plain, needed = ctx.dim, is_plain(grad), ctx.needs_input_grad
        if plain:
            sums = gradient_sums(grad, dim)
        else:
            others = [d for d in range(grad.ndim) if d != dim % grad.ndim]
            sums = grad.sum(others, dtype=ctx.wide)
        by_bias = sums.to(ctx.bias) if needed[3] else None
        by_total = sums.to(ctx.wide) / -ctx.count
        nothing = bystander().gradient() if ctx.past else None
        if needed[1] and not (ctx.past and is_watched(ctx.input(), ctx.hooks)):
            return grad, by_total, nothing, by_bias, None, None
        if not needed[0]:
            grad_x = None
        elif plain:
            grad_x = columns.rectify(grad, dim, by_total, relu=False, summed=False)[0]
        else:
            grad_x = (grad + columns.along(by_total, grad, dim)).to(grad.dtype)
        return grad_x, None, nothing, by_bias, None, None


# Nobody but autograd looks on, so what Function.apply sees to for others is left out.
_centre = super(torch.autograd.Function, _Centre).apply
