"""Figures of the claims, each with a caption beside it."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from geoparam import plots
from geoparam_lab import methods
from geoparam_lab.experiments.claims_measures import draw_correlated
from geoparam_lab.experiments.measurements import find_means, select_records
from geoparam_lab.run_folder import Record, Run, group_records


class Drawing(NamedTuple):
    """Panels of one part: a row for each value of a field, a column for each measure."""

    caption: str
    rows: str
    over: str
    label: str
    measures: dict[str, str]
    scale: str = "log"


DRAWINGS = {
    "cost": Drawing(
        """Remark 3.4. Processor time of a layer's forward and backward pass over the number of
        inputs or units (512 of the other), batch 128, as multiples of SP's.""",
        "dataset", "size", "inputs, units", {"ratio": "time over SP's"},
    ),
    "shift": Drawing(
        """Remark 3.6. Length of the mean of each layer's input over the size of the input after
        training: with the batch's means, as in training, and with running means.""",
        "dataset", "size", "layer",
        {"offset": "mean over size", "offset_running": "mean over size, running"}, "linear",
    ),
    "shell": Drawing(
        """Section 3.1. Median distance |λ| of the units' boundaries over the median length of the
        inputs, over training; one row a rate, mean over seeds and the three sets.""",
        "lr", "epochs", "epoch", {"path": "|λ| over ‖x‖"}, "symlog",
    ),
    "products": Drawing(
        """Appendix E. A layer of 32 units over its fan-in, one row a rate: smallest product of
        sines times the root of the fan-in, share of angles whose metric is below 1e-4, share of
        activations that are 0; before training (pale) and after it.""",
        "lr", "size", "fan-in",
        {"smallest": "product × √n", "negligible": "share of angles", "sparsity": "share of 0"},
    ),
}  # fmt: skip
COVARIANCE = """Equation 9. Two inputs with correlations 0, 0.5 and 0.9 (points), and weights of
    length 1: in the norm of their covariance, as BN has it (line), and in the usual norm, as WN
    has it (dashed). Across the data's long axis BN's weights are long."""


def draw(run: Run) -> None:
    """Draw the figures of all parts that a run has."""
    records = run.records()
    run.figure("covariance", _draw_norms(), COVARIANCE)
    for part, drawing in DRAWINGS.items():
        if own := select_records(records, part=part):
            run.figure(part, _draw_panels(own, drawing), drawing.caption)


def _draw_norms() -> Figure:
    figure, axes = plots.new_figure(1, 3, size=(11.0, 3.6))
    angles = np.linspace(0, 2 * np.pi, 200)
    circle = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    for ax, correlation in zip(axes[0], (0.0, 0.5, 0.9), strict=True):
        x = draw_correlated(correlation, 400, 2, seed=0).numpy()
        length = np.sqrt(((circle @ (x.T @ x / len(x))) * circle).sum(axis=1))
        ax.plot(*x.T, ".", color="#bbbbbb", ms=3)
        ax.plot(*(circle / length[:, None]).T, label="BN", **plots.method_style("bn").line)
        ax.plot(*circle.T, "--", color=plots.method_style("wn").colour, label="WN")
        ax.set(xlim=(-4, 4), ylim=(-4, 4), aspect="equal", title=f"correlation {correlation:g}")
    plots.legend_beside(axes[0, -1])
    return figure


def _draw_panels(records: Sequence[Record], drawing: Drawing) -> Figure:
    rows, count = group_records(records, drawing.rows), len(drawing.measures)
    figure, axes = plots.new_figure(len(rows), count, size=(4 * count + 1.5, 3 * len(rows)))
    for row, ((value,), own) in zip(axes, rows.items(), strict=True):
        for ax, (measure, label) in zip(row, drawing.measures.items(), strict=True):
            known = [record for record in own if measure in record]
            if f"{measure}_start" in known[0]:
                start = {"alpha": 0.4, "marker": "", "label": None}
                _draw_lines(ax, known, drawing.over, f"{measure}_start", **start)
            _draw_lines(ax, known, drawing.over, measure)
            title = f"rate {value:g}" if drawing.rows == "lr" else value
            ax.set(xlabel=drawing.label, ylabel=label, title=title, xscale=drawing.scale)
            if measure == "smallest":
                ax.set_yscale("symlog", linthresh=1e-6)
                ax.set_ylim(0, 1)
    plots.legend_beside(axes[0, -1])
    return figure


def _draw_lines(
    ax: Axes, records: Sequence[Record], over: str, measure: str, **style: Any
) -> None:
    """Draw the means of a measure over a field, or of a path over epochs, one line a method."""
    by_method = group_records(records, "method")
    styles = plots.curve_styles(methods.title(name) for (name,) in by_method)
    for own, method_style in zip(by_method.values(), styles, strict=True):
        if over == "epochs":
            at, means = own[0][over], np.mean([r[measure] for r in own], axis=0).tolist()
        else:
            at, means = find_means(own, over, measure)
        line = {**method_style.line, "label": method_style.title, "marker": "o", "ms": 3}
        ax.plot(at, means, **{**line, **style})
