"""Train a small ResNet on digits: SGD, the same SGD with geometry, and Muon with a turn.

    python examples/optimizer.py [--steps 120] [--out optimizer.png]

The model is plain in all three runs; only the optimizer differs. All have the same schedule, a
linear warmup and a linear fall. Needs the extra: pip install '.[experiments]'
"""

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import geoparam as gp
from geoparam import plots


class Block(nn.Module):
    """Two convolutions with BatchNorm beside a shortcut, as in torchvision's ResNet-18."""

    def __init__(self, n: int, m: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(n, m, 3, 2, 1, bias=False), nn.BatchNorm2d(m)
        self.conv2, self.bn2 = nn.Conv2d(m, m, 3, 1, 1, bias=False), nn.BatchNorm2d(m)
        self.shortcut = nn.Conv2d(n, m, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


def build() -> nn.Module:
    torch.manual_seed(0)
    stem = [nn.Conv2d(1, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    blocks = [Block(16, 32), Block(32, 64)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def make_optimizer(model: nn.Module, name: str) -> torch.optim.Optimizer:
    if name == "SGD":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if name == "geometric SGD":
        return gp.GeometricOptimizer(model, torch.optim.SGD, lr=0.1, momentum=0.9)
    return gp.GeometricOptimizer(model, torch.optim.Muon, turn=2.4, lr=1e-2)


def train(name: str, steps: int, x: Tensor, y: Tensor) -> list[tuple[int, float]]:
    """Return the test accuracy in percent every ten steps."""
    model = build()
    optimizer = make_optimizer(model, name)
    warmup = max(1, steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda k: min((k + 1) / warmup, (steps - k) / steps)
    )
    generator = torch.Generator().manual_seed(0)
    curve = []
    for step in range(1, steps + 1):
        batch = torch.randint(1200, (64,), generator=generator)
        loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 10 == 0 or step == steps:
            model.eval()
            with torch.no_grad():
                right = model(x[1200:]).argmax(1) == y[1200:]
            curve.append((step, 100 * right.float().mean().item()))
            model.train()
    return curve


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--out", type=Path, default=Path("optimizer.png"))
    given = parser.parse_args(arguments)
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    x = torch.tensor(digits.images / 16, dtype=torch.float32)[order, None]
    y = torch.tensor(digits.target)[order]

    figure, axes = plots.new_figure(1, 1, size=(6, 4))
    for name in ("SGD", "geometric SGD", "Muon, 2.4 degrees"):
        curve = train(name, given.steps, x, y)
        axes[0, 0].plot(*zip(*curve, strict=True), label=name)
        print(f"{name:18} test accuracy {curve[-1][1]:.1f} % after {given.steps} steps")
    axes[0, 0].set(xlabel="step", ylabel="test accuracy, %", ylim=(80, 100))
    axes[0, 0].set_title("A small ResNet on digits", loc="left")
    axes[0, 0].legend(frameon=False)
    figure.savefig(given.out, dpi=120)


if __name__ == "__main__":
    main()
