"""Heat maps: one coloured cell for each layer and recorded step.

Values are (layers, records), as `tracker.history.table(quantity)` gives them. Cells without a
finite value are hatched.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.ticker import Formatter, FuncFormatter, MaxNLocator

from geoparam.plots.style import new_figure

ROW = 0.16  # inches a layer's name needs at 7 points
COLUMNS = 400  # cells that a figure 900 pixels wide can show
PERCENT = FuncFormatter(lambda share, _: f"{100 * share:g}%")
Limits = tuple[float, float] | None


def layer_heatmap(
    values: np.ndarray,
    *,
    layers: Sequence[str],
    label: str,
    steps: np.ndarray | None = None,
    norm: Normalize | None = None,
    cmap: str = "viridis",
    ticks: Formatter | None = None,
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
        norm, cmap, ticks: matplotlib's.
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

    starts = np.arange(min(records, COLUMNS)) * records // min(records, COLUMNS)
    values = np.where(np.isfinite(values), values, np.nan)  # matplotlib leaves a gap at NaN only
    values = np.fmax.reduceat(values, starts, axis=1)
    if norm is None and np.isnan(values).all():
        norm = Normalize(0, 1)  # nothing to take a range from
    if ax is None:
        ax = new_figure(1, 1, (6.0, max(3.0, 1.0 + ROW * len(layers))))[1][0, 0]

    image = ax.imshow(values, aspect="auto", cmap=cmap, norm=norm, interpolation="nearest")
    ax.grid(visible=False)
    if np.isnan(values).any():  # imshow leaves such cells open, and the background shows
        ax.patch.set(facecolor="white", edgecolor="#c4c4c4", hatch="////")
    _name_layers(ax, layers)
    _number_steps(ax, steps[starts])
    ax.figure.colorbar(image, ax=ax, label=label, format=ticks, pad=0.02, fraction=0.05)
    return ax


def rotation_heatmap(
    values: np.ndarray, *, layers: Sequence[str], limits: Limits = None, **options: Any
) -> Axes:
    """Draw the rotation of each layer's units in each step, in degrees, on a logarithmic scale.

    0 takes the colour of the lowest value. `limits` are the values of the lowest and highest
    colour, for figures that are compared; `steps` and `ax` are options as in `layer_heatmap`.

    Example:
        >>> ax = rotation_heatmap(np.array([[0.1, 1.0], [0.0, 10.0]]), layers=["conv1", "fc"])
        >>> ax.images[0].norm.vmin, ax.images[0].norm.vmax
        (0.1, 10.0)
    """
    values = _check_values(values, layers)
    positive = values[np.isfinite(values) & (values > 0)]
    if limits is None and len(positive):
        low = positive.min()
        limits = (low, max(positive.max(), 1.01 * low))
    norm = LogNorm(*(limits or (1e-3, 1.0)), clip=True)  # 0 has no logarithm, but is not unknown
    return layer_heatmap(values, layers=layers, label="rotation (degrees)", norm=norm, **options)


def dead_units(
    values: np.ndarray, *, layers: Sequence[str], limits: Limits = None, **options: Any
) -> Axes:
    """Draw the share of each layer's units that are dead, 0 to 1; as in `rotation_heatmap`.

    Example:
        >>> ax = dead_units(np.array([[0.0, 0.5]]), layers=["conv1"])
        >>> ax.images[0].norm.vmax
        0.5
    """
    values = _check_values(values, layers)
    known = values[np.isfinite(values)]
    highest = max(0.01, known.max(initial=0.0))  # one unit in a thousand must not look like all
    norm = Normalize(*(limits or (0.0, highest)))
    options |= {"label": "dead units", "cmap": "magma_r", "ticks": PERCENT, "norm": norm}
    return layer_heatmap(values, layers=layers, **options)


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
