"""Take BatchNorm out of a trained network, and fine-tune it at batch size 2.

    python examples/pretrained.py [--steps 500] [--out pretrained.png]

A small CNN learns the digits 0 to 4 with BatchNorm and large batches. It is then fine-tuned on 5
to 9, two images at a time: with BatchNorm as it is, with BatchNorm in evaluation mode, and with
BatchNorm taken out in each of three ways. `verify` measures that taking it out changes nothing.
Needs the extra: pip install '.[experiments]'
"""

import argparse
import copy
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import geoparam as gp
from geoparam import plots

RATES = (0.001, 0.003, 0.01, 0.03)
METHODS = ("BN", "BN in eval mode", "imn", "frozen means", "fold", "fold, r and u apart")


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 5),
    )  # fmt: skip


def change(model: nn.Module, method: str, x: Tensor) -> nn.Module:
    """Do to the network's BatchNorms what the method says."""
    if method.startswith("fold"):
        gp.convert_(model, norm="fold", weights="plain", example_inputs=x)
    if method in ("imn", "frozen means"):
        gp.convert_(model, norm="imn", weights="plain", example_inputs=x)
    if method == "frozen means":
        gp.freeze_means_(model)
    return model


def fine_tune(model: nn.Module, method: str, x: Tensor, y: Tensor, lr: float, steps: int) -> None:
    """Train with SGD, two images at a time, while the rate falls to 0."""
    if method == "fold, r and u apart":
        optimizer: torch.optim.Optimizer = gp.GeometricOptimizer(
            model, torch.optim.SGD, lr=lr, momentum=0.9
        )
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    generator = torch.Generator().manual_seed(0)
    model.train()
    if method == "BN in eval mode":
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
    for _ in range(steps):
        batch = torch.randint(len(x), (2,), generator=generator)
        loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


@torch.no_grad()
def find_accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    return 100 * (model.eval()(x).argmax(1) == y).float().mean().item()


def pretrain(x: Tensor, y: Tensor, steps: int) -> nn.Module:
    """Return a network with BatchNorm, trained on batches of 64."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(steps):
        batch = torch.randint(len(x), (64,))
        loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--out", type=Path, default=Path("pretrained.png"))
    given = parser.parse_args(arguments)
    digits = load_digits()
    images = torch.tensor(digits.images / 16, dtype=torch.float32)[:, None]
    labels = torch.tensor(digits.target)
    known, new = labels < 5, labels >= 5
    pretrained = pretrain(images[known], labels[known], min(given.steps, 200))
    x, y = images[new], labels[new] - 5
    x_train, y_train, x_test, y_test = x[:300], y[:300], x[300:], y[300:]

    print("fine-tuned at batch 2, accuracy on test images (%) by rate")
    print(f"{'':20}", *(f"{rate:>7g}" for rate in RATES), " changed by")
    figure, axes = plots.new_figure(1, 1, size=(6, 4))
    for method in METHODS:
        start = change(copy.deepcopy(pretrained), method, x_train[:64])
        difference = gp.verify(pretrained, start, x_test)
        accuracies = []
        for rate in RATES:
            model = copy.deepcopy(start)
            fine_tune(model, method, x_train, y_train, rate, given.steps)
            accuracies.append(find_accuracy(model, x_test, y_test))
        print(f"{method:20}", *(f"{each:7.1f}" for each in accuracies), f"  {difference:.0e}")
        axes[0, 0].plot(RATES, accuracies, marker="o", label=method)
    axes[0, 0].set(xscale="log", xlabel="learning rate", ylabel="test accuracy (%)")
    axes[0, 0].legend(frameon=False)
    figure.savefig(given.out, dpi=120)


if __name__ == "__main__":
    main()
