"""The one operator, geoparam::weight(latitude, r) -> w = r u(latitude), for every way to call it.

Two torch.library ops do the work and are opaque to torch.compile, torch.export, autocast and FSDP:

    weight(latitude, r)                 the rows r u, on any leading batch shape
    weight_backward(grad, latitude, r)  the gradients of <grad, weight>

Registering autograd for them is not enough: torch.func.jvp would then return zeros without a
word, and torch.func.grad would raise. So in eager mode the ops are wrapped in two
autograd.Functions that also carry their tangents; dynamo refuses such a Function, so under
compilation the op is called as it is.

`r` may be None (then the rows are unit vectors), `natural=True` divides the latitudes' gradient by
the sphere's metric, and `dtype` is the type of the result (default: what latitude and r promote
to). Arithmetic is float32 or better whatever the storage type.
"""

import functools
import importlib
import importlib.util
import os
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.fx import Proxy

from geoparam.ops import cpu
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
    if torch.compiler.is_compiling() or isinstance(latitude, Proxy):
        return torch.ops.geoparam.weight(latitude, r, natural=natural, dtype=dtype)
    return _Weight.apply(latitude, r, natural, dtype)


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


# --- eager mode: the same ops with their tangents ---------------------------------------------


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
        ctx.save_for_forward(latitude, r)
        ctx.dtype = output.dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        latitude, r = ctx.saved_tensors
        grad_latitude, grad_r = _WeightBackward.apply(grad, latitude, r, ctx.natural)
        return grad_latitude, None if r is None else grad_r, None, None

    @staticmethod
    def jvp(ctx: Any, d_latitude: Tensor | None, d_r: Tensor | None, *_: None) -> Tensor:
        latitude, r = ctx.saved_tensors
        return weight_tangent(latitude, r, d_latitude, d_r).to(ctx.dtype)

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

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
        *tensors, ctx.natural = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        ctx.dtypes = tuple(x.dtype for x in output)

    @staticmethod
    def backward(
        ctx: Any, d_latitude: Tensor, d_r: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None, None]:
        _refuse_natural(ctx.natural)
        grad, latitude, r = ctx.saved_tensors
        d_grad = weight_tangent(latitude, r, d_latitude, d_r)
        to_latitude, to_r = gradient_tangent(grad, latitude, r, None, d_latitude, d_r)
        return (
            d_grad.to(grad.dtype),
            to_latitude.to(latitude.dtype),
            None if r is None else to_r.to(r.dtype),
            None,
        )

    @staticmethod
    def jvp(
        ctx: Any, d_grad: Tensor | None, d_latitude: Tensor | None, d_r: Tensor | None, _: None
    ) -> tuple[Tensor, ...]:
        _refuse_natural(ctx.natural)
        grad, latitude, r = ctx.saved_tensors
        tangents = gradient_tangent(grad, latitude, r, d_grad, d_latitude, d_r)
        return tuple(t.to(dtype) for t, dtype in zip(tangents, ctx.dtypes, strict=True))

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple, grad: Tensor, latitude: Tensor, r: Tensor | None, natural: bool
    ) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        grad, latitude, r = _batch_first(info.batch_size, in_dims, grad, latitude, r)
        return _WeightBackward.apply(grad, latitude, r, natural), (0, 0)


# --- helpers ----------------------------------------------------------------------------------


_KERNELS = os.environ.get("GEOPARAM_KERNELS", "auto")  # or "torch", "triton": for tests
if _KERNELS not in ("auto", "torch", "triton"):
    raise ValueError(f"GEOPARAM_KERNELS is auto, torch or triton; got {_KERNELS!r}.")


def _implementation(x: Tensor) -> ModuleType:
    if _KERNELS == "triton" or (_KERNELS == "auto" and x.is_cuda and _triton_installed()):
        return importlib.import_module("geoparam.ops.triton")
    return cpu


@functools.cache
def _triton_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def _as_rows(latitude: Tensor, r: Tensor | None) -> tuple[Tensor, Tensor | None]:
    flat = latitude.reshape(r.numel() if r is not None else -1, latitude.shape[-1])
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
            "derivative. Use natural=False for double backward or forward-over-reverse."
        )
