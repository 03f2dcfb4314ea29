"""Replay a function's kernels: on a GPU, hundreds of small ones cost Python more than the device.

A ResNet-50 needs some 700 kernels for one record. Launching them from Python took 15 ms on the
host of an H200, which is idle for 13 of these; a CUDA graph launches them in one call.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

Result = TypeVar("Result")


class Replayed(Generic[Result]):
    """A function of tensors that stay where they are, called by replaying its kernels.

    The function takes nothing and must do the same every time: read the tensors of `modules`,
    change its own state in place, and return tensors; these hold a result until the next call.
    The first call runs it, the second captures it. Where a tensor has moved, or a module has got
    another one, it begins anew. On a CPU, and for parameters in pieces, it is just called.

    Example:
        >>> layer = nn.Linear(2, 1, bias=False)
        >>> double = Replayed(lambda: 2 * layer.weight.detach(), [layer])
        >>> _ = nn.init.ones_(layer.weight)
        >>> double()
        tensor([[2., 2.]])
    """

    def __init__(self, function: Callable[[], Result], modules: Iterable[nn.Module]) -> None:
        self._function = function
        inner = dict.fromkeys(part for module in modules for part in module.modules())
        self._holders: list[Mapping[str, Tensor | None]] = [
            held for module in inner for held in (module._parameters, module._buffers)
        ]
        tensors = [t for held in self._holders for t in held.values() if t is not None]
        whole = not any(hasattr(t, "full_tensor") for t in tensors)
        self._replayable = whole and bool(tensors) and all(t.is_cuda for t in tensors)
        self._places: tuple[int, ...] | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: Result | None = None

    def forget(self) -> None:
        """Begin anew with the next call."""
        self._places = self._graph = self._result = None

    def __call__(self) -> Result:
        if not self._replayable:
            return self._function()
        places = tuple(
            t.data_ptr() for held in self._holders for t in held.values() if t is not None
        )
        if places != self._places:
            self._places, self._graph = places, None
            return self._function()
        if self._graph is None:
            self._graph, self._result = torch.cuda.CUDAGraph(), None
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                self._result = self._function()
        self._graph.replay()
        assert self._result is not None
        return self._result
