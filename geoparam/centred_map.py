"""Means of channels and linear maps of centred rows, with backward passes of their own.

Autograd's backward pass of a mean writes a tensor of the input's size that is constant in each
channel. `channel_mean` returns an expanded view of one value per channel instead.
`centred_linear` adds that value inside of the matrix product. For rows x, with m = E[x], n rows,
and s = dL/dz summed over the rows,

    z = x w^T + (b - w m)
    dL/dx = dL/dz w - (w^T s) / n,    dL/dw = (dL/dz)^T x - s m^T,    dL/db = s.

Both are for large tensors in eager code, where passes over memory take the time. For small ones
autograd's own nodes are faster than ones written in Python. Compilers fuse these passes
themselves, and torch.func and forward mode need torch's own ops. Second derivatives are those of
the formulas above.
"""

from typing import Any

import torch
from torch import Tensor

from geoparam.functional import is_eager

LARGE = 2**22  # elements; below it, calls cost more than passes over memory


def has_own_backward(x: Tensor, weight: Tensor | None = None) -> bool:
    """Return whether a mean of `x`, or a map of it, uses the backward pass of this module."""
    return x.numel() >= LARGE and is_eager(x, weight)


def working_type(x: Tensor) -> torch.dtype:
    """Return the type of sums over x: float32 or better."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def channel_mean(x: Tensor, dims: list[int]) -> Tensor:
    """Return the mean of x over `dims`, in float32 or better.

    Example:
        >>> channel_mean(torch.tensor([[1.0, 2.0], [3.0, 6.0]]), [0])
        tensor([2., 4.])
    """
    if has_own_backward(x):
        return _Mean.apply(x, dims)
    return x.mean(dim=dims, dtype=working_type(x))


def centred_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, dim: int = -1
) -> tuple[Tensor, Tensor]:
    """Return z = (x - m) w^T + b and the mean m of each channel; `dim` is the channels' dimension.

    It is -1, or 1 for images in channels_last, whose positions are rows in memory.

    Example:
        >>> x, weight = torch.tensor([[1.0, 2.0], [3.0, 6.0]]), torch.ones(1, 2)
        >>> z, mean = centred_linear(x, weight, torch.ones(1))
        >>> z.tolist(), mean.tolist()
        ([[-2.0], [4.0]], [2.0, 4.0])
    """
    kind = x.device.type
    if not torch.is_autocast_enabled(kind):
        return _Linear.apply(x, weight, bias, dim)
    dtype = torch.get_autocast_dtype(kind)
    with torch.autocast(kind, enabled=False):
        return _Linear.apply(x.to(dtype), weight.to(dtype), bias, dim)


class _Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dims: list[int]) -> Tensor:
        ctx.shape, ctx.dtype, ctx.dims = x.shape, x.dtype, dims
        return x.mean(dim=dims, dtype=working_type(x))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        shape = [1 if dim in ctx.dims else size for dim, size in enumerate(ctx.shape)]
        grad = grad / (ctx.shape.numel() // grad.numel())
        return grad.to(ctx.dtype).view(shape).expand(ctx.shape), None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dim: int
    ) -> tuple[Tensor, Tensor]:
        rows = _to_rows(x, dim)
        mean = rows.mean(dim=0, dtype=working_type(x))
        shift = weight.to(mean.dtype).mv(mean)
        shift = shift.neg() if bias is None else bias - shift
        ctx.save_for_backward(x, weight, mean)
        ctx.dim, ctx.bias_type = dim, None if bias is None else bias.dtype
        ctx.set_materialize_grads(False)
        z = _make_empty(x, len(weight), dim)
        torch.addmm(shift.to(x.dtype), rows, weight.t(), out=_to_rows(z, dim))
        return z, mean

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor | None, grad_mean: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        x, weight, mean = ctx.saved_tensors
        rows = _to_rows(x, ctx.dim)
        grad = rows.new_zeros(len(rows), len(weight)) if grad is None else _to_rows(grad, ctx.dim)
        sums = grad.sum(dim=0, dtype=mean.dtype)
        grad_x = grad_weight = None
        with torch.autocast(x.device.type, enabled=False):  # backward() may be called inside of it
            if ctx.needs_input_grad[0]:
                shift = weight.to(mean.dtype).t().mv(sums).neg()
                shift = shift if grad_mean is None else shift + grad_mean
                grad_x = torch.addmm((shift / len(rows)).to(x.dtype), grad, weight)
                grad_x = grad_x.view(x.movedim(ctx.dim, -1).shape).movedim(-1, ctx.dim)
            if ctx.needs_input_grad[1]:
                product = grad.t().mm(rows)
                grad_weight = (product - torch.outer(sums, mean)).to(weight.dtype)
        grad_bias = None if ctx.bias_type is None else sums.to(ctx.bias_type)
        return grad_x, grad_weight, grad_bias, None


def _to_rows(x: Tensor, dim: int) -> Tensor:
    return x.movedim(dim, -1).reshape(-1, x.shape[dim])


def _make_empty(x: Tensor, channels: int, dim: int) -> Tensor:
    """Return a new tensor for z. It is no view: an in-place ReLU on a view would copy it."""
    shape = list(x.shape)
    shape[dim] = channels
    layout = torch.channels_last if dim == 1 else torch.contiguous_format
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=layout)
