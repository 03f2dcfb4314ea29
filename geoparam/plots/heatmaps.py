"""Heat maps: one coloured cell for each layer and recorded step.

Values are (layers, records), as `tracker.history.table(quantity)` gives them. Cells without a
finite value are hatched.
"""

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.ticker import MaxNLocator

from geoparam.plots.style import new_figure

ROW = 0.16  # inches a layer's name needs at 7 points
COLUMNS = 400  # cells that a figure 900 pixels wide can show


def layer_heatmap(
    values: np.ndarray,
    *,
    layers: Sequence[str],
    label: str,
    steps: np.ndarray | None = None,
    limits: tuple[float, float] | None = None,
    log: bool = False,
    ax: Axes | None = None,
) -> Axes:
    """Draw one coloured cell for each layer and recorded step; return the axis.

    Where there are more than 400 records, a cell is the highest of several, so that no jump of
    one step is lost between pixels.

    Args:
        values: (layers, records).
        layers: Names of the layers, the first one at the top.
        label: What the colour means.
        steps: The number of each recorded step; 0, 1, ... by default.
        limits: The values of the lowest and the highest colour, for figures that are compared.
        log: Whether colours are on a logarithmic scale. 0 takes the lowest colour.
        ax: The axis to draw on; None makes a figure.

    Example:
        >>> ax = layer_heatmap(np.eye(2), layers=["conv1", "fc"], label="share")
        >>> [text.get_text() for text in ax.get_yticklabels()]
        ['conv1', 'fc']
    """
    values = _check_values(values, layers)
    records = values.shape[1]
    steps = np.arange(records) if steps is None else np.asarray(steps)
    if steps.shape != (records,):
        raise ValueError(f"steps must have shape ({records},); got {steps.shape}.")

    columns = min(records, COLUMNS)
    starts = np.arange(columns) * records // columns
    values = np.where(np.isfinite(values), values, np.nan)  # matplotlib leaves a gap at NaN only
    values = np.fmax.reduceat(values, starts, axis=1)
    if ax is None:
        ax = new_figure(1, 1, (6.0, max(3.0, 1.0 + ROW * len(layers))))[1][0, 0]

    norm = _make_norm(values, limits, log)
    image = ax.imshow(values, aspect="auto", norm=norm, interpolation="nearest", cmap="viridis")
    ax.grid(visible=False)
    if np.isnan(values).any():  # imshow leaves such cells open, and the background shows
        ax.patch.set(facecolor="white", edgecolor="#c4c4c4", hatch="////")
    _name_layers(ax, layers)
    _number_steps(ax, steps[starts])
    ax.figure.colorbar(image, ax=ax, label=label, pad=0.02, fraction=0.05)
    return ax


def _make_norm(values: np.ndarray, limits: tuple[float, float] | None, log: bool) -> Normalize:
    """Return matplotlib's map from values to colours."""
    known = values[np.isfinite(values)]
    if log:
        known = known[known > 0]
    if limits is None and len(known):
        limits = known.min(), known.max()
    if not log:
        return Normalize(*(limits or (0, 1)))

    low, high = limits or (1e-3, 1.0)
    high = max(high, 1.01 * low)  # one value has no range
    return LogNorm(low, high, clip=True)  # 0 has no logarithm, but is not unknown


def _check_values(values: np.ndarray, layers: Sequence[str]) -> np.ndarray:
    values = np.asarray(values, dtype=float)
    if values.ndim != 2 or len(values) != len(layers) or not values.size:
        raise ValueError(
            f"values must have shape ({len(layers)}, records), a row for each name in `layers`; "
            f"got {values.shape}."
        )
    return values


def _name_layers(ax: Axes, layers: Sequence[str]) -> None:
    """Write as many of the names as the axis has room for, evenly chosen, first at the top."""
    height = ax.get_window_extent().height / ax.figure.get_dpi()
    every = max(1, math.ceil(0.85 * ROW * len(layers) / height))
    shown = range(0, len(layers), every)
    size = 7 if len(layers) > 12 else 9
    ax.set_yticks(shown, [layers[i] for i in shown], size=size)
    ax.set_ylim(len(layers) - 0.5, -0.5)


def _number_steps(ax: Axes, steps: np.ndarray) -> None:
    """Write round numbers of steps below the columns where they belong."""
    ticks = MaxNLocator(5, integer=True).tick_values(steps[0], steps[-1])
    ticks = ticks[(ticks >= steps[0]) & (ticks <= steps[-1])]
    places = np.interp(ticks, steps, np.arange(len(steps)))
    ax.set_xticks(places, [f"{tick:,.0f}" for tick in ticks])
    ax.set_xlabel("step")
