"""Print how far rules for the turn are above the best turn tried, at each size of a sweep.

    rule.py FOLDER

Each rule begins at 2.4 degrees for width 256, depth 6, 500 steps and a batch of 64. Published
rates are a power of the tokens times the square root of the batch size; tokens are steps times
batch size, which gives the exponents here. Between two turns that were tried the loss is taken
along a line over log(turn), which is a little too high. `bottom` is the lowest point of the
parabola through the best turn and its two neighbours.
"""

import sys

import numpy as np

from geoparam_lab.experiments import text_results
from geoparam_lab.experiments.text_results import Losses, Size
from geoparam_lab.run_folder import Run

CENTRE = (256, 6, 500, 64)
RULES = {  # exponents of width, depth, steps, batch size
    "2.4 for all": (0, 0, 0, 0),
    "steps^-0.5": (0, 0, -0.5, 0),
    "steps^-0.5 width^-0.25": (-0.25, 0, -0.5, 0),
    "HyperP": (0, -0.5, -0.32, 0.18),
    "HyperP, depth left out": (0, 0, -0.32, 0.18),
    "marin": (-0.15, 0, -0.395, 0.105),
}


def find_turn(exponents: tuple[float, ...], size: Size) -> float:
    ratios = np.divide(size, CENTRE)
    return float(2.4 * np.prod(ratios**exponents))


def find_excess(losses: Losses, turn: float) -> float:
    """Return the loss at a turn above the lowest; beyond the turns tried, that of the last one."""
    loss = np.interp(np.log(turn), np.log(list(losses)), list(losses.values()))
    return float(loss - min(losses.values()))


def find_bottom(losses: Losses) -> float:
    turns = sorted(losses)
    best = turns.index(min(losses, key=losses.__getitem__))
    middle = min(max(best, 1), len(turns) - 2)
    near = turns[middle - 1 : middle + 2]
    square, linear, _ = np.polyfit(np.log(near), [losses[turn] for turn in near], 2)
    return float(np.exp(-linear / (2 * square)))


def main() -> None:
    by_size = text_results.measure_peaks(Run.open(sys.argv[1]).records(), "turn")
    for size, losses in by_size.items():
        best = min(losses, key=losses.__getitem__)
        is_edge = best in (min(losses), max(losses))
        print(text_results.name_size(size))
        print(f"  best {best:g}{' (edge)' if is_edge else ''}, bottom {find_bottom(losses):.2f}")

    for rule, exponents in RULES.items():
        print(rule)
        for size, losses in by_size.items():
            turn = find_turn(exponents, size)
            excess = find_excess(losses, turn)
            print(f"  {excess:.4f} at {turn:.2f}: {text_results.name_size(size)}")


if __name__ == "__main__":
    main()
