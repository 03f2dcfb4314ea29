"""Single units over one or two inputs: boundary, location and sides."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes

from geoparam.plots import INK
from geoparam_lab.plots.method_styles import BLUE, BROWN, VERMILLION, legend_beside

SIDES = (("active", "#d3e6f2"), ("inactive", "#f8efe6"))
ACTIVE, INACTIVE = BLUE, VERMILLION  # the papers' green and red are one colour to some


def unit_1d(
    direction: float,
    lam: float,
    *,
    r: float = 1.0,
    limits: tuple[float, float] = (-3.0, 3.0),
    legend: bool = True,
    ax: Axes,
) -> Axes:
    """A unit r * relu(direction * x + lam) over one input: its value, boundary and two sides."""
    if direction == 0:
        raise ValueError("a unit with direction 0 has no boundary to draw.")
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
    ax: Axes,
) -> Axes:
    """A unit over two inputs: its boundary, active half plane, direction and location φ.

    `direction` (2,) is its unit vector u, or its weight under other parameterizations.
    """
    length, width = np.linalg.norm(direction), limits[1] - limits[0]
    if length == 0:
        raise ValueError("a unit with direction 0 has no boundary to draw.")
    plane(ax, limits)
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
        ax.annotate(word, (x, y), xytext=tuple(beside), **text, size=12, annotation_clip=True)


def plane(ax: Axes, limits: tuple[float, float]) -> Axes:
    """Make the axis a square of the plane with the origin marked.

    `limits` are the lowest and highest value in view of both inputs.
    """
    ax.set(xlim=limits, ylim=limits, aspect="equal", xlabel="$x_1$", ylabel="$x_2$")
    ax.locator_params(nbins=5)
    ax.plot([0], [0], "+", color=INK, markersize=9, zorder=4)
    return ax
