"""See how the units of a CNN turn in training: plain SGD beside turns of one degree.

    python examples/track.py [--steps 100] [--rate 0.2] [--out track.png]

With `turn` the units of every layer turn by the same angle (root mean square), whatever their
gradient. Both rates rise over a tenth of the steps and fall to 0. The output layer has no units
and is left out here. The tracker does not change the run. Each pair of maps shares a colour scale.
Needs the extra: pip install '.[experiments]'
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import geoparam as gp
from geoparam import analysis, plots


def track(name: str, steps: int, rate: float, x: Tensor, y: Tensor) -> analysis.History:
    """Train a CNN without norms and return what its units did."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(),
        nn.Conv2d(32, 32, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip
    if name == "SGD":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(
            model.parameters(), lr=rate, momentum=0.9
        )
    else:
        optimizer = gp.GeometricOptimizer(model, torch.optim.SGD, turn=1.0, lr=rate, momentum=0.9)
    warmup = max(1, steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda k: min((k + 1) / warmup, (steps - k) / (steps - warmup + 1))
    )
    hidden = [name for name, module in model.named_modules() if hasattr(module, "weight")][:-1]
    tracker = gp.watch(model, optimizer, probe=x[:256], layers=hidden)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        batch = torch.randint(len(x), (64,), generator=generator)
        loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    turn = tracker.history.table("rotation_max").max()
    print(f"{name:14} largest turn in one step {turn:5.1f} degrees, last loss {loss.item():.3f}")
    return tracker.history


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rate", type=float, default=0.2)
    parser.add_argument("--out", type=Path, default=Path("track.png"))
    given = parser.parse_args(arguments)
    digits = load_digits()
    x = torch.tensor(digits.images / 16, dtype=torch.float32)[:, None]
    y = torch.tensor(digits.target)
    names = ("SGD", "SGD, turn=1")
    histories = {name: track(name, given.steps, given.rate, x, y) for name in names}
    turns = {name: history.table("rotation_max") for name, history in histories.items()}
    dead = {name: h.table("dead") / h.table("units") for name, h in histories.items()}
    highest = max(values.max() for values in turns.values())
    most_dead = max(0.01, *(np.nanmax(values) for values in dead.values()))

    figure, axes = plots.new_figure(2, 2, size=(11, 6))
    for column, (name, history) in zip(axes.T, histories.items(), strict=True):
        layers = list(history)
        plots.layer_heatmap(
            turns[name],
            layers=layers,
            label="rotation (degrees)",
            limits=(highest / 1e3, highest),
            log=True,
            ax=column[0],
        )
        plots.layer_heatmap(
            dead[name],
            layers=layers,
            label="share of dead units",
            limits=(0, most_dead),
            ax=column[1],
        )
        column[0].set_title(f"{name}: largest turn of a unit in each step", loc="left")
        column[1].set_title(f"{name}: dead units", loc="left")
    figure.savefig(given.out, dpi=120)


if __name__ == "__main__":
    main()
