"""Units of one layer over one or two inputs: boundaries, locations, what moves them."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import ArrayLike

from geoparam.plots.planes import plane, square_view
from geoparam.plots.style import (
    BLUE,
    BROWN,
    INK,
    MUTED,
    VERMILLION,
    as_array,
    axis_or_new,
    finite,
    legend_beside,
    ordered_colours,
)

SIDES = (("active", "#d3e6f2"), ("inactive", "#f8efe6"))
ACTIVE, INACTIVE = BLUE, VERMILLION  # the papers' green and red are one colour to some


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
    direction, lam = finite(np.array([direction, lam], dtype=float)).tolist()
    ax = axis_or_new(ax)
    x = np.linspace(*limits, 401)
    location = _location(np.array([direction]), lam)[0]
    if limits[0] < location < limits[1]:
        x = np.sort(np.append(x, location))
    inside = direction * x + lam
    for (word, fill), side in zip(SIDES, (inside >= 0, inside <= 0), strict=True):
        place: dict[str, Any] = {"transform": ax.get_xaxis_transform(), "label": word}
        ax.fill_between(x, 0, 1, where=side, color=fill, linewidth=0, **place)
    ax.plot(x, r * np.maximum(inside, 0), color=INK, linewidth=2.4, label="unit")
    ax.set(xlim=limits, xlabel="x", ylabel="z")
    if np.isfinite(location):
        reach = 0.12 * np.sign(direction) * (limits[1] - limits[0])
        _mark_point(ax, location, reach, height=0.1 if r < 0 else 0.9)
        ax.set_title(f"boundary at φ = {location:.3g}", loc="left")
    else:
        ax.set_title("no boundary", loc="left")
    ax.grid(visible=False)
    if legend:
        legend_beside(ax)
    return ax


def _location(direction: np.ndarray, lam: ArrayLike) -> np.ndarray:
    """The nearest point to the origin with direction @ x + lam = 0, NaN where there is none."""
    square = np.asarray((direction**2).sum(axis=-1, keepdims=True))
    offset = finite(np.asarray(lam, dtype=float))[..., None]
    return -offset * direction / np.where(square > 0, square, np.nan)


def _mark_point(ax: Axes, location: float, reach: float, height: float) -> None:
    """The boundary of a unit with one input: a line, the point and an arrow to either side."""
    ax.axvline(location, color=BROWN, linewidth=2.0, label="boundary")
    ax.plot([location], [0], "o", color=INK, markersize=7, zorder=5, label="location φ")
    for tip, colour in [(location + reach, ACTIVE), (location - reach, INACTIVE)]:
        _arrow(ax, (location, height), (tip, height), colour, ax.get_xaxis_transform())


def _arrow(ax: Axes, start: Any, tip: Any, colour: str, coordinates: Any) -> None:
    style = {"arrowstyle": "-|>", "color": colour, "linewidth": 1.6, "shrinkA": 0}
    place = {"xycoords": coordinates, "annotation_clip": True}
    ax.annotate("", tip, xytext=start, arrowprops=style, **place)


def unit_2d(
    direction: np.ndarray,
    lam: float,
    *,
    limits: tuple[float, float] | None = None,
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
    advice = "Only units with two inputs have a plane."
    direction = finite(as_array("direction", direction, (2,), advice))
    location = _location(direction, lam)
    if limits is None:
        limits = square_view(np.stack([location, [0.8, 0.8]]), margin=2.0)
    ax = plane(ax, limits)
    ax.grid(visible=False)
    _fill_sides(ax, direction, lam, limits)
    if np.isfinite(location).all():
        towards = direction / np.linalg.norm(direction)
        _boundary(ax, location, towards, limits, color=BROWN, linewidth=2.4, label="boundary")
        ax.plot(*np.stack([[0, 0], location], axis=1), color=INK, linewidth=1.2, linestyle=":")
        ax.plot(*location, "o", color=INK, markersize=7, zorder=5, label="location φ")
        _arrows(ax, location, towards, 0.08 * (limits[1] - limits[0]))
    else:
        ax.set_title("no boundary", loc="left")
    if legend:
        legend_beside(ax)
    return ax


def _fill_sides(ax: Axes, direction: np.ndarray, lam: float, limits: tuple[float, float]) -> None:
    """Shade both half planes; the axis clips them."""
    location, reach = _location(direction, lam), 3 * (limits[1] - limits[0])
    square = reach * np.array([[-1, -1], [1, -1], [1, 1], [-1, 1]])
    for (word, fill), sign in zip(SIDES, (1, -1), strict=True):
        corners = square if sign * lam > 0 else np.zeros((1, 2))
        if np.isfinite(location).all():
            u = direction / np.linalg.norm(direction)
            along = (reach + np.linalg.norm(location)) * np.array([-u[1], u[0]])
            ends = np.stack([location - along, location + along])
            corners = np.concatenate([ends, (ends + 2 * sign * reach * u)[::-1]])
        ax.fill(*corners.T, color=fill, linewidth=0, zorder=0, label=word)


def _boundary(
    ax: Axes, location: np.ndarray, towards: np.ndarray, limits: tuple[float, float], **line: Any
) -> None:
    """The line through the location, at right angles to the direction, across the view."""
    along = np.array([-towards[1], towards[0]])
    reach = 1.5 * (limits[1] - limits[0]) + np.linalg.norm(location)
    ax.plot(*np.stack([location - reach * along, location + reach * along], axis=1), **line)


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


def perturbation(
    directions: np.ndarray,
    lams: np.ndarray,
    *,
    deltas: np.ndarray,
    rotations: np.ndarray,
    limits: tuple[float, float] | None = None,
    legend: bool = True,
    ax: Axes | None = None,
) -> Axes:
    """A boundary before and after perturbations of its parameters, with each turn in degrees.

    `directions` (1 + deltas, 2) and `lams` (1 + deltas,) have the unperturbed unit first;
    `rotations` (deltas,) are in degrees.

    Example:
        >>> u = np.array([[1.0, 0.0], [0.8, 0.6]])
        >>> ax = perturbation(u, np.array([1.0, 1.0]), deltas=[0.1], rotations=[36.87])
        >>> [text.get_text() for text in ax.get_legend().get_texts()]
        ['unperturbed', 'δ = 0.1: 36.9°']
    """
    deltas = as_array("deltas", deltas, ("deltas",), "Give the sizes of the perturbations.")
    advice = "Put the unperturbed unit first, then one for each delta."
    directions = finite(as_array("directions", directions, (len(deltas) + 1, 2), advice))
    lams = as_array("lams", lams, (len(deltas) + 1,), advice)
    turns = as_array("rotations", rotations, deltas.shape, "Give one angle for each delta.")
    locations = _location(directions, lams)
    ax = plane(ax, limits := limits or square_view(locations, margin=1.6))
    labels = [f"δ = {delta:g}: {turn:.3g}°" for delta, turn in zip(deltas, turns, strict=True)]
    colours = [MUTED, *ordered_colours(len(deltas))]
    for i, label in enumerate(["unperturbed", *labels]):
        style: dict[str, Any] = {"color": colours[i]}
        if not np.isfinite(locations[i]).all():
            ax.plot([], [], **style, label=f"{label} (no boundary)")
            continue
        towards = directions[i] / np.linalg.norm(directions[i])
        width = 4.0 if i == 0 else 1.8
        _boundary(ax, locations[i], towards, limits, **style, linewidth=width, label=label)
        ax.plot(*np.stack([[0, 0], locations[i]], axis=1), **style, linewidth=1.2, linestyle=":")
        ax.plot(*locations[i], "o", **style, markersize=5.5, mec=INK, mew=0.6)
    if legend:
        legend_beside(ax)
    return ax
