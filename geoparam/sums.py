"""The sums of a tensor's channels with their gradient: noted where it was made, or computed.

Where one step made both, the gradient of the sums may go past the tensor itself: from the layer
that asked for the mean to that step, which adds it up in its own pass. Whoever looks at the
tensor's gradient, a hook, retain_grad or autograd.grad, must find it there all the same:
`is_watched` tells when, and then the layer adds it to the gradient that it gives to the tensor.
Only a prehook on the node itself, x.grad_fn.register_prehook, sees the gradients of the tensor and
of its sums apart, as two.
"""

import functools
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from geoparam.notes import note, noted, noted_in_parts, whole
from geoparam.ops import columns, direct


def channel_sums(x: Tensor, dim: int, past: bool = False) -> Tensor:
    """Return the sums of the channels, with their gradient: noted, or computed and then noted.

    The gradient goes to x; with `past` it may go past it, and the caller asks `is_watched`.

    Example:
        >>> channel_sums(torch.ones(2, 3, 4), 1)
        tensor([8., 8., 8.])
    """
    known = noted(x, dim)
    if past and known is not None and is_beside(known, x):
        return known
    sums = _ChannelSums.apply(x, dim, None if known is None else known.detach())
    if known is None and not x.is_leaf:  # a leaf's memory may be that of others
        note(x, dim, sums.detach())  # without its graph, which may hold x
    return sums


def known_sums(x: Tensor, dim: int) -> Tensor:
    """Return the sums of the channels, noted with their gradient or computed without one."""
    known = noted(x, dim)
    if known is None:
        known = columns.sums(x.detach(), dim)
        if not x.is_leaf:
            note(x, dim, known)
    return known


def gradient_sums(grad: Tensor, dim: int) -> Tensor:
    """Return the sums of a gradient's channels, which the step that made it may have noted."""
    return whole(gradient_partials(grad, dim))


def gradient_partials(grad: Tensor, dim: int) -> Tensor:
    """Return these sums, or parts (parts, channels) of them, which are still to be added up."""
    sums = noted_in_parts(grad, dim)
    return columns.sums(grad, dim) if sums is None else sums


class _ChannelSums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, known: Tensor | None) -> Tensor:
        ctx.shape, ctx.dtype, ctx.dim = x.shape, x.dtype, dim
        return columns.sums(x, dim) if known is None else known

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        shape = [1] * len(ctx.shape)
        shape[ctx.dim] = -1
        return grad.to(ctx.dtype).view(shape).expand(ctx.shape), None, None


# --- who looks on -------------------------------------------------------------------------------


def is_plain(*gradients: Tensor | None) -> bool:
    """Return whether gradients are numbers in memory that can have notes.

    And nobody will differentiate further.
    """
    if torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        return False
    return direct.possible(*gradients)


def is_beside(sums: Tensor, x: Tensor) -> bool:
    """Return whether one step made both, so that gradients of the sums go past x."""
    return sums.grad_fn is not None and sums.grad_fn is x.grad_fn


def is_watched(x: Tensor | None, hooks: Mapping | None = None) -> bool:
    """Return whether someone may look at x's own gradient in this backward pass.

    Hooks and retain_grad are seen on x, if it is still there; if it has gone, hooks that were set
    on it are run all the same, and seen in what `hooks_of` returned. What autograd.grad asks for
    is not seen; but it asks for nothing of the bystander, to which every other pass comes.
    """
    if hooks or (x is None and hooks is None):
        return True
    if x is not None and (x._backward_hooks or x.retains_grad):
        return True
    return not torch._C._will_engine_execute_node(bystander().node)


def hooks_of(x: Tensor) -> Mapping:
    """Return where the hooks on x's gradient are, those set later too; it outlives x.

    Torch makes that place with the first hook, and leaves it when the hook goes.
    """
    if x._backward_hooks is None:
        x.register_hook(_look_away).remove()
    hooks = x._backward_hooks
    assert hooks is not None
    return hooks


def _look_away(grad: Tensor) -> None:
    pass


class Bystander(NamedTuple):
    """A leaf that goes into a step and does nothing, and its node in the graph."""

    leaf: Tensor
    node: Any

    @staticmethod
    def gradient() -> Tensor | None:
        """Return None, or where compiled autograd adds up without looking, 0."""
        compiled = sys.modules.get("torch._dynamo.compiled_autograd")
        running = compiled is not None and compiled.in_compiled_autograd_region
        return torch.zeros((), device="cpu") if running else None


@functools.cache
def bystander() -> Bystander:
    """Return the one leaf for all steps."""
    leaf = torch.zeros((), device="cpu", requires_grad=True)
    node = torch.autograd.graph.get_gradient_edge(leaf).node
    return Bystander(leaf, node)
