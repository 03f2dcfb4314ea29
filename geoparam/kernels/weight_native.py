"""The operator in C (weight.c), compiled on first use.

Plain torch makes many passes over the memory, and for a small weight many calls; a loop in C makes
neither. Much may go wrong: no compiler, a home that cannot be written to, wrong code.
`is_available` tries it once, compares a small case with plain torch, and never raises.

The C code takes tensors that are all float32 or all float64. Others are converted: to float64 if
any is, so that no input is rounded.
"""

import ctypes
import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from geoparam.kernels import loader, weight

_log = logging.getLogger("geoparam")

_FLAGS = (
    "-fno-math-errno",
    "-fno-tree-slp-vectorize",  # gcc 12 packs the chains' four rows: slower by 1/4
    f"-DSMALLEST_METRIC={weight.SMALLEST_METRIC}",
)
_ANGLES_PER_THREAD = 1 << 16  # 0.1 ms forward; a thread costs 0.05


def forward(latitude: Tensor, r: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the weight rows (rows, n) for contiguous latitudes (rows, n - 1) and r (rows,)."""
    rows, angles = latitude.shape
    out = latitude.new_empty(rows, angles + 1, dtype=dtype)
    _run([latitude, r, None, out, None], False)
    return out


def backward(
    grad: Tensor, latitude: Tensor, r: Tensor | None, natural: bool
) -> tuple[Tensor, Tensor]:
    """Return dL/dlatitude (rows, n - 1) and dL/dr (rows,) for grad = dL/dweight (rows, n)."""
    grad_latitude = torch.empty_like(latitude)
    grad_r = latitude.new_empty(latitude.shape[0], dtype=latitude.dtype if r is None else r.dtype)
    _run([latitude, r, grad.contiguous(), grad_latitude, grad_r], natural)
    return grad_latitude, grad_r


@functools.cache
def is_available() -> bool:
    """Whether the C code could be compiled and loaded, and computes what plain torch does."""
    try:
        _check()
    except loader.ERRORS as e:
        _log.info("no C kernel on this machine, plain torch instead: %s", e)
        return False
    return True


def _run(tensors: list[Any], natural: bool) -> None:
    """Fill the last two of (latitude, r or None, grad or None, out, grad_r or None)."""
    types = {x.dtype for x in tensors if x is not None}
    working = torch.float64 if torch.float64 in types else torch.float32
    converted = tensors
    if types != {working}:
        converted = [None if x is None else x.to(working) for x in tensors]
    pointers = [None if x is None else x.data_ptr() for x in converted]
    rows, angles = tensors[0].shape
    threads = max(1, min(torch.get_num_threads(), rows * angles // _ANGLES_PER_THREAD))
    _library()(*pointers, rows, angles + 1, working == torch.float64, natural, threads)
    if converted is not tensors:
        for x, result in zip(tensors[3:], converted[3:], strict=True):
            if x is not result:
                x.copy_(result)


def _check() -> None:
    """Raise RuntimeError unless a small case with poles comes out as in plain torch."""
    for dtype in (torch.float32, torch.float64):
        k = torch.arange(5 * 300, dtype=dtype, device="cpu")
        grad = torch.cos(k * k).view(5, 300)
        latitude, r = 0.1 * grad[:, :-1].sin(), grad[:, 0].exp()
        latitude[1, ::40], latitude[2, 7:9], latitude[3] = torch.pi / 2, -torch.pi / 2, 50 * r[3]
        found = (forward(latitude, r, dtype), *backward(grad, latitude, r, True))
        expected = (weight.forward(latitude, r, dtype), *weight.backward(grad, latitude, r, True))
        tolerance = 1e-4 if dtype == torch.float32 else 1e-11
        for a, b in zip(found, expected, strict=True):
            if not torch.allclose(a, b, rtol=tolerance, atol=tolerance):
                raise RuntimeError(f"its results differ from plain torch's in {dtype}")


@functools.cache
def _library() -> Callable[..., None]:
    run = loader.load("weight", _FLAGS).geoparam_run
    run.restype = None
    run.argtypes = (*[ctypes.c_void_p] * 5, *[ctypes.c_int64] * 2, *[ctypes.c_int] * 3)
    return run
