"""How much a method's result depends on its learning rate.

Each rate has a median error over seeds or splits. The plateau is the rates around the best one,
without a gap, whose medians are at most 10 % above its own. A network fails where its error is not
finite, or more than twice the median over all methods and rates.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from geoparam_lab import methods
from geoparam_lab.experiments.experiment import Drawings, Measure, list_in_words
from geoparam_lab.run_folder import Record, Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FEWEST = 4  # rates of a figure over them
NEAR = 1.1  # times the best median: the plateau
FAILED = 2.0  # times the median of all errors: a network with more fails
HIGHEST = 10  # times the lowest median: the top of a figure

Panels = Mapping[str, Mapping[str, "Tolerance"]]  # by data set, then by method


@dataclass(frozen=True)
class Tolerance:
    """One method's errors over its rates."""

    rates: np.ndarray  # ascending, (R,)
    medians: np.ndarray  # of the errors at each, infinite where most are, (R,)
    failed: float  # the share of networks that fail, over all rates

    @property
    def plateau(self) -> np.ndarray:
        """The rates around the best one that are nearly as good."""
        near = self.medians <= NEAR * self.medians.min()
        gaps = np.cumsum(~near)  # how many rates up to each are not as good
        return self.rates[near & (gaps == gaps[np.argmin(self.medians)])]

    @property
    def width(self) -> float:
        """The plateau's highest rate over its lowest."""
        return float(self.plateau[-1] / self.plateau[0])


def measure_tolerance(records: Iterable[Record], measure: Measure) -> dict[str, Tolerance]:
    """Return the tolerance of each method, from one record for each rate and seed or split."""
    records = list(records)
    lrs = np.array([record["lr"] for record in records], float)
    errors = np.array([record[measure.name] for record in records], float)
    if measure.better == "higher":
        errors = 1 - errors
    errors = np.where(np.isfinite(errors), errors, np.inf)
    failed = np.isinf(errors) | (errors > FAILED * np.median(errors))

    tolerances = {}
    for method in dict.fromkeys(record["method"] for record in records):
        is_method = np.array([record["method"] == method for record in records])
        rates = np.unique(lrs[is_method])
        medians = np.array([np.median(errors[is_method & (lrs == rate)]) for rate in rates])
        tolerances[method] = Tolerance(rates, medians, float(failed[is_method].mean()))
    return tolerances


def describe_tolerance(panels: Panels) -> str:
    """Return in a sentence how wide the plateaus are, and how many networks fail."""
    phrases = []
    for name in next(iter(panels.values())):
        tolerances = [panel[name] for panel in panels.values()]
        width = math.exp(np.mean([math.log(tolerance.width) for tolerance in tolerances]))
        failed = np.mean([tolerance.failed for tolerance in tolerances])
        phrases.append(f"{methods.title(name)} {width:.2g} ({failed:.0%})")
    over = ", the geometric mean over data sets" if len(panels) > 1 else ""
    return (
        "Highest over lowest rate whose median error is within 10 % of the best one's"
        f"{over}, and in brackets the share of networks that fail over all rates (an error that "
        f"is not finite, or more than twice the median of all): {list_in_words(phrases)}."
    )


def draw_rates(run: Run, records: Mapping[str, Iterable[Record]], measure: Measure) -> Drawings:
    """Return a run's figure over its rates, if there are enough; `records` are by panel title."""
    if len(run.config["lrs"]) < FEWEST:
        return {}
    panels = {title: measure_tolerance(each, measure) for title, each in records.items()}
    label = "median test error" if measure.better == "higher" else f"median {measure.title}"
    return {"rates": (lambda: draw_tolerance(panels, label), describe_tolerance(panels))}


def draw_tolerance(panels: Panels, label: str) -> "Figure":
    """Draw the median error over the rate, a panel for each data set; the plateau is filled."""
    from geoparam_lab import plots

    lines = max(map(len, panels.values()))  # of the legend
    size = (3.6, max(3.6, 0.6 + 0.3 * lines))
    figure, columns, corner = plots.new_columns(len(panels), 1, size, most=4)
    for ax, (title, panel) in zip(columns[:, 0], panels.items(), strict=True):
        styles = plots.curve_styles([methods.title(name) for name in panel])
        for style, tolerance in zip(styles, panel.values(), strict=True):
            rates, medians = tolerance.rates, tolerance.medians
            filled = np.isin(rates, tolerance.plateau)
            ax.plot(rates, medians, **style.line, label=style.title)
            ax.plot(rates[filled], medians[filled], "o", color=style.colour, ms=5)
        ax.set(xscale="log", yscale="log", xlabel="learning rate", ylabel=label)
        best = min(tolerance.medians.min() for tolerance in panel.values())
        ax.set_ylim(0.8 * best, min(ax.get_ylim()[1], HIGHEST * best))
        ax.set_title(title, loc="left")
    plots.legend_beside(corner)
    return figure
