"""Replay a function's kernels as one CUDA graph.

A record of a ResNet-50 needs some 700 small kernels. Launching them from Python took 15 ms on the
host of an H200, and their work 2 ms of the device.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

Result = TypeVar("Result")


class GraphReplay(Generic[Result]):
    """Calls a function of tensors that stay in place by replaying its kernels.

    The function takes no arguments and must do the same every time: read the tensors of `modules`,
    change its own state in place, and return tensors, which the next call overwrites. The first
    call runs it, the second captures it. If a tensor has moved or was replaced, capture starts
    again. On a CPU, and for sharded parameters, it is just called.
    """

    def __init__(self, function: Callable[[], Result], modules: Iterable[nn.Module]) -> None:
        self._function = function
        inner = dict.fromkeys(part for module in modules for part in module.modules())
        self._holders: list[Mapping[str, Tensor | None]] = [
            held for module in inner for held in (module._parameters, module._buffers)
        ]
        tensors = self._tensors()
        whole = not any(hasattr(t, "full_tensor") for t in tensors)
        self._can_replay = whole and bool(tensors) and all(t.is_cuda for t in tensors)
        self._places: list[int] | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: Result | None = None

    def _tensors(self) -> list[Tensor]:
        return [t for held in self._holders for t in held.values() if t is not None]

    def __call__(self) -> Result:
        if not self._can_replay:
            return self._function()
        places = [t.data_ptr() for t in self._tensors()]
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
