"""The one operator, geoparam::weight(latitude, r) -> w = r u(latitude), for every way to call it.

Two torch.library ops do the work and are opaque to torch.compile, torch.export, autocast and FSDP:

    weight(latitude, r)                 the rows r u, on any leading batch shape
    weight_backward(grad, latitude, r)  the gradients of <grad, weight>

Both have autograd registered, so the op can be differentiated any number of times. That is not
enough for torch.func: its `grad` refuses such an op, so there they are wrapped in two
autograd.Functions. In forward mode (jvp, jacfwd, hessian) an op's tangent would be zero, and that
of a Function is lost when nested or compiled, without a word in either case: there the weight is
computed by `sphere`'s differentiable formula, which has no such limits.

`r` may be None (then the rows are unit vectors), `natural=True` divides the latitudes' gradient by
the sphere's metric, and `dtype` is the type of the result (default: what latitude and r promote
to). Arithmetic is float32 or better whatever the storage type.
"""

import functools
import importlib
import importlib.util
import math
import os
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx import Proxy

from geoparam import sphere
from geoparam.ops import cpu, native
from geoparam.ops.tangents import gradient_tangent, weight_tangent

__all__ = ["weight"]


def weight(
    latitude: Tensor,
    r: Tensor | None = None,
    *,
    natural: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the weight rows (..., n) for latitudes (..., n - 1) and scales (...).

    Example:
        >>> weight(torch.zeros(2, 3), torch.tensor([1., 2.]))
        tensor([[0., 0., 0., 1.],
                [0., 0., 0., 2.]])
    """
    if _in_forward_mode():
        _refuse_natural(natural)
        u = sphere.to_unit(latitude) if r is None else r[..., None] * sphere.to_unit(latitude)
        return u.to(_result_type(latitude, r, dtype))
    if hasattr(latitude, "placements") and not isinstance(latitude, Proxy):
        return _weight_of_shards(latitude, r, natural, dtype)
    if torch._C._are_functorch_transforms_active() and not torch.compiler.is_compiling():
        return _Weight.apply(latitude, r, natural, dtype)
    return torch.ops.geoparam.weight(latitude, r, natural=natural, dtype=dtype)


def _weight_of_shards(latitude: Any, r: Any, natural: bool, dtype: torch.dtype | None) -> Tensor:
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
    rows = weight(latitude.to_local(), local_r, natural=natural, dtype=dtype)
    shape = (*latitude.shape[:-1], latitude.shape[-1] + 1)
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
    "(Tensor latitude, Tensor? r=None, *, bool natural=False, ScalarType? dtype=None) -> Tensor",
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
) -> Tensor:
    _check(latitude, r)
    if _in_forward_mode():
        raise RuntimeError(
            "forward-mode differentiation does not see through geoparam::weight itself; call "
            "geoparam.ops.weight, or the layer, instead of a traced or exported copy of it."
        )
    rows = _implementation(latitude).forward(
        *_as_rows(latitude, r), _result_type(latitude, r, dtype)
    )
    return rows.reshape(*latitude.shape[:-1], latitude.shape[-1] + 1)


@torch.library.impl("geoparam::weight_backward", "CompositeExplicitAutograd")
def _weight_backward(
    grad: Tensor, latitude: Tensor, r: Tensor | None, natural: bool
) -> tuple[Tensor, Tensor]:
    rows = grad.reshape(-1, grad.shape[-1])
    grad_latitude, grad_r = _implementation(latitude).backward(
        rows, *_as_rows(latitude, r), natural
    )
    return grad_latitude.view(latitude.shape), grad_r.view(latitude.shape[:-1])


@torch.library.register_fake("geoparam::weight")
def _weight_fake(
    latitude: Tensor,
    r: Tensor | None = None,
    *,
    natural: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    _check(latitude, r)
    shape = (*latitude.shape[:-1], latitude.shape[-1] + 1)
    return latitude.new_empty(shape, dtype=_result_type(latitude, r, dtype))


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
    d_r = torch.zeros_like(d_r) if r is None else d_r  # without r its gradient is not used
    d_grad = weight_tangent(latitude, r, d_latitude, d_r)
    to_latitude, to_r = gradient_tangent(grad, latitude, r, d_latitude, d_r)
    return (
        d_grad.to(grad.dtype),
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
) -> tuple[Tensor, int]:
    latitude, r = _batch_first(info.batch_size, in_dims, latitude, r)
    return torch.ops.geoparam.weight(latitude, r, natural=natural, dtype=dtype), 0


@torch.library.register_vmap("geoparam::weight_backward")
def _weight_backward_vmap(
    info: Any, in_dims: tuple, grad: Tensor, latitude: Tensor, r: Tensor | None, natural: bool
) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    grad, latitude, r = _batch_first(info.batch_size, in_dims, grad, latitude, r)
    return torch.ops.geoparam.weight_backward(grad, latitude, r, natural), (0, 0)


# --- the same ops for torch.func --------------------------------------------------------------


class _Weight(torch.autograd.Function):
    @staticmethod
    def forward(
        latitude: Tensor, r: Tensor | None, natural: bool, dtype: torch.dtype | None
    ) -> Tensor:
        return torch.ops.geoparam.weight(latitude, r, natural=natural, dtype=dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        latitude, r, ctx.natural, _ = inputs
        ctx.save_for_backward(latitude, r)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        latitude, r = ctx.saved_tensors
        grad_latitude, grad_r = _WeightBackward.apply(grad, latitude, r, ctx.natural)
        return grad_latitude, None if r is None else grad_r, None, None

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple,
        latitude: Tensor,
        r: Tensor | None,
        natural: bool,
        dtype: torch.dtype | None,
    ) -> tuple[Tensor, int]:
        latitude, r = _batch_first(info.batch_size, in_dims, latitude, r)
        return _Weight.apply(latitude, r, natural, dtype), 0


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


# auto: the fastest there is. torch: plain torch. triton, native: that one, or an error; for tests.
_KERNELS = os.environ.get("GEOPARAM_KERNELS", "auto")
if _KERNELS not in ("auto", "torch", "triton", "native"):
    raise ValueError(f"GEOPARAM_KERNELS is auto, torch, triton or native; got {_KERNELS!r}.")


def _implementation(x: Tensor) -> ModuleType:
    if _KERNELS == "triton" or (_KERNELS == "auto" and x.is_cuda and _triton_installed()):
        return importlib.import_module("geoparam.ops.triton")
    if x.is_cpu and (_KERNELS == "native" or (_KERNELS == "auto" and native.available())):
        return native
    return cpu


@functools.cache
def _triton_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def _in_forward_mode() -> bool:
    return forward_ad._current_level >= 0


def _as_rows(latitude: Tensor, r: Tensor | None) -> tuple[Tensor, Tensor | None]:
    flat = latitude.reshape(math.prod(latitude.shape[:-1]), latitude.shape[-1])
    return flat.contiguous(), None if r is None else r.reshape(-1).contiguous()


def _result_type(latitude: Tensor, r: Tensor | None, dtype: torch.dtype | None) -> torch.dtype:
    if dtype is not None:
        return dtype
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
