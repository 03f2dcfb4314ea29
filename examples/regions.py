"""Draw the linear regions of a small network in its input plane, before and after training.

    python examples/regions.py [--steps 300] [--units 12] [--out regions.png]

The regions are exact polygons, not a grid of samples. Needs the extra: pip install '.[plots]'
"""

import argparse
import copy
from pathlib import Path

import torch
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PolyCollection
from torch import Tensor, nn

import geoparam as gp
from geoparam import plots
from geoparam_lab.regions import Regions, find_regions

FILLS = ("#f4f4f4", "#e8eef4", "#f4efe8", "#eaf2ec", "#f1eaf1")
WINDOW = (-2.0, 2.0, -2.0, 2.0)


def draw_rings(count: int) -> tuple[Tensor, Tensor]:
    """Return random points of two rings around the origin, and which ring each is on."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(count) % 2
    angle = 2 * torch.pi * torch.rand(count, generator=generator)
    radius = 0.7 + 0.7 * y + 0.1 * torch.randn(count, generator=generator)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1), y


def train(model: nn.Module, x: Tensor, y: Tensor, steps: int) -> float:
    """Turn the units by up to 2 degrees in a step, and return the last loss."""
    optimizer = gp.GeometricOptimizer(model, torch.optim.Muon, turn=2.0, lr=1e-2)
    warmup = max(1, steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda k: min((k + 1) / warmup, (steps - k) / (steps - warmup + 1))
    )
    for _ in range(steps):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return loss.item()


def draw(regions: Regions, ax: Axes) -> None:
    """Fill the polygons, and draw the boundaries of each layer on top."""
    fills = [FILLS[i % len(FILLS)] for i in range(len(regions.polygons))]
    ax.add_collection(PolyCollection(regions.polygons, facecolors=fills, edgecolors="none"))
    for depth, (name, pieces) in enumerate(regions.segments.items()):
        colour = colormaps["plasma"](0.8 * depth / max(1, len(regions.segments) - 1))
        lines = LineCollection(list(pieces), colors=[colour], linewidths=2 - depth, label=name)
        ax.add_collection(lines)
    ax.set(xlim=WINDOW[:2], ylim=WINDOW[2:], aspect="equal", xlabel="$x_1$", ylabel="$x_2$")
    ax.grid(visible=False)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--units", type=int, default=12)
    parser.add_argument("--out", type=Path, default=Path("regions.png"))
    given = parser.parse_args(arguments)
    torch.manual_seed(0)
    n = given.units
    model = nn.Sequential(nn.Linear(2, n), nn.ReLU(), nn.Linear(n, n), nn.ReLU(), nn.Linear(n, 2))
    x, y = draw_rings(200)
    fresh = copy.deepcopy(model)
    print(f"loss after {given.steps} steps: {train(model, x, y, given.steps):.4f}")

    figure, axes = plots.new_figure(1, 2, size=(11, 5))
    for ax, title, network in zip(axes[0], ("before", "after"), (fresh, model), strict=True):
        regions = find_regions(network, WINDOW)
        draw(regions, ax)
        for ring, colour in ((0, "black"), (1, "white")):
            ax.plot(*x[y == ring].T, "o", color=colour, mec="black", ms=3)
        ax.set_title(f"{title} training: {len(regions.polygons)} linear regions", loc="left")
        print(f"{title} training: {len(regions.polygons)} linear regions")
    axes[0, 1].legend(title="layer", loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    figure.savefig(given.out, dpi=120)


if __name__ == "__main__":
    main()
