"""The one operator, geoparam::weight(latitude, r) -> w = r u(latitude), for every way to call it.

Two torch.library ops do the work and are opaque to torch.compile, torch.export, autocast and FSDP:

    weight(latitude, r)                 the rows r u, on any leading batch shape
    weight_backward(grad, latitude, r)  the gradients of <grad, weight>

Both have autograd registered, so the op can be differentiated any number of times. That is not
enough for torch.func: its `grad` refuses such an op, so there they are wrapped in two
autograd.Functions. In forward mode (jvp, jacfwd, hessian) an op's tangent would be zero, and that
of a Function is lost when nested or compiled, without a word in either case: there the weight is
computed by `sphere`'s differentiable formula, which has no such limits.

Torch's dispatch of an op written in Python takes longer than most weights. Where nobody looks on,
in plain eager training, `direct` calls the kernels without it; for a compiler on a GPU `expansion`
replaces the ops by their kernels. Where a mean is taken into a layer's bias, weight and bias are
made together (`shifted`, and for compilers `shifted_op` with `means`).

`r` may be None (then the rows are unit vectors), `natural=True` divides the latitudes' gradient by
the sphere's metric, and `dtype` is the type of the result (default: what latitude and r promote
to). `shape` is that of a row in the result, and `channels_last` says how a convolution's weight
lies in memory; neither changes a number. Arithmetic is float32 or better whatever the type.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx import Proxy

from geoparam import sphere
from geoparam.ops import direct, expansion, implementation, intrinsic
from geoparam.ops.implementation import result_type
from geoparam.ops.tangents import gradient_tangent, weight_tangent

__all__ = ["intrinsic", "weight"]


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
        dtype: type of the result.
        shape: a row's shape in the result, as (channels, height, width); None for (n,).
        channels_last: lay the weight (out, *shape) of an image convolution out in this order.

    Example:
        >>> weight(torch.zeros(2, 3), torch.tensor([1., 2.]))
        tensor([[0., 0., 0., 1.],
                [0., 0., 0., 2.]])
        >>> weight(torch.zeros(2, 17), shape=(2, 3, 3), channels_last=True).stride()
        (18, 1, 6, 2)
    """
    if not direct.possible(latitude, r):
        return _dispatched(latitude, r, natural, dtype, shape, channels_last)
    _check(latitude, r)
    return direct.weight(
        latitude, r, natural, dtype or result_type(latitude, r), shape, channels_last
    )


def _dispatched(
    latitude: Tensor,
    r: Tensor | None,
    natural: bool,
    dtype: torch.dtype | None,
    shape: tuple[int, ...] | None,
    channels_last: bool,
) -> Tensor:
    """Call the op, or what stands for it."""
    if _in_forward_mode():
        _refuse_natural(natural)
        u = sphere.to_unit(latitude) if r is None else r[..., None] * sphere.to_unit(latitude)
        u = u.to(dtype or result_type(latitude, r))
        return u if shape is None else u.unflatten(-1, shape)
    if hasattr(latitude, "placements") and not isinstance(latitude, Proxy):
        return _weight_of_shards(latitude, r, natural, dtype, shape)
    if torch._C._are_functorch_transforms_active() and not torch.compiler.is_compiling():
        return _Weight.apply(latitude, r, natural, dtype, shape)
    return torch.ops.geoparam.weight(
        latitude, r, natural=natural, dtype=dtype, shape=shape, channels_last=channels_last
    )


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


# --- the ops ----------------------------------------------------------------------------------

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
            "geoparam.ops.weight, or the layer, instead of a traced or exported copy of it."
        )
    return implementation.forward(
        latitude,
        r,
        dtype or result_type(latitude, r),
        None if shape is None else tuple(shape),
        channels_last,
    )


@torch.library.impl("geoparam::weight_backward", "CompositeExplicitAutograd")
def _weight_backward(
    grad: Tensor, latitude: Tensor, r: Tensor | None, natural: bool
) -> tuple[Tensor, Tensor]:
    return implementation.backward(grad, latitude, r, natural)


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
    row = None if shape is None else tuple(shape)
    layout = implementation.layout_of(latitude.shape, row, channels_last)
    return latitude.new_empty_strided(
        layout.size, layout.stride, dtype=dtype or result_type(latitude, r)
    )


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


expansion.register()


# --- the same ops for torch.func --------------------------------------------------------------


class _Weight(torch.autograd.Function):
    @staticmethod
    def forward(
        latitude: Tensor,
        r: Tensor | None,
        natural: bool,
        dtype: torch.dtype | None,
        shape: tuple[int, ...] | None,
    ) -> Tensor:
        return torch.ops.geoparam.weight(latitude, r, natural=natural, dtype=dtype, shape=shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        latitude, r, ctx.natural, _, _ = inputs
        ctx.save_for_backward(latitude, r)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        latitude, r = ctx.saved_tensors
        grad_latitude, grad_r = _WeightBackward.apply(grad, latitude, r, ctx.natural)
        return grad_latitude, None if r is None else grad_r, None, None, None

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple,
        latitude: Tensor,
        r: Tensor | None,
        natural: bool,
        dtype: torch.dtype | None,
        shape: tuple[int, ...] | None,
    ) -> tuple[Tensor, int]:
        latitude, r = _batch_first(info.batch_size, in_dims, latitude, r)
        return _Weight.apply(latitude, r, natural, dtype, shape), 0


class _WeightBackward(torch.autograd.Function):
    @staticmethod
    def forward(
        grad: Tensor, latitude: Tensor, r: Tensor | None, natural: bool
    ) -> tuple[Tensor, Tensor]:
        return torch.ops.geoparam.weight_backward(grad, latitude, r, natural)

    setup_context = staticmethod(_setup_backward_context)
    backward = staticmethod(_double_backward)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple, grad: Tensor, latitude: Tensor, r: Tensor | None, natural: bool
    ) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        grad, latitude, r = _batch_first(info.batch_size, in_dims, grad, latitude, r)
        return _WeightBackward.apply(grad, latitude, r, natural), (0, 0)


# --- helpers ----------------------------------------------------------------------------------


def _in_forward_mode() -> bool:
    return forward_ad._current_level >= 0


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
