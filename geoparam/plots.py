"""Arrays in, matplotlib axes out. Needs the extra: pip install 'geoparam[plots]'.

Nothing here computes results or touches pyplot's global state: a caller brings the axes.
"""

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.transforms import blended_transform_factory

COLOURS = {"SP": "#c8553d", "GmP": "#1b6ca8"}
INK, MUTED = "#222222", "#8a8a8a"


def new_figure(rows: int, columns: int, size: tuple[float, float]) -> tuple[Figure, np.ndarray]:
    """A figure of its own, on no screen, with its axes in an array (rows, columns).

    Example:
        >>> figure, axes = new_figure(2, 2, size=(8, 6))
        >>> axes.shape
        (2, 2)
    """
    figure = Figure(figsize=size, layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1))
    axes = figure.subplots(rows, columns, squeeze=False)
    for ax in axes.flat:
        ax.spines[["top", "right"]].set_visible(False)
        ax.spines[["left", "bottom"]].set_color(MUTED)
        ax.tick_params(color=MUTED, labelcolor=INK)
        ax.grid(color="#eeeeee", linewidth=0.8)
        ax.set_axisbelow(True)
    return figure, axes


def fit_1d(
    ax: Axes,
    *,
    points: tuple[np.ndarray, np.ndarray],
    grid: np.ndarray,
    truth: np.ndarray,
    prediction: np.ndarray,
    units: np.ndarray,
    colour: str = INK,
) -> None:
    """Data, truth and prediction over one input, with a tick where each unit switches.

    Example:
        >>> _, axes = new_figure(1, 1, size=(4, 3))
        >>> x = np.linspace(-1, 1, 9)
        >>> fit_1d(axes[0, 0], points=(x, x), grid=x, truth=x, prediction=x, units=x[::2])
    """
    low, high = grid.min(), grid.max()
    inside = units[(units >= low) & (units <= high)]
    ax.plot(grid, truth, color=MUTED, linewidth=1.2, linestyle=(0, (4, 2)), label="true function")
    ax.plot(grid, prediction, color=colour, linewidth=2.0, label="network")
    ax.plot(*points, "o", color=INK, markersize=3.2, label="training data")
    ticks = blended_transform_factory(ax.transData, ax.transAxes)
    ax.vlines(inside, 0, 0.05, transform=ticks, color=colour, linewidth=0.9, alpha=0.7)
    ax.set_xlim(low, high)
    ax.set_xlabel(f"x     (ticks: where units switch; {len(inside)} of {len(units)} in view)")
    ax.locator_params(axis="x", nbins=5)


def training_curves(ax: Axes, curves: Mapping[str, np.ndarray], *, title: str) -> None:
    """One noisy positive curve a method, on a logarithmic axis, with its typical value in bold.

    Example:
        >>> _, axes = new_figure(1, 1, size=(4, 3))
        >>> training_curves(axes[0, 0], {"SP": np.exp(-np.arange(500.0))}, title="Loss")
    """
    for name, values in curves.items():
        colour = COLOURS.get(name, INK)
        ax.plot(values, color=colour, linewidth=0.5, alpha=0.25)
        ax.plot(*_medians(values), color=colour, linewidth=1.8, label=name)
    ax.set_yscale("log")
    ax.set_xlim(0, max(map(len, curves.values())))
    ax.set_xlabel("epoch")
    ax.set_title(title, loc="left")
    ax.legend(frameon=False)


def _medians(values: np.ndarray, bins: int = 100) -> tuple[np.ndarray, np.ndarray]:
    """Centres of equal stretches of the curve, and the median in each."""
    parts = np.array_split(np.arange(len(values)), min(bins, len(values)))
    return np.array([p.mean() for p in parts]), np.array([np.median(values[p]) for p in parts])
