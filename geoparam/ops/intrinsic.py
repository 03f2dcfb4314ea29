"""(d, r) -> w = r d / ||d||, the weight in intrinsic coordinates.

Plain torch, which autograd, torch.func and compilers see through; on a GPU in plain eager training
two Triton kernels instead, one pass over the memory each way, where torch would take nine.
"""

import functools
import importlib
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from geoparam.ops import direct, implementation

_SHORTEST = 1e-12  # a vector that was set to 0 stays finite


def weight(
    d: Tensor,
    r: Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
    shape: tuple[int, ...] | None = None,
    channels_last: bool = False,
) -> Tensor:
    """Return the weight rows (..., n) for vectors (..., n) of any length and scales (...).

    `dtype`, `shape` and `channels_last` are those of `ops.weight`.

    Example:
        >>> weight(torch.tensor([[3., 4.]]), torch.tensor([10.]))
        tensor([[6., 8.]])
    """
    dtype = dtype or implementation.result_type(d, r)
    if torch.compiler.is_compiling():  # one kernel writes in any order
        return _arranged(_formula(d, r, dtype), shape, channels_last)
    if not (direct.possible(d, r) and implementation.uses_triton(d)):
        return _arranged(_formula(d, r, dtype), shape, False)
    if torch.is_grad_enabled():
        return _Weight.apply(d, r, dtype, shape, channels_last)
    return forward(d, r, dtype, shape, channels_last)


def normalise_(d: Tensor) -> None:
    """Divide the rows of d (..., n) by their lengths in place; zero rows stay zero."""
    if direct.possible(d) and implementation.uses_triton(d) and d.is_contiguous():
        return _kernels().normalise_(d)
    precise = torch.promote_types(d.dtype, torch.float32)
    length = torch.linalg.vector_norm(d, dim=-1, keepdim=True, dtype=precise)
    d.div_(torch.where(length == 0, 1, length))


def _formula(d: Tensor, r: Tensor | None, dtype: torch.dtype) -> Tensor:
    d = d if d.dtype == torch.float64 else d.float()
    length = torch.linalg.vector_norm(d, dim=-1, keepdim=True)
    scale = length.clamp(min=_SHORTEST).reciprocal()
    return (d * (scale if r is None else scale * r[..., None])).to(dtype)


def _arranged(rows: Tensor, shape: tuple[int, ...] | None, channels_last: bool) -> Tensor:
    if shape is None:
        return rows
    w = rows.unflatten(-1, shape)
    if channels_last and w.ndim in (4, 5):
        last = torch.channels_last if w.ndim == 4 else torch.channels_last_3d
        return w.contiguous(memory_format=last)
    return w


def forward(
    d: Tensor,
    r: Tensor | None,
    dtype: torch.dtype,
    shape: tuple[int, ...] | None,
    channels_last: bool,
) -> Tensor:
    """Return the weight, without autograd."""
    if not implementation.uses_triton(d):
        return _arranged(_formula(d, r, dtype), shape, channels_last)
    layout = _layout(d.shape, shape, channels_last)
    return _kernels().forward(d.contiguous(), None if r is None else r.contiguous(), dtype, layout)


def backward(grad: Tensor, d: Tensor, r: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the gradients of d and r, or 1, for `grad` in any layout."""
    if not implementation.uses_triton(d):
        r = d.new_ones(d.shape[:-1]) if r is None else r
        inputs = d.detach().requires_grad_(), r.detach().requires_grad_()
        by_d, by_r = _differentiable_backward((True, True), grad, *inputs)
        assert by_d is not None and by_r is not None
        return by_d, by_r
    grad, taps = implementation.readable(grad, d.ndim - 1)
    return _kernels().backward(grad, d.contiguous(), None if r is None else r.contiguous(), taps)


@functools.cache
def _layout(
    size: torch.Size, shape: tuple[int, ...] | None, channels_last: bool
) -> implementation.Layout:
    return implementation.layout_of((*size[:-1], size[-1] - 1), shape, channels_last)


class _Weight(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        d: Tensor,
        r: Tensor | None,
        dtype: torch.dtype,
        shape: tuple[int, ...] | None,
        channels_last: bool,
    ) -> Tensor:
        ctx.save_for_backward(d, r)
        return forward(d, r, dtype, shape, channels_last)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        d, r = ctx.saved_tensors
        if torch.is_grad_enabled() or not direct.possible(grad, d, r):
            return *_differentiable_backward(ctx.needs_input_grad, grad, d, r), None, None, None
        grad_d, grad_r = backward(grad, d, r)
        return grad_d, None if r is None else grad_r, None, None, None


def _differentiable_backward(
    needed: tuple[bool, ...], grad: Tensor, d: Tensor, r: Tensor | None
) -> list[Tensor | None]:
    """Return the gradients by the formula, which can be differentiated further."""
    create_graph = torch.is_grad_enabled()
    inputs = [x for x, wanted in zip((d, r), needed, strict=False) if wanted and x is not None]
    with torch.enable_grad():
        rows = _formula(d, r, grad.dtype)
        found = iter(
            torch.autograd.grad(rows, inputs, grad.reshape(rows.shape), create_graph=create_graph)
        )
    return [next(found) if wanted else None for wanted in needed[:2]]


@functools.cache
def _kernels() -> ModuleType:
    return importlib.import_module("geoparam.ops.rows_triton")  # needs Triton
