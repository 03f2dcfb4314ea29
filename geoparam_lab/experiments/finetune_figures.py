"""The figure of fine-tuning: accuracy over the batch size."""

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from geoparam_lab import plots
from geoparam_lab.experiments import finetune
from geoparam_lab.plots import CYCLE, legend_beside
from geoparam_lab.run_folder import Record, Run, group_records, select_records
from geoparam_lab.training.finetune.settings import METHODS

_BATCHES = """Top-1 accuracy on test images over the batch size, each method at the rate with its
    best accuracy on images held out; means over seeds, and their standard errors. Points are
    shifted a little to the side, so that errors can be told apart."""
_SHIFT = 1.03  # between the points of two methods, as a factor of the batch size
_COLOURS = dict(zip(METHODS, CYCLE, strict=False))


def draw(run: Run) -> None:
    """Draw the figure of a sweep, as far as it is done."""
    records = [record for record in run.records() if math.isfinite(record["top1"])]
    if records:
        run.figure("batch_sizes", draw_batch_sizes(records), _BATCHES)


def draw_batch_sizes(records: Sequence[Record]) -> Figure:
    """Return test accuracy over the batch size, a line for each method."""
    figure, axes = plots.new_figure(1, 1, size=(6.4, 4.2))
    ax = axes[0, 0]
    best = finetune.choose(records)
    trained = {record["method"] for record in records}
    methods = [method for method in METHODS if method in trained]
    for index, method in enumerate(methods):
        by_batch = group_records(select_records(best, method=method), "batch_size")
        batches, means, errors = [], [], []
        for (batch,), group in sorted(by_batch.items()):
            top1 = [record["top1"] for record in group]
            batches.append(batch * _SHIFT ** (index - (len(methods) - 1) / 2))
            means.append(np.mean(top1))
            errors.append(_find_error(top1))
        style = {"color": _COLOURS[method], "marker": "o", "ms": 5, "capsize": 3}
        ax.errorbar(batches, means, errors, **style, label=method)
    plots.tick_values(ax, sorted({record["batch_size"] for record in records}))
    ax.set(xlabel="batch size", ylabel="top-1 accuracy on test images (%)")
    legend_beside(ax)
    return figure


def _find_error(values: Sequence[float]) -> float:
    """Return the standard error of the mean; 0 for one value, which has none."""
    if len(values) < 2:
        return 0.0
    return float(np.std(values, ddof=1) / math.sqrt(len(values)))
