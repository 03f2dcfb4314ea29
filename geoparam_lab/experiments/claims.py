"""Claims of the papers that have no figure or table of their own, each as a small measurement.

    covariance    equation 9 (v1: 6): BN is WN in the norm of the data's covariance
    cost          remark 3.4: a layer's cost grows as mn, as that of SP
    shift         remark 3.6: MBN on pre-activations leaves the shift of inputs, IMN removes it
    shell         section 3.1: boundaries should lie near the shell of the data
    fisher        equations 28 and 29: natural gradients under SP and GmP
    products      appendix E: sparse activations and vanishing products, over the width
    deep          the question they leave open: regions in networks of several layers

Targets of UCI sets are in units of their deviation. A fifth of the training part is held out; it
decides which weights are kept. All methods have the same rates.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from geoparam_lab.checks import check_counts, check_names
from geoparam_lab.data import banana_data, uci_data
from geoparam_lab.experiments import claims_measures as measures
from geoparam_lab.experiments.claims_measures import QUANTITIES, Member, Sets
from geoparam_lab.experiments.experiment import Experiment, Layout, Measure
from geoparam_lab.experiments.natural_steps import measure_natural_steps
from geoparam_lab.experiments.rank_correlations import correlate
from geoparam_lab.run_folder import Record, Run, group_records, select_records
from geoparam_lab.training.tasks import Done, Progress, Session, Task, Tick

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Part(NamedTuple):
    """One claim: its measurement, and the grid of what is measured."""

    measure: Callable[..., list[Record]]
    methods: str
    datasets: str
    sizes: Sequence[float]
    rates: Sequence[float | None] = (None,)
    epochs: int = 0
    stacked: str = ""  # a field whose values share a task, besides rate and seed
    max_seeds: int = 1000


PARTS = {
    "covariance": Part(
        measures.measure_covariance, "equation-9 epsilon wn", "normal", (0.0, 0.5, 0.9, 0.99)
    ),
    "cost": Part(
        measures.measure_cost, "sp wn gmp intrinsic", "inputs units", (64, 256, 1024, 4096),
        stacked="method", max_seeds=3,
    ),
    "shift": Part(
        measures.measure_shift, "wn wn+mbn bn gmp gmp:norm=mbn gmp+imn", "energy", range(1, 7),
        (0.03,), 60, stacked="size",
    ),
    "shell": Part(
        measures.measure_shell, "sp wn wn+mbn bn ln gmp gmp+bn gmp+ln natural intrinsic",
        "energy yacht boston", (100,), (0.01, 0.1), 300,
    ),
    "fisher": Part(
        measure_natural_steps, "equation-28 equation-29", "normal", (0.001, 0.01, 0.1)
    ),
    "products": Part(
        measures.measure_products, "sp gmp:init=sphere", "energy", [4**k for k in range(2, 8)],
        (0.01, 0.1), 20, max_seeds=2,
    ),
    "deep": Part(
        measures.measure_deep, "sp wn bn gmp intrinsic", "banana energy yacht", (2, 3, 4, 5),
        (0.01, 0.03, 0.1), 150,
    ),
}  # fmt: skip


def _measure(data: Sets, task: Task, tick: Tick) -> Done:
    part = PARTS[task.keys[0].part]
    found = zip(task.keys, part.measure(task.keys, data, part.epochs), strict=True)
    return Done([member._asdict() | own for member, own in found])


def run(
    out: str | Path,
    *,
    parts: Sequence[str] = tuple(PARTS),
    seeds: int = 5,
    data: str | Path | None = None,
    jobs: int | None = None,
    resume: bool = False,
    command: str | None = None,
    progress: Progress | None = None,
) -> Run:
    """Measure the papers' claims that have no table; write records and a picture to a folder.

    Args:
        parts: some of covariance, cost, shift, shell, fisher, products, deep.
        seeds: how many initial weights and splits; at most 3 for the cost, 2 for the products.
        data: folder with the UCI and Banana data, before $GEOPARAM_DATA, the cache, the network.
        jobs: how many processes of this machine work; by default as many as there are cores.
    """
    check_names("each of parts", PARTS, *parts)
    check_counts(seeds=seeds)
    import geoparam.plots  # noqa: F401  fails now if matplotlib is missing

    chosen = [part for part in PARTS if part in parts]
    trained = " ".join(PARTS[part].datasets for part in chosen if PARTS[part].epochs)
    sets = {name: load(name, data) for name in dict.fromkeys(trained.split())}
    options: Any = {"key": Member._fields, "resume": resume, "may_change": ("parts",)}
    todo = [task for part in chosen for task in make_tasks(part, seeds)]
    total = sum(len(task.keys) for task in todo)
    work = functools.partial(_measure, sets)
    config = {"parts": chosen, "seeds": seeds}
    with Run.create(out, "claims", config, command, **options) as folder:
        Session(folder, work, total, jobs, progress).spread(todo)
        done = [r for r in folder.records() if r["part"] in chosen]  # others may be half done
        folder.append_missing(find_answers(done))
        folder.figure("covariance", _draw_norms(), _COVARIANCE)
    return folder


def load(name: str, data: str | Path | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs and targets; regression targets with mean 0 and deviation 1."""
    if name == "banana":
        points = banana_data.load(data)
        x, y = (np.concatenate([points[k], points[k + 2]]) for k in (0, 1))
        return x, y
    x, y = uci_data.load(name, data)
    return x, (y - y.mean()) / y.std()


def make_tasks(name: str, seeds: int) -> list[Task]:
    """Return the tasks of a part: one for each data set, method and size that is not stacked."""
    part = PARTS[name]
    grid = (part.sizes, part.methods.split(), part.rates, range(min(seeds, part.max_seeds)))
    found: dict[tuple, list[Member]] = {}
    for dataset, size, method, lr, seed in itertools.product(part.datasets.split(), *grid):
        own = {"method": method, "size": size} | {part.stacked: ""}
        cell = (dataset, own["method"], own["size"])
        found.setdefault(cell, []).append(Member(name, dataset, method, size, lr, seed))
    return [Task(f"{name}, {cell[0]}", tuple(members)) for cell, members in found.items()]


def find_answers(records: Sequence[Record]) -> list[Record]:
    """Return how cost grows, and whether what was measured goes with the test error."""
    by_part = {part: select_records(records, part=part) for part in PARTS}
    found: list[Record] = []
    for (dataset, method), own in group_records(by_part["cost"], "dataset", "method").items():
        sizes, seconds = (np.log([r[name] for r in own]) for name in ("size", "seconds"))
        key = {"part": "growth", "dataset": dataset, "method": method}
        exponent = float(np.polyfit(sizes, seconds, 1)[0])
        found.append(dict.fromkeys(Member._fields) | key | {"exponent": exponent})
    groups: Any = {"shell: all": (), "shell: within": ("method", "lr")}
    found += correlate(by_part["shell"], ("dataset",), ("relative", "on_shell"), groups)
    groups = {"deep: rates": ("size",), "deep: seeds": ("size", "lr")}
    return found + correlate(by_part["deep"], ("dataset", "method"), QUANTITIES, groups)


_COVARIANCE = """Equation 9. Two inputs with correlations 0, 0.5 and 0.9 (points), and weights of
    length 1: in the norm of their covariance, as BN has it (line), and in the usual norm, as WN
    has it (dashed). Across the data's long axis BN's weights are long."""


def _draw_norms() -> "Figure":
    from geoparam import plots

    figure, axes = plots.new_figure(1, 3, size=(11.0, 3.6))
    angles = np.linspace(0, 2 * np.pi, 200)
    circle = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    for ax, correlation in zip(axes[0], (0.0, 0.5, 0.9), strict=True):
        x = measures.draw_correlated(correlation, 400, 2, seed=0).numpy()
        length = np.sqrt(((circle @ (x.T @ x / len(x))) * circle).sum(axis=1))
        ax.plot(*x.T, ".", color="#bbbbbb", ms=3)
        ax.plot(*(circle / length[:, None]).T, label="BN", **plots.method_style("bn").line)
        ax.plot(*circle.T, "--", color=plots.method_style("wn").colour, label="WN")
        ax.set(xlim=(-4, 4), ylim=(-4, 4), aspect="equal", title=f"correlation {correlation:g}")
    plots.legend_beside(axes[0, -1])
    return figure


_ERROR = {"test_error": "Test error: root mean square, or share of wrong classes"}
_OFFSET = "Mean of a layer's input over its size"
_TABLES: dict[str, tuple[str, dict[str, str]]] = {  # what `size` is, and the measures
    "covariance": ("correlation", {"error": "Largest difference from BN"}),
    "cost": ("inputs or units", {"ratio": "Time of a layer over SP's"}),
    "growth": ("", {"exponent": "Exponent with which time grows"}),
    "shift": ("layer", {
        "offset": f"{_OFFSET}, with the batch's means",
        "offset_running": f"{_OFFSET}, with running means",
        "drift": "Change of that mean in an epoch, with the batch's means",
    }),
    "shell": ("", _ERROR | {
        "relative_start": "Median |λ| over median ‖x‖ before training",
        "relative": "Median |λ| over median ‖x‖", "on_shell": "Share of units on the shell",
    }),
    "fisher": ("rate", {"error": "Difference of SP's and GmP's output changes, over SP's"}),
    "products": ("fan-in", _ERROR | {
        "smallest_start": "Smallest product times √fan-in before training",
        "smallest": "Smallest product times √fan-in",
        "negligible": "Share of angles with metric below 1e-4",
        "sparsity": "Share of activations that are 0",
        "dead": "Share of dead units",
    }),
    "deep": ("hidden layers", _ERROR),
} | {
    part: ("quantity", {
        "correlation": f"Rank correlation with the test error, {how}",
        "p_holm": "p, corrected by Holm for all comparisons",
    })
    for part, how in {
        "shell: all": "over all networks",
        "shell: within": "over seeds, within method and rate",
        "deep: rates": "over rates and seeds, within depth",
        "deep: seeds": "over seeds, within depth and rate",
    }.items()
}  # fmt: skip


def _make_layout(part: str, size: str, texts: dict[str, str]) -> Layout:
    small = ("error", "smallest", "smallest_start")  # with three significant digits
    shown = tuple(Measure(n, text, None if n in small else 3) for n, text in texts.items())
    keys = {"dataset": "data"} | ({"size": size} if size else {})
    return Layout(shown, keys, {"part": part}, compare=False, title=f"Part {part}")


def _finding(run: Run) -> str:
    deep = [r for r in run.records() if r["part"].startswith("deep: ")]
    clear = [r["part"] for r in deep if r["p_holm"] < 0.05]
    if not deep:
        return ""
    return (
        f"In networks of several layers, {len(clear)} of {len(deep)} rank correlations between "
        "what regions do in training and the test error are clear after Holm's correction, "
        f"{clear.count('deep: seeds')} of them between networks with the same rate."
    )


EXPERIMENT = Experiment(
    name="claims",
    title="Claims without a figure",
    about="Claims of the papers that have no figure or table there, each measured on its own.",
    summary="Claims of the papers that have no figure there, each measured. Fifteen minutes.",
    run=run,
    layouts=tuple(_make_layout(part, *table) for part, table in _TABLES.items()),
    finding=_finding,
    choose=lambda records: [{k: v for k, v in r.items() if v is not None} for r in records],
    limits=lambda run: (
        "Small networks, few seeds, at most three rates: where rates differ, what "
        "goes with the test error may only go with the rate."
    ),
    names={name: name.replace("_", ", ") for name in QUANTITIES}
    | {"inputs": "over inputs", "units": "over units", "normal": "normal inputs"}
    | {"relative": "|λ| over ‖x‖", "on_shell": "share on the shell"},
)
