"""A model that is written as a function."""

from collections.abc import Callable
from typing import Any

from torch import nn


class FunctionModel(nn.Module):
    """Holds the given modules; its forward is a function of the model and its inputs."""

    def __init__(self, function: Callable, **members: nn.Module | nn.Parameter) -> None:
        super().__init__()
        for name, member in members.items():
            setattr(self, name, member)
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)
