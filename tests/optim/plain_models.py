"""Small plain models and short trainings of them, shared by the tests of the optimizer."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import geoparam as gp

SGD = {"base": torch.optim.SGD, "lr": 0.05, "momentum": 0.9}
ADAM = {"base": torch.optim.Adam, "lr": 3e-3}


def mlp(dtype: torch.dtype = torch.float64, norm: Callable[[int], nn.Module] = nn.Identity) -> Any:
    """Return an MLP with two layers of units and an output layer, the same in every call."""
    torch.manual_seed(1)
    first, second = nn.Linear(6, 8), nn.Linear(8, 7)
    first.bias.data /= 2  # below the rows' lengths, so that all of them are kept as distances
    layers = (first, norm(8), nn.Tanh(), second, norm(7), nn.Tanh(), nn.Linear(7, 3))
    return nn.Sequential(*layers).to(dtype)


def cnn(dtype: torch.dtype = torch.float64, norm: Callable[[int], nn.Module] = nn.Identity) -> Any:
    """Return a CNN with two layers of units, one of them grouped, and an output layer."""
    torch.manual_seed(1)
    first, second = nn.Conv2d(2, 6, 3), nn.Conv2d(6, 8, 3, groups=2)
    body = (first, norm(6), nn.Tanh(), second, norm(8), nn.Tanh(), nn.Flatten())
    return nn.Sequential(*body, nn.Linear(32, 3)).to(dtype)


def batch(model: nn.Module, step: int) -> tuple[Tensor, Tensor]:
    """Return the inputs and labels of one step: the same for every model and run."""
    is_cnn = any("Conv2d" in type(module).__name__ for module in model.modules())
    shape = (8, 2, 6, 6) if is_cnn else (8, 6)
    random = torch.Generator().manual_seed(step)
    x = torch.randn(shape, generator=random, dtype=torch.float64)
    return x.to(next(model.parameters()).dtype), torch.randint(3, (8,), generator=random)


def backward(model: nn.Module, step: int = 0, scale: float = 1.0) -> Tensor:
    """Compute the gradients of one step and return the loss."""
    x, y = batch(model, step)
    loss = F.cross_entropy(model(x).double(), y)
    model.zero_grad()
    (scale * loss).backward()
    return loss.detach()


def train(model: nn.Module, optimizer: Any, steps: int = 3, first: int = 0) -> list[float]:
    """Train on batches `first`, `first + 1`, ... and return the losses."""
    losses = []
    for step in range(first, first + steps):
        losses.append(backward(model, step).item())
        optimizer.step()
    return losses


def build(model: nn.Module, base: Any = torch.optim.SGD, **options: Any) -> gp.GeometricOptimizer:
    return gp.GeometricOptimizer(model, base, **{"lr": 0.05, **options})


def rows(layer: nn.Module) -> Tensor:
    return layer.weight.detach().flatten(1).clone()


def assert_same_weights(model: nn.Module, other: nn.Module, tolerance: float = 0.0) -> None:
    """The two have equal parameters, with tolerance 0 bit for bit."""
    expected = dict(other.named_parameters())
    for name, p in model.named_parameters():
        torch.testing.assert_close(
            p, expected[name], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )
