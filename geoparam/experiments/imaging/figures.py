"""Figures of a sweep over images, each with a caption beside it: figure 4, and results over rates.

Figure 4 shows every method at one learning rate. Where a sweep has several, that is the one with
the highest mean validation top-1 among those at which no seed diverged, for each batch size alone;
and where the papers' own rates are among them and are others, a second figure shows these.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from geoparam import plots
from geoparam.data.files import replacing
from geoparam.experiments.methods import METHODS, TITLES
from geoparam.experiments.results import Record, Run
from geoparam.experiments.tabling import images as described
from geoparam.plots.style import legend_beside

Array = np.ndarray
Rates = dict[tuple[str, int], float]  # by method and batch size

_ROWS = {"train_top5": "training top-5 accuracy (%)", "val_top5": "validation top-5 accuracy (%)"}
_PAPERS_RATES = "figure4b"
_FIGURE_4 = """Figure 4. Top-5 accuracy over epochs, above in training (augmented images, and
    weights that change during the epoch), below on the validation images; mean over seeds, the
    band is ± its standard error. A seed that diverged or stopped early is in the mean as long as
    it lasted."""
_OVER_RATES = """Validation top-1 accuracy over the learning rate, mean over seeds ± standard
    error. Rates at which a seed diverged have a cross at the bottom."""
_THEIRS = "Every method is shown at the papers' learning rate"
_BEST = """Every method is shown at the learning rate with its highest validation top-1, which
    flatters a method the more rates it was given"""


def draw(run: Run, papers: Mapping[str, float]) -> None:
    """Draw all figures of a sweep, as far as it is done.

    Args:
        run: its folder; a record has its curves under its `name`.
        papers: the papers' learning rate of each method.
    """
    records = sorted(run.records(), key=_order)
    if not records:
        return
    best, theirs = best_rates(records), papers_rates(records, papers)
    _draw_convergence(run, "figure4", records, best, _THEIRS if best == theirs else _BEST)
    if theirs != best and theirs.keys() == best.keys():
        _draw_convergence(run, _PAPERS_RATES, records, theirs, _THEIRS)
    else:  # before the sweep went on, there may have been one
        for suffix in (".png", ".txt"):
            (run.folder / "figures" / f"{_PAPERS_RATES}{suffix}").unlink(missing_ok=True)
    if any(len(rates) > 1 for rates in _tried(records).values()):
        _save(run, "rates", _over_rates(records), f"{_OVER_RATES} {_what(run)}")


# --- which rates --------------------------------------------------------------------------------


def best_rates(records: Iterable[Record]) -> Rates:
    """Return the rate with the highest mean top-1 by method and batch size.

    One at which a seed diverged counts only where there is no other; of equal ones, the lowest.

    Example:
        >>> records = [{"method": "bn", "batch_size": 256, "lr": lr, "seed": seed, "top1": top1}
        ...            for lr, both in {0.1: (40, 41), 0.3: (43, float("nan"))}.items()
        ...            for seed, top1 in enumerate(both)]
        >>> best_rates(records)
        {('bn', 256): 0.1}
    """
    return {
        place: max(rates, key=lambda lr: (_mean(rates[lr]), -lr))
        for place, rates in _tried(records).items()
    }


def papers_rates(records: Iterable[Record], papers: Mapping[str, float]) -> Rates:
    """Return the papers' rate by method and batch size, where there is a result at it."""
    return {
        (method, batch): papers[method]
        for (method, batch), rates in _tried(records).items()
        if papers[method] in rates
    }


def _tried(records: Iterable[Record]) -> dict[tuple[str, int], dict[float, list[float]]]:
    """Return top-1 of all seeds by method and batch size, and then by rate."""
    found: dict[tuple[str, int], dict[float, list[float]]] = {}
    for record in records:
        place = record["method"], record["batch_size"]
        found.setdefault(place, {}).setdefault(record["lr"], []).append(record["top1"])
    return found


def _mean(values: Sequence[float]) -> float:
    """Return the mean, below every other where one value is not finite."""
    return float(np.mean(values)) if all(map(math.isfinite, values)) else -math.inf


# --- drawing ------------------------------------------------------------------------------------


def _draw_convergence(
    run: Run, name: str, records: Sequence[Record], rates: Rates, how: str
) -> None:
    shown = [r for r in records if rates.get((r["method"], r["batch_size"])) == r["lr"]]
    kept = set(run.curve_names())
    curves = {
        record["name"]: run.curves(record["name"]) for record in shown if record["name"] in kept
    }
    longest = max((len(each["val_top5"]) for each in curves.values()), default=0)
    if longest:
        figure = _convergence([r for r in shown if r["name"] in curves], curves, longest)
        _save(run, name, figure, f"{_FIGURE_4} {how}: {_rates_in_words(rates)}. {_what(run)}")


def _convergence(
    records: Sequence[Record], curves: Mapping[str, Mapping[str, Array]], epochs: int
) -> Figure:
    """Return training above validation, and a column of these for each batch size."""
    batches = sorted({record["batch_size"] for record in records})
    figure, axes = plots.new_figure(2, len(batches), size=(3.9 * len(batches) + 2.0, 6.4))
    for row, (curve, label) in zip(axes, _ROWS.items(), strict=True):
        for ax, batch in zip(row, batches, strict=True):
            own = [record for record in records if record["batch_size"] == batch]
            lines = {
                method: np.stack([_padded(curves[r["name"]][curve], epochs) for r in some])
                for method, some in itertools.groupby(own, key=lambda record: record["method"])
            }
            ax.sharey(row[0])
            plots.convergence(lines, label=label if ax is row[0] else "", legend=False, ax=ax)
            ax.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    for ax, batch in zip(axes[0], batches, strict=True):
        ax.set_title(f"batch size {batch:,}", fontsize=10)
        ax.set_xlabel("")
    _legend(axes[0, -1], records)
    return figure


def _padded(values: Array, length: int) -> Array:
    """Return a curve with NaN for the epochs that it does not have."""
    return np.append(values.astype(float), np.full(length - len(values), np.nan))


def _over_rates(records: Sequence[Record]) -> Figure:
    batches = sorted({record["batch_size"] for record in records})
    figure, axes = plots.new_figure(1, len(batches), size=(3.9 * len(batches) + 2.0, 3.6))
    for ax, batch in zip(axes[0], batches, strict=True):
        ax.sharey(axes[0, 0])
        own = {method: r for (method, size), r in _tried(records).items() if size == batch}
        plots.over_rates(own, label="validation top-1 accuracy (%)", legend=False, ax=ax)
        ax.set_title(f"batch size {batch:,}", fontsize=10)
    for ax in axes[0, 1:]:
        ax.set_ylabel("")
    _legend(axes[0, -1], records)
    return figure


def _legend(ax: Axes, records: Sequence[Record]) -> None:
    """Name all methods of the figure, those too that the axis does not have."""
    for method in dict.fromkeys(record["method"] for record in records):
        if plots.method_style(method).title not in ax.get_legend_handles_labels()[1]:
            style = plots.method_style(method)
            ax.plot([], [], **style.line, label=style.title)
    legend_beside(ax)


# --- words --------------------------------------------------------------------------------------


def _rates_in_words(rates: Rates) -> str:
    """Return the rates by method, and by batch size where that matters.

    Example:
        >>> _rates_in_words({("bn", 256): 0.1, ("bn", 1024): 0.3, ("gmp", 256): 0.1})
        'BN 0.1 (batch 256) and 0.3 (batch 1,024), GmP 0.1'
    """
    said = []
    for method, places in itertools.groupby(rates, key=lambda place: place[0]):
        own = {batch: rates[method, batch] for _, batch in places}
        if len(set(own.values())) == 1:
            said.append(f"{TITLES[method]} {next(iter(own.values())):g}")
        else:
            each = (f"{rate:g} (batch {batch:,})" for batch, rate in own.items())
            said.append(f"{TITLES[method]} {' and '.join(each)}")
    return ", ".join(said)


def _what(run: Run) -> str:
    return f"{described.network_title(run.config)}; {described.images(run.config)}."


def _order(record: Record) -> tuple[Any, ...]:
    rank = list(METHODS).index(record["method"])
    return rank, record["batch_size"], record["lr"], record["seed"]


def _save(run: Run, name: str, figure: Figure, caption: str) -> None:
    path = run.figure(name, figure).with_suffix(".txt")
    with replacing(path) as unfinished:
        unfinished.write_text(" ".join(caption.split()) + "\n", encoding="utf-8")
