"""Which kernels compute the operator, and the memory that they write to.

The kernels know rows (rows, n) alone. A layer wants its weight's own shape, and a convolution on
channels_last images wants the weight in that order too, since cuDNN would otherwise copy it in
every call: the Triton kernels write and read either order, elsewhere one copy follows.
"""

import functools
import importlib
import importlib.util
import math
import os
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from geoparam.ops import cpu, native

# auto: the fastest there is. torch: plain torch. triton, native: that one, or an error; for tests.
KERNELS = os.environ.get("GEOPARAM_KERNELS", "auto")
if KERNELS not in ("auto", "torch", "triton", "native"):
    raise ValueError(f"GEOPARAM_KERNELS is auto, torch, triton or native; got {KERNELS!r}.")


def implementation(x: Tensor) -> ModuleType:
    """Return the module whose `forward` and `backward` serve this tensor."""
    if uses_triton(x):
        return _triton()
    if x.is_cpu and (KERNELS == "native" or (KERNELS == "auto" and native.available())):
        return native
    return cpu


def uses_triton(x: Tensor) -> bool:
    """Return whether Triton's kernels serve this tensor."""
    return KERNELS == "triton" or (KERNELS == "auto" and x.is_cuda and has_triton())


@functools.cache
def _triton() -> ModuleType:
    return importlib.import_module("geoparam.ops.triton")


@functools.cache
def has_triton() -> bool:
    """Return whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def result_type(latitude: Tensor, r: Tensor | None) -> torch.dtype:
    """Return the type of a weight that nobody has asked for in another."""
    if r is None or r.dtype == latitude.dtype:
        return latitude.dtype
    return torch.promote_types(latitude.dtype, r.dtype)


class Layout(NamedTuple):
    """A weight's shape and memory: rows one after the other, in order or tap by tap.

    With taps = 1 a row lies in order; else it is (channels, taps) and lies as (taps, channels).
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    taps: int


def layout_of(
    latitude_size: tuple[int, ...], shape: tuple[int, ...] | None, channels_last: bool
) -> Layout:
    """Return the layout of a weight whose rows have this shape.

    Example:
        >>> layout_of((8, 26), (3, 3, 3), True)
        Layout(size=(8, 3, 3, 3), stride=(27, 1, 9, 3), taps=9)
    """
    lead, n = tuple(latitude_size[:-1]), latitude_size[-1] + 1
    inner = (n,) if shape is None else tuple(shape)
    if math.prod(inner) != n:
        raise ValueError(
            f"a row of {n} numbers, one more than its latitudes, cannot have the shape {inner}."
        )
    taps = math.prod(inner[1:])
    if not (channels_last and len(lead) == 1 and len(inner) in (3, 4) and 1 < taps < n):
        return Layout((*lead, *inner), _strides((*lead, *inner)), 1)
    of_taps = _strides((*inner[1:], inner[0]))[:-1]
    return Layout((*lead, *inner), (n, 1, *of_taps), taps)


def _strides(size: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(size[i + 1 :]) for i in range(len(size)))


layout_for = functools.cache(layout_of)  # for shapes that are known


def forward(
    latitude: Tensor,
    r: Tensor | None,
    dtype: torch.dtype,
    shape: tuple[int, ...] | None = None,
    channels_last: bool = False,
    traced: bool = False,
) -> Tensor:
    """Return the weight in its shape, for latitudes (..., n - 1) and scales (...).

    If `traced`, Triton's kernel is left in the graph that a compiler is tracing.
    """
    layout = layout_for(latitude.shape, shape, channels_last)
    latitude, r = latitude.contiguous(), None if r is None else r.contiguous()
    if uses_triton(latitude):
        return _triton().forward(latitude, r, dtype, layout, traced)
    rows = implementation(latitude).forward(*_as_rows(latitude, r), dtype)
    if layout.taps == 1:
        return torch.ops.aten._unsafe_view(rows, layout.size)
    weight = torch.empty_strided(layout.size, layout.stride, dtype=dtype, device=rows.device)
    return weight.copy_(rows.view(layout.size))


def backward(
    grad: Tensor, latitude: Tensor, r: Tensor | None, natural: bool, traced: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the gradients of latitude and r for `grad`, of the weight's shape in any layout."""
    latitude, r = latitude.contiguous(), None if r is None else r.contiguous()
    if uses_triton(latitude):
        grad, taps = readable(grad, latitude.ndim - 1)
        return _triton().backward(grad, latitude, r, natural, taps, traced)
    rows = grad.reshape(math.prod(latitude.shape[:-1]), latitude.shape[-1] + 1)
    module = implementation(latitude)
    grad_latitude, grad_r = module.backward(rows, *_as_rows(latitude, r), natural)
    return grad_latitude.view(latitude.shape), grad_r.view(latitude.shape[:-1])


def readable(grad: Tensor, lead: int) -> tuple[Tensor, int]:
    """Return a weight's gradient and its taps, copied only if Triton cannot read it as it lies.

    `lead` is the number of dimensions before a row's own.
    """
    if grad.is_contiguous():
        return grad, 1
    taps = _taps(grad.shape, grad.stride()) if lead == 1 else 0
    return (grad, taps) if taps else (grad.contiguous(), 1)


@functools.lru_cache(maxsize=4096)
def _taps(size: torch.Size, stride: tuple[int, ...]) -> int:
    """Return the taps of an image convolution's weight that lies tap by tap; else 0."""
    if len(size) not in (4, 5):
        return 0
    layout = layout_of((size[0], size[1:].numel() - 1), size[1:], True)
    return layout.taps if stride == layout.stride else 0


def _as_rows(latitude: Tensor, r: Tensor | None) -> tuple[Tensor, Tensor | None]:
    flat = latitude.view(math.prod(latitude.shape[:-1]), latitude.shape[-1])
    return flat, None if r is None else r.view(-1)
