"""Small networks under every parameterization, and a training loop, for the tracker's tests."""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import geoparam as gp
from geoparam.analysis import SReLU
from geoparam.analysis.history import History

TYPE = torch.float64
ZEROS = torch.zeros(2, 3, dtype=TYPE)


def linear(n: int, out: int) -> nn.Linear:
    return nn.Linear(n, out, dtype=TYPE)


def gmp(n: int, out: int, **options: object) -> gp.GmPLinear:
    return gp.GmPLinear(n, out, dtype=TYPE, **options)


def signed(layer: nn.Module) -> nn.Module:
    """Give some units a negative scale, which turns an inside direction around."""
    for name in ("r", "weight"):
        if isinstance(scale := layer._parameters.get(name), nn.Parameter) and scale.ndim == 1:
            scale.data[::3] *= -1
    return layer


NETWORKS: dict[str, Callable[[], list[nn.Module]]] = {
    "sp": lambda: [linear(3, 8), nn.ReLU()],
    "wn": lambda: [weight_norm(linear(3, 8)), nn.LeakyReLU()],
    "bn": lambda: [linear(3, 8), signed(nn.BatchNorm1d(8, dtype=TYPE)), nn.ReLU()],
    "ln": lambda: [linear(3, 8), nn.LayerNorm(8, bias=False, dtype=TYPE), nn.ReLU()],
    "gmp inside": lambda: [signed(gmp(3, 8)), nn.ELU()],
    "gmp outside": lambda: [signed(gmp(3, 8, activation=torch.relu))],
    "intrinsic": lambda: [signed(gmp(3, 8, coordinates="intrinsic")), nn.PReLU(dtype=TYPE)],
    "imn": lambda: [gmp(3, 8, input_norm=True), nn.ReLU()],
    "two breakpoints": lambda: [linear(3, 8), nn.Hardtanh(-0.5, 2.0)],
    "learned breakpoints": lambda: [linear(3, 8), SReLU(8, dtype=TYPE)],
}


def network(name: str) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*NETWORKS[name](), linear(8, 1))


def record(model: nn.Module, **options: object) -> History:
    """Return what a tracker of the model records in one step."""
    tracker = gp.BoundaryTracker(model, **options)
    tracker.step()
    return tracker.history


def train(
    model: nn.Module, steps: int, after: Callable[[], None] = lambda: None, seed: int = 1
) -> list[float]:
    torch.manual_seed(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5)
    losses = []
    for _ in range(steps):
        x = torch.randn(16, 3, dtype=TYPE)
        loss = (model(x).squeeze(-1) - x.sin().sum(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        after()
    return losses
