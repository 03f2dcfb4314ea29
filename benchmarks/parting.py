"""Where the papers' unit and the optimizer's part: when a first r becomes negative.

    python -m benchmarks.parting --data DIR [--steps 1000]

One hidden layer on Yacht (100 units, MAE) and Banana (10 units, cross-entropy), full batch, Adam
at 0.1, float64, all examples: once as GmP layers with r outside the ReLU, r relu(u x + lam), once
as a plain model under GeometricOptimizer with angles, match=False and scale="free", which has r
inside, relu(r u x + r lam). Both start from the same function. The two are one training until a
first r changes its sign.
"""

import argparse
import copy
import csv
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import geoparam as gp

RATE = 0.1


def load(data: Path, name: str) -> tuple[Tensor, Tensor]:
    """Return standardised inputs, and targets in the last column."""
    path = data / "uci" / "yacht.csv" if name == "yacht" else data / "banana.csv"
    with path.open() as lines:
        rows = [[float(x) for x in row] for row in list(csv.reader(lines))[1:]]
    table = torch.tensor(rows, dtype=torch.float64)
    x, y = table[:, :-1], table[:, -1:]
    return (x - x.mean(0)) / x.std(0), y if name == "yacht" else (y > 0).double()


def compare(name: str, data: Path, steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    x, y = load(data, name)
    units, loss_of = (
        (100, F.l1_loss) if name == "yacht" else (10, F.binary_cross_entropy_with_logits)
    )
    outside = nn.Sequential(
        gp.GmPLinear(x.shape[1], units, activation=torch.relu, init="glorot"), nn.Linear(units, 1)
    ).double()
    hidden = nn.Linear(x.shape[1], units).double()
    with torch.no_grad():
        hidden.weight.copy_(outside[0].r[:, None] * outside[0].direction)
        hidden.bias.copy_(outside[0].r * outside[0].lam)
    inside = nn.Sequential(hidden, nn.ReLU(), copy.deepcopy(outside[1]))
    pairs = [
        (outside, torch.optim.Adam(outside.parameters(), lr=RATE)),
        (inside, gp.GeometricOptimizer(
            inside, torch.optim.Adam, lr=RATE, coordinates="angles", match=False, scale="free"
        )),
    ]  # fmt: skip
    first, before, largest, last = None, 0.0, 0.0, [0.0, 0.0]
    for step in range(steps):
        for k, (model, optimizer) in enumerate(pairs):
            loss = loss_of(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            last[k] = loss.item()
        difference = abs(last[0] - last[1])
        if first is None:
            before = max(before, difference)
            first = step + 1 if bool((outside[0].r < 0).any()) else None
        largest = max(largest, difference)
    negative = int((outside[0].r < 0).sum())
    print(
        f"{name}, seed {seed}: first r < 0 in step {first}; largest difference of the loss before "
        f"{before:.1e}, in all {largest:.2g}; after {steps} steps {negative} of {units} r are "
        f"negative, loss {last[0]:.4f} (r outside) and {last[1]:.4f} (r inside)",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1000)
    arguments = parser.parse_args()
    for name in ("yacht", "banana"):
        for seed in range(3):
            compare(name, arguments.data, arguments.steps, seed)


if __name__ == "__main__":
    main()
