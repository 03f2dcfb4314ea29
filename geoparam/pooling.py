"""Max pooling in training in few passes: what `fused.ReLU` is to nn.ReLU.

A pool only moves gradients: their sums per channel are those of its result's. `MaxPool2d` notes
them for the centring that comes before it, and the sums of its result for the layer behind it.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from geoparam import fused
from geoparam.notes import note
from geoparam.ops import pooling, pooling_op
from geoparam.ops.pooling import Window
from geoparam.sums import is_plain

_LARGEST = 5  # window that is served: kernels write out a line for each of its places


class MaxPool2d(nn.MaxPool2d):
    """nn.MaxPool2d that adds up channels in the same pass, for who asks next.

    Example:
        >>> MaxPool2d(2)(torch.arange(4.).view(1, 1, 2, 2))
        tensor([[[[3.]]]])
    """

    def forward(self, x: Tensor) -> Tensor:
        compiled = self.training and pooling_op.wanted(x)
        if compiled or (self.training and fused.eligible(x)):  # asked first: x may be anything
            window = self._window(x) if x.requires_grad else None
            if window is not None and compiled:
                return torch.ops.geoparam.max_pool(x, *window)[0]
            if window is not None and pooling.worthwhile(x, window):
                y, sums = _pool(x, window)
                note(y, 1, sums)
                return y
        options: Any = self.padding, self.dilation, self.ceil_mode, self.return_indices
        return F.max_pool2d(x, self.kernel_size, self.stride, *options)

    def _window(self, x: Tensor) -> Window | None:
        """Return the windows if all is square, and none reaches over the padding."""
        sides = [_side(one) for one in (self.kernel_size, self.stride, self.padding)]
        size, stride, padding = sides
        if (
            x.ndim != 4
            or size is None
            or stride is None
            or padding is None
            or self.dilation not in (1, (1, 1))
            or self.ceil_mode
            or self.return_indices
        ):
            return None
        fits = 2 * padding <= size and min(x.shape[2:]) + 2 * padding >= size
        served = fits and 0 < size <= _LARGEST and stride > 0 and padding >= 0
        return Window(size, stride, padding) if served else None


def _side(of: Any) -> int | None:
    """Return what both dimensions have; None if they differ, or torch is to say what is meant."""
    if type(of) is int:
        return of
    pair = type(of) is tuple and len(of) == 2 and type(of[0]) is type(of[1]) is int
    return of[0] if pair and of[0] == of[1] else None


class _MaxPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, window: Window) -> tuple[Tensor, Tensor]:
        y, place, sums = pooling.pool(x, window)
        ctx.save_for_backward(place)
        ctx.dtype, ctx.how = x.dtype, (window, x.shape[2:])
        ctx.set_materialize_grads(False)
        return y, sums

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor | None, grad_sums: Tensor | None
    ) -> tuple[Tensor | None, None]:
        (place,) = ctx.saved_tensors
        if grad is None and grad_sums is None:
            return None, None
        grad = torch.zeros_like(place, dtype=ctx.dtype) if grad is None else grad
        if not is_plain(grad, grad_sums):
            return pooling.scattered(pooling.spread(grad, grad_sums), place, *ctx.how), None
        grad_x, sums = pooling.pool_backward(grad, place, grad_sums, *ctx.how)
        note(grad_x, 1, sums)
        return grad_x, None


# Nobody but autograd looks on, so what Function.apply sees to for others is left out.
_pool = super(torch.autograd.Function, _MaxPool).apply
