"""The figures of fine-tuning: accuracy over the batch size, and over the rate."""

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from geoparam_lab import plots
from geoparam_lab.experiments import finetune
from geoparam_lab.plots import CYCLE, legend_beside
from geoparam_lab.plots.ticks import label_ticks
from geoparam_lab.run_folder import Record, Run, group_records, select_records
from geoparam_lab.training.finetune.settings import METHODS

_BATCHES = """Top-1 accuracy on test images over the batch size, each method at the rate with its
    best accuracy on images held out; means over seeds, and their standard errors. Points are
    shifted a little to the side, so that errors can be told apart."""
_RATES = """Top-1 accuracy on images held out over the learning rate, with the first seed. Runs
    that diverged are left out."""
_SHIFT = 1.03  # between the points of two methods, as a factor of the batch size
_COLOURS = dict(zip(METHODS, CYCLE, strict=False))


def draw(run: Run) -> None:
    """Draw the figures of a sweep, as far as it is done."""
    records = [record for record in run.records() if math.isfinite(record["top1"])]
    if records:
        run.figure("batch_sizes", draw_batch_sizes(records), _BATCHES)
        run.figure("rates", draw_rates(records), _RATES)


def draw_batch_sizes(records: Sequence[Record]) -> Figure:
    """Return test accuracy over the batch size, a line for each method."""
    figure, axes = plots.new_figure(1, 1, size=(6.4, 4.2))
    ax = axes[0, 0]
    best = finetune.choose(records)
    methods = _list_methods(records)
    for index, method in enumerate(methods):
        by_batch = group_records(select_records(best, method=method), "batch_size")
        top1 = {batch: [r["top1"] for r in by_batch[batch,]] for (batch,) in sorted(by_batch)}
        shift = _SHIFT ** (index - (len(methods) - 1) / 2)
        ax.errorbar(
            [batch * shift for batch in top1],
            [np.mean(values) for values in top1.values()],
            [_find_error(values) for values in top1.values()],
            color=_COLOURS[method],
            marker="o",
            ms=5,
            capsize=3,
            label=method,
        )
    ax.set(xscale="log", xlabel="batch size", ylabel="top-1 accuracy on test images (%)")
    batches = sorted({record["batch_size"] for record in records})
    label_ticks(ax, {batch: f"{batch:,}" for batch in batches})
    legend_beside(ax)
    return figure


def draw_rates(records: Sequence[Record]) -> Figure:
    """Return accuracy on images held out over the rate, a panel for each batch size."""
    first = select_records(records, seed=0)
    batches = sorted({record["batch_size"] for record in first})
    figure, axes = plots.new_figure(1, len(batches), size=(3.6 * len(batches) + 1.8, 3.8))
    for ax, batch in zip(axes[0], batches, strict=True):
        ax.sharey(axes[0, 0])
        for method in _list_methods(records):
            same = select_records(first, batch_size=batch, method=method)
            same.sort(key=lambda record: record["lr"])
            rates, top1 = ([record[name] for record in same] for name in ("lr", "select_top1"))
            ax.plot(rates, top1, color=_COLOURS[method], marker="o", ms=4, label=method)
        ax.set(xscale="log", xlabel="learning rate")
        ax.set_title(f"batch size {batch:,}", loc="left")
    axes[0, 0].set_ylabel("top-1 accuracy on images held out (%)")
    legend_beside(axes[0, -1])
    return figure


def _list_methods(records: Sequence[Record]) -> list[str]:
    present = {record["method"] for record in records}
    return [method for method in METHODS if method in present]


def _find_error(values: Sequence[float]) -> float:
    """Return the standard error of the mean; 0 for one value, which has none."""
    if len(values) < 2:
        return 0.0
    return float(np.std(values, ddof=1) / math.sqrt(len(values)))
