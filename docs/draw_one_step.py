"""Draws docs/images/one-step.png: a unit's boundary before and after one step.

    python docs/draw_one_step.py

Two units have the same boundary, one from a long weight, one from a short one. On the left a step
of the same length moves their weights (w, b); on the right both turn by the same angle.
"""

from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

matplotlib.use("Agg")

ANGLE, DISTANCE = np.deg2rad(35.0), -0.4
LENGTHS = {"long": 1.0, "short": 0.15}  # of the weight
STEP = 0.15 * np.array([-0.9, 0.3, 0.3]) / np.linalg.norm([-0.9, 0.3, 0.3])  # of (w, b)
TURN = np.deg2rad(7.0)


def draw_boundary(axes: Axes, w: np.ndarray, b: float, **style: object) -> None:
    """Draw the line w x + b = 0."""
    u = w / np.linalg.norm(w)
    nearest = -b / np.linalg.norm(w) * u
    along = np.array([-u[1], u[0]])
    ends = nearest + np.outer([-6.0, 6.0], along)
    axes.plot(ends[:, 0], ends[:, 1], **style)  # type: ignore[arg-type]


def find_angle(v: np.ndarray, w: np.ndarray) -> float:
    """Return the angle between two vectors, in degrees."""
    cosine = v @ w / (np.linalg.norm(v) * np.linalg.norm(w))
    return float(np.rad2deg(np.arccos(cosine)))


def main() -> None:
    points = np.random.default_rng(0).normal(size=(150, 2))
    direction = np.array([np.cos(ANGLE), np.sin(ANGLE)])
    turned = np.array([np.cos(ANGLE + TURN), np.sin(ANGLE + TURN)])
    figure = Figure(figsize=(10, 2.5), dpi=150, layout="constrained")
    panels = iter(figure.subplots(1, 4))
    for kind in ("plain step", "step by angle"):
        for name, length in LENGTHS.items():
            axes = next(panels)
            axes.scatter(*points.T, s=4, color="#bbbbbb", linewidths=0)
            w, b = length * direction, length * DISTANCE
            draw_boundary(axes, w, b, color="#888888", linewidth=1.5, label="before")
            if kind == "plain step":
                new_w, new_b = w + STEP[:2], b + STEP[2]
            else:
                new_w, new_b = length * turned, b
            draw_boundary(axes, new_w, new_b, color="#c0392b", linewidth=2.2, label="after")
            title = f"{kind}, {name} weight: {find_angle(w, new_w):.0f}°"
            axes.set_title(title, fontsize=9)
            axes.set(xlim=(-3, 3), ylim=(-2.7, 2.7), xticks=[], yticks=[], aspect="equal")
    figure.axes[0].legend(frameon=False, fontsize=8, loc="lower left")
    figure.savefig(Path(__file__).parent / "images" / "one-step.png")


if __name__ == "__main__":
    main()
