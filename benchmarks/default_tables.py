"""Tables and figure of `benchmarks.defaults`, from its records.

The best rate of a method has the lowest validation loss at the end, in the mean over seeds. The
first try is at the rate that was best before the geometry came: that of the same network (with
norms or without) and the same torch optimizer; with `turn` it is 2.4 degrees.
"""

import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

Records = list[dict[str, Any]]
Line = tuple[str, str]  # method, family
FAMILIES = {
    "adam": "Adam",
    "sgd": "SGD",
    "muon": "Muon",
    "turn": "Muon, turn",
    "snippet": "Muon, turn, lr=1e-3",
}
FIRST_TURN = 2.4
NORM_ADAM, NORM_SGD = ("norm", "adam"), ("norm", "sgd")
# Ours at the rate of a first try, or at its best rate; and what it is compared with, at its best.
PAIRS: list[tuple[Line, str, Line]] = [
    (("optimizer, turn, norm", "snippet"), "first", NORM_ADAM),
    (("optimizer, turn, norm", "turn"), "first", NORM_ADAM),
    (("optimizer, turn, norm", "turn"), "first", NORM_SGD),
    (("optimizer, turn, norm", "turn"), "best", ("muon, norm", "muon")),
    (("optimizer, intrinsic, norm", "sgd"), "first", NORM_SGD),
    (("optimizer, intrinsic, norm", "adam"), "first", NORM_ADAM),
    (("optimizer, turn", "turn"), "best", ("muon", "muon")),
    (("optimizer, intrinsic", "adam"), "first", ("plain", "adam")),
    (("optimizer, intrinsic", "sgd"), "first", ("plain", "sgd")),
    (("optimizer, turn, imn", "turn"), "first", NORM_ADAM),
    (("optimizer, intrinsic, imn", "adam"), "first", NORM_ADAM),
    (("gmp layers", "adam"), "first", ("plain", "adam")),
    (("intrinsic layers", "adam"), "first", ("plain", "adam")),
    (("optimizer, angles, norm", "sgd"), "best", ("optimizer, intrinsic, norm", "sgd")),
    (("optimizer, angles, norm", "adam"), "best", ("optimizer, intrinsic, norm", "adam")),
    (("optimizer, angles", "adam"), "best", ("optimizer, intrinsic", "adam")),
]


class Sweep:
    """All records of a task by method, family and rate."""

    def __init__(self, records: Records, task: str) -> None:
        self.runs: dict[tuple[str, str, float], Records] = defaultdict(list)
        for record in records:
            if record["task"] == task:
                key = record["method"], record["family"], record["rate"]
                self.runs[key].append(record)

    def lines(self) -> list[Line]:
        return list(dict.fromkeys((method, family) for method, family, _ in self.runs))

    def rates(self, line: Line) -> list[float]:
        return sorted(rate for method, family, rate in self.runs if (method, family) == line)

    def values(self, line: Line, rate: float, when: str, what: int) -> list[float]:
        """Return one value for each seed: the loss (what 0) or the accuracy (1)."""
        return [record[when][what] for record in self.runs[(*line, rate)]]

    def best_rate(self, line: Line) -> float:
        def mean_loss(rate: float) -> float:
            runs = self.runs[(*line, rate)]
            return statistics.fmean(record["validation"][1][0] for record in runs)

        return min(self.rates(line), key=mean_loss)

    def first_rate(self, line: Line) -> float | None:
        """Return the rate of a first try, None where there is none."""
        family = line[1]
        if family in ("turn", "snippet"):
            return FIRST_TURN
        before = ("norm" if line[0].endswith("norm") else "plain"), family
        return None if family == "muon" or before not in self.lines() else self.best_rate(before)


def mean_and_error(values: list[float]) -> tuple[float, float]:
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return statistics.fmean(values), error


def show(values: list[float]) -> str:
    return f"{statistics.fmean(values):.1f}"


def compare(ours: list[float], theirs: list[float]) -> int:
    """Return 1 or -1 where means differ by more than the difference's standard error, else 0."""
    mean, error = mean_and_error(ours)
    their_mean, their_error = mean_and_error(theirs)
    spread = (error**2 + their_error**2) ** 0.5
    if mean > their_mean + spread:
        return 1
    return -1 if mean < their_mean - spread else 0


def to_markdown(records: Records) -> str:
    """Return the two summaries, and a table for each task."""
    tasks = list(dict.fromkeys(record["task"] for record in records))
    sweeps = {task: Sweep(records, task) for task in tasks}
    seeds = len({record["seed"] for record in records})
    text = [
        "# Settings for a first try",
        "",
        f"`python -m benchmarks.defaults`, {len(records)} runs, {seeds} seeds each. The tasks are "
        "described in `benchmarks/default_tasks.py`, the methods in `benchmarks/defaults.py`. "
        '"norm" is BatchNorm, in the transformer LayerNorm; "imn" is input mean normalization '
        "with Glorot's initialisation. Test accuracy in percent after the first epoch / at the "
        "end, mean over seeds. The last column counts the tasks on which a method is no worse "
        "than the network with norms under the same optimizer (under Adam for Muon), up to the "
        "standard error of the difference.",
        "",
        "## First try",
        "At the rate that is best without geometry for the same network, with norms or without, "
        "and the same optimizer. With `turn` it is 2.4 degrees, and 0.01 for the rest, or 0.001 "
        "where it says so.",
        "",
        *_summary(sweeps, Sweep.first_rate),
        "",
        "## Every method at its own best rate",
        "Chosen by the validation loss at the end.",
        "",
        *_summary(sweeps, Sweep.best_rate),
    ]
    text += ["", "## Wins, ties and losses", *_verdicts(sweeps)]
    text += ["", "## How fast r should be under Adam", *_scale_rates(sweeps)]
    for task, sweep in sweeps.items():
        text += ["", f"## {task}", *_details(sweep)]
    return "\n".join(text) + "\n"


def _summary(sweeps: dict[str, Sweep], choose: Any) -> list[str]:
    titles = ["method", "optimizer", *sweeps, "no worse than norm: first, end"]
    rows = [titles, ["---"] * len(titles)]
    lines = list(dict.fromkeys(line for sweep in sweeps.values() for line in sweep.lines()))
    for line in lines:
        row, counts = [], [0, 0]
        for sweep in sweeps.values():
            rate = choose(sweep, line) if line in sweep.lines() else None
            if rate is None or (*line, rate) not in sweep.runs:
                break  # no such try, or the sweep is not finished
            peer = ("norm", line[1] if line[1] in ("adam", "sgd") else "adam")
            cells = []
            for at, when in enumerate(("first", "last")):
                ours = sweep.values(line, rate, when, 1)
                theirs = sweep.values(peer, choose(sweep, peer), when, 1)
                cells.append(show(ours))
                counts[at] += compare(ours, theirs) >= 0
            row.append(" / ".join(cells))
        else:
            rows.append([line[0], FAMILIES[line[1]], *row, f"{counts[0]}, {counts[1]}"])
    return [f"| {' | '.join(row)} |" for row in rows]


def _verdicts(sweeps: dict[str, Sweep]) -> list[str]:
    """Return one line for each pair: ours : theirs on each task, in the first epoch and then."""
    rows = [
        "Ours : theirs. The other method is at its best rate; ours at that of a first try, or at "
        "its own where it says best. Bold: ahead by more than the standard error of the "
        "difference; in brackets: behind by more.",
        "",
        f"| ours | against | when | {' | '.join(sweeps)} |",
        "| --- " * (3 + len(sweeps)) + "|",
    ]
    for ours, at, theirs in PAIRS:
        if any(not {ours, theirs} <= {*sweep.lines()} for sweep in sweeps.values()):
            continue
        for when, title in (("first", "first epoch"), ("last", "end")):
            cells = []
            for sweep in sweeps.values():
                rate = sweep.first_rate(ours) if at == "first" else sweep.best_rate(ours)
                our_values = sweep.values(ours, rate or 0.0, when, 1)
                their_values = sweep.values(theirs, sweep.best_rate(theirs), when, 1)
                form = ("{}", "**{}**", "({})")[compare(our_values, their_values)]
                cells.append(form.format(f"{show(our_values)} : {show(their_values)}"))
            names = [f"{method}; {FAMILIES[family]}" for method, family in (ours, theirs)]
            names[0] += ", best" if at == "best" else ""
            rows.append(f"| {' | '.join([*names, title, *cells])} |")
    return rows


def _scale_rates(sweeps: dict[str, Sweep]) -> list[str]:
    """Return the loss at the end for each factor of r's rate."""
    stem = "optimizer, intrinsic"
    methods = {"1": stem, "3": f"{stem}, r 3x", "sqrt(n)": f"{stem}, r sqrt(n)x"}
    rows = [
        "Test loss at the end, network without norms: at the plain model's best rate / at the "
        "method's own. n is the mean fan-in of the layers.",
        "",
        f"| r's rate over lr | {' | '.join(sweeps)} |",
        "| --- " * (1 + len(sweeps)) + "|",
    ]
    for title, method in {"plain model": "plain", **methods}.items():
        line, cells = (method, "adam"), []
        for sweep in sweeps.values():
            if line in sweep.lines():
                rates = sweep.first_rate(line), sweep.best_rate(line)
                losses = [statistics.fmean(sweep.values(line, r, "last", 0)) for r in rates if r]
                cells.append(" / ".join(f"{loss:.3f}" for loss in losses))
        rows.append(f"| {title} | {' | '.join(cells)} |")
    return rows


def _details(sweep: Sweep) -> list[str]:
    titles = ["method", "optimizer", "best rate", "first", "end", "end, loss", "loss by rate"]
    rows = [titles, ["---"] * len(titles)]
    for line in sweep.lines():
        rate = sweep.best_rate(line)
        first, last = (mean_and_error(sweep.values(line, rate, w, 1)) for w in ("first", "last"))
        rates = sweep.rates(line)
        losses = [statistics.fmean(sweep.values(line, r, "last", 0)) for r in rates]
        row = [line[0], FAMILIES[line[1]], f"{rate:g}"]
        row += [f"{mean:.1f} ± {error:.1f}" for mean, error in (first, last)]
        row.append(f"{losses[rates.index(rate)]:.3f}")
        row.append(", ".join(f"{loss:.2f}" for loss in losses))
        rows.append(row)
    return [f"| {' | '.join(row)} |" for row in rows]


def draw(records: Records, path: Path) -> None:
    """Draw the test loss at the end over the rate: a line for each method."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    tasks = list(dict.fromkeys(record["task"] for record in records))
    rows = {
        "Adam": ("adam",),
        "SGD": ("sgd",),
        "Muon's rate; turn in degrees": ("muon", "turn"),
    }
    stems = list(dict.fromkeys(_stem(record["method"]) for record in records))
    palette = matplotlib.colormaps["tab20"].colors[::2] + matplotlib.colormaps["Dark2"].colors
    figure, axes = plt.subplots(3, len(tasks), figsize=(16, 11), squeeze=False, sharex="row")
    for column, task in enumerate(tasks):
        sweep = Sweep(records, task)
        for axis, (label, families) in zip(axes[:, column], rows.items(), strict=True):
            start = 0.0
            for line in (line for line in sweep.lines() if line[1] in families):
                rates, method = sweep.rates(line), line[0]
                losses = [statistics.fmean(sweep.values(line, r, "last", 0)) for r in rates]
                start = max(start, losses[0])
                dash = ":" if "imn" in method else "--" if "norm" in method else "-"
                colour = palette[stems.index(_stem(method))]
                axis.plot(rates, losses, dash, color=colour, label=method)
            axis.set(xscale="log", yscale="log", xlabel=label)
            axis.set_ylim(top=1.1 * start)  # what diverges leaves the view
        axes[0, column].set_title(task)
    for axis in axes[:, 0]:
        axis.set_ylabel("test loss at the end")
    for axis in axes[:, -1]:
        axis.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    plt.close(figure)


def _stem(method: str) -> str:
    """Return the method without its norm: the two share a colour."""
    return method.replace("+imn", "").removesuffix(", norm").removesuffix(", imn")
