"""The operator in plain eager training: kernels and one autograd.Function, no dispatch.

Whoever else may look on, torch.compile, torch.func, forward mode, fake tensors, modes that record
operations, tracing, tensor subclasses, and the second derivative, needs the ops; `possible` tells.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from geoparam.ops import implementation

_PLAIN = (nn.Parameter, Tensor)


def possible(*tensors: Tensor | None) -> bool:
    """Return whether nobody but autograd looks on."""
    if torch.compiler.is_compiling():  # first: a compiler knows the answer and reads no further
        return False
    for x in tensors:
        if x is not None and (type(x) not in _PLAIN or not _is_in_memory(x)):
            return False
    return not (
        torch._C._len_torch_dispatch_stack()
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
    )


def _is_in_memory(x: Tensor) -> bool:
    """Return whether the numbers are what lies in memory.

    Without storage are those of autograd's own vmap, for batched gradients.
    """
    return torch._C._has_storage(x) and not x.is_neg() and not x._is_zerotensor()


def weight(
    latitude: Tensor,
    r: Tensor | None,
    natural: bool,
    dtype: torch.dtype,
    shape: tuple[int, ...] | None,
    channels_last: bool,
) -> Tensor:
    """Return the weight, where this is possible."""
    if torch.is_grad_enabled():
        if latitude.requires_grad or (r is not None and r.requires_grad):
            return _Weight.apply(latitude, r, natural, dtype, shape, channels_last)
    return implementation.forward(latitude, r, dtype, shape, channels_last)


class _Weight(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        latitude: Tensor,
        r: Tensor | None,
        natural: bool,
        dtype: torch.dtype,
        shape: tuple[int, ...] | None,
        channels_last: bool,
    ) -> Tensor:
        ctx.save_for_backward(latitude, r)
        ctx.natural = natural
        return implementation.forward(latitude, r, dtype, shape, channels_last)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None, None, None]:
        latitude, r = ctx.saved_tensors
        plain = not torch.is_grad_enabled() and possible(grad, latitude, r)
        backward: Any = implementation.backward if plain else torch.ops.geoparam.weight_backward
        grad_latitude, grad_r = backward(grad, latitude, r, ctx.natural)
        return grad_latitude, None if r is None else grad_r, None, None, None, None
