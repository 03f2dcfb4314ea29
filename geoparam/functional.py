"""weight(latitude, r) -> w = r u(latitude): the one door to the kernels that make weights.

Two torch.library ops do the work and are opaque to torch.compile, torch.export, autocast and FSDP:

    weight(latitude, r)                 the rows r u, on any leading batch shape
    weight_backward(grad, latitude, r)  the gradients of <grad, weight>

Both have autograd registered, so the op can be differentiated any number of times. Torch's
dispatch of an op written in Python takes longer than most weights, so eager code reaches the
kernels through an autograd.Function. torch.func refuses to differentiate such an op, and has
Functions of its own around it. In forward mode (jvp, jacfwd, hessian) an op's tangent would be
zero, and that of a Function is lost when nested or compiled, without a word in either case: there
the weight is computed by `sphere`'s differentiable formula. In compiled code for a GPU the ops are
replaced by their Triton kernels, which inductor then launches as it does its own.

Arithmetic is float32 or better whatever the type.
"""

import functools
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.autograd import forward_ad
from torch.fx import Proxy

from geoparam import sphere
from geoparam.kernels.layout import layout_for, layout_of, positions_of
from geoparam.kernels.selection import uses_triton, weight_kernel
from geoparam.kernels.tangents import gradient_tangent, weight_tangent

__all__ = ["compute_gradients", "compute_weight", "weight"]


def weight(
    latitude: Tensor,
    r: Tensor | None = None,
    *,
    natural: bool = False,
    dtype: torch.dtype | None = None,
    shape: tuple[int, ...] | None = None,
    channels_last: bool = False,
) -> Tensor:
    """Return the weight rows (..., n) for latitudes (..., n - 1) and scales (...).

    Args:
        latitude: the angles from the equator, pi/2 - theta.
        r: a scale for each row; None for unit vectors.
        natural: divide the latitudes' gradient by the sphere's metric.
        dtype: type of the result; what latitude and r promote to by default.
        shape: a row's shape in the result, as (channels, height, width); None for (n,).
        channels_last: lay the weight (out, *shape) of an image convolution out in this order.

    Example:
        >>> weight(torch.zeros(2, 3), torch.tensor([1., 2.]))
        tensor([[0., 0., 0., 1.],
                [0., 0., 0., 2.]])
        >>> weight(torch.zeros(2, 17), shape=(2, 3, 3), channels_last=True).stride()
        (18, 1, 6, 2)
    """
    if _in_forward_mode():
        return _formula(latitude, r, natural, dtype, shape)
    if hasattr(latitude, "placements") and not isinstance(latitude, Proxy):
        return _weight_of_shards(latitude, r, natural, dtype, shape)
    if not torch.compiler.is_compiling():
        if _is_plain(latitude, r):
            return _Weight.apply(latitude, r, natural, dtype, shape, channels_last)
        if torch._C._are_functorch_transforms_active():
            return _FuncWeight.apply(latitude, r, natural, dtype, shape)
    return torch.ops.geoparam.weight(
        latitude, r, natural=natural, dtype=dtype, shape=shape, channels_last=channels_last
    )


def _formula(
    latitude: Tensor,
    r: Tensor | None,
    natural: bool,
    dtype: torch.dtype | None,
    shape: tuple[int, ...] | None,
) -> Tensor:
    """Return the weight by plain operations, for forward mode."""
    _refuse_natural(natural)
    u = sphere.to_unit(latitude) if r is None else r[..., None] * sphere.to_unit(latitude)
    u = u.to(dtype or _result_type(latitude, r))
    return u if shape is None else u.unflatten(-1, shape)


def _weight_of_shards(
    latitude: Any,
    r: Any,
    natural: bool,
    dtype: torch.dtype | None,
    row_shape: tuple[int, ...] | None,
) -> Tensor:
    """Return the weight of DTensors, which parameters are under FSDP2 outside of forward.

    A row of the weight comes from one row of the latitudes: each process makes those it holds.
    """
    from torch.distributed.tensor import DTensor  # slow to import, and not in every build

    last, placements = latitude.ndim - 1, latitude.placements
    by_rows = not any(place.is_partial() or place.is_shard(last) for place in placements)
    if not by_rows or (r is not None and getattr(r, "placements", None) != placements):
        raise ValueError(
            "latitude and r must be sharded alike, with whole rows on each process; got "
            f"{placements} and {getattr(r, 'placements', None)}. Under FSDP2, call unshard() on "
            "the module first."
        )
    local_r = None if r is None else r.to_local()
    rows = weight(latitude.to_local(), local_r, natural=natural, dtype=dtype, shape=row_shape)
    shape = (*latitude.shape[:-1], *(row_shape or (latitude.shape[-1] + 1,)))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        rows,
        latitude.device_mesh,
        placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=stride,
    )


# --- the kernels --------------------------------------------------------------------------------


def compute_weight(
    latitude: Tensor,
    r: Tensor | None,
    dtype: torch.dtype | None = None,
    shape: Sequence[int] | None = None,
    channels_last: bool = False,
    traced: bool = False,
) -> Tensor:
    """Return the weight without autograd.

    If `traced`, leave the kernel in the graph that a compiler is tracing.
    """
    dtype = dtype or _result_type(latitude, r)
    layout = layout_for(latitude.shape, None if shape is None else tuple(shape), channels_last)
    latitude, r = latitude.contiguous(), None if r is None else r.contiguous()
    kernel: Any = weight_kernel(latitude)
    if uses_triton(latitude):
        return kernel.forward(latitude, r, dtype, layout, traced)
    rows = kernel.forward(*_as_rows(latitude, r), dtype)
    if layout.positions == 1:
        return torch.ops.aten._unsafe_view(rows, layout.size)
    weight = torch.empty_strided(layout.size, layout.stride, dtype=dtype, device=rows.device)
    return weight.copy_(rows.view(layout.size))


def compute_gradients(
    grad: Tensor, latitude: Tensor, r: Tensor | None, natural: bool, traced: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the gradients of latitude and r for `grad`, of the weight's shape in any layout."""
    latitude, r = latitude.contiguous(), None if r is None else r.contiguous()
    kernel: Any = weight_kernel(latitude)
    if uses_triton(latitude):
        positions = 1 if grad.is_contiguous() else 0
        if not positions and latitude.ndim == 2:
            positions = positions_of(tuple(grad.shape), grad.stride())
        grad = grad if positions else grad.contiguous()
        return kernel.backward(grad, latitude, r, natural, positions or 1, traced)
    flat, scale = _as_rows(latitude, r)
    grad_latitude, grad_r = kernel.backward(
        grad.reshape(len(flat), flat.shape[1] + 1), flat, scale, natural
    )
    return grad_latitude.view(latitude.shape), grad_r.view(latitude.shape[:-1])


def _as_rows(latitude: Tensor, r: Tensor | None) -> tuple[Tensor, Tensor | None]:
    rows = latitude.shape[:-1].numel()
    return latitude.view(rows, latitude.shape[-1]), None if r is None else r.view(-1)


# --- eager code ---------------------------------------------------------------------------------


class _Weight(torch.autograd.Function):
    """Without setup_context, for which torch binds arguments in longer than a weight takes."""

    @staticmethod
    def forward(
        ctx: Any,
        latitude: Tensor,
        r: Tensor | None,
        natural: bool,
        dtype: torch.dtype | None,
        shape: tuple[int, ...] | None,
        channels_last: bool,
    ) -> Tensor:
        _check(latitude, r)
        ctx.save_for_backward(latitude, r)
        ctx.natural = natural
        return compute_weight(latitude, r, dtype, shape, channels_last)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        latitude, r = ctx.saved_tensors
        plain = not torch.is_grad_enabled() and _is_plain(grad, latitude, r)
        backward: Any = compute_gradients if plain else torch.ops.geoparam.weight_backward
        grad_latitude, grad_r = backward(grad, latitude, r, ctx.natural)
        return grad_latitude, None if r is None else grad_r, None, None, None, None


# --- torch.func ---------------------------------------------------------------------------------


class _FuncWeight(torch.autograd.Function):
    @staticmethod
    def forward(latitude: Tensor, r: Tensor | None, natural: bool, *options: Any) -> Tensor:
        dtype, shape = options
        return torch.ops.geoparam.weight(latitude, r, natural=natural, dtype=dtype, shape=shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        latitude, r, ctx.natural, *_ = inputs
        ctx.save_for_backward(latitude, r)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        latitude, r = ctx.saved_tensors
        grad_latitude, grad_r = _FuncBackward.apply(grad, latitude, r, ctx.natural)
        return grad_latitude, None if r is None else grad_r, None, None, None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple, latitude: Tensor, r: Tensor | None, *options: Any
    ) -> tuple[Tensor, int]:
        latitude, r = _batch_first(info.batch_size, in_dims, latitude, r)
        return _FuncWeight.apply(latitude, r, *options), 0


class _FuncBackward(torch.autograd.Function):
    @staticmethod
    def forward(
        grad: Tensor, latitude: Tensor, r: Tensor | None, natural: bool
    ) -> tuple[Tensor, Tensor]:
        return torch.ops.geoparam.weight_backward(grad, latitude, r, natural)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
        _setup_backward_context(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, d_latitude: Tensor, d_r: Tensor) -> tuple[Tensor | None, ...]:
        return _double_backward(ctx, d_latitude, d_r)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple, grad: Tensor, latitude: Tensor, r: Tensor | None, natural: bool
    ) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        grad, latitude, r = _batch_first(info.batch_size, in_dims, grad, latitude, r)
        return _FuncBackward.apply(grad, latitude, r, natural), (0, 0)


# --- the ops ------------------------------------------------------------------------------------

torch.library.define(
    "geoparam::weight",
    "(Tensor latitude, Tensor? r=None, *, bool natural=False, ScalarType? dtype=None, "
    "SymInt[]? shape=None, bool channels_last=False) -> Tensor",
)
torch.library.define(
    "geoparam::weight_backward",
    "(Tensor grad, Tensor latitude, Tensor? r, bool natural) -> (Tensor, Tensor)",
)


@torch.library.impl("geoparam::weight", "CompositeExplicitAutograd")
def _weight(
    latitude: Tensor,
    r: Tensor | None = None,
    *,
    natural: bool = False,
    dtype: torch.dtype | None = None,
    shape: Sequence[int] | None = None,
    channels_last: bool = False,
) -> Tensor:
    _check(latitude, r)
    if _in_forward_mode():
        raise RuntimeError(
            "forward-mode differentiation does not see through geoparam::weight itself; call "
            "geoparam.functional.weight, or the layer, instead of a traced or exported copy of it."
        )
    return compute_weight(latitude, r, dtype, shape, channels_last)


@torch.library.impl("geoparam::weight_backward", "CompositeExplicitAutograd")
def _weight_backward(
    grad: Tensor, latitude: Tensor, r: Tensor | None, natural: bool
) -> tuple[Tensor, Tensor]:
    return compute_gradients(grad, latitude, r, natural)


@torch.library.register_fake("geoparam::weight")
def _weight_fake(
    latitude: Tensor,
    r: Tensor | None = None,
    *,
    natural: bool = False,
    dtype: torch.dtype | None = None,
    shape: Sequence[int] | None = None,
    channels_last: bool = False,
) -> Tensor:
    _check(latitude, r)
    layout = layout_of(latitude.shape, None if shape is None else tuple(shape), channels_last)
    dtype = dtype or _result_type(latitude, r)
    return latitude.new_empty_strided(layout.size, layout.stride, dtype=dtype)


@torch.library.register_fake("geoparam::weight_backward")
def _weight_backward_fake(
    grad: Tensor, latitude: Tensor, r: Tensor | None, natural: bool
) -> tuple[Tensor, Tensor]:
    like_r = latitude if r is None else r
    return latitude.new_empty(latitude.shape), like_r.new_empty(latitude.shape[:-1])


def _setup_op_context(ctx: Any, inputs: tuple, keyword_only_inputs: dict, output: Tensor) -> None:
    ctx.save_for_backward(*inputs)
    ctx.natural = keyword_only_inputs["natural"]


def _op_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
    latitude, r = ctx.saved_tensors
    grad_latitude, grad_r = torch.ops.geoparam.weight_backward(grad, latitude, r, ctx.natural)
    return grad_latitude, None if r is None else grad_r


torch.library.register_autograd("geoparam::weight", _op_backward, setup_context=_setup_op_context)


def _setup_backward_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.natural = inputs
    ctx.save_for_backward(*tensors)


def _double_backward(
    ctx: Any, d_latitude: Tensor, d_r: Tensor
) -> tuple[Tensor, Tensor, Tensor | None, None]:
    _refuse_natural(ctx.natural)
    grad, latitude, r = ctx.saved_tensors
    rows = grad.reshape(*latitude.shape[:-1], latitude.shape[-1] + 1)
    d_r = torch.zeros_like(d_r) if r is None else d_r  # without r its gradient is not used
    d_grad = weight_tangent(latitude, r, d_latitude, d_r)
    to_latitude, to_r = gradient_tangent(rows, latitude, r, d_latitude, d_r)
    return (
        d_grad.to(grad.dtype).reshape(grad.shape),
        to_latitude.to(latitude.dtype),
        None if r is None else to_r.to(r.dtype),
        None,
    )


torch.library.register_autograd(
    "geoparam::weight_backward", _double_backward, setup_context=_setup_backward_context
)


@torch.library.register_vmap("geoparam::weight")
def _weight_vmap(
    info: Any,
    in_dims: tuple,
    latitude: Tensor,
    r: Tensor | None = None,
    *,
    natural: bool = False,
    dtype: torch.dtype | None = None,
    shape: Sequence[int] | None = None,
    channels_last: bool = False,
) -> tuple[Tensor, int]:
    latitude, r = _batch_first(info.batch_size, in_dims, latitude, r)
    return torch.ops.geoparam.weight(latitude, r, natural=natural, dtype=dtype, shape=shape), 0


@torch.library.register_vmap("geoparam::weight_backward")
def _weight_backward_vmap(
    info: Any, in_dims: tuple, grad: Tensor, latitude: Tensor, r: Tensor | None, natural: bool
) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    grad, latitude, r = _batch_first(info.batch_size, in_dims, grad, latitude, r)
    return torch.ops.geoparam.weight_backward(grad, latitude, r, natural), (0, 0)


# --- compiled code ------------------------------------------------------------------------------


def _expand(op: str, kernel: Any) -> None:
    """Let AOTAutograd put `kernel` in the place of an op, as torch.library.triton_op does.

    Only on a GPU, for sizes that are known, and not for export, which keeps the op.
    """

    def rule(mode: Any, target: Any, types: Any, args: tuple, kwargs: dict | None) -> Any:
        kwargs = kwargs or {}
        if not _is_expandable([x for x in args if isinstance(x, Tensor)]):
            return mode.__torch_dispatch__(target, types, args, kwargs)
        with mode:
            return kernel(*args, **kwargs)

    torch.library.register_torch_dispatch(f"geoparam::{op}", FunctionalTensorMode, rule)
    if hasattr(torch._library.triton, "triton_ops_to_kernels"):
        torch._library.triton.triton_ops_to_kernels[f"geoparam::{op}"] = [_Code()]


class _Code:
    """The kernels' code, as torch's cache of compiled graphs asks for it: it knows ops by name."""

    __name__ = "geoparam"
    fn = staticmethod(lambda: None)  # it calls no others

    @functools.cached_property
    def src(self) -> str:
        files = sorted(Path(__file__).with_name("kernels").glob("*.py"))
        return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def _is_expandable(tensors: list[Tensor]) -> bool:
    if not all(type(x) is FunctionalTensor and _is_on_gpu(x) for x in tensors):
        return False
    from torch.export import _trace  # loads most of the compiler, which is there by now

    known = all(type(size) is int for x in tensors for size in x.shape)
    return known and not _trace.custom_triton_ops_decomposition_disabled()


def _is_on_gpu(x: Tensor) -> bool:
    return x.is_cuda and uses_triton(x)


def _traced_weight(
    latitude: Tensor, r: Tensor | None = None, *, natural: bool = False, **options: Any
) -> Tensor:
    return compute_weight(latitude, r, **options, traced=True)


def _traced_backward(
    grad: Tensor, latitude: Tensor, r: Tensor | None, natural: bool
) -> tuple[Tensor, Tensor]:
    return compute_gradients(grad, latitude, r, natural, traced=True)


_expand("weight", _traced_weight)
_expand("weight_backward", _traced_backward)


# --- helpers ----------------------------------------------------------------------------------


def _in_forward_mode() -> bool:
    return forward_ad._current_level >= 0


def _is_plain(*tensors: Tensor | None) -> bool:
    """Return whether the elements are in memory, and no mode or tracer is active."""
    for x in tensors:
        if x is not None and (type(x) not in (Tensor, nn.Parameter) or not _is_in_memory(x)):
            return False
    modes = torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active()
    return not modes and torch._C._get_tracing_state() is None


def _is_in_memory(x: Tensor) -> bool:
    """Return whether x has storage, unlike autograd's batched gradients, and no pending sign."""
    return torch._C._has_storage(x) and not x.is_neg() and not x._is_zerotensor()


def _result_type(latitude: Tensor, r: Tensor | None) -> torch.dtype:
    return latitude.dtype if r is None else torch.promote_types(latitude.dtype, r.dtype)


def _batch_first(size: int, dims: tuple, *tensors: Tensor | None) -> list:
    """Give every tensor its vmapped dimension as the first one."""
    return [
        x if x is None else x.movedim(dim, 0) if dim is not None else x.expand(size, *x.shape)
        for x, dim in zip(tensors, dims, strict=False)
    ]


def _check(latitude: Tensor, r: Tensor | None) -> None:
    if latitude.ndim == 0 or not latitude.is_floating_point():
        raise ValueError(
            "latitude needs its n - 1 angles in the last dimension, in a floating type; "
            f"got shape {tuple(latitude.shape)} of {latitude.dtype}."
        )
    if r is not None and r.shape != latitude.shape[:-1]:
        raise ValueError(
            "r needs one scale per row of latitude, of shape "
            f"{tuple(latitude.shape[:-1])}; got {tuple(r.shape)}."
        )


def _refuse_natural(natural: bool) -> None:
    if natural:
        raise RuntimeError(
            "The natural gradient is not the gradient of any function, so it has no second "
            "derivative. Use natural=False for double backward and forward mode."
        )
