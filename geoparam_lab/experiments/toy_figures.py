"""Which seeds of Levy and Banana are shown, and figures of them.

One seed may be lucky. Figures and the slider show each method at the seed with its median test
result; the slider offers other seeds as well.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from geoparam_lab import methods
from geoparam_lab.experiments import papers
from geoparam_lab.experiments.experiment import Experiment
from geoparam_lab.experiments.toys import Array, Arrays, Member
from geoparam_lab.run_folder import Record, Run
from geoparam_lab.training.stacks import snapshots

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SHOWN = 5  # seeds that the slider offers, or more where methods have more medians


def find_papers_lr(method: str, lrs: Sequence[float]) -> float:
    """Return the papers' rate of a method, or where that was not run the nearest one that was.

    Example:
        >>> find_papers_lr("gmp", (0.01, 0.1)), find_papers_lr("gmp", (0.01, 0.03))
        (0.1, 0.03)
    """
    return min(lrs, key=lambda lr: abs(np.log(lr / methods.get(method).lr)))


def find_records(run: Run, method: str, lr: float | None = None) -> list[Record]:
    """Return a method's records at a rate, or else at the papers'."""
    lr = lr or find_papers_lr(method, run.config["lrs"])
    return [r for r in run.records() if r["method"] == method and r["lr"] == lr]


def compare_gmp_with_sp(
    run: Run, measure: str, motion: str, lr: float | None = None
) -> list[tuple[float, float]] | None:
    """Return GmP's median result and largest motion, then SP's; None where one is missing."""
    found = []
    for method in ("gmp", "sp"):
        own = find_records(run, method, lr)
        results = [r[measure] for r in own if math.isfinite(r[measure])]
        if not results:
            return None
        found.append((float(np.median(results)), max(r[motion] for r in own)))
    return found


def find_median_seed(records: Iterable[Record], measure: str) -> int:
    """Return the seed with the median result; of two in the middle, the one with the lower value.

    Example:
        >>> records = [{"seed": s, "rmse": x} for s, x in enumerate((0.4, 1.2, 1.1))]
        >>> find_median_seed(records, "rmse")
        2
    """
    order = sorted((not math.isfinite(r[measure]), r[measure], r["seed"]) for r in records)
    finite = sum(not infinite for infinite, _, _ in order) or 1
    return int(order[(finite - 1) // 2][2])


def load_medians(run: Run, measure: str, lr: float | None = None) -> dict[str, Arrays]:
    """Return each method's arrays of its median seed, at a rate or else at the papers' own."""
    found = {}
    for method in run.config["methods"]:
        rate = lr or find_papers_lr(method, run.config["lrs"])
        seed = find_median_seed(find_records(run, method, rate), measure)
        found[method] = run.curves(Member(method, rate, seed).name)
    return found


def film_seeds(
    run: Run, measure: str, frames: Mapping[str, str], motion: str, per_epoch: int = 1
) -> Arrays:
    """Return what the slider shows of training: several seeds, each method at the papers' rate.

    The result has the arrays of `frames`, by their names in the curves, as (S, M, T, ...) on one
    time axis; `motion`, the largest of any update since the frame before; the `steps` of its
    frames, the methods' titles, the seeds, and the place of each method's median seed among them.
    """
    config = run.config
    own = {method: find_records(run, method) for method in config["methods"]}
    medians = [find_median_seed(records, measure) for records in own.values()]
    others = [seed for seed in range(config["seeds"]) if seed not in medians]
    seeds = sorted({*medians, *others[: max(0, SHOWN - len(set(medians)))]})
    films = [
        run.curves(Member(method, find_papers_lr(method, config["lrs"]), seed).name)
        for seed in seeds
        for method in own
    ]
    together = snapshots.together(films, [*frames.values()])
    steps = together["steps"]
    found = {name: together[kept] for name, kept in frames.items()}
    found[motion] = np.array(
        [snapshots.largest_since(film[motion], steps, per_epoch) for film in films]
    )
    shape = (len(seeds), len(own))
    return {name: array.reshape(*shape, *array.shape[1:]) for name, array in found.items()} | {
        "steps": steps,
        "methods": np.array([methods.title(name) for name in own]),
        "seeds": np.array(seeds),
        "median": np.array([seeds.index(seed) for seed in medians]),
    }


# --- drawing ------------------------------------------------------------------------------------


def new_columns(
    count: int, deep: int, size: tuple[float, float]
) -> tuple["Figure", Array, "Axes"]:
    """Return a figure, a column of `deep` axes for each of `count` methods, and the upper right.

    Five columns are beside each other at most, the others below; `size` is that of a panel.

    Example:
        >>> figure, columns, corner = new_columns(7, 2, (4.0, 3.0))
        >>> columns.shape, len(figure.axes), corner is columns[4, 0]
        ((7, 2), 20, True)
    """
    from geoparam import plots

    wide = min(count, 5)
    bands = -(-count // wide)
    inches = (1.0 + size[0] * wide, size[1] * deep * bands)
    figure, axes = plots.new_figure(bands * deep, wide, size=inches)
    columns = axes.reshape(bands, deep, wide).swapaxes(1, 2).reshape(-1, deep)
    for spare in columns[count:].flat:
        spare.axis("off")
    return figure, columns[:count], axes[0, -1]


def draw_seeds(run: Run, measure: str, label: str, printed: Experiment | None = None) -> "Figure":
    """Draw a point for every seed, method and rate, and the one seed that an experiment's papers
    print, where it is given."""
    from geoparam import plots

    config = run.config
    columns = [(method, lr) for method in config["methods"] for lr in config["lrs"]]
    wide = max(1.6 + 0.95 * len(columns), 7.0)  # words need that much, however few the columns
    figure, axes = plots.new_figure(1, 1, size=(wide, 4.2))
    ax = axes[0, 0]
    for x, (method, lr) in enumerate(columns):
        values = [r[measure] for r in find_records(run, method, lr) if np.isfinite(r[measure])]
        _draw_seed_column(ax, x, values, method, lr)
        known = printed.find_printed(measure, method) if printed else None
        if known and lr == papers.RATES.get(method):
            ax.plot([x], [known.value], "D", color="white", mec="black", ms=8, zorder=4)
    if printed:
        ax.plot([], [], "D", color="white", mec="black", ms=8, label="papers, one seed")
    ax.plot([], [], "_", color="black", ms=16, mew=2, label="median")
    names = [f"{methods.title(method)}\n{lr:g}" for method, lr in columns]
    ax.set_xticks(range(len(columns)), names)
    ax.set(ylabel=label, xlim=(-0.6, len(columns) - 0.4))
    ax.set_xlabel("method and learning rate (filled: the rate that the papers chose)")
    ax.grid(visible=False, axis="x")
    ax.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False)
    return figure


def _draw_seed_column(ax: "Axes", x: int, values: list[float], method: str, lr: float) -> None:
    """One method at one rate: filled where the rate is the papers' for it."""
    from geoparam import plots

    colour = plots.method_style(methods.without_options(method)).colour
    order = np.argsort(np.argsort(values))
    middle = (min(len(values), 5) - 1) / 2
    beside = x + 0.11 * (order % 5 - middle)  # so that equal values do not hide each other
    filled = lr == methods.get(method).lr
    ax.plot(beside, values, "o", color=colour, mfc=colour if filled else "none", ms=5, alpha=0.75)
    if values:
        ax.plot([x], [np.median(values)], "_", color="black", ms=26, mew=2, zorder=3)
