"""weight(latitude, r) -> w = r u(latitude): the one entrance to the weight kernels.

Two torch.library ops are opaque to torch.compile, torch.export, autocast and FSDP:

    weight(latitude, r)                 the rows r u, on any leading batch shape
    weight_backward(grad, latitude, r)  the gradients of <grad, weight>

Torch's dispatch of an op written in Python takes longer than most weights, so eager code calls the
kernels through an autograd.Function. Forward mode, torch.func and second derivatives need formulas
that torch differentiates itself: `sphere`'s for the weight, `_gradient_formula` for its gradient.
Arithmetic is float32 or better whatever the type.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.fx import Proxy

from geoparam import sphere
from geoparam.kernels.selection import weight_kernel

Type = torch.dtype | None
Saved = Sequence[Tensor] | None

__all__ = ["can_use_function", "compute_gradients", "compute_weight", "is_eager", "weight"]


def weight(
    latitude: Tensor, r: Tensor | None = None, *, natural: bool = False, dtype: Type = None
) -> Tensor:
    """Return the weight rows (..., n) for latitudes (..., n - 1) and scales (...).

    Args:
        latitude: the angles from the equator, pi/2 - theta.
        r: a scale for each row; None for unit vectors.
        natural: divide the latitudes' gradient by the sphere's metric.
        dtype: type of the result; what latitude and r promote to by default.

    Example:
        >>> weight(torch.zeros(2, 3), torch.tensor([1., 2.]))
        tensor([[0., 0., 0., 1.],
                [0., 0., 0., 2.]])
    """
    if is_eager(latitude, r):
        return _Weight.apply(latitude, r, natural, dtype)
    if _in_forward_mode() or torch._C._are_functorch_transforms_active():
        _refuse_natural(natural)
        w = sphere.to_unit(latitude)
        if r is not None:
            w = r[..., None] * w
        return w.to(dtype or result_type(latitude, r))
    if hasattr(latitude, "placements") and not isinstance(latitude, Proxy):
        return _weight_of_shards(latitude, r, natural, dtype)
    return _weight(latitude, r, natural, dtype)


def _weight_of_shards(latitude: Any, r: Any, natural: bool, dtype: Type) -> Tensor:
    """Return the weight of DTensors, which parameters are under FSDP2 outside of forward.

    A row of the weight comes from one row of the latitudes: each process computes its own.
    """
    from torch.distributed.tensor import DTensor  # slow to import, and not in every build

    placements, last = latitude.placements, latitude.ndim - 1
    r_placements = getattr(r, "placements", None)
    has_whole_rows = not any(p.is_partial() or p.is_shard(last) for p in placements)
    if not has_whole_rows or (r is not None and r_placements != placements):
        raise ValueError(
            "latitude and r must be sharded alike, with whole rows on each process; got "
            f"{placements} and {r_placements}. Under FSDP2, call unshard() on the module first."
        )

    local_r = None if r is None else r.to_local()
    rows = weight(latitude.to_local(), local_r, natural=natural, dtype=dtype)
    whole = torch.empty((*latitude.shape[:-1], latitude.shape[-1] + 1), device="meta")
    return DTensor.from_local(
        rows,
        latitude.device_mesh,
        placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


def compute_weight(latitude: Tensor, r: Tensor | None, dtype: Type = None) -> Tensor:
    """Return the weight without autograd."""
    return _compute_weight_and_saved(latitude, r, dtype)[0]


def _compute_weight_and_saved(
    latitude: Tensor, r: Tensor | None, dtype: Type
) -> tuple[Tensor, Saved]:
    """Return the weight, and what the kernel's backward can use again."""
    flat, scale = _as_rows(latitude, r)
    dtype = dtype or result_type(latitude, r)
    rows, saved = weight_kernel(latitude).forward(flat, scale, dtype)
    if latitude.ndim != 2:
        shape = (*latitude.shape[:-1], latitude.shape[-1] + 1)
        rows = torch.ops.aten._unsafe_view(rows, shape)
    return rows, saved


def compute_gradients(
    grad: Tensor,
    latitude: Tensor,
    r: Tensor | None,
    natural: bool,
    saved: Saved = None,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of latitude and r for `grad`, of the weight's shape."""
    kernel = weight_kernel(latitude)
    flat, scale = _as_rows(latitude, r)
    if latitude.ndim == 2:
        return kernel.backward(grad, flat, scale, natural, saved)
    grad = grad.reshape(len(flat), flat.shape[1] + 1)
    grad_latitude, grad_r = kernel.backward(grad, flat, scale, natural, saved)
    return grad_latitude.view(latitude.shape), grad_r.view(latitude.shape[:-1])


def _as_rows(latitude: Tensor, r: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return contiguous matrices of latitudes (rows, n - 1) and scales (rows,)."""
    flat, scale = latitude.contiguous(), None if r is None else r.contiguous()
    if latitude.ndim != 2:
        flat = flat.view(latitude.shape[:-1].numel(), latitude.shape[-1])
        scale = None if scale is None else scale.view(-1)
    return flat, scale


def _gradient_formula(grad: Tensor, latitude: Tensor, r: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return what `compute_gradients` does without `natural`, differentiably.

    y_n = g_n, y_k = sin(a_k) g_k + cos(a_k) y_{k+1};  dL/dr = y_1;
    dL/da_k = r P_k (cos(a_k) g_k - sin(a_k) y_{k+1}).
    """
    a, g = sphere.wide(latitude), sphere.wide(grad)
    sin, cos = a.sin(), a.cos()
    g_head, g_last = g[..., :-1], g[..., -1:]

    # y runs from the last coordinate to the first.
    factors = torch.cat([cos, torch.ones_like(g_last)], dim=-1)
    terms = torch.cat([sin * g_head, g_last], dim=-1)
    y = sphere.scan(factors.flip(-1), terms.flip(-1)).flip(-1)

    p = sphere.products(cos)[..., :-1]
    grad_latitude = p * (cos * g_head - sin * y[..., 1:])
    if r is not None:
        grad_latitude = r[..., None] * grad_latitude
    r_type = latitude.dtype if r is None else r.dtype
    return grad_latitude.to(latitude.dtype), y[..., 0].to(r_type)


class _Weight(torch.autograd.Function):
    """Has no setup_context: binding its arguments takes torch longer than a small weight."""

    @staticmethod
    def forward(
        ctx: Any, latitude: Tensor, r: Tensor | None, natural: bool, dtype: Type
    ) -> Tensor:
        _check_shapes(latitude, r)
        weight, saved = _compute_weight_and_saved(latitude, r, dtype)
        ctx.save_for_backward(latitude, r, *(saved or ()))
        ctx.natural = natural
        return weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        latitude, r, *saved = ctx.saved_tensors
        if torch.is_grad_enabled():
            _refuse_natural(ctx.natural)
            grad_latitude, grad_r = _gradient_formula(grad, latitude, r)
        elif is_eager(grad, latitude, r):
            grad_latitude, grad_r = compute_gradients(
                grad, latitude, r, ctx.natural, saved or None
            )
        else:
            grad_latitude, grad_r = _weight_backward(grad, latitude, r, ctx.natural)
        return grad_latitude, None if r is None else grad_r, None, None


@torch.library.custom_op("geoparam::weight", mutates_args=())
def _weight(
    latitude: Tensor, r: Tensor | None = None, natural: bool = False, dtype: Type = None
) -> Tensor:
    _refuse_onnx()
    _check_shapes(latitude, r)
    if _in_forward_mode():
        raise RuntimeError(
            "forward-mode differentiation does not see through geoparam::weight itself; call "
            "geoparam.functional.weight, or the layer, instead of a traced or exported copy of it."
        )
    return compute_weight(latitude, r, dtype)


@_weight.register_fake
def _weight_fake(
    latitude: Tensor, r: Tensor | None = None, natural: bool = False, dtype: Type = None
) -> Tensor:
    _refuse_onnx()
    _check_shapes(latitude, r)
    size = (*latitude.shape[:-1], latitude.shape[-1] + 1)
    return latitude.new_empty(size, dtype=dtype or result_type(latitude, r))


def _setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
    latitude, r, ctx.natural, _ = inputs
    ctx.save_for_backward(latitude, r)


_weight.register_autograd(_Weight.backward, setup_context=_setup_context)


@torch.library.custom_op("geoparam::weight_backward", mutates_args=())
def _weight_backward(
    grad: Tensor, latitude: Tensor, r: Tensor | None, natural: bool
) -> tuple[Tensor, Tensor]:
    return compute_gradients(grad, latitude, r, natural)


@_weight_backward.register_fake
def _weight_backward_fake(
    grad: Tensor, latitude: Tensor, r: Tensor | None, natural: bool
) -> tuple[Tensor, Tensor]:
    like_r = latitude if r is None else r
    return latitude.new_empty(latitude.shape), like_r.new_empty(latitude.shape[:-1])


def _refuse_onnx() -> None:
    if torch.onnx.is_in_onnx_export():
        raise ValueError(
            "ONNX has no operator for weights that are computed from angles: fold the model first "
            "(geoparam.fold_), and export the plain one."
        )


def is_eager(*tensors: Tensor | None) -> bool:
    """Return whether kernels can be called: an autograd.Function can, and no mode is active."""
    return can_use_function(*tensors) and not torch._C._len_torch_dispatch_stack()


def can_use_function(*tensors: Tensor | None) -> bool:
    """Return whether an autograd.Function can be used.

    The tensors are ordinary ones, and no compiler, torch.func, forward mode or tracer is active.
    """
    if torch.compiler.is_compiling() or _in_forward_mode():
        return False
    for x in tensors:
        if x is None:
            continue
        if type(x) not in (Tensor, nn.Parameter):
            return False
        # Autograd's batched gradients have no storage, and a sign may be pending.
        if not torch._C._has_storage(x) or x.is_neg() or x._is_zerotensor():
            return False
    if torch._C._are_functorch_transforms_active():
        return False
    return torch._C._get_tracing_state() is None


def _in_forward_mode() -> bool:
    return forward_ad._current_level >= 0


def result_type(stored: Tensor, r: Tensor | None) -> torch.dtype:
    """Return the type of a weight that is computed from stored directions and scales."""
    if r is None or r.dtype == stored.dtype:
        return stored.dtype
    return torch.promote_types(stored.dtype, r.dtype)


def _check_shapes(latitude: Tensor, r: Tensor | None) -> None:
    sphere.check_rank(latitude, "latitude")
    if r is not None and r.shape != latitude.shape[:-1]:
        raise ValueError(
            "r needs one scale per row of latitude, of shape "
            f"{tuple(latitude.shape[:-1])}; got {tuple(r.shape)}."
        )


def _refuse_natural(natural: bool) -> None:
    if natural:
        raise RuntimeError(
            "the natural gradient is not the gradient of any function, so torch.func, forward "
            "mode and second derivatives (create_graph=True) cannot use it: set natural=False."
        )
