"""Max pooling in training in few passes: what `fused.ReLU` is to nn.ReLU.

A pool only moves gradients: their sums per channel are those of its result's, a quarter of the
numbers. `MaxPool2d` notes them for the centring that comes before it, and the sums of its result
for the layer behind it.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from geoparam import fused
from geoparam.notes import note
from geoparam.ops import pooling
from geoparam.sums import is_plain


class MaxPool2d(nn.MaxPool2d):
    """nn.MaxPool2d that adds up channels in the same pass, for who asks next.

    Example:
        >>> MaxPool2d(2)(torch.arange(4.).view(1, 1, 2, 2))
        tensor([[[[3.]]]])
    """

    def forward(self, x: Tensor) -> Tensor:
        if not (self.training and fused.eligible(x) and x.requires_grad and self._is_served(x)):
            options: Any = self.padding, self.dilation, self.ceil_mode, self.return_indices
            return F.max_pool2d(x, self.kernel_size, self.stride, *options)
        y, sums = _pool(x)
        note(y, 1, sums)
        return y

    def _is_served(self, x: Tensor) -> bool:
        two = 2, (2, 2)
        return (
            x.ndim == 4
            and x.shape[2] % 2 == x.shape[3] % 2 == 0
            and self.kernel_size in two
            and self.stride in two
            and self.padding in (0, (0, 0))
            and self.dilation in (1, (1, 1))
            and not self.return_indices
            and pooling.worthwhile(x)
        )


class _MaxPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        y, place, sums = pooling.pool(x)
        ctx.save_for_backward(place)
        ctx.dtype = x.dtype
        ctx.set_materialize_grads(False)
        return y, sums

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_sums: Tensor | None) -> Tensor | None:
        (place,) = ctx.saved_tensors
        if grad is None and grad_sums is None:
            return None
        grad = torch.zeros_like(place, dtype=ctx.dtype) if grad is None else grad
        if not is_plain(grad, grad_sums):
            return pooling.scattered(pooling.spread(grad, grad_sums), place)
        grad_x, sums = pooling.pool_backward(grad, place, grad_sums)
        note(grad_x, 1, sums)
        return grad_x


# Nobody but autograd looks on, so what Function.apply sees to for others is left out.
_pool = super(torch.autograd.Function, _MaxPool).apply
