"""Does one rate, or one turn, serve every width and depth?

    python -m benchmarks.turns --out results/benchmarks/turns.json [--steps 200] [--device cuda]
    python -m benchmarks.turns --draw results/benchmarks/turns.json

MLPs with ReLU (He's initialisation, no norm) on scikit-learn's digits, batch 128, linear warmup
over the first tenth of the steps, then linear to 0. Seven rates for each optimizer: SGD with
momentum 0.9, AdamW, Muon on hidden weights with AdamW at 1e-3 for the rest, and GeometricOptimizer
with Muon and `turn` (the rest as before). Widths at four hidden layers, depths at width 256. What
counts is the mean loss of the last 20 steps; a run that is not finite counts as 10.
"""

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import geoparam as gp
from geoparam.optim.muon import RowMuon

WIDTHS = [(width, 4) for width in (64, 128, 256, 512, 1024, 2048)]
DEPTHS = [(256, depth) for depth in (2, 4, 8, 16)]
REST = 1e-3
Make = Callable[[nn.Module, float], list[torch.optim.Optimizer]]


def mlp(width: int, depth: int) -> nn.Sequential:
    """Return an MLP with `depth` hidden layers."""
    sizes = [64, *[width] * depth]
    layers: list[nn.Module] = []
    for n, m in zip(sizes, sizes[1:], strict=False):
        layers += [nn.Linear(n, m), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(width, 10))
    for layer in model:
        if isinstance(layer, nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)
    return model


def sgd(model: nn.Module, rate: float) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)]


def adamw(model: nn.Module, rate: float) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)]


def muon(model: nn.Module, rate: float) -> list[torch.optim.Optimizer]:
    hidden = [p for p in model[:-1].parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim == 1] + [model[-1].weight]
    return [
        RowMuon(hidden, lr=rate, weight_decay=0.0),
        torch.optim.AdamW(rest, lr=REST, weight_decay=0.0),
    ]


def turn(model: nn.Module, rate: float) -> list[torch.optim.Optimizer]:
    return [gp.GeometricOptimizer(model, torch.optim.Muon, turn=rate, lr=REST)]


METHODS: dict[str, tuple[Make, list[float]]] = {
    "SGD": (sgd, [0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0]),
    "AdamW": (adamw, [1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1]),
    "Muon": (muon, [1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0]),
    "turn (degrees)": (turn, [0.1, 0.3, 1.0, 2.0, 4.0, 8.0, 16.0]),
}


def final_loss(
    make: Make, rate: float, width: int, depth: int, steps: int, data: tuple[Tensor, Tensor]
) -> float:
    """Train once and return the mean loss of the last 20 steps."""
    torch.manual_seed(0)
    x, y = data
    model = mlp(width, depth).to(x.device)
    optimizers = make(model, rate)
    warmup = steps // 10

    def factor(step: int) -> float:
        return min((step + 1) / warmup, (steps - step) / (steps - warmup))

    schedules = [torch.optim.lr_scheduler.LambdaLR(o, factor) for o in optimizers]
    losses = []
    batches = torch.randint(len(x), (steps, 128), generator=torch.Generator().manual_seed(1))
    for batch in batches.to(x.device):
        loss = F.cross_entropy(model(x[batch]), y[batch])
        model.zero_grad()
        loss.backward()
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        losses.append(loss.detach())
    last = torch.stack(losses[-20:]).mean().item()
    return last if last < 10 else 10.0  # NaN counts as 10


def measure(device: str, steps: int) -> list[dict[str, float | str]]:
    from sklearn.datasets import load_digits

    digits = load_digits()
    data = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    run = partial(final_loss, steps=steps, data=(data[0].to(device), data[1].to(device)))
    rows = []
    for name, (make, rates) in METHODS.items():
        for width, depth in dict.fromkeys([*WIDTHS, *DEPTHS]):
            for rate in rates:
                loss = run(make, rate, width, depth)
                rows.append(
                    {"method": name, "width": width, "depth": depth, "rate": rate, "loss": loss}
                )
            best = min(rows[-len(rates) :], key=lambda row: row["loss"])
            print(
                f"{name} width {width} depth {depth}: best {best['loss']:.4f} at {best['rate']}",
                flush=True,
            )
    return rows


def draw(path: Path) -> None:
    """Draw the loss over the rate, one line for each width and depth."""
    import matplotlib.pyplot as plt

    rows = json.loads(path.read_text())
    figure, axes = plt.subplots(2, len(METHODS), figsize=(14, 6), sharey=True)
    for line, (shapes, label) in enumerate(((WIDTHS, "width"), (DEPTHS, "depth"))):
        for axis, name in zip(axes[line], METHODS, strict=True):
            for k, (width, depth) in enumerate(shapes):
                shape = (name, width, depth)
                runs = [r for r in rows if (r["method"], r["width"], r["depth"]) == shape]
                axis.plot(
                    [run["rate"] for run in runs],
                    [run["loss"] for run in runs],
                    "o-",
                    color=plt.cm.viridis(k / len(shapes)),
                    label=f"{label} {width if label == 'width' else depth}",
                )
            axis.set(xscale="log", yscale="log", title=name if line == 0 else "", xlabel="rate")
        axes[line][0].set_ylabel("loss of the last 20 steps")
        axes[line][-1].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path.with_suffix(".png"), dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--draw", type=Path)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    if arguments.draw:
        draw(arguments.draw)
        return
    rows = measure(arguments.device, arguments.steps)
    if arguments.out:
        arguments.out.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
