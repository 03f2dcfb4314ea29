"""Weights that are computed once, where a user asks for it; nothing else is ever remembered."""

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor, nn

Model = TypeVar("Model", bound=nn.Module)

_LOCK = threading.Lock()


class Memory:
    """A layer's weight and what it was computed from, while `remembered` is active."""

    def __init__(self) -> None:
        self.value: tuple[Tensor, Tensor, Tensor] | None = None
        self.users = 0

    def __reduce__(self) -> tuple:
        return Memory, ()  # copies and pickles remember nothing


@contextmanager
def remembered(model: Model) -> Iterator[Model]:
    """Compute the weights of all GmP layers once, and use them until the context is left.

    For evaluation without gradients: where gradients are recorded, layers compute their weights
    as ever. Inside, parameters must not be written to: the weights in use would not change.
    Several threads may share a model, on CUDA streams of their own, and contexts may be nested. A
    CUDA graph that is captured inside computes its weights itself, so that it may be replayed
    outside. A model that is served for long is better folded.

    Example:
        >>> from geoparam import GmPLinear
        >>> model, x = nn.Sequential(GmPLinear(4, 8), nn.ReLU()), torch.randn(2, 4)
        >>> with torch.no_grad(), remembered(model):
        ...     y = model(x)
    """
    found = {module: getattr(module, "_remembered", None) for module in model.modules()}
    layers = {module: memory for module, memory in found.items() if isinstance(memory, Memory)}
    with _LOCK, torch.no_grad():
        for layer, memory in layers.items():
            if memory.users == 0:
                memory.value = layer._remember()  # type: ignore[operator]
            memory.users += 1
    _synchronise(layers)  # other streams may read the weights now
    try:
        yield model
    finally:
        _synchronise(layers)  # no stream reads memory that is freed
        with _LOCK:
            for memory in layers.values():
                memory.users -= 1
                if memory.users == 0:
                    memory.value = None


def _synchronise(layers: Iterable[nn.Module]) -> None:
    """Wait for the GPUs that hold the layers; not while a CUDA graph is captured."""
    for device in {p.device for layer in layers for p in layer.parameters() if p.is_cuda}:
        if not torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize(device)
