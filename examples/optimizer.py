"""A rate depends on how long the weights are; an angle does not.

    python examples/optimizer.py [--steps 120] [--seeds 3] [--out optimizer.png]

A small ResNet learns digits from two starts: torch's own, and the same with the weights of every
layer but the last made ten times longer. BatchNorm undoes the length, so both compute the same
function. At rates that suit the first start, SGD and AdamW turn longer weights too little. A turn
of 2.4 degrees is the same step from either start. Needs the extra: pip install '.[experiments]'
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import geoparam as gp
from geoparam import plots

METHODS = ("SGD, rate 0.1", "AdamW, rate 0.003", "Muon, turn 2.4 degrees")
LENGTHS = (1.0, 10.0)


class Block(nn.Module):
    """Two convolutions with BatchNorm beside a shortcut, as in torchvision's ResNet-18."""

    def __init__(self, n: int, m: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(n, m, 3, 2, 1, bias=False), nn.BatchNorm2d(m)
        self.conv2, self.bn2 = nn.Conv2d(m, m, 3, 1, 1, bias=False), nn.BatchNorm2d(m)
        self.shortcut = nn.Sequential(nn.Conv2d(n, m, 1, 2, bias=False), nn.BatchNorm2d(m))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


def build(length: float, seed: int) -> nn.Module:
    """Return the network with all convolutions scaled; BatchNorm follows each of them."""
    torch.manual_seed(seed)
    stem = [nn.Conv2d(1, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)]
    model = nn.Sequential(*stem, Block(16, 32), Block(32, 64), *head)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Conv2d):
                module.weight.mul_(length)
    return model


def make_optimizer(model: nn.Module, method: str) -> torch.optim.Optimizer:
    if method.startswith("SGD"):
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if method.startswith("AdamW"):
        return torch.optim.AdamW(model.parameters(), lr=3e-3)
    return gp.GeometricOptimizer(model, torch.optim.Muon, turn=2.4, lr=3e-3)


def train(
    method: str, length: float, seed: int, steps: int, x: Tensor, y: Tensor
) -> list[tuple[int, float]]:
    """Return the test accuracy in percent every ten steps."""
    model = build(length, seed)
    optimizer = make_optimizer(model, method)
    warmup = max(1, steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda k: min((k + 1) / warmup, (steps - k) / (steps - warmup + 1))
    )
    generator = torch.Generator().manual_seed(seed)
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
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("optimizer.png"))
    given = parser.parse_args(arguments)
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    x = torch.tensor(digits.images / 16, dtype=torch.float32)[order, None]
    y = torch.tensor(digits.target)[order]

    figure, axes = plots.new_figure(1, 2, size=(10, 4))
    for ax, length in zip(axes[0], LENGTHS, strict=True):
        for number, method in enumerate(METHODS):
            curves = np.array(
                [train(method, length, seed, given.steps, x, y) for seed in range(given.seeds)]
            )
            steps, accuracies = curves[0, :, 0], curves[:, :, 1]
            ax.plot(steps, accuracies.T, color=f"C{number}", lw=1)
            ax.plot([], color=f"C{number}", label=method)
            ends = " ".join(f"{accuracy:5.1f}" for accuracy in accuracies[:, -1])
            print(f"weights x {length:<4g} {method:23} test accuracy {ends} %")
        ax.set(xlabel="step", ylabel="test accuracy, %", ylim=(0, 100))
        ax.set_title("torch's start" if length == 1 else f"weights {length:g} times longer")
    axes[0, 1].legend(frameon=False)
    figure.savefig(given.out, dpi=120)


if __name__ == "__main__":
    main()
