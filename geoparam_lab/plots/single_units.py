"""Single units over one or two inputs: boundary, location and sides."""

import numpy as np
from matplotlib.axes import Axes

from geoparam.plots import INK
from geoparam_lab.plots.method_styles import BROWN

VIEW = (-3.0, 3.0)
SIDES = (("active", "#d3e6f2"), ("inactive", "#f8efe6"))


def unit_1d(
    direction: float,
    lam: float,
    *,
    r: float = 1.0,
    ax: Axes,
) -> None:
    """A unit r * relu(direction * x + lam) over one input: its value, boundary and two sides."""
    if direction == 0:
        raise ValueError("a unit with direction 0 has no boundary to draw.")
    location = -lam / direction
    x = np.sort(np.append(np.linspace(*VIEW, 401), np.clip(location, *VIEW)))
    inside = direction * x + lam
    for (word, fill), side in zip(SIDES, (inside >= 0, inside <= 0), strict=True):
        across = ax.get_xaxis_transform()
        ax.fill_between(x, 0, 1, where=side, color=fill, lw=0, transform=across, label=word)
    ax.plot(x, r * np.maximum(inside, 0), color=INK, linewidth=2.4, label="unit")
    ax.axvline(location, color=BROWN, linewidth=2.0, label="boundary")
    ax.plot([location], [0], "o", color=INK, markersize=7, zorder=5, label="location φ")

    ax.set(xlim=VIEW, xlabel="x", ylabel="z")
    ax.grid(visible=False)


def unit_2d(
    direction: np.ndarray,
    lam: float,
    *,
    limits: tuple[float, float] = VIEW,
    ax: Axes,
) -> None:
    """A unit over two inputs: its boundary, active half plane, direction and location φ.

    `direction` (2,) is its unit vector u, or its weight under other parameterizations.
    """
    length = np.linalg.norm(direction)
    if length == 0:
        raise ValueError("a unit with direction 0 has no boundary to draw.")
    plane(ax, limits)
    ax.grid(visible=False)
    u = direction / length
    location = -lam * u / length

    # The boundary and both half planes reach beyond the axis, which clips them.
    width = limits[1] - limits[0]
    reach = 3 * width + np.linalg.norm(location)
    along = reach * np.array([-u[1], u[0]])
    ends = np.stack([location - along, location + along])
    for (word, fill), sign in zip(SIDES, (1, -1), strict=True):
        far = ends + 2 * sign * reach * u
        corners = np.concatenate([ends, far[::-1]])
        ax.fill(*corners.T, color=fill, linewidth=0, zorder=0, label=word)

    ax.plot(*ends.T, color=BROWN, linewidth=2.4, label="boundary")
    ax.plot(*np.stack([[0, 0], location], axis=1), color=INK, linewidth=1.2, linestyle=":")
    ax.plot(*location, "o", color=INK, markersize=7, zorder=5, label="location φ")
    arrow = {"arrowstyle": "-|>", "color": INK, "linewidth": 1.6, "shrinkA": 0}
    ax.annotate("", location + 0.16 * width * u, xytext=location, arrowprops=arrow)
    beside = 0.05 * (along / reach - u) * width
    for word, place in (("u", location + 0.14 * width * u), ("φ", location)):
        x, y = place + beside
        ax.text(x, y, word, ha="center", va="center", size=12, clip_on=True)


def plane(ax: Axes, limits: tuple[float, float]) -> None:
    """Make the axis a square of the plane with the origin marked.

    `limits` are the lowest and highest value in view of both inputs.
    """
    ax.set(xlim=limits, ylim=limits, aspect="equal", xlabel="$x_1$", ylabel="$x_2$")
    ax.locator_params(nbins=5)
    ax.plot([0], [0], "+", color=INK, markersize=9, zorder=4)
