"""A layer's units in the plane of two inputs: how they moved, and what was learnt with them."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap

from geoparam.plots.style import (
    BLUE,
    CYCLE,
    INK,
    MUTED,
    ORANGE,
    VERMILLION,
    as_array,
    axis_or_new,
    finite,
    legend_beside,
)

CLASS_FILLS, CLASS_COLOURS, CLASS_MARKERS = ("#d6e8f3", "#fbeccb"), (BLUE, ORANGE), "o^"


def plane(ax: Axes | None, limits: tuple[float, float]) -> Axes:
    """The given axis, or a new one, as a square of the plane with the origin marked.

    `limits` are the lowest and highest value in view of both inputs.
    """
    ax = axis_or_new(ax, size=(6.0, 4.6))
    ax.set(xlim=limits, ylim=limits, aspect="equal", xlabel="$x_1$", ylabel="$x_2$")
    ax.locator_params(nbins=5)
    ax.plot([0], [0], "+", color=INK, markersize=9, zorder=4)
    return ax


def square_view(
    points: np.ndarray, share: float = 1.0, margin: float = 1.25
) -> tuple[float, float]:
    """Limits of both inputs, around the origin, that hold a share of the finite points, (N, 2)."""
    reach = np.abs(points).max(axis=-1)
    reach = reach[np.isfinite(reach)]
    half = margin * float(np.quantile(reach, share)) if len(reach) else 1.0
    return (-half, half) if half > 0 else (-1.0, 1.0)


def trajectories(
    locations: np.ndarray,
    *,
    points: np.ndarray | None = None,
    limits: tuple[float, float] | None = None,
    legend: bool = True,
    ax: Axes | None = None,
) -> Axes:
    """The paths of the units' locations in a plane over training, one colour a unit.

    `locations` are (steps, units, 2); `points` (points, 2) are the data's inputs, for orientation.
    By default 95 % of the locations are in view.

    Example:
        >>> ax = trajectories(np.random.randn(50, 10, 2).cumsum(axis=0), limits=(-99, 99))
        >>> ax.get_xlabel()
        '$x_1$     (10 of 10 units end in view)'
    """
    advice = "Give the locations of every unit at every step; two inputs only."
    locations = finite(as_array("locations", locations, ("steps", "units", 2), advice))
    shown = locations.reshape(-1, 2)
    if points is not None:
        points = as_array("points", points, ("points", 2), "Give the data's two inputs.")
        shown = np.concatenate([shown, points])
    ax = plane(ax, limits := limits or square_view(shown, share=0.95))
    if points is not None:
        ax.plot(*points.T, ".", color=MUTED, markersize=2.5, alpha=0.5, label="data")
    for unit, path in enumerate(locations.swapaxes(0, 1)):
        colour = CYCLE[unit % len(CYCLE)]
        ax.plot(*path.T, color=colour, linewidth=1.1, alpha=0.85)
        first, last = ("start", "end") if unit == 0 else (None, None)
        ax.plot(*path[0], "o", color=colour, mfc="white", markersize=5, label=first, zorder=5)
        ax.plot(*path[-1], "*", color=colour, mec=INK, mew=0.6, ms=11, label=last, zorder=6)
    _say_in_view(ax, locations[-1], limits, limits, "units end")
    if legend:
        legend_beside(ax)
    return ax


def _say_in_view(
    ax: Axes,
    locations: np.ndarray,
    across: tuple[float, float],
    up: tuple[float, float],
    what: str,
) -> None:
    low, high = np.array([across, up]).T
    inside = ((locations >= low) & (locations <= high)).all(axis=-1).sum()
    ax.set_xlabel(f"$x_1$     ({inside} of {len(locations)} {what} in view)")


def decision_regions(
    scores: np.ndarray,
    *,
    grid: tuple[np.ndarray, np.ndarray],
    points: np.ndarray,
    labels: np.ndarray,
    locations: np.ndarray,
    level: float = 0.5,
    legend: bool = True,
    ax: Axes | None = None,
) -> Axes:
    """What a classifier of two inputs decides where, with the data and its units' locations.

    Args:
        scores: the classifier's score on the grid, (rows, columns): second input, then first.
        grid: values of the first input, (columns,), and of the second, (rows,).
        points: the data's inputs, (points, 2).
        labels: their classes, 0 or 1, (points,).
        locations: of the hidden units, (units, 2).
        level: the score between the classes: 0.5 for probabilities, 0 for logits.

    Example:
        >>> x = np.linspace(-2, 2, 9)
        >>> ax = decision_regions(x[:, None] + x, grid=(x, x), level=0.0, points=np.eye(2),
        ...                       labels=np.array([0, 1]), locations=np.array([[1.0, 1.0]]))
        >>> ax.get_xlabel()
        '$x_1$     (1 of 1 locations in view)'
    """
    across, up = (as_array("grid", side, ("values",), "Give two arrays.") for side in grid)
    advice = "Give a row for each value of the second input, a column for each of the first."
    scores = finite(as_array("scores", scores, (len(up), len(across)), advice))
    if min(scores.shape) < 2:
        raise ValueError(
            f"scores must fill a grid; got {scores.shape}. Give 2 values a side or more"
        )
    points = as_array("points", points, ("points", 2), "Give the data's two inputs.")
    labels = as_array("labels", labels, (len(points),), "Give the class, 0 or 1, of each point.")
    if not np.isin(labels, (0, 1)).all():
        raise ValueError(f"labels must be 0 or 1; got {np.unique(labels)[:5]}. Renumber them")
    locations = as_array("locations", locations, ("units", 2), "Give those of the last step.")
    ax = axis_or_new(ax, size=(6.0, 4.6))
    _fill_classes(ax, across, up, scores, level)
    for label, colour, marker in zip((0, 1), CLASS_COLOURS, CLASS_MARKERS, strict=True):
        part = points[labels == label].T
        ax.plot(*part, marker, color=colour, markersize=3.6, alpha=0.8, label=f"class {label}")
    ax.plot(*locations.T, "*", color=VERMILLION, mec="white", ms=15, zorder=6, label="location φ")
    sides = (across.min(), across.max()), (up.min(), up.max())
    ax.set(xlim=sides[0], ylim=sides[1], ylabel="$x_2$")
    _say_in_view(ax, locations, *sides, "locations")
    if legend:
        legend_beside(ax)
    return ax


def _fill_classes(
    ax: Axes, across: np.ndarray, up: np.ndarray, scores: np.ndarray, level: float
) -> None:
    sides = np.where(np.isfinite(scores), scores > level, np.nan)
    ax.pcolormesh(
        across, up, sides, cmap=ListedColormap(CLASS_FILLS), vmin=0, vmax=1, shading="nearest"
    )
    known = scores[np.isfinite(scores)]
    if len(known) and known.min() < level < known.max():  # contour warns where there is none
        ax.contour(across, up, scores, levels=[level], colors=INK, linewidths=2.6)
        ax.plot([], [], color=INK, linewidth=2.6, label="decision")
