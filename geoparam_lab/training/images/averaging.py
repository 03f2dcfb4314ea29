"""A moving average of a model's state along one run, and the model seen with it.

Weights and the norms' running statistics are averaged together, since these belong to those
weights. Averages of unit vectors are shorter than 1, which does not change what they compute.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn


class Average:
    """The exponential moving average of all floating-point parameters and buffers.

    Build it when the model is on its device, sharded or not. `decay` is the share of the average
    that stays in each step.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model, self.decay = model, decay
        # Two lists, since FSDP2's parameters are DTensors and buffers are not.
        self._live = [
            [parameter.detach() for parameter in model.parameters()],
            [buffer for buffer in model.buffers() if buffer.is_floating_point()],
        ]
        self._average = [[tensor.clone() for tensor in tensors] for tensors in self._live]

    @torch.no_grad()
    def update(self) -> None:
        """Add the model's present state to the average."""
        for average, live in zip(self._average, self._live, strict=True):
            if live:
                torch._foreach_lerp_(average, live, 1 - self.decay)

    def restart(self) -> None:
        """Let the model's present state be the average."""
        _copy(self._average, self._live)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the model hold the average within the context; its own state is restored after."""
        kept = [[tensor.clone() for tensor in tensors] for tensors in self._live]
        _copy(self._live, self._average)
        try:
            yield
        finally:
            _copy(self._live, kept)
            _reshard(self.model)


@torch.no_grad()
def _copy(to: list[list[torch.Tensor]], values: list[list[torch.Tensor]]) -> None:
    for tensors, theirs in zip(to, values, strict=True):
        for tensor, value in zip(tensors, theirs, strict=True):
            tensor.copy_(value)


def _reshard(model: nn.Module) -> None:
    """Free the whole parameters that FSDP2's root keeps after a forward pass: of the average."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
