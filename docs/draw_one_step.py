"""Draws docs/images/one-step.png: a unit's boundary before and after one step of the same length.

    python docs/draw_one_step.py

On the left the step moves the weights (w, b), on the right the angle and the distance.
"""

from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

matplotlib.use("Agg")

STEP = 0.15  # length of the step, in either form
ANGLE, DISTANCE = np.deg2rad(35.0), -0.4
LENGTHS = (1.0, 0.15)  # of the weight: a long one and a short one


def draw_boundary(axes: Axes, w: np.ndarray, b: float, **style: object) -> None:
    """Draw the line w x + b = 0."""
    u = w / np.linalg.norm(w)
    nearest = -b / np.linalg.norm(w) * u
    along = np.array([-u[1], u[0]])
    ends = nearest + np.outer([-6.0, 6.0], along)
    axes.plot(ends[:, 0], ends[:, 1], **style)  # type: ignore[arg-type]


def main() -> None:
    points = np.random.default_rng(0).normal(size=(150, 2))
    direction = np.array([np.cos(ANGLE), np.sin(ANGLE)])
    figure = Figure(figsize=(9, 2.75), dpi=150, layout="constrained")
    titles = ("plain, a long weight", "plain, a short weight", "by angle, any weight")
    for axes, title, length in zip(figure.subplots(1, 3), titles, (*LENGTHS, 1.0), strict=True):
        axes.scatter(*points.T, s=5, color="#bbbbbb", linewidths=0)
        w, b = length * direction, length * DISTANCE
        draw_boundary(axes, w, b, color="#888888", linewidth=1.5, label="before")
        if title.startswith("plain"):
            step = STEP * np.array([-0.9, 0.3, 0.3]) / np.linalg.norm([-0.9, 0.3, 0.3])
            w, b = w + step[:2], b + step[2]
        else:
            turned = ANGLE + STEP * 0.9
            w, b = np.array([np.cos(turned), np.sin(turned)]), DISTANCE + STEP * 0.3
        draw_boundary(axes, w, b, color="#c0392b", linewidth=2.2, label="after one step")
        axes.set_title(title, fontsize=11)
        axes.set(xlim=(-3, 3), ylim=(-2.4, 2.4), xticks=[], yticks=[], aspect="equal")
    figure.axes[0].legend(frameon=False, fontsize=9, loc="lower left")
    figure.savefig(Path(__file__).parent / "images" / "one-step.png")


if __name__ == "__main__":
    main()
