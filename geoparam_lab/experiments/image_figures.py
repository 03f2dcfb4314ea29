"""Figure 4 of a sweep over images, with its caption.

It shows every method at one setting. Where a sweep has several, that is the one with the highest
mean top-1 among those at which no seed diverged, for each batch size alone: on the images kept
back for that, or else on the validation images.
"""

import warnings
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from geoparam_lab import methods, plots
from geoparam_lab.experiments import image_text
from geoparam_lab.plots import curve_styles, legend_beside
from geoparam_lab.run_folder import Record, Run, select_records

Array = np.ndarray

_ROWS = {
    "train_top5": "training top-5 accuracy (%)",
    "val_top5": "validation top-5 accuracy (%)",
    "select_top5": "top-5 accuracy on images kept back (%)",
}
_FIGURE_4 = """Figure 4. Top-5 accuracy over epochs, above in training (augmented images, and
    weights that change during the epoch), below in evaluation; mean over seeds, the
    band is ± its standard error. A seed that diverged or stopped early is in the mean as long as
    it lasted.
    With --recalibrate the last epoch's evaluation is after statistics were recomputed."""
_HOW = {
    "one": "Every method has one setting",
    "top1": """Every method is shown at the learning rate with its highest validation top-1, which
    flatters a method the more rates it was given""",
    "select_top1": """Every method is shown at the setting with its highest top-1 on the images
    kept back for that""",
}


def draw(run: Run) -> None:
    """Draw the figure of a sweep, as far as it is done."""
    order = ("method", "batch_size", "lr", "seed")
    records = run.records()
    records.sort(key=lambda r: (methods.rank(r["method"]), *(r[name] for name in order)))
    if not records:
        return
    measure = "select_top1" if "select_top1" in records[0] else "top1"
    shown = image_text.choose(records, measure)
    kept = set(run.curve_names())
    if missing := [r["name"] for r in shown if r["name"] not in kept]:
        text = f"figure 4 is without these runs, whose curves are missing: {missing}."
        warnings.warn(text, stacklevel=2)
    shown = [record for record in shown if record["name"] in kept]
    curves = {record["name"]: run.curves(record["name"]) for record in shown}
    longest = max((len(arrays["train_top5"]) for arrays in curves.values()), default=0)
    if longest:
        figure = _draw_curves(shown, curves, longest)
        how = _HOW["one" if all(record["tries"] == 1 for record in shown) else measure]
        data = f"{image_text.name_network(run.config)}; {image_text.describe_images(run.config)}"
        run.figure("figure4", figure, f"{_FIGURE_4} {how}; the table has it. {data}.")


def _draw_curves(
    records: Sequence[Record], curves: Mapping[str, Mapping[str, Array]], epochs: int
) -> Figure:
    """Return training above validation, and a column of these for each batch size."""
    batches = sorted({record["batch_size"] for record in records})
    rows = {name: label for name, label in _ROWS.items() if name in next(iter(curves.values()))}
    figure, columns, corner = plots.new_columns(
        len(batches), len(rows), size=(3.9, 3.2), most=len(batches)
    )
    for column, batch in zip(columns, batches, strict=True):
        for ax, first, (name, label) in zip(column, columns[0], rows.items(), strict=True):
            # Every title, so that styles and legend are the same on all axes.
            lines = {methods.title(r["method"]): [np.full(epochs, np.nan)] for r in records}
            for record in select_records(records, batch_size=batch):
                values = curves[record["name"]][name].astype(float)
                lacking = (0, epochs - len(values))
                padded = np.pad(values, lacking, constant_values=np.nan)
                lines[methods.title(record["method"])].append(padded)
            ax.sharey(first)
            draw_means(ax, {title: np.stack(seeds) for title, seeds in lines.items()})
            ax.set_ylabel(label if ax is first else "")
            ax.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        column[0].set_title(f"batch size {batch:,}", fontsize=10)
        column[-1].set_xlabel("epoch")
    legend_beside(corner)
    return figure


def draw_means(ax: Axes, curves: Mapping[str, Array]) -> None:
    """Draw the mean of (seeds, epochs), and the standard error of that mean as a band.

    Where a seed ended early, the mean is that of the seeds still there.
    """
    for style, values in zip(curve_styles(curves), curves.values(), strict=True):
        finite = np.ma.masked_invalid(values)
        mean = finite.mean(axis=0).filled(np.nan)
        error = (finite.std(axis=0, ddof=1) / np.sqrt(finite.count(axis=0))).filled(np.nan)
        at = np.arange(1, values.shape[1] + 1)
        alone = "o" if len(at) == 1 else None  # a line needs two points
        ax.plot(at, mean, **style.line, linewidth=1.8, marker=alone, label=style.title)
        ax.fill_between(at, mean - error, mean + error, color=style.colour, alpha=0.2, linewidth=0)
