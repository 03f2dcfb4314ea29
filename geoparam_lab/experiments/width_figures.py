"""Figures of the width experiment, each with a caption beside it."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from geoparam import plots
from geoparam.plots import DASHED, DOTTED, SOLID, legend_beside, ordered_colours
from geoparam_lab.experiments.measurements import find_means, select_records
from geoparam_lab.experiments.width_scales import VARIANTS, Variant
from geoparam_lab.run_folder import Record, Run, group_records

_DASHES = {  # solid where the initialisation knows the fan-in alone
    Variant("gmp", "sphere"): SOLID,
    Variant("gmp", "glorot"): DASHED,
    Variant("sp", "glorot"): DOTTED,
    Variant("sp", "he"): SOLID,
}
_STARTS = {
    "activation": "hidden activations",
    "output": "outputs",
    "gradient_offset": "gradient of offsets",
    "gradient_output": "gradient of output weights",
    "output_change": "change of outputs in a step",
}
_START_CAPTION = """Networks before training, over the width of their hidden layer: root mean
    squares, mean over seeds. The step is Adam's first, at rate 0.01. Flat lines do not depend on
    the width: activations and outputs under the text's initialisation and under He's."""
_TRAINED_CAPTION = """Test error after a fixed number of steps over the learning rate, one line a
    width, mean over seeds. Where the lowest points lie above each other, one rate serves all
    widths."""


def draw(run: Run) -> None:
    """Draw all figures of a run."""
    config, by_kind = run.config, group_records(run.records(), "kind")
    run.figure("start", _draw_scales(by_kind["start",], config), _START_CAPTION)
    run.figure("trained", _draw_trained(by_kind["trained",], config), _TRAINED_CAPTION)


def _draw_scales(records: Sequence[Record], config: Record) -> Figure:
    datasets = config["datasets"]
    size = (3.2 * len(_STARTS) + 1.8, 3.1 * len(datasets))
    figure, axes = plots.new_figure(len(datasets), len(_STARTS), size=size)
    for row, dataset in zip(axes, datasets, strict=True):
        for ax, (measure, title) in zip(row, _STARTS.items(), strict=True):
            for variant in VARIANTS:
                own = select_records(records, dataset=dataset, **variant._asdict())
                colour = plots.method_style(variant.method).colour
                line = {"color": colour, "linestyle": _DASHES[variant], "label": variant.title}
                ax.plot(*find_means(own, "width", measure), **line, marker="o", ms=3)
            _finish(ax, f"{dataset.capitalize()}: {title}", "width", config["widths"])
    legend_beside(axes[0, -1])
    return figure


def _draw_trained(records: Sequence[Record], config: Record) -> Figure:
    datasets, widths = config["datasets"], config["widths"]
    size = (3.2 * len(VARIANTS) + 1.0, 3.1 * len(datasets))
    figure, axes = plots.new_figure(len(datasets), len(VARIANTS), size=size)
    for row, dataset in zip(axes, datasets, strict=True):
        for ax, variant in zip(row, VARIANTS, strict=True):
            ax.sharey(row[0])
            for width, colour in zip(widths, ordered_colours(len(widths)), strict=True):
                fields = {"dataset": dataset, "width": width, **variant._asdict()}
                line = find_means(select_records(records, **fields), "lr", "test_rmse")
                ax.plot(*line, color=colour, marker="o", ms=3, label=f"{width:,}")
            title = f"{dataset.capitalize()}: {variant.title}"
            _finish(ax, title, "learning rate", config["rates"])
        row[0].set_ylabel("test RMSE")
    legend_beside(axes[0, -1], title="width")
    return figure


def _finish(ax: Axes, title: str, label: str, ticks: Sequence[float]) -> None:
    ax.set(xscale="log", yscale="log", xlabel=label)
    ax.set_xticks(ticks, [f"{x:g}" for x in ticks])
    ax.minorticks_off()
    ax.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
    ax.yaxis.set_major_formatter("{x:g}")
    ax.yaxis.set_minor_formatter("{x:g}")
    ax.tick_params(which="both", labelsize=8)
    ax.set_title(title, fontsize=9)
