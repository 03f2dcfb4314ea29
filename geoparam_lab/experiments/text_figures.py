"""The figure of a sweep over text: validation loss over turn or rate, a line for each size."""

import math

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from geoparam_lab import plots
from geoparam_lab.experiments import text_results
from geoparam_lab.experiments.text_results import Losses, Size
from geoparam_lab.plots import legend_beside
from geoparam_lab.run_folder import Run

_CAPTION = """Validation loss over the turn or the learning rate, a line for each size; means over
    the seeds that all points of a line have, at the best of the other numbers that were tried. A
    ring marks the lowest point of a line; runs that diverged are left out."""
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
    height = max(3.6, 1.0 + 0.25 * len(sizes))
    figure, columns, corner = plots.new_columns(len(panels), 1, size=(3.4, height))
    for ax, (method, by_size) in zip(columns[:, 0], panels.items(), strict=True):
        ax.sharey(columns[0, 0])
        for index, size in enumerate(sizes):
            colour = colormaps["viridis"](0.9 * index / max(1, len(sizes) - 1))
            _draw_line(ax, by_size.get(size, {}), names[size], colour)
        tried = sorted({peak for losses in by_size.values() for peak in losses})
        plots.tick_values(ax, tried, rotation=45)
        ax.set_xlabel("turn (degrees)" if method == "turn" else "learning rate")
        ax.set_title(method, loc="left")
    columns[0, 0].set_ylabel("validation loss (nats per byte)")

    lines = [losses for by_size in panels.values() for losses in by_size.values()]
    finite = [loss for losses in lines for loss in losses.values() if math.isfinite(loss)]
    if finite:
        best = [text_results.lowest(losses) for losses in lines]
        top = min(max(finite), np.nanmax(best) + _HIGHEST)
        columns[0, 0].set_ylim(min(finite) - 0.02, top + 0.02)
    legend_beside(corner)
    return figure


def _draw_line(ax: Axes, losses: Losses, name: str, colour: tuple[float, ...]) -> None:
    finite = {peak: loss for peak, loss in losses.items() if math.isfinite(loss)}
    ax.plot(list(finite), list(finite.values()), marker="o", ms=4, color=colour, label=name)
    if finite:
        best = min(finite, key=finite.__getitem__)
        ax.plot([best], [finite[best]], "o", ms=9, mfc="none", mew=1.4, color=colour)
