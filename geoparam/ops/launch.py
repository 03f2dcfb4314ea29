"""Launch a Triton kernel over and over with as little Python as can be.

Triton's own launch looks at every argument anew, to choose among the variants it has compiled:
some 20 us, more than a small weight takes to compute. A `Launch` holds one kernel with all its
numbers, so only addresses change from call to call: it remembers the variant that Triton chose at
first, on each device, and calls that, without the hooks that only Triton's own profiler sets.
Addresses off 16 bytes, which want another variant, and Triton's interpreter, which compiles
nothing, take the ordinary way.

In a compiler's trace nothing runs: `traced` leaves the kernel in the graph instead, from where
inductor launches it as it does its own.
"""

import contextlib
import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_ALIGNMENT = 16  # bytes; what Triton distinguishes

Types = tuple[torch.dtype | None, ...]


def dtypes_of(*tensors: Tensor | None) -> Types:
    """Return what a kernel is compiled for, beside its numbers."""
    return tuple([None if x is None else x.dtype for x in tensors])


def image(size: tuple[int, ...], like: Tensor) -> Tensor:
    """Return memory for images with their channels last.

    By torch.empty: what is asked for by a layout, inductor fills with zeros, and what is asked for
    by strides, older compilers take for the same memory as any other of this size, and copy.
    """
    images, channels, height, width = size
    memory = torch.empty((images, height, width, channels), dtype=like.dtype, device=like.device)
    return memory.permute(0, 3, 1, 2)


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

    def traced(self, *tensors: Tensor) -> None:
        """Put the kernel into the graph that is being traced."""
        warps = self.options["num_warps"]  # inductor drops all other options
        kernel = torch.library.wrap_triton(self.kernel)
        kernel[self.grid](*tensors, *self.arguments, num_warps=warps)

    def __call__(self, *tensors: Tensor) -> None:
        device = tensors[0].get_device()
        run = self._runs.get(device)
        if run is None or (device >= 0 and device != _current_device()):
            return self._launch(device, tensors)
        addresses = [x.data_ptr() for x in tensors]
        if functools.reduce(operator.or_, addresses) % _ALIGNMENT:
            return self._launch(device, tensors)
        run(*addresses, *self.arguments)

    def _launch(self, device: int, tensors: tuple[Tensor, ...]) -> None:
        """Launch by Triton, and remember what it chose for aligned addresses."""
        with torch.cuda.device(device) if device >= 0 else contextlib.nullcontext():
            variant = self.kernel[self.grid](*tensors, *self.arguments, **self.options)
        aligned = all(x.data_ptr() % _ALIGNMENT == 0 for x in tensors)
        if aligned and hasattr(variant, "packed_metadata"):  # the interpreter returns nothing
            self._runs[device] = _runner(variant, self.grid, device)


def _runner(variant: Any, grid: tuple[int, int, int], device: int) -> Callable[..., None]:
    """Return a function that launches the variant on the current stream of its device."""
    from triton.runtime import driver

    run, function, metadata = variant.run, variant.function, variant.packed_metadata
    stream_of, (x, y, z) = driver.active.get_current_stream, grid

    def launch(*arguments: int) -> None:
        run(x, y, z, stream_of(device), function, metadata, None, None, None, *arguments)

    return launch


# Without the check that CUDA is initialised: a tensor is on a GPU already.
_current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
