"""Real networks: many layers over training, and the regions of a small one in a plane."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.colors import LogNorm, Normalize
from matplotlib.ticker import Formatter, FuncFormatter, MaxNLocator

from geoparam.plots.style import as_array, axis_or_new, legend_beside, step_numbers

ROW = 0.16  # inches a layer's name needs at 7 points
COLUMNS = 400  # cells that a figure 900 pixels wide can show
PERCENT = FuncFormatter(lambda share, _: f"{100 * share:g}%")
Limits = tuple[float, float] | None
FILLS = ("#f4f4f4", "#e8eef4", "#f4efe8", "#eaf2ec", "#f1eaf1")


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
    """One coloured cell for each layer and recorded step; hatched where there is no value.

    A cell is the highest of several records where there are more than 400, so that no jump of one
    step is lost between pixels.

    `values` are (layers, records), `label` says what the colour means, and `norm`, `cmap` and
    `ticks` are matplotlib's.

    Example:
        >>> ax = layer_heatmap(np.eye(2), layers=["conv1", "fc"], label="share")
        >>> [text.get_text() for text in ax.get_yticklabels()]
        ['conv1', 'fc']
    """
    values = as_array("values", values, (len(layers), "records"))
    values = np.where(np.isfinite(values), values, np.nan)  # matplotlib leaves a gap at NaN only
    steps = step_numbers(steps, records := values.shape[1])
    starts = np.arange(min(records, COLUMNS)) * records // min(records, COLUMNS)
    values, steps = np.fmax.reduceat(values, starts, axis=1), steps[starts]
    ax = axis_or_new(ax, size=(6.0, max(3.0, 1.0 + ROW * len(layers))))
    if norm is None and np.isnan(values).all():
        norm = Normalize(0, 1)  # nothing to take a range from
    image = ax.imshow(values, aspect="auto", cmap=cmap, norm=norm, interpolation="nearest")
    ax.grid(visible=False)
    if np.isnan(values).any():  # imshow leaves such cells open, the background shows
        ax.patch.set(facecolor="white", edgecolor="#c4c4c4", hatch="////")
    _name_layers(ax, layers)
    _number_steps(ax, steps)
    ax.figure.colorbar(image, ax=ax, label=label, format=ticks, pad=0.02, fraction=0.05)
    return ax


def _name_layers(ax: Axes, layers: Sequence[str]) -> None:
    """As many of the names as the axis has room for, evenly chosen, first at the top."""
    height = ax.get_window_extent().height / ax.figure.get_dpi()
    every = max(1, math.ceil(0.85 * ROW * len(layers) / height))
    shown = range(0, len(layers), every)
    ax.set_yticks(shown, [layers[i] for i in shown], size=7 if len(layers) > 12 else 9)
    ax.set_ylim(len(layers) - 0.5, -0.5)


def _number_steps(ax: Axes, steps: np.ndarray) -> None:
    """Round numbers of steps, below the columns where they belong."""
    ticks = MaxNLocator(5, integer=True).tick_values(steps[0], steps[-1])
    ticks = ticks[(ticks >= steps[0]) & (ticks <= steps[-1])]
    ax.set_xticks(np.interp(ticks, steps, np.arange(len(steps))), [f"{t:,.0f}" for t in ticks])
    ax.set_xlabel("step")


def rotation_heatmap(
    values: np.ndarray, *, layers: Sequence[str], limits: Limits = None, **options: Any
) -> Axes:
    """The rotation of each layer's units in each step, in degrees, on a logarithmic scale.

    `values` are (layers, records); 0 takes the colour of the lowest one. `limits` are the values
    of the lowest and highest colour, for figures that are compared; `steps` and `ax` are options
    as in `layer_heatmap`.

    Example:
        >>> ax = rotation_heatmap(np.array([[0.1, 1.0], [0.0, 10.0]]), layers=["conv1", "fc"])
        >>> ax.images[0].norm.vmin, ax.images[0].norm.vmax
        (0.1, 10.0)
    """
    values = as_array("values", values, (len(layers), "records"))
    positive = values[np.isfinite(values) & (values > 0)]
    positive = positive if len(positive) else np.array([1e-3, 1.0])
    low, high = limits or (positive.min(), max(positive.max(), 1.01 * positive.min()))
    norm = LogNorm(low, high, clip=True)  # clip: 0 has no logarithm, but is not unknown
    return layer_heatmap(values, layers=layers, label="rotation (degrees)", norm=norm, **options)


def dead_units(
    values: np.ndarray, *, layers: Sequence[str], limits: Limits = None, **options: Any
) -> Axes:
    """The share of each layer's units that are dead, 0 to 1; as in `rotation_heatmap`.

    Example:
        >>> ax = dead_units(np.array([[0.0, 0.5]]), layers=["conv1"])
        >>> ax.images[0].norm.vmax
        0.5
    """
    shares = as_array("values", values, (len(layers), "records"))
    known = shares[np.isfinite(shares)]
    highest = max(0.01, known.max(initial=0.0))  # one unit in a thousand must not look like all
    norm = Normalize(*(limits or (0.0, highest)))
    options |= {"label": "dead units", "cmap": "magma_r", "ticks": PERCENT, "norm": norm}
    return layer_heatmap(shares, layers=layers, **options)


def region_slice(
    polygons: Sequence[np.ndarray],
    segments: Mapping[str, np.ndarray],
    *,
    legend: bool = True,
    ax: Axes | None = None,
) -> Axes:
    """The regions of `analysis.slice_regions` in their plane, and each layer's boundaries.

    `polygons` are the corners of each region, (corners, 2), `segments` start and end of the pieces
    of each layer's boundaries, (segments, 2, 2).

    Example:
        >>> left, right = np.array([[0, 0], [1, 0], [1, 2]]), np.array([[1, 0], [2, 0], [1, 2]])
        >>> ax = region_slice([left, right], {"fc1": np.array([[[1, 0], [1, 2]]])})
        >>> [text.get_text() for text in ax.get_legend().get_texts()]
        ['fc1']
    """
    corners = [as_array("a polygon", polygon, ("corners", 2)) for polygon in polygons]
    corners = [polygon for polygon in corners if np.isfinite(polygon).all()]
    ax = axis_or_new(ax, size=(6.0, 5.0))
    fills = [FILLS[i % len(FILLS)] for i in range(len(corners))]
    ax.add_collection(PolyCollection(corners, facecolors=fills, edgecolors="none"))
    for i, (name, pieces) in enumerate(segments.items()):
        depth = i / max(1, len(segments) - 1)
        colour = colormaps["plasma"](0.8 * depth)  # its last fifth is too pale for lines on white
        width = 2.4 - 1.2 * depth
        lines = LineCollection(list(pieces), colors=[colour], linewidths=width, label=name)
        ax.add_collection(lines)
    every = np.concatenate(corners)
    (left, low), (right, high) = every.min(axis=0), every.max(axis=0)
    ax.set(xlim=(left, right), ylim=(low, high), aspect="equal", xlabel="a", ylabel="b")
    ax.grid(visible=False)
    if legend and segments:
        legend_beside(ax, title="layer")
    return ax
