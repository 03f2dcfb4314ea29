"""What figures share: panels beside each other, ticks at the values tried, a legend."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, NullLocator

from geoparam.plots import new_figure


def new_columns(
    count: int, deep: int, size: tuple[float, float], most: int = 5
) -> tuple[Figure, np.ndarray, Axes]:
    """Return a figure, `count` columns of `deep` axes each, and the upper right axis.

    At most `most` columns are beside each other, the others below; `size` is that of a panel.

    Example:
        >>> figure, columns, corner = new_columns(7, 2, (4.0, 3.0))
        >>> columns.shape, len(figure.axes), corner is columns[4, 0]
        ((7, 2), 20, True)
    """
    wide = min(count, most)
    bands = -(-count // wide)
    inches = (1.5 + size[0] * wide, size[1] * deep * bands)
    figure, axes = new_figure(bands * deep, wide, size=inches)
    columns = axes.reshape(bands, deep, wide).swapaxes(1, 2).reshape(-1, deep)
    for spare in columns[count:].flat:
        spare.axis("off")
    return figure, columns[:count], axes[0, -1]


def tick_values(ax: Axes, values: Sequence[float], rotation: float = 0) -> None:
    """Make the first axis logarithmic, with a tick at each of these values and no others."""
    ax.set_xscale("log")
    ax.set_xticks(values, [f"{value:,g}" for value in values], rotation=rotation)
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_minor_formatter(NullFormatter())


def legend_beside(ax: Axes) -> None:
    """Put a legend to the right of the axis, where it covers no data."""
    place: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1.01, 1.0)}
    ax.legend(**place, borderaxespad=0.0, handlelength=2.6, frameon=False)
