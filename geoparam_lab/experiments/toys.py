"""What Levy and Banana share: seeds and rates in one stack, its records, and figures of them.

**Stacks.** All rates and up to twenty seeds of a method train at once (`stacked`), on one thread;
several stacks in several processes, if asked. Members do not depend on each other, but the size of
the stack decides in which order torch adds, and thousands of steps amplify a last digit. So that a
killed run resumes to the numbers it would have had, a stack is the same whatever is
finished: where any of its records is missing it is trained again, and only those are added.

**Which seed is shown.** One seed may be lucky. Figures and the slider show each method at the seed
with its median test result; the slider offers other seeds as well.
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from geoparam_lab import methods
from geoparam_lab.experiments import papers
from geoparam_lab.experiments.experiment import Experiment
from geoparam_lab.run_folder import Record, Run
from geoparam_lab.training import tasks
from geoparam_lab.training.stacks import snapshots, stacked
from geoparam_lab.training.stacks.snapshots import Film, frame_epochs
from geoparam_lab.training.stacks.stacked import Protocol, Result
from geoparam_lab.training.tasks import Progress, Tick

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Array = np.ndarray
Arrays = dict[str, Array]
Describe = Callable[[Result, Film, Sequence[int]], Iterable[tuple[Arrays, Record]]]

COMPARED = ("sp", "wn", "bn", "gmp")  # by the papers
LRS = (0.01, 0.1)  # in the papers 0.1 is GmP's, 0.01 that of the others
KEY = ("method", "lr", "seed")
BLOCK = 20  # seeds in a stack
SHOWN = 5  # seeds that the slider offers, or more where methods have more medians


class Member(NamedTuple):
    """One network of a stack."""

    lr: float
    seed: int


@dataclass(frozen=True)
class Problem:
    """What all members of an experiment are trained for.

    Args:
        title: of the experiment, in messages.
        widths: of the networks, inputs first.
        protocol: loss, metric and schedule.
        data: inputs and targets to train on.
        evaluation: those that the metric is of, if there is one.
    """

    title: str
    widths: tuple[int, ...]
    protocol: Protocol
    data: tuple[Array, Array]
    evaluation: tuple[Array, Array] | None = None

    @property
    def steps_per_epoch(self) -> int:
        """How many updates an epoch has."""
        rows = len(self.data[0])
        return -(-rows // (self.protocol.batch_size or rows))


def begin(out: str | Path, name: str, config: Record, command: str | None, resume: bool) -> Run:
    """Return the folder of a run that will be drawn, new or resumed."""
    import geoparam.plots  # noqa: F401  says now, not after training, that matplotlib is missing

    may_change = ("methods", "seeds", "lrs")
    return Run.create(out, name, config, command, key=KEY, resume=resume, may_change=may_change)


def check_options(names: Sequence[str], init: str, seeds: int, lrs: Sequence[float]) -> Record:
    """Return this part of a run's configuration; raise ValueError where some of it is wrong."""
    tasks.check_names("methods", names, tuple(methods.METHODS))
    for name in names:
        methods.get(name, init=init)
    if seeds < 1:
        raise ValueError(f"seeds is how many initial weights to train from, >= 1; got {seeds}.")
    if not lrs or not all(0 < lr < math.inf for lr in lrs):
        raise ValueError(f"lrs are learning rates above 0 and finite; got {list(lrs)}.")
    return {
        "methods": list(dict.fromkeys(names)),
        "seeds": seeds,
        "lrs": sorted({float(lr) for lr in lrs}),
        "init": init,
    }


# --- training -----------------------------------------------------------------------------------


def train(
    problem: Problem,
    method: str,
    members: Sequence[Member],
    init: str = "glorot",
    progress: Tick | None = None,
) -> tuple[Result, Film]:
    """Train a method's members in one stack, and keep its state at some epochs.

    Example:
        >>> x = np.linspace(-1, 1, 20)[:, None]
        >>> problem = Problem("Kink", (1, 8, 1), Protocol(epochs=30), (x, np.abs(x[:, 0])))
        >>> result, film = train(problem, "gmp", [Member(0.1, seed) for seed in range(3)])
        >>> film.predict(x).shape[2], int(film.epochs[-1])
        (20, 30)
    """
    models = [methods.mlp(method, problem.widths, seed=m.seed, init=init) for m in members]
    rates, seeds = zip(*members, strict=True)
    result = stacked.train(
        models,
        problem.data,
        rates,
        problem.protocol,
        problem.evaluation,
        seeds=seeds,
        track="step",
        snapshots=set(frame_epochs(problem.protocol.epochs).tolist()),
        progress=progress,
    )
    frames = result.snapshots | {len(result.losses): result.states}
    return result, Film(np.array([*frames]), torch.stack([*frames.values()]), models[0])


class Stack(NamedTuple):
    """A piece of work: a method's members, and the numbers of those that have no record yet."""

    method: str
    members: tuple[Member, ...]
    missing: tuple[int, ...]


def find_stacks(run: Run) -> list[Stack]:
    """Return the stacks of a run in which a record is missing."""
    config, found = run.config, []
    for method in config["methods"]:
        for first in range(0, config["seeds"], BLOCK):
            block = range(first, min(first + BLOCK, config["seeds"]))
            members = tuple(Member(lr, seed) for lr in config["lrs"] for seed in block)
            done = [run.done(method=method, lr=lr, seed=seed) for lr, seed in members]
            missing = tuple(i for i, finished in enumerate(done) if not finished)
            found += [Stack(method, members, missing)] * bool(missing)
    return found


def train_missing(
    run: Run,
    problem: Problem,
    describe: Describe,
    jobs: int | None,
    progress: Progress | None = None,
) -> None:
    """Train every stack that lacks a record, and add curves and record of what was missing.

    Ctrl-C lets the stacks under way finish, so that no work is lost; a second one stops at once.

    Args:
        run: its configuration names methods, seeds, lrs and init.
        problem: what to train for.
        describe: gives the arrays and the measures of some members, one after the other; for
            several jobs, a function of a module or a partial of one.
        jobs: how many processes train; as many as there are cores if None.
        progress: called with how many epochs are done, of all stacks together.
    """
    todo, each = find_stacks(run), problem.protocol.epochs
    epochs = dict.fromkeys(todo, 0)

    def report(stack: Stack, epoch: int, left: int = 0, remark: str = "") -> None:
        epochs[stack] = epoch
        if progress is not None:
            progress(problem.title, sum(epochs.values()), each * len(todo))

    work = functools.partial(_train_stack, problem, run.config["init"], describe)
    for stack, outcomes in tasks.spread(work, todo, jobs or tasks.cores(), report, patient=True):
        for (arrays, record), i in zip(outcomes, stack.missing, strict=True):
            run.save_curves(name_curves(stack.method, stack.members[i]), **_to_single(arrays))
            run.append(record)
        report(stack, each)


def _train_stack(
    problem: Problem, init: str, describe: Describe, stack: Stack, tick: Tick
) -> list[tuple[Arrays, Record]]:
    """Train one stack; return arrays and record of each member that has none yet."""
    result, film = train(problem, stack.method, stack.members, init, tick)
    common = [_record(stack.method, stack.members[i], init, result, i) for i in stack.missing]
    own = describe(result, film, stack.missing)
    return [
        (arrays, record | measures) for record, (arrays, measures) in zip(common, own, strict=True)
    ]


def name_curves(method: str, member: Member) -> str:
    """Return the name under which a member's arrays are kept.

    Example:
        >>> name_curves("gmp", Member(0.1, 3))
        'gmp-lr0.1-seed3'
    """
    return f"{method}-lr{member.lr:g}-seed{member.seed}"


def _record(method: str, member: Member, init: str, result: Result, i: int) -> Record:
    """Return what the records of both experiments have in common."""
    assert result.motion is not None
    lower = np.flatnonzero(result.rates[:, i] < result.rates[0, i])
    return {
        "method": method,
        "lr": member.lr,
        "seed": member.seed,
        "init": init,
        "epochs": int(result.epochs[i]),
        "best_epoch": int(result.best_epoch[i]),
        "first_cut": int(lower[0]) if len(lower) else None,  # the first epoch with a lower rate
        "outcome": "diverged" if result.outcomes[i] == "diverged" else "finished",
        "largest_move": float(np.nanmax(result.motion.displacement[:, i])),
        "largest_rotation": float(np.nanmax(result.motion.rotation[:, i])),
    }


def _to_single(arrays: Arrays) -> Arrays:
    """Return the arrays in single precision, which is enough to draw them."""
    with np.errstate(over="ignore"):  # what diverged
        return {k: v.astype("f4") if v.dtype == np.float64 else v for k, v in arrays.items()}


# --- reading ------------------------------------------------------------------------------------


def papers_lr(method: str, lrs: Sequence[float]) -> float:
    """Return the papers' rate of a method, or where that was not run the nearest one that was.

    Example:
        >>> papers_lr("gmp", (0.01, 0.1)), papers_lr("gmp", (0.01, 0.03))
        (0.1, 0.03)
    """
    return min(lrs, key=lambda lr: abs(np.log(lr / methods.LEARNING_RATES[method])))


def records_of(run: Run, method: str, lr: float | None = None) -> list[Record]:
    """Return a method's records at a rate, or else at the papers'."""
    lr = lr or papers_lr(method, run.config["lrs"])
    return [r for r in run.records() if r["method"] == method and r["lr"] == lr]


def compare_gmp_with_sp(
    run: Run, measure: str, motion: str, lr: float | None = None
) -> list[tuple[float, float]] | None:
    """Return GmP's median result and largest motion, then SP's; None where one is missing."""
    found = []
    for method in ("gmp", "sp"):
        own = records_of(run, method, lr)
        results = [r[measure] for r in own if math.isfinite(r[measure])]
        if not results:
            return None
        found.append((float(np.median(results)), max(r[motion] for r in own)))
    return found


def median_seed(records: Iterable[Record], measure: str) -> int:
    """Return the seed with the median result; of two in the middle, the one with the lower value.

    Example:
        >>> median_seed([{"seed": s, "rmse": x} for s, x in enumerate((0.4, 1.2, 1.1))], "rmse")
        2
    """
    order = sorted((not math.isfinite(r[measure]), r[measure], r["seed"]) for r in records)
    finite = sum(not infinite for infinite, _, _ in order) or 1
    return int(order[(finite - 1) // 2][2])


def show_median(run: Run, measure: str, lr: float | None = None) -> dict[str, Arrays]:
    """Return each method's arrays of its median seed, at a rate or else at the papers' own."""
    found = {}
    for method in run.config["methods"]:
        rate = lr or papers_lr(method, run.config["lrs"])
        seed = median_seed(records_of(run, method, rate), measure)
        found[method] = run.curves(name_curves(method, Member(rate, seed)))
    return found


def film_seeds(run: Run, measure: str, names: Sequence[str]) -> tuple[Arrays, list[list[Arrays]]]:
    """Return what the slider shows of several seeds, and the arrays by seed and method.

    The result has `names` as (S, M, T, ...) on one time axis, the `steps` of its frames, the
    methods' titles, the seeds, and for each method the place of its median seed among them.
    """
    config = run.config
    own = {method: records_of(run, method) for method in config["methods"]}
    medians = [median_seed(records, measure) for records in own.values()]
    others = [seed for seed in range(config["seeds"]) if seed not in medians]
    seeds = sorted({*medians, *others[: max(0, SHOWN - len(set(medians)))]})
    films = [
        [run.curves(name_curves(m, Member(papers_lr(m, config["lrs"]), seed))) for m in own]
        for seed in seeds
    ]
    together = snapshots.together([film for each in films for film in each], names)
    found = {n: together[n].reshape(len(seeds), len(own), *together[n].shape[1:]) for n in names}
    found |= {
        "steps": together["steps"],
        "methods": np.array([methods.TITLES[name] for name in own]),
        "seeds": np.array(seeds),
        "median": np.array([seeds.index(seed) for seed in medians]),
    }
    return found, films


def largest_moves(
    films: Sequence[Sequence[Arrays]], name: str, steps: Array, per_epoch: int = 1
) -> Array:
    """Return the largest value of any update since the frame before, (S, M, T)."""
    return np.array(
        [
            [snapshots.largest_since(film[name], steps, per_epoch) for film in each]
            for each in films
        ]
    )


# --- drawing ------------------------------------------------------------------------------------


def save_figures(
    run: Run,
    drawings: dict[str, tuple[Callable[..., "Figure"], str]],
    what: Sequence[Any],
    progress: Progress | None = None,
) -> None:
    """Write figures/NAME.png and its caption, one by one: `drawings` are functions of `what`."""
    title = f"{run.info['experiment'].capitalize()} figures"
    for count, (name, (draw, caption)) in enumerate(drawings.items(), start=1):
        run.figure(name, draw(*what), caption)
        if progress is not None:
            progress(title, count, len(drawings))


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
        values = [r[measure] for r in records_of(run, method, lr) if np.isfinite(r[measure])]
        _draw_seed_column(ax, x, values, method, lr)
        known = printed.printed(measure, method) if printed else None
        if known and lr == papers.RATES[method]:
            ax.plot([x], [known.value], "D", color="white", mec="black", ms=8, zorder=4)
    if printed:
        ax.plot([], [], "D", color="white", mec="black", ms=8, label="papers, one seed")
    ax.plot([], [], "_", color="black", ms=16, mew=2, label="median")
    names = [f"{methods.TITLES[method]}\n{lr:g}" for method, lr in columns]
    ax.set_xticks(range(len(columns)), names)
    ax.set(ylabel=label, xlim=(-0.6, len(columns) - 0.4))
    ax.set_xlabel("method and learning rate (filled: the rate that the papers chose)")
    ax.grid(visible=False, axis="x")
    ax.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False)
    return figure


def _draw_seed_column(ax: "Axes", x: int, values: list[float], method: str, lr: float) -> None:
    """One method at one rate: filled where the rate is the papers' for it."""
    from geoparam import plots

    colour = plots.method_style(method).colour
    order = np.argsort(np.argsort(values))
    middle = (min(len(values), 5) - 1) / 2
    beside = x + 0.11 * (order % 5 - middle)  # so that equal values do not hide each other
    filled = lr == methods.LEARNING_RATES[method]
    ax.plot(beside, values, "o", color=colour, mfc=colour if filled else "none", ms=5, alpha=0.75)
    if values:
        ax.plot([x], [np.median(values)], "_", color="black", ms=26, mew=2, zorder=3)
