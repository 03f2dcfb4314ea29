"""The ways to train a network without BatchNorm, and networks whose BatchNorms have seen data."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import geoparam as gp

CHOICES: dict[str, dict[str, Any]] = {
    "imn": {"norm": "imn"},
    "imn plain": {"norm": "imn", "weights": "plain"},
    "fold": {"norm": "fold"},
    "fold plain": {"norm": "fold", "weights": "plain"},
    "frozen": {"norm": "imn", "weights": "plain"},
}
choices = pytest.mark.parametrize("choice", CHOICES)


def remove_batchnorm(model: nn.Module, choice: str, *inputs: Any) -> nn.Module:
    model = gp.convert_(model, example_inputs=inputs, **CHOICES[choice])
    return gp.freeze_means_(model) if choice == "frozen" else model


def show_batches(model: nn.Module, shape: tuple[int, ...]) -> nn.Module:
    """Give BatchNorms random scales and offsets, and the statistics of three random batches."""
    for norm in batch_norms(model):
        nn.init.uniform_(norm.weight, 0.5, 1.5)
        nn.init.normal_(norm.bias, std=0.2)
    with torch.no_grad():
        for _ in range(3):
            model.train()(torch.randn(shape))
    return model


def batch_norms(model: nn.Module) -> list[Any]:
    kind = nn.modules.batchnorm._BatchNorm
    return [module for module in model.modules() if isinstance(module, kind)]


def build_optimizer(model: nn.Module, choice: str, lr: float = 1e-3) -> torch.optim.Optimizer:
    """Layers that hold r and directions have their groups; plain weights GeometricOptimizer."""
    if "weights" in CHOICES[choice]:
        return gp.GeometricOptimizer(model, torch.optim.SGD, lr=lr)
    return torch.optim.SGD(gp.param_groups(model, lr=lr, kind="sgd"))


def loss_of(outputs: Any) -> Tensor:
    """The mean square of a tensor, or of all in a mapping or list."""
    if isinstance(outputs, dict):
        outputs = list(outputs.values())
    if isinstance(outputs, list | tuple):
        return torch.stack([loss_of(output) for output in outputs]).sum()
    return outputs.square().mean()
