"""The figure of a sweep over text: validation loss over turn or rate, a line for each size."""

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from geoparam_lab import plots
from geoparam_lab.experiments import text_results
from geoparam_lab.experiments.text_results import Losses, Size
from geoparam_lab.plots import legend_beside
from geoparam_lab.plots.ticks import label_ticks
from geoparam_lab.run_folder import Run

_CAPTION = """Validation loss over the turn or the learning rate, a line for each size; means over
    seeds, at the best of the other numbers that were tried. A ring marks the lowest point of a
    line; runs that diverged are left out."""
_HIGHEST = 0.5  # nats above the lowest loss: the top of the figure


def draw(run: Run) -> None:
    """Draw the figure of a sweep, as far as it is done."""
    records = run.records()
    panels = {
        method: text_results.measure_peaks(records, method)
        for method in text_results.list_methods(records)
    }
    if panels:
        caption = f"{_CAPTION} {text_results.describe(run)}"
        run.figure("peaks", draw_peaks(panels), caption)


def draw_peaks(panels: dict[str, dict[Size, Losses]]) -> Figure:
    """Return a panel for each method, with the same lines and the same range of losses."""
    sizes = sorted({size for by_size in panels.values() for size in by_size})
    names = text_results.name_sizes(sizes)
    size = 3.4 * len(panels) + 2.0, max(3.6, 1.0 + 0.25 * len(sizes))
    figure, axes = plots.new_figure(1, len(panels), size=size)
    for ax, (method, by_size) in zip(axes[0], panels.items(), strict=True):
        ax.sharey(axes[0, 0])
        for index, size_key in enumerate(sizes):
            _draw_line(ax, by_size.get(size_key, {}), names[size_key], index, len(sizes))
        is_turn = method == "turn"
        ax.set(xscale="log", xlabel="turn (degrees)" if is_turn else "learning rate")
        ax.set_title(method, loc="left")
        peaks = sorted({peak for losses in by_size.values() for peak in losses})
        label_ticks(ax, {peak: f"{peak:g}" for peak in peaks}, rotation=45)
    axes[0, 0].set_ylabel("validation loss (nats per byte)")
    _limit_losses(axes[0, 0], [losses for panel in panels.values() for losses in panel.values()])
    legend_beside(axes[0, -1])
    return figure


def _limit_losses(ax: Axes, lines: Sequence[Losses]) -> None:
    """Let an axis end above the worst of the lines' lowest points."""
    finite = [loss for losses in lines for loss in losses.values() if math.isfinite(loss)]
    if finite:
        lowest = [text_results.lowest(losses) for losses in lines]
        top = min(max(finite), np.nanmax(lowest) + _HIGHEST)
        ax.set_ylim(min(finite) - 0.02, top + 0.02)


def _draw_line(ax: Axes, losses: Losses, name: str, index: int, count: int) -> None:
    from matplotlib import colormaps

    colour = colormaps["viridis"](0.9 * index / max(1, count - 1))
    finite = {peak: loss for peak, loss in losses.items() if math.isfinite(loss)}
    ax.plot(list(finite), list(finite.values()), marker="o", ms=4, color=colour, label=name)
    if finite:
        best = min(finite, key=finite.__getitem__)
        ax.plot([best], [finite[best]], "o", ms=9, mfc="none", mew=1.4, color=colour)
