"""How far does the same step turn a unit's boundary? Plain weights, weight norm and GmP.

    python examples/perturbation.py [--steps 20] [--out perturbation.png]

One layer, 200 units with weights of many lengths, in three parameterizations of the same
function. In each, Gaussian noise of the same size moves the stored parameters, except the lengths
of the weights, which GmP (r) and weight norm (g) store apart; `--steps` is the number of sizes.
Needs the extra: pip install '.[plots]'
"""

import argparse
import copy
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import geoparam as gp
from geoparam import sphere
from geoparam.analysis import layer_boundaries
from geoparam_lab import plots

LENGTHS = ("r", "parametrizations.weight.original0")  # a length that becomes negative is a flip


def build() -> dict[str, nn.Module]:
    """Return the same 200 units three times; their weights are from 0.01 to 1 long."""
    torch.manual_seed(0)
    plain = nn.Linear(10, 200)
    with torch.no_grad():
        lengths = torch.logspace(-2, 0, 200)
        plain.weight.copy_(lengths[:, None] * nn.functional.normalize(plain.weight, dim=1))
        plain.bias.copy_(0.5 * lengths)
    return {
        "SP": plain,
        "WN": weight_norm(copy.deepcopy(plain)),
        "GmP": gp.GmPLinear.from_linear(plain),
    }


@torch.no_grad()
def turn(layer: nn.Module, deviation: float) -> torch.Tensor:
    """Return by how many degrees the boundaries turn under the noise."""
    generator = torch.Generator().manual_seed(0)
    moved = copy.deepcopy(layer).double()
    for name, parameter in moved.named_parameters():
        if name not in LENGTHS:
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter += deviation * noise
    before, after = layer_boundaries(layer), layer_boundaries(moved)
    return sphere.angle_between(before.direction, after.direction).rad2deg()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("perturbation.png"))
    given = parser.parse_args(arguments)
    deltas = np.logspace(-4, -1, given.steps).tolist()

    figure, axes = plots.new_figure(1, 2, size=(11, 4.5))
    for name, layer in build().items():
        turns = [turn(layer, delta) for delta in deltas]
        style = plots.method_style(name).line
        for ax, find in zip(axes[0], (torch.max, torch.median), strict=True):
            ax.plot(deltas, [find(turn) for turn in turns], **style, label=name)
        middle = len(deltas) // 2
        print(
            f"{name:3} noise of {deltas[middle]:.1e}: a turn of up to "
            f"{turns[middle].max():.2f} degrees"
        )
    for ax, what in zip(axes[0], ("largest", "median"), strict=True):
        ax.set(xscale="log", yscale="log", ylim=(1e-3, 200))
        ax.set(xlabel="standard deviation of the noise", ylabel="degrees")
        ax.set_title(f"{what} turn of 200 boundaries", loc="left")
    axes[0, 0].legend(frameon=False)
    figure.savefig(given.out, dpi=120)


if __name__ == "__main__":
    main()
