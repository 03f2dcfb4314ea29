"""Units of one layer over one or two inputs: boundaries, locations, what was learnt with them."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap

from geoparam.plots.style import (
    BLUE,
    BROWN,
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

SIDES = (("active", "#d3e6f2"), ("inactive", "#f8efe6"))
ACTIVE, INACTIVE = BLUE, VERMILLION  # the papers' green and red are one colour to some
CLASS_FILLS, CLASS_COLOURS, CLASS_MARKERS = ("#d6e8f3", "#fbeccb"), (BLUE, ORANGE), "o^"


def unit_1d(
    direction: float,
    lam: float,
    *,
    r: float = 1.0,
    limits: tuple[float, float] = (-3.0, 3.0),
    legend: bool = True,
    ax: Axes | None = None,
) -> Axes:
    """A unit r * relu(direction * x + lam) over one input: its value, boundary and two sides.

    Example:
        >>> ax = unit_1d(-1.0, 1.0, r=2.0)
        >>> ax.get_title(loc="left")
        'boundary at φ = 1'
    """
    if direction == 0:
        raise ValueError("a unit with direction 0 has no boundary to draw.")
    ax = axis_or_new(ax)
    location = -lam / direction
    x = np.sort(np.append(np.linspace(*limits, 401), np.clip(location, *limits)))
    inside = direction * x + lam
    for (word, fill), side in zip(SIDES, (inside >= 0, inside <= 0), strict=True):
        place: dict[str, Any] = {"transform": ax.get_xaxis_transform(), "label": word}
        ax.fill_between(x, 0, 1, where=side, color=fill, linewidth=0, **place)
    ax.plot(x, r * np.maximum(inside, 0), color=INK, linewidth=2.4, label="unit")
    ax.axvline(location, color=BROWN, linewidth=2.0, label="boundary")
    ax.plot([location], [0], "o", color=INK, markersize=7, zorder=5, label="location φ")
    reach = 0.12 * np.sign(direction) * (limits[1] - limits[0])
    height = 0.1 if r < 0 else 0.9
    for tip, colour in [(location + reach, ACTIVE), (location - reach, INACTIVE)]:
        _arrow(ax, (location, height), (tip, height), colour, ax.get_xaxis_transform())
    ax.set(xlim=limits, xlabel="x", ylabel="z")
    ax.set_title(f"boundary at φ = {location:.3g}", loc="left")
    ax.grid(visible=False)
    if legend:
        legend_beside(ax)
    return ax


def _arrow(ax: Axes, start: Any, tip: Any, colour: str, coordinates: Any) -> None:
    style = {"arrowstyle": "-|>", "color": colour, "linewidth": 1.6, "shrinkA": 0}
    place = {"xycoords": coordinates, "annotation_clip": True}
    ax.annotate("", tip, xytext=start, arrowprops=style, **place)


def unit_2d(
    direction: np.ndarray,
    lam: float,
    *,
    limits: tuple[float, float] = (-3.0, 3.0),
    legend: bool = True,
    ax: Axes | None = None,
) -> Axes:
    """A unit over two inputs: its boundary, active half plane, direction and location φ.

    `direction` (2,) is its unit vector u, or its weight under other parameterizations.

    Example:
        >>> ax = unit_2d(np.array([0.6, 0.8]), -1.0)
        >>> ax.get_xlabel(), ax.get_ylabel()
        ('$x_1$', '$x_2$')
    """
    direction = as_array("direction", direction, (2,))
    length, width = np.linalg.norm(direction), limits[1] - limits[0]
    if length == 0:
        raise ValueError("a unit with direction 0 has no boundary to draw.")
    ax = plane(ax, limits)
    ax.grid(visible=False)
    u, location = direction / length, -lam * direction / length**2
    reach = 3 * width + np.linalg.norm(location)  # beyond the axis, which clips
    along = reach * np.array([-u[1], u[0]])
    ends = np.stack([location - along, location + along])
    for (word, fill), sign in zip(SIDES, (1, -1), strict=True):
        corners = np.concatenate([ends, (ends + 2 * sign * reach * u)[::-1]])
        ax.fill(*corners.T, color=fill, linewidth=0, zorder=0, label=word)
    ax.plot(*ends.T, color=BROWN, linewidth=2.4, label="boundary")
    ax.plot(*np.stack([[0, 0], location], axis=1), color=INK, linewidth=1.2, linestyle=":")
    ax.plot(*location, "o", color=INK, markersize=7, zorder=5, label="location φ")
    _arrows(ax, location, u, 0.08 * width)
    if legend:
        legend_beside(ax)
    return ax


def _arrows(ax: Axes, location: np.ndarray, towards: np.ndarray, length: float) -> None:
    """The direction u as an arrow from φ, and beside it one to the active and inactive side."""
    along = length * np.array([-towards[1], towards[0]])
    _arrow(ax, location, location + 2.0 * length * towards, INK, "data")
    for start in (location + 3.0 * along, location - 3.0 * along):
        _arrow(ax, start, start + length * towards, ACTIVE, "data")
        _arrow(ax, start, start - length * towards, INACTIVE, "data")
    beside = 11 * (along / length - towards)  # in points, the same in large and small panels
    text: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "va": "center"}
    for word, (x, y) in [("u", location + 1.8 * length * towards), ("φ", location)]:
        place = (beside[0], beside[1])
        ax.annotate(word, (x, y), xytext=place, **text, size=12, annotation_clip=True)


def plane(ax: Axes | None, limits: tuple[float, float]) -> Axes:
    """The given axis, or a new one, as a square of the plane with the origin marked.

    `limits` are the lowest and highest value in view of both inputs.
    """
    ax = axis_or_new(ax, size=(6.0, 4.6))
    ax.set(xlim=limits, ylim=limits, aspect="equal", xlabel="$x_1$", ylabel="$x_2$")
    ax.locator_params(nbins=5)
    ax.plot([0], [0], "+", color=INK, markersize=9, zorder=4)
    return ax


def _choose_view(points: np.ndarray) -> tuple[float, float]:
    """Limits of both inputs, around the origin, that hold 95 % of the finite points, (N, 2)."""
    reach = np.abs(points).max(axis=-1)
    reach = reach[np.isfinite(reach)]
    half = 1.25 * float(np.quantile(reach, 0.95)) if len(reach) else 1.0
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
    locations = finite(as_array("locations", locations, ("steps", "units", 2)))
    shown = locations.reshape(-1, 2)
    if points is not None:
        points = as_array("points", points, ("points", 2))
        shown = np.concatenate([shown, points])
    ax = plane(ax, limits := limits or _choose_view(shown))
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
    across, up = (as_array("grid", side, ("values",)) for side in grid)
    scores = finite(as_array("scores", scores, (len(up), len(across))))
    points = as_array("points", points, ("points", 2))
    labels = as_array("labels", labels, (len(points),))
    if not np.isin(labels, (0, 1)).all():
        raise ValueError(f"labels must be 0 or 1; got {np.unique(labels)[:5]}. Renumber them")
    locations = as_array("locations", locations, ("units", 2))
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
