"""Weight and shifted bias for compilers: two ops, which become the kernels of `shifted_triton`.

    shifted_weight(stored, r, lam, mean, batches)        weight, bias; batches += 1
    shifted_weight_backward(grad_weight, grad_bias, ...) the gradients of stored, r, lam and mean

A compiler computes the mean, and moves the running mean on the way, in kernels that it has anyway.
To count the batches, one number, it would launch a kernel in every layer: ours does that. Hence an
op that changes an argument, for which torch.library has no autograd; it is registered by hand.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from geoparam.ops import columns, expansion, implementation, shifted

_HAS_TRITON = implementation.has_triton()  # looked up here: a compiler cannot follow that


def wanted(stored: Tensor) -> bool:
    """Return whether a compiler that is tracing should find this op in the place of others."""
    return (
        torch.compiler.is_compiling()
        and not expansion.is_exporting()
        and expansion.COMPILED == "kernels"
        and (implementation.KERNELS == "triton" or (stored.is_cuda and _has_kernels()))
        and not hasattr(stored, "placements")
        and not torch._C._are_functorch_transforms_active()
    )


def _has_kernels() -> bool:
    return implementation.KERNELS == "auto" and _HAS_TRITON


def weight_and_bias(
    stored: Tensor,
    r: Tensor,
    lam: Tensor | None,
    mean: Tensor,
    batches: Tensor | None,
    *,
    coordinates: str,
    natural: bool,
    inside: bool,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    channels_last: bool,
    parts: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return what `shifted.forward` does, of the mean itself, and count one batch.

    With `parts`, the bias is (parts, units), the same for all, in float32 or better: its gradient
    then arrives in as many.
    """
    given = stored, r, lam, mean, batches
    how = coordinates, natural, inside, dtype, shape, channels_last
    return torch.ops.geoparam.shifted_weight(*given, *how, parts)


torch.library.define(
    "geoparam::shifted_weight",
    "(Tensor stored, Tensor r, Tensor? lam, Tensor mean, Tensor(a!)? batches, str coordinates, "
    "bool natural, bool inside, ScalarType dtype, SymInt[] shape, bool channels_last, "
    "SymInt parts) -> (Tensor, Tensor)",
)
torch.library.define(
    "geoparam::shifted_weight_backward",
    "(Tensor grad_weight, Tensor grad_bias, Tensor stored, Tensor r, Tensor? lam, Tensor mean, "
    "Tensor weight, str coordinates, bool natural, bool inside) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
)


@torch.library.impl("geoparam::shifted_weight", "CompositeExplicitAutograd")
def _forward(
    stored: Tensor,
    r: Tensor,
    lam: Tensor | None,
    mean: Tensor,
    batches: Tensor | None,
    *options: Any,
) -> tuple[Tensor, Tensor]:
    *how, parts = options
    if batches is not None:
        batches.add_(1)
    weight, bias = shifted.forward(stored, r, lam, mean, None, _how(*how))
    return weight, _spread(bias, parts)


@torch.library.impl("geoparam::shifted_weight_backward", "CompositeExplicitAutograd")
def _backward(
    grad_weight: Tensor,
    grad_bias: Tensor,
    stored: Tensor,
    r: Tensor,
    lam: Tensor | None,
    mean: Tensor,
    weight: Tensor,
    coordinates: str,
    natural: bool,
    inside: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    how = _how(coordinates, natural, inside, weight.dtype, weight.shape[1:], False)
    found = shifted.backward(grad_weight, grad_bias, stored, r, lam, mean, weight, how)
    grad_stored, grad_r, grad_lam, grad_mean = _all_there(found, r)
    return grad_stored, grad_r, grad_lam.clone(), grad_mean  # it may be grad_bias itself


@torch.library.register_fake("geoparam::shifted_weight")
def _forward_fake(
    stored: Tensor,
    r: Tensor,
    lam: Tensor | None,
    mean: Tensor,
    batches: Tensor | None,
    *options: Any,
) -> tuple[Tensor, Tensor]:
    coordinates, _, _, dtype, shape, channels_last, parts = options
    last = stored.shape[-1] - (coordinates != "latitude")
    layout = implementation.layout_of((stored.shape[0], last), tuple(shape), channels_last)
    weight = stored.new_empty_strided(layout.size, layout.stride, dtype=dtype)
    return weight, _spread(stored.new_empty(stored.shape[:1], dtype=dtype), parts)


@torch.library.register_fake("geoparam::shifted_weight_backward")
def _backward_fake(
    grad_weight: Tensor,
    grad_bias: Tensor,
    stored: Tensor,
    r: Tensor,
    lam: Tensor | None,
    mean: Tensor,
    weight: Tensor,
    coordinates: str,
    natural: bool,
    inside: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grad_r = r.new_empty(r.shape) if inside else None
    grad_lam = None if lam is None else lam.new_empty(lam.shape)
    found = stored.new_empty(stored.shape), grad_r, grad_lam, mean.new_empty(mean.shape)
    return _all_there(found, r)


class _Shifted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        with torch._C._AutoDispatchBelowAutograd():
            weight, bias = torch.ops.geoparam.shifted_weight(*inputs)
        stored, r, lam, mean, _, *ctx.options = inputs
        ctx.save_for_backward(stored, r, lam, mean, weight)
        return weight, bias

    @staticmethod
    def backward(ctx: Any, grad_weight: Tensor, grad_bias: Tensor) -> tuple[Tensor | None, ...]:
        _, _, lam, *_ = saved = ctx.saved_tensors
        coordinates, natural, inside, *_ = ctx.options
        if torch.is_grad_enabled():  # somebody will differentiate once more
            *how, _ = ctx.options
            found = _readable_gradients(grad_weight, grad_bias, saved[:4], _how(*how))
            return *found, *[None] * 8
        grad_stored, grad_r, grad_lam, grad_mean = torch.ops.geoparam.shifted_weight_backward(
            grad_weight, grad_bias, *saved, coordinates, natural, inside
        )
        grad_r, grad_lam = grad_r if inside else None, None if lam is None else grad_lam
        return grad_stored, grad_r, grad_lam, grad_mean, *[None] * 8


def _readable_gradients(
    grad_weight: Tensor, grad_bias: Tensor, inputs: tuple[Tensor | None, ...], how: shifted.How
) -> list[Tensor | None]:
    """Return the gradients of stored, r, lam and mean by plain operations, with a graph."""
    inputs = tuple(None if t is None else t.view_as(t) for t in inputs)  # none leads to another
    stored, r, lam, mean = inputs
    assert stored is not None and r is not None and mean is not None
    scale = r if how.inside else None
    weight = shifted.readable_weight(stored, scale, how)
    bias = -columns.response(weight, mean)
    if lam is not None:
        bias = bias + (lam if scale is None else scale * lam)
    grad_bias = grad_bias if grad_bias.ndim == 1 else grad_bias.sum(0)
    wanted = [t for t in inputs if t is not None and t.requires_grad]
    outputs, grads = (weight, bias.to(how.dtype)), (grad_weight, grad_bias.to(how.dtype))
    found = torch.autograd.grad(outputs, wanted, grads, create_graph=True, allow_unused=True)
    given = dict(zip(map(id, wanted), found, strict=True))
    return [given.get(id(t)) for t in inputs]


@torch.library.impl("geoparam::shifted_weight", "Autograd")
def _differentiable(*inputs: Any) -> tuple[Tensor, Tensor]:
    return _Shifted.apply(*inputs)


# --- for compilers on a GPU ---------------------------------------------------------------------


def _forward_kernels(
    stored: Tensor,
    r: Tensor,
    lam: Tensor | None,
    mean: Tensor,
    batches: Tensor | None,
    *options: Any,
) -> tuple[Tensor, Tensor]:
    *how, parts = options
    running = None if batches is None else (None, batches)
    given = stored, r, lam, mean, running, _how(*how)
    weight, bias = shifted.kernels().forward(*given, traced=True)
    return weight, _spread(bias, parts)


def _backward_kernels(
    *inputs: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *tensors, coordinates, natural, inside = inputs
    _, _, _, r, _, _, weight = tensors
    how = _how(coordinates, natural, inside, weight.dtype, weight.shape[1:], False)
    return _all_there(shifted.kernels().backward(*tensors, how, traced=True), r)


expansion.expand("shifted_weight", _forward_kernels)
expansion.expand("shifted_weight_backward", _backward_kernels)


def _how(
    coordinates: str,
    natural: bool,
    inside: bool,
    dtype: torch.dtype,
    shape: Sequence[int],
    channels_last: bool,
) -> shifted.How:
    return shifted.How(
        coordinates, natural, dtype, tuple(shape), channels_last, inside, numbers=1, momentum=0.0
    )


def _spread(bias: Tensor, parts: int) -> Tensor:
    """Return the bias as often as asked for, without a copy."""
    if isinstance(parts, int) and parts == 0:
        return bias
    return bias.to(torch.promote_types(bias.dtype, torch.float32)).expand(parts, -1)


def _all_there(
    found: tuple[Tensor, Tensor | None, Tensor | None, Tensor], r: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return a tensor for each gradient: an op has no optional ones."""
    grad_stored, grad_r, grad_lam, grad_mean = found
    grad_r = r.new_empty(0) if grad_r is None else grad_r
    grad_lam = r.new_empty(0) if grad_lam is None else grad_lam
    return grad_stored, grad_r, grad_lam, grad_mean
