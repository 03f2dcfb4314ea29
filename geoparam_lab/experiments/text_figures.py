"""The figures of a sweep over text: validation loss over turn or rate, a line for each size.

`peaks` has a panel for each method and compares them; `transfer` has one for each number of the
size (width, depth, steps, batch) and shows whether all sizes have the same best turn or rate.
"""

import math
from collections.abc import Iterable

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
    ring marks the lowest point of a line, the dashed line the lowest of all; runs that diverged
    are left out."""
_TRANSFER = """Validation loss above the lowest of each line, over the turn or the learning rate.
    One number of the size varies in a panel, around {centre}; sizes that differ from it in more
    than one are in the table only. The band is 0.01 nats high."""
_HIGHEST = 0.05  # nats above the worst line's best: the top of `peaks`
_HIGHEST_ABOVE_BEST = 0.1  # nats: where `transfer` ends at the latest
_ROW = 3  # panels beside each other
_BAND = 0.01  # nats: as good as the best


def draw(run: Run) -> None:
    """Draw the figures of a sweep, as far as it is done."""
    records = run.records()
    panels = {
        method: text_results.measure_peaks(records, method)
        for method in text_results.list_methods(records)
    }
    if not panels:
        return
    said = text_results.describe(run)
    run.figure("peaks", draw_peaks(panels), f"{_CAPTION} {said}")

    centre = text_results.find_centre({size for by_size in panels.values() for size in by_size})
    figure = draw_transfer(panels, centre)
    if figure is not None:
        caption = _TRANSFER.format(centre=text_results.name_size(centre))
        run.figure("transfer", figure, f"{caption} {said}")


def draw_peaks(panels: dict[str, dict[Size, Losses]]) -> Figure:
    """Return a panel for each method, with the same lines and the same range of losses."""
    sizes = sorted({size for by_size in panels.values() for size in by_size})
    names = text_results.name_sizes(sizes)
    height = max(3.4, 1.0 + 0.25 * len(sizes))
    legend = 0.9 + 0.08 * max(map(len, names.values()))  # inches; a figure has 1.5 for it
    width = 3.4 + max(0.0, legend - 1.5) / min(len(panels), _ROW)
    figure, columns, corner = plots.new_columns(len(panels), 1, size=(width, height), most=_ROW)
    for ax, (method, by_size) in zip(columns[:, 0], panels.items(), strict=True):
        ax.sharey(columns[0, 0])
        for index, size in enumerate(sizes):
            _draw_line(ax, by_size.get(size, {}), names[size], _choose_colour(index, len(sizes)))
        _label_peaks(ax, method, by_size.values())
        ax.set_title(method, loc="left")
    columns[0, 0].set_ylabel("validation loss (nats per byte)")

    lines = [losses for by_size in panels.values() for losses in by_size.values()]
    finite = [loss for losses in lines for loss in losses.values() if math.isfinite(loss)]
    if finite:
        best = [text_results.lowest(losses) for losses in lines]
        top = min(max(finite), np.nanmax(best) + _HIGHEST)
        columns[0, 0].set_ylim(min(finite) - 0.02, top + 0.02)
        for ax in columns[:, 0]:
            ax.axhline(min(finite), color="0.6", linestyle="--", linewidth=1, zorder=0)
    legend_beside(corner)
    return figure


def draw_transfer(panels: dict[str, dict[Size, Losses]], centre: Size) -> Figure | None:
    """Return a panel for each method and each number that varies alone, or None without one."""
    shown = [
        (method, word, lines)
        for method, by_size in panels.items()
        for word, lines in text_results.list_factors(by_size, centre).items()
    ]
    if not shown:
        return None
    factors = len({word for _, word, _ in shown})
    most = 2 if len(panels) == 1 else factors  # several methods: a row for each
    figure, columns, _ = plots.new_columns(len(shown), 1, size=(3.4, 2.8), most=most)
    for ax, (method, word, lines) in zip(columns[:, 0], shown, strict=True):
        ax.sharey(columns[0, 0])
        ax.axhspan(0, _BAND, color="0.92", zorder=0)
        for index, (value, losses) in enumerate(lines.items()):
            best = text_results.lowest(losses)
            above = {peak: loss - best for peak, loss in losses.items()}
            _draw_line(ax, above, f"{word} {value:,}", _choose_colour(index, len(lines)))
        _label_peaks(ax, method, lines.values())
        ax.set_title(f"{method}: {word}", loc="left")
        ax.legend(loc="upper center", frameon=False)
    for row in columns[::most, 0]:
        row.set_ylabel("nats above the line's best")
    top = min(columns[0, 0].get_ylim()[1], _HIGHEST_ABOVE_BEST)
    columns[0, 0].set_ylim(-0.06 * top, top)
    return figure


def _label_peaks(ax: Axes, method: str, lines: Iterable[Losses]) -> None:
    """Mark the turns or rates that were tried."""
    tried = sorted({peak for losses in lines for peak in losses})
    plots.tick_values(ax, tried, rotation=45)
    ax.set_xlabel("turn (degrees)" if method == "turn" else "learning rate")


def _choose_colour(index: int, count: int) -> tuple[float, ...]:
    return colormaps["viridis"](0.9 * index / max(1, count - 1))


def _draw_line(ax: Axes, losses: Losses, name: str, colour: tuple[float, ...]) -> None:
    finite = {peak: loss for peak, loss in losses.items() if math.isfinite(loss)}
    ax.plot(list(finite), list(finite.values()), marker="o", ms=4, color=colour, label=name)
    if finite:
        best = min(finite, key=finite.__getitem__)
        ax.plot([best], [finite[best]], "o", ms=9, mfc="none", mew=1.4, color=colour)
