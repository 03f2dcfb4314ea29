"""The functions of `rows` in C (rows.c), compiled on first use: one call for all rows."""

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from geoparam.kernels import loader
from geoparam.kernels.rows import Matrices, Rows, addresses

_ELEMENTS_PER_CHUNK = 1 << 14
_FUNCTIONS = {"enter": 0, "leave": 1, "measure": 2, "rotate": 3}


class _Job(ctypes.Structure):
    """As in rows.c."""

    _fields_ = [
        ("chunks", ctypes.c_void_p),
        ("widths", ctypes.c_void_p),
        ("operand", ctypes.c_void_p * 3),
        ("per_row", ctypes.c_void_p * 4),
        ("rescales", ctypes.c_int),
    ]


class NativeRows(Rows):
    """Rows on a CPU, by the C functions."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        chunks = _chunks(self.counts, self.widths)
        self.chunks = torch.tensor(chunks, dtype=torch.int64, device="cpu")
        self.column_counts = torch.tensor(self.widths, dtype=torch.int64, device="cpu")
        self.pointers = ctypes.c_void_p * len(self.counts)

    def _run(
        self, name: str, operands: Sequence[Matrices], per_row: Sequence[Tensor], **options: bool
    ) -> None:
        job = _Job(self.chunks.data_ptr(), self.column_counts.data_ptr())
        arrays = [self.pointers(*addresses(matrices)) for matrices in operands]
        for i, array in enumerate(arrays):
            job.operand[i] = ctypes.addressof(array)
        for i, tensor in enumerate(per_row):
            job.per_row[i] = tensor.data_ptr()
        job.rescales = options.get("rescales", False)
        threads = min(torch.get_num_threads(), len(self.chunks))
        wide = self.dtype == torch.float64
        _library()(_FUNCTIONS[name], wide, threads, len(self.chunks), ctypes.byref(job))


@functools.cache
def _library() -> Callable[..., None]:
    run = loader.load("rows").geoparam_rows
    run.restype = None
    run.argtypes = (*[ctypes.c_int] * 3, ctypes.c_int64, ctypes.c_void_p)
    return run


def _chunks(counts: Sequence[int], widths: Sequence[int]) -> list[tuple[int, int, int, int]]:
    """Return (matrix, first row there, number of rows, flat number of the first) of each chunk."""
    chunks, row = [], 0
    for matrix, (count, width) in enumerate(zip(counts, widths, strict=True)):
        size = max(1, _ELEMENTS_PER_CHUNK // width)
        for first in range(0, count, size):
            chunks.append((matrix, first, min(size, count - first), row + first))
        row += count
    return chunks
