"""Take BatchNorm out of a trained network, and fine-tune it at batch size 2.

    python examples/pretrained.py [--steps 200] [--out pretrained.png]

A CNN with nine BatchNorms learns digits at batch 64, and then digits upside down at batch 2, in
five ways. `verify` shows that taking BatchNorm out does not change the function. This has one
seed; notebooks/small_batch.md has three, and docs/pretrained.md a pretrained MobileNetV2. Needs
the extra: pip install '.[experiments]'
"""

import argparse
import copy
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import geoparam as gp
from geoparam import plots

RATES = (0.001, 0.003, 0.01)
METHODS = ("BN", "BN in evaluation mode", "fold", "frozen means", "imn")


def build() -> nn.Module:
    torch.manual_seed(0)
    channels = [1, 16] + [32] * 8
    layers: list[nn.Module] = []
    for i in range(9):
        n, m = channels[i], channels[i + 1]
        conv = nn.Conv2d(n, m, 3, stride=2 if i == 1 else 1, padding=1, bias=False)
        layers += [conv, nn.BatchNorm2d(m), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


def take_out(model: nn.Module, method: str, x: Tensor) -> nn.Module:
    """Treat the network's BatchNorms as the method says."""
    if method == "fold":
        gp.convert_(model, norm="fold", weights="plain", example_inputs=x)
    if method in ("frozen means", "imn"):
        gp.convert_(model, norm="imn", weights="plain", example_inputs=x)
    if method == "frozen means":
        gp.freeze_means_(model)
    return model


def train(
    model: nn.Module, x: Tensor, y: Tensor, lr: float, batch: int, steps: int, hold: bool = False
) -> None:
    """Train with SGD; `hold` keeps BatchNorm in evaluation mode."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    warmup = max(1, steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda k: min((k + 1) / warmup, (steps - k) / (steps - warmup + 1))
    )
    model.train()
    for module in model.modules():
        if hold and isinstance(module, nn.BatchNorm2d):
            module.eval()

    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        chosen = torch.randint(len(x), (batch,), generator=generator)
        loss = nn.functional.cross_entropy(model(x[chosen]), y[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


@torch.no_grad()
def measure_accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    return 100 * (model.eval()(x).argmax(1) == y).float().mean().item()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path("pretrained.png"))
    given = parser.parse_args(arguments)
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    x = torch.tensor(digits.images / 16, dtype=torch.float32)[order, None]
    y = torch.tensor(digits.target)[order]
    pretrained = build()
    train(pretrained, x[:900], y[:900], lr=0.1, batch=64, steps=given.steps)

    x = x.flip(2)
    print("fine-tuned at batch 2, accuracy on test images (%) by rate")
    print(f"{'':22}", *(f"{rate:>7g}" for rate in RATES), " changed by")
    figure, axes = plots.new_figure(1, 1, size=(6, 4))
    for method in METHODS:
        start = take_out(copy.deepcopy(pretrained), method, x[900:964])
        difference = gp.verify(pretrained, start, x[900:964])
        accuracies = []
        for rate in RATES:
            model = copy.deepcopy(start)
            hold = method == "BN in evaluation mode"
            train(model, x[900:1200], y[900:1200], rate, 2, given.steps, hold)
            accuracies.append(measure_accuracy(model, x[1200:], y[1200:]))
        print(f"{method:22}", *(f"{each:7.1f}" for each in accuracies), f"  {difference:.0e}")
        axes[0, 0].plot(RATES, accuracies, marker="o", label=method)
    axes[0, 0].set(xscale="log", xlabel="learning rate", ylabel="test accuracy (%)")
    axes[0, 0].legend(frameon=False)
    figure.savefig(given.out, dpi=120)


if __name__ == "__main__":
    main()
