"""Launch a Triton kernel over and over with as little Python as can be.

Triton's own launch looks at every argument anew, to choose among the variants it has compiled:
some 20 us, more than a small weight takes to compute. A `Launch` holds one kernel with all its
numbers, so only addresses change from call to call: it remembers the variant that Triton chose at
first, on each device, and calls that. Addresses off 16 bytes, which want another variant, and
Triton's interpreter, which compiles nothing, take the ordinary way.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_ALIGNMENT = 16  # bytes; what Triton distinguishes


class Launch:
    """A kernel, its grid, all its arguments but the tensors, which come first, and options."""

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, int, int],
        arguments: tuple[Any, ...],
        warps: int,
        **options: int,
    ) -> None:
        self.kernel = kernel
        self.grid = grid
        self.arguments = arguments
        self.options = {"num_warps": warps, **options}
        self._runs: dict[int, Callable[..., None]] = {}  # by device, where the code was loaded

    def __call__(self, *tensors: Tensor) -> None:
        device = tensors[0].get_device()
        if device < 0 or device == torch.cuda.current_device():
            return self._launch(device, tensors)
        with torch.cuda.device(device):
            self._launch(device, tensors)

    def _launch(self, device: int, tensors: tuple[Tensor, ...]) -> None:
        addresses = [x.data_ptr() for x in tensors]
        aligned = functools.reduce(operator.or_, addresses) % _ALIGNMENT == 0
        if aligned and device in self._runs:
            return self._runs[device](*addresses, *self.arguments)
        variant = self.kernel[self.grid](*tensors, *self.arguments, **self.options)
        if aligned and hasattr(variant, "__getitem__"):  # the interpreter returns nothing
            self._runs[device] = variant[self.grid]
