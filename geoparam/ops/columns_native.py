"""The passes of `columns` in C (columns.c), for large activations on CPUs, compiled on first use.

`native` says where and how. It takes float32 and float64 in memory of the shape's own order.
"""

import ctypes
import functools
import logging
import math
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from geoparam.ops import native

_log = logging.getLogger(__name__)
_SOURCE = Path(__file__).with_name("columns.c")
FLAGS = ("-O3", "-fno-math-errno", "-fno-trapping-math")
SMALLEST = 1 << 16  # numbers; below, a call costs more than it saves
NUMBERS_PER_THREAD = 1 << 17
MOST_LENT = 1 << 26  # bytes that are kept; larger steps take longer in any case


def serves(x: Tensor) -> bool:
    """Return whether this tensor is of a kind that the C code takes, and large enough."""
    return (
        x.is_cpu
        and x.dtype in (torch.float32, torch.float64)
        and x.numel() >= SMALLEST
        and x.is_contiguous()
        and available()
    )


def rectify(
    x: Tensor,
    dim: int,
    bias: Tensor | None,
    scale: Tensor | None,
    relu: bool,
    inplace: bool,
    summed: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return scale relu(x + bias), and its sums per channel; see `columns`."""
    y = x if inplace else torch.empty_like(x)
    total, _ = _call(x, None, dim, bias, scale, y, relu, summed)
    if inplace:
        torch.autograd.graph.increment_version(x)
    return y, total if summed else None


def sums(x: Tensor, dim: int) -> Tensor:
    """Return the sum of each channel."""
    return _call(x, None, dim, None, None, None, False)[0]


def rectify_backward(
    grad: Tensor,
    a: Tensor,
    dim: int,
    grad_sums: Tensor | None,
    scale: Tensor | None,
    whole: bool = True,
    bias: Tensor | None = None,
    lent: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradients of x, bias and scale, always whole; see `columns`."""
    if bias is not None:
        a, _ = rectify(a, dim, bias, None, True, False, False)
    grad_x = _lent_like(a) if lent else torch.empty_like(a)
    given = grad.to(a.dtype).contiguous()
    total, by_scale = _call(given, a, dim, grad_sums, scale, grad_x, False)
    return grad_x, total, None if scale is None else by_scale


class _Lent(threading.local):
    """Memory that is used again and again, by one thread."""

    memory = torch.empty(0, dtype=torch.uint8, device="cpu")


_lent = _Lent()


def _lent_like(x: Tensor) -> Tensor:
    """Return a tensor in memory that the next call will write to; a new one if it is large.

    New memory comes from the system a page at a time, which takes longer than to fill it.
    """
    size = x.numel() * x.element_size()
    if size > MOST_LENT:
        return torch.empty_like(x)
    if _lent.memory.numel() < size:
        _lent.memory = torch.empty(size, dtype=torch.uint8, device="cpu")
    return _lent.memory[:size].view(x.dtype).view(x.shape)


def _call(
    x: Tensor,
    a: Tensor | None,
    dim: int,
    bias: Tensor | None,
    scale: Tensor | None,
    y: Tensor | None,
    relu: bool,
    summed: bool = True,
) -> tuple[Tensor, Tensor]:
    channels = x.shape[dim]
    positions = math.prod(x.shape[dim % x.ndim + 1 :])  # one channel's stride may be anything
    total = torch.empty(2, channels, dtype=torch.float64, device="cpu")
    per_channel = [None if t is None else t.to(x.dtype).contiguous() for t in (bias, scale)]
    pointers = [None if t is None else t.data_ptr() for t in (x, a, *per_channel, y, *total)]
    images = x.numel() // (channels * positions)
    threads = min(torch.get_num_threads(), channels, x.numel() // NUMBERS_PER_THREAD + 1)
    wide = x.dtype == torch.float64
    _library()(*pointers, images, channels, positions, wide, relu, summed, threads)
    return tuple(total.to(x.dtype))


@functools.cache
def available() -> bool:
    """Whether the C code could be compiled and loaded, and computes a small case right."""
    try:
        _check()
    except (OSError, subprocess.SubprocessError, AttributeError, RuntimeError) as error:
        _log.info("no C passes on this machine, plain torch instead: %s", error)
        return False
    return True


def _check() -> None:
    x = torch.arange(-20.0, 20.0, device="cpu").view(2, 2, 10)
    y, _ = rectify(x, 1, None, None, True, False, True)
    grad, by_bias, _ = rectify_backward(x, y, 1, None, None)
    expected = x.relu()
    right = torch.equal(y, expected) and torch.equal(sums(y, 1), expected.sum((0, 2)))
    if not (right and torch.equal(grad, expected) and torch.equal(by_bias, sums(y, 1))):
        raise RuntimeError("its results differ from plain torch's")


@functools.cache
def _library() -> Callable[..., None]:
    run = ctypes.CDLL(str(native.binary(_SOURCE, FLAGS))).geoparam_columns
    run.restype = None
    run.argtypes = (*[ctypes.c_void_p] * 7, *[ctypes.c_int64] * 3, *[ctypes.c_int] * 4)
    return run
