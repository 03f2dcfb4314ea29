"""Curves: a quantity of each layer over the recorded steps."""

from collections.abc import Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes

from geoparam.plots.style import new_figure

NAMED = 12  # names of layers that a legend has room for


def layer_curves(
    values: np.ndarray,
    *,
    layers: Sequence[str],
    label: str,
    steps: np.ndarray | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draw one line for each layer, the first in the darkest colour; return the axis.

    Args:
        values: (layers, records), as `tracker.history.table(quantity)` gives them.
        layers: Names of the layers; if there are many, the legend has some of them.
        label: What the values are.
        steps: The number of each recorded step; 0, 1, ... by default.
        ax: The axis to draw on; None makes a figure.

    Example:
        >>> ax = layer_curves(np.eye(2), layers=["conv1", "fc"], label="rotation_rms")
        >>> [line.get_label() for line in ax.lines]
        ['conv1', 'fc']
    """
    values = np.asarray(values, dtype=float)
    if values.ndim != 2 or len(values) != len(layers):
        raise ValueError(
            f"values must have shape ({len(layers)}, records), a row for each name in `layers`; "
            f"got {values.shape}."
        )
    steps = np.arange(values.shape[1]) if steps is None else np.asarray(steps)
    if ax is None:
        ax = new_figure(1, 1, (7.0, 3.5))[1][0, 0]

    colours = matplotlib.colormaps["viridis"](np.linspace(0, 0.9, len(layers)))
    every = -(-len(layers) // NAMED)
    named = []
    for number, (name, row) in enumerate(zip(layers, values, strict=True)):
        (line,) = ax.plot(steps, row, color=colours[number], linewidth=1.2, label=name)
        if number % every == 0:
            named.append(line)
    ax.set_xlabel("step")
    ax.set_ylabel(label)
    ax.legend(handles=named, loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=7)
    return ax
