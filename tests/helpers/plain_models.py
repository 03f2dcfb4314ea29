"""Small plain models, optimizers of all kinds for them, and short trainings."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import geoparam as gp

ADAM = {"base": torch.optim.Adam, "lr": 1e-2}
HALF = {**ADAM, "dtype": torch.bfloat16}
KINDS: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9},
    "Adam": ADAM,
    "Adagrad": {"base": torch.optim.Adagrad, "lr": 1e-2},
    "Muon": {"base": torch.optim.Muon, "lr": 1e-2},
    "angles": {**ADAM, "coordinates": "angles"},
    "turn": {"turn": 2.0, "momentum": 0.9},
    "bounded": {"max_turn": 2.0, "momentum": 0.9, "coordinates": "angles"},
    "bfloat16": HALF,
    "bfloat16 angles": {**HALF, "coordinates": "angles"},
    "bfloat16 turn": {**HALF, "turn": 2.0},
}
every_kind = pytest.mark.parametrize("kind", KINDS)
both_coordinates = pytest.mark.parametrize("coordinates", ["intrinsic", "angles"])


def mlp(dtype: torch.dtype = torch.float64, norm: Any = nn.Identity) -> nn.Sequential:
    """Return the same MLP in every call: layers 0 and 3 have units, 6 is the output layer."""
    torch.manual_seed(1)
    inner = [nn.Linear(6, 8), norm(8), nn.Tanh(), nn.Linear(8, 7), norm(7), nn.Tanh()]
    inner[0].bias.data /= 2  # below the rows' lengths, so that all are kept as distances
    return nn.Sequential(*inner, nn.Linear(7, 3)).to(dtype)


def cnn(dtype: torch.dtype = torch.float64, norm: Any = nn.Identity) -> nn.Sequential:
    """Return the same CNN in every call: 0 and 3, a grouped layer, have units."""
    torch.manual_seed(1)
    inner = [nn.Conv2d(2, 6, 3), norm(6), nn.Tanh(), nn.Conv2d(6, 8, 3, groups=2), norm(8)]
    return nn.Sequential(*inner, nn.Tanh(), nn.Flatten(), nn.Linear(32, 3)).to(dtype)


def build(model: nn.Module, base: Any = torch.optim.SGD, **options: Any) -> gp.GeometricOptimizer:
    return gp.GeometricOptimizer(model, base, **{"lr": 0.05, **options})


def start(kind: str, make: Any = mlp, **others: Any) -> tuple[nn.Sequential, Any]:
    options = {**KINDS[kind], **others}
    model = make(options.pop("dtype", torch.float64))
    return model, build(model, **options)


def backward(model: nn.Module, step: int = 0, scale: float = 1.0) -> Tensor:
    """Compute the gradients on the batch of this step, the same for every model and run."""
    random = torch.Generator().manual_seed(step)
    if hasattr(model, "config"):
        tokens = torch.randint(20, (4, 6), generator=random)
        loss = model(tokens, labels=tokens[:, 0] % 3 if hasattr(model, "bert") else tokens).loss
    else:
        is_cnn = any("Conv2d" in type(module).__name__ for module in model.modules())
        shape = (8, 3, 32, 32) if hasattr(model, "fc") else (8, 2, 6, 6) if is_cnn else (8, 6)
        x = torch.randn(shape, generator=random, dtype=torch.float64)
        y = torch.randint(3, (8,), generator=random)
        loss = nn.functional.cross_entropy(model(x.to(next(model.parameters()).dtype)).double(), y)
    model.zero_grad()
    (scale * loss).backward()
    return loss.detach()


def train(model: nn.Module, optimizer: Any, steps: int = 3, first: int = 0) -> list[Tensor]:
    losses = []
    for step in range(first, first + steps):
        losses.append(backward(model, step))
        optimizer.step()
    return losses


def assert_same_training(one: tuple[Any, Any], other: tuple[Any, Any]) -> None:
    """Go on with two models and their optimizers, and assert that their weights are the same."""
    for pair in (one, other):
        train(*pair, first=3)
    assert_same_weights(one[0], other[0])


def rows(layer: nn.Module) -> Tensor:
    return layer.weight.detach().flatten(1).clone()


def assert_same_weights(model: nn.Module, other: nn.Module, tolerance: float = 0.0) -> None:
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        difference = (p - q).abs().max().item()
        assert difference <= tolerance, f"{name} differs by {difference}"
