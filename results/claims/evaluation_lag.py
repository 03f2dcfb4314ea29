"""How far evaluation is behind training mode, for several momenta of IMN's running means.

The running means do not change the training, so one training serves all momenta: batch means are
recorded, averaged with each momentum, and put into a copy of the network that is evaluated on 360
images of scikit-learn's digits. Training mode is the same copy on these images as one batch.
"""

import argparse
import copy
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import geoparam as gp
from geoparam.norm import TrackedMean
from geoparam_lab.tables.formats import Table

MOMENTA = (0.1, 0.2, 0.3, 0.5, 1.0)
STEPS = (*range(20, 161, 10), 1000)


def block(channels: int, units: int, stride: int = 1) -> list[nn.Module]:
    conv = nn.Conv2d(channels, units, 3, stride, padding=1, bias=False)
    return [conv, nn.BatchNorm2d(units), nn.ReLU()]


def three_convolutions() -> nn.Module:
    blocks = [*block(1, 16), *block(16, 32, 2), *block(32, 64, 2)]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def two_convolutions() -> nn.Module:
    blocks = [*block(1, 16), *block(16, 32)]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, 10))


def with_a_hidden_layer() -> nn.Module:
    blocks = [*block(1, 16), *block(16, 32), nn.MaxPool2d(2), *block(32, 32), nn.Flatten()]
    hidden = [nn.Linear(512, 64, bias=False), nn.BatchNorm1d(64), nn.ReLU()]
    return nn.Sequential(*blocks, *hidden, nn.Linear(64, 10))


def load() -> tuple[Tensor, Tensor]:
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    return images[order], torch.tensor(digits.target)[order]


def measure_accuracy(model: nn.Module, x: Tensor, y: Tensor, training: bool = False) -> float:
    model.train(training)
    with torch.no_grad():
        return 100 * (model(x).argmax(1) == y).float().mean().item()


def find_norms(model: nn.Module) -> list[TrackedMean]:
    return [module for module in model.modules() if isinstance(module, TrackedMean)]


def compare(
    build: Callable[[], nn.Module], weights: str, batch: int, seed: int, steps: tuple[int, ...]
) -> Iterator[tuple[int, str, float]]:
    """Yield the step, the average, and points of accuracy by which it is below training mode."""
    torch.manual_seed(seed)
    (x, test_x), (y, test_y) = (values.tensor_split([-360]) for values in load())
    model = gp.convert_(build(), norm="imn", weights=weights, init="glorot", example_inputs=x[:8])
    norms = find_norms(model)
    for norm in norms:
        norm.momentum = 1.0  # the running mean is the last batch's
    averages = {m: [torch.zeros_like(n.running_mean) for n in norms] for m in MOMENTA}

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(1, max(steps) + 1):
        rows = torch.randint(len(x), (batch,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
        for momentum, means in averages.items():
            for mean, norm in zip(means, norms, strict=True):
                mean.lerp_(norm.running_mean, max(momentum, 1 / step))
        if step not in steps:
            continue

        in_training = measure_accuracy(copy.deepcopy(model), test_x, test_y, training=True)
        evaluated = copy.deepcopy(model)
        for momentum, means in averages.items():
            for mean, norm in zip(means, find_norms(evaluated), strict=True):
                norm.running_mean.copy_(mean)
            accuracy = measure_accuracy(evaluated, test_x, test_y)
            yield step, f"momentum {momentum}", in_training - accuracy
        gp.recalibrate_(evaluated, x[: 10 * batch].split(batch))
        yield step, "recalibrated", in_training - measure_accuracy(evaluated, test_x, test_y)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--most", type=int, default=1000, help="steps of a training")
    arguments = parser.parse_args()
    torch.set_num_threads(1)

    steps = tuple(step for step in STEPS if step <= arguments.most)
    networks = (two_convolutions, three_convolutions, with_a_hidden_layer)
    settings = itertools.product(
        networks, ("geometric", "plain"), (32, 64), range(arguments.seeds)
    )
    below: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for setting in settings:
        for step, name, points in compare(*setting, steps):
            below[name].append((step, points))

    rows = []
    for name, measured in below.items():
        points = np.array([point for _, point in measured])
        cells = [name, f"{points.mean():.2f}", f"{(points > 2).mean():.1%}"]
        for step in (20, 50, 100, 1000):
            worst = max((point for s, point in measured if s == step), default=0.0)
            cells.append(f"{worst:.1f}")
        rows.append((*cells, f"{points.max():.1f}"))
    columns = (
        "average",
        "mean",
        "more than 2 below",
        "worst at 20",
        "50",
        "100",
        "1,000",
        "of all",
    )
    print(Table("", columns, tuple(rows)).markdown())


if __name__ == "__main__":
    main()
