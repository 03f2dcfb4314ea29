"""The passes of `pooling` in C (pooling.c), for large activations on CPUs, compiled on first use.

`native` says where and how. It takes squares of 2x2 numbers in images of even sizes, float32 and
float64 in memory of the shape's own order, where torch's max pool compares one after the other.
"""

import ctypes
import functools
import logging
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from geoparam.ops import columns_native, native

_log = logging.getLogger(__name__)
_SOURCE = Path(__file__).with_name("pooling.c")
_LONGEST = 512  # squares in a row: BLOCK in pooling.c


def serves(x: Tensor, window: tuple[int, int, int]) -> bool:
    """Return whether this tensor and these windows are of a kind that the C code takes."""
    return (
        x.ndim == 4
        and columns_native.serves(x)
        and _is_squares(window, x.shape[2:])
        and x.shape[3] <= 2 * _LONGEST
        and available()
    )


def serves_backward(grad: Tensor, window: tuple[int, int, int], size: tuple[int, int]) -> bool:
    """Return the same for the gradient of what was pooled, which may lie in any way."""
    return (
        grad.is_cpu
        and grad.dtype in (torch.float32, torch.float64)
        and 4 * grad.numel() >= columns_native.SMALLEST
        and _is_squares(window, size)
        and size[1] <= 2 * _LONGEST
        and available()
    )


def _is_squares(window: tuple[int, int, int], size: Sequence[int]) -> bool:
    return window == (2, 2, 0) and all(length % 2 == 0 for length in size)


def pool(x: Tensor, window: tuple[int, int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the largest of each square, its place, and sums per channel; see `pooling`."""
    images, channels, height, width = x.shape
    y = x.new_empty(images, channels, height // 2, width // 2)
    place = torch.empty_like(y, dtype=torch.uint8)
    return y, place, _call(_library().geoparam_pool, (x, y, place), y)


def pool_backward(
    grad: Tensor,
    place: Tensor,
    grad_sums: Tensor | None,
    window: tuple[int, int, int],
    size: tuple[int, int],
) -> tuple[Tensor, Tensor]:
    """Return the gradient of x and its sums; see `pooling`."""
    grad = grad.contiguous()
    grad_x = grad.new_empty(*grad.shape[:2], *size)
    shift = None if grad_sums is None else grad_sums.to(grad.dtype).contiguous()
    tensors = grad, shift, place.contiguous(), grad_x
    return grad_x, _call(_library().geoparam_pool_backward, tensors, grad)


def _call(run: Callable[..., None], tensors: tuple[Tensor | None, ...], squares: Tensor) -> Tensor:
    """Run a function on tensors and the sums, which are returned."""
    total = torch.empty(squares.shape[1], dtype=torch.float64, device="cpu")
    pointers = [None if t is None else t.data_ptr() for t in (*tensors, total)]
    threads = min(
        torch.get_num_threads(), 4 * squares.numel() // columns_native.NUMBERS_PER_THREAD + 1
    )
    run(*pointers, *squares.shape, squares.dtype == torch.float64, threads)
    return total.to(squares.dtype)


@functools.cache
def available() -> bool:
    """Whether the C code could be compiled and loaded, and computes a small case right."""
    try:
        _check()
    except (OSError, subprocess.SubprocessError, AttributeError, RuntimeError) as error:
        _log.info("no C max pool on this machine, torch's instead: %s", error)
        return False
    return True


def _check() -> None:
    x = torch.arange(48.0, device="cpu").mul(7).remainder(11).view(2, 1, 4, 6)
    y, place, sums = pool(x, (2, 2, 0))
    grad_x, _ = pool_backward(y, place, None, (2, 2, 0), (4, 6))
    expected, index = F.max_pool2d(x, 2, return_indices=True)
    back = F.max_unpool2d(expected, index, (2, 2))
    right = torch.equal(y, expected) and torch.equal(sums, expected.sum((0, 2, 3)))
    if not (right and torch.equal(grad_x, back)):
        raise RuntimeError("its results differ from torch's")


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(native.binary(_SOURCE, columns_native.FLAGS)))
    numbers = *[ctypes.c_int64] * 4, ctypes.c_int, ctypes.c_int
    library.geoparam_pool.argtypes = (*[ctypes.c_void_p] * 4, *numbers)
    library.geoparam_pool_backward.argtypes = (*[ctypes.c_void_p] * 5, *numbers)
    library.geoparam_pool.restype = library.geoparam_pool_backward.restype = None
    return library
