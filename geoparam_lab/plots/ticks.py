"""Ticks at the values that were tried."""

from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter, NullLocator


def label_ticks(ax: Axes, labels: Mapping[float, str], rotation: float = 0) -> None:
    """Put ticks at these values of the horizontal axis, and none between."""
    ax.set_xticks(list(labels), list(labels.values()), rotation=rotation)
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_minor_formatter(NullFormatter())
