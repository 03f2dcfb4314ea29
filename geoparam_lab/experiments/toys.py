"""What Levy and Banana share: training in stacks of seeds and rates, and the choice of rates.

**Stacks.** All rates and up to twenty seeds of a method train at once (`stacked`), on one thread;
several stacks in several processes, if asked. Members do not depend on each other, but the size of
the stack decides in which order torch adds, and thousands of steps amplify a last digit. A resumed
run must give the numbers that it would have had. So a stack has the same members whatever is
finished: if any record is missing, all are trained again, and the missing records are added.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from geoparam_lab import methods as methods_table
from geoparam_lab.checks import check_counts, check_folds, check_rates
from geoparam_lab.experiments.experiment import Config, Drawings, Measure
from geoparam_lab.experiments.rate_tolerance import draw_rates
from geoparam_lab.run_folder import Record, Run, select_records
from geoparam_lab.training.stacks import snapshots, stacked
from geoparam_lab.training.stacks.snapshots import Film, frame_epochs
from geoparam_lab.training.stacks.stacked import Protocol, Result
from geoparam_lab.training.tasks import Done, Progress, Session, Task, Tick

Array = np.ndarray
Arrays = dict[str, Array]
FindErrors = Callable[[Array, Array], Array]

COMPARED = ("sp", "wn", "bn", "gmp")  # by the papers
LRS = (0.01, 0.1)  # in the papers 0.1 is GmP's, 0.01 that of the others
BLOCK = 20  # seeds in a stack
SHOWN = 5  # seeds that the slider offers: the first, and the one that moves farthest
WORDS = {50: "median", 90: "90 %", 99: "99 %", 100: "largest"}  # quantiles in percent
TURNS = tuple(
    Measure(f"turn_{q}", f"turn: {w} (°)", 2 if q < 100 else None) for q, w in WORDS.items()
)
MOVES = tuple(Measure(f"move_{q}", f"move: {w}", 3 if q < 100 else None) for q, w in WORDS.items())
LARGEST = (
    "Largest: of any unit of any seed in one update. Turns and moves, but for running statistics, "
    "are those before the first cut of the rate."
)


class Network(NamedTuple):
    """Which network of a run: the fields that tell its record apart."""

    method: str
    lr: float
    seed: int

    @property
    def name(self) -> str:
        """The name under which its arrays are kept."""
        return f"{self.method}-lr{self.lr:g}-seed{self.seed}".replace(":", "-")


@dataclass(frozen=True)
class Problem:
    """What all members of an experiment are trained for."""

    widths: tuple[int, ...]  # of the networks, inputs first
    protocol: Protocol  # loss, metric and schedule
    data: tuple[Array, Array]  # training inputs (N, d) and targets; or (draws, N, d), ...
    evaluation: tuple[Array, Array] | None = None  # the data of the metric, if there is one

    @property
    def steps_per_epoch(self) -> int:
        """How many updates an epoch has."""
        rows = self.data[0].shape[-2]
        return -(-rows // (self.protocol.batch_size or rows))

    def select(self, seeds: Sequence[int]) -> tuple[Array, Array]:
        """Return the data of members with these seeds: all of it, or a draw for each."""
        x, y = self.data
        draws = np.array(seeds) % len(x)
        return (x, y) if x.ndim == 2 else (x[draws], y[draws])

    def divide(self, fold: int, folds: int) -> tuple["Problem", "Problem"]:
        """Return the problem without one of several folds of its points, and with it alone.

        Where there is a metric, the points left out judge the training.
        """
        x, y = self.data
        held = np.arange(x.shape[-2]) % folds == fold
        left_out = x[..., held, :], y[..., held]
        judge = left_out if self.evaluation is not None else None
        part = replace(self, data=(x[..., ~held, :], y[..., ~held]), evaluation=judge)
        return part, replace(self, data=left_out)


@dataclass(frozen=True)
class Toy:
    """What Levy and Banana have of their own; they share `run`."""

    name: str
    options: Callable[..., Any]  # a dataclass of its own options, about its data
    load: Callable[[Any], tuple[Any, Record]]  # the data that these ask for
    make_problem: Callable[[Any, int, int], Problem]  # from data, epochs and patience
    # Arrays and measures of each member of a stack; picklable, for other processes.
    describe: Callable[[Any, Result, Film], Iterable[tuple[Arrays, Record]]]
    draw: Callable[[Run, Any], Drawings]
    film: Callable[[Run, Any], Arrays]  # the slider's arrays, or none
    measure: Measure  # the test result that is drawn over rates
    find_errors: FindErrors  # of each row of predictions; chooses rates under cross-validation


def run(
    toy: Toy,
    out: str | Path,
    *,
    methods: Sequence[str] = COMPARED,
    seeds: int = 20,
    lrs: Sequence[float] = LRS,
    epochs: int,
    patience: int,
    folds: int = 0,
    jobs: int | None = None,
    resume: bool = False,
    command: str | None = None,
    progress: Progress | None = None,
    **data_options: Any,
) -> Run:
    """Train all methods from several seeds; write records, curves and figures to a folder.

    Args:
        toy: which experiment.
        methods: methods to train, such as sp, wn, bn, gmp, gmp+imn.
        seeds: number of initial weights and batch orders: seeds 0, 1, ...
        lrs: learning rates; every method is trained at each.
        epochs: maximum number of epochs.
        patience: epochs without a better result before the rate is cut to a tenth; training stops
            after twice as many.
        folds: choose each seed's rate by cross-validation with this many folds of the training
            points; 0 shows all rates.
        jobs: processes that train, by default one per core; results do not depend on it.
        data_options: the experiment's own options, about its data.
    """
    import geoparam_lab.plots  # noqa: F401  fails now, not after training, without it

    names = methods_table.check_methods(methods)
    check_counts(seeds=seeds, epochs=epochs, patience=patience, jobs=jobs)
    if any(methods_table.get(name).order for name in names):
        raise ValueError("another order of the inputs is an option of uci; leave it out here.")
    config: Record = {
        "methods": names,
        "seeds": seeds,
        "lrs": check_rates(lrs),
        "epochs": epochs,
        "patience": patience,
    }
    if folds:
        config["folds"] = folds

    data, source = toy.load(toy.options(**data_options))
    problem = toy.make_problem(data, epochs, patience)
    if folds:
        check_folds(folds, problem.data[0].shape[-2])
    may_change = ("methods", "seeds") if folds else ("methods", "seeds", "lrs")
    options: Record = {"key": Network._fields, "resume": resume, "may_change": may_change}
    with Run.create(out, toy.name, config | source, command, **options) as folder:
        stacks = list_stacks(folder.config)
        count = sum(len(stack.keys) for stack in stacks)
        work = functools.partial(_train_stack, toy, data, problem, folds)
        session = Session(folder, work, count, jobs, progress)
        session.spread(stacks)

        over_rates = draw_rates(folder, {toy.name.capitalize(): folder.records()}, toy.measure)
        save_figures(folder, toy.draw(folder, data) | over_rates, progress)
        if arrays := toy.film(folder, data):
            folder.save_curves(f"slider_{toy.name}", kind=toy.name, **arrays)
    return folder


def train(
    problem: Problem, networks: Sequence[Network], progress: Tick | None = None
) -> tuple[Result, Film]:
    """Train networks of one method in one stack, and keep its state at some epochs."""
    shown = set(frame_epochs(problem.protocol.epochs).tolist())
    result = _train(problem, networks, track=True, snapshots=shown, progress=progress)
    frames = result.snapshots | {len(result.losses): result.states}
    states = torch.stack([*frames.values()])
    data = problem.select([network.seed for network in networks])
    return result, Film(np.array([*frames]), states, result.model(0), data)


def _train(problem: Problem, networks: Sequence[Network], **options: Any) -> Result:
    models = [methods_table.mlp(n.method, problem.widths, seed=n.seed) for n in networks]
    names, rates, seeds = zip(*networks, strict=True)
    method = methods_table.get(names[0])
    protocol = replace(problem.protocol, decay=method.decay, angle_lr=method.angle_lr)
    data, judge = problem.select(seeds), problem.evaluation
    return stacked.train(models, data, rates, protocol, judge, seeds=seeds, **options)


def list_stacks(config: Config) -> list[Task]:
    """Return the stacks of a run."""
    seeds = range(config["seeds"])
    blocks = [seeds[first : first + BLOCK] for first in seeds[::BLOCK]]
    stacks = []
    for method, block in itertools.product(config["methods"], blocks):
        networks = tuple(Network(method, lr, seed) for lr in config["lrs"] for seed in block)
        stacks.append(Task(methods_table.title(method), networks))
    return stacks


def _train_stack(
    toy: Toy, data: Any, problem: Problem, folds: int, stack: Task, tick: Tick
) -> Done:
    """Train one stack; return arrays and record of each network."""
    networks = stack.keys
    result, film = train(problem, networks, tick)
    choices: Sequence[Record] = [{}] * len(networks)
    if folds:
        choices = choose_rates(folds, toy.find_errors, problem, networks)

    records, curves = [], {}
    for i, (arrays, measures) in enumerate(toy.describe(data, result, film)):
        records.append(_make_record(networks[i], result, i) | choices[i] | measures)
        with np.errstate(over="ignore"):  # what diverged; single precision is enough to draw it
            single = {k: v.astype("f4") for k, v in arrays.items() if v.dtype == np.float64}
        curves[networks[i].name] = arrays | single
    return Done(records, curves)


def choose_rates(
    folds: int, find_errors: FindErrors, problem: Problem, networks: Sequence[Network]
) -> list[Record]:
    """Cross-validate all networks; return each one's error and whether its rate was chosen.

    Each seed takes its rate with the lowest mean error over the folds; of equal ones the lowest.
    """
    seeds = [network.seed for network in networks]
    total = np.zeros(len(networks))
    for fold in range(folds):
        part, left_out = problem.divide(fold, folds)
        x, y = left_out.select(seeds)
        errors = find_errors(_train(part, networks).predict(x), y)
        total += np.where(np.isfinite(errors), errors, np.inf)

    means = dict(zip(networks, (total / folds).tolist(), strict=True))
    records = []
    for network, mean in means.items():
        of_seed = [(means[other], other.lr) for other in networks if other.seed == network.seed]
        records.append({"cv_error": mean, "chosen": min(of_seed) == (mean, network.lr)})
    return records


def remark_on_rates(config: Config) -> Iterable[str]:
    """Yield how rates were chosen, where cross-validation did."""
    if config.get("folds"):
        yield (
            f"Each seed has the rate that cross-validation with {config['folds']} folds of its "
            "training points chose."
        )


def _make_record(network: Network, result: Result, i: int) -> Record:
    """Return what the records of both experiments have in common.

    Quantiles are over the updates before the first cut of the rate, of the largest turn or move of
    any unit in an update. `largest_move` is over all, by the norms' running statistics.
    """
    motion, running = result.motion, result.running_motion
    assert motion is not None and running is not None
    epochs, rates = int(result.epochs[i]), result.rates[:, i]
    cuts = np.flatnonzero(rates < rates[0])  # the epochs with a lower rate
    first_cut = int(cuts[0]) if len(cuts) else None
    per_epoch = len(motion.rotation) // len(rates)
    steps = per_epoch * (epochs if first_cut is None else first_cut)

    record = {
        **network._asdict(),
        "init": methods_table.get(network.method).init,
        "epochs": epochs,
        "best_epoch": int(result.best_epoch[i]),
        "first_cut": first_cut,
        "outcome": "diverged" if result.outcomes[i] == "diverged" else "finished",
        "largest_move": float(np.nanmax(running.displacement[:, i])),
        "largest_rotation": float(np.nanmax(running.rotation[:, i])),
    }
    for name, values in (("turn", motion.rotation), ("move", motion.displacement)):
        for percent in WORDS:
            quantile = np.nanquantile(values[:steps, i], percent / 100)
            record[f"{name}_{percent}"] = float(quantile)
    return record


def save_figures(run: Run, drawings: Drawings, progress: Progress | None = None) -> None:
    """Write figures/NAME.png and its caption, one by one."""
    title = f"{run.info['experiment'].capitalize()} figures"
    for count, (name, (draw, caption)) in enumerate(drawings.items(), start=1):
        run.figure(name, draw(), caption)
        if progress is not None:
            progress(title, count, len(drawings))


def find_papers_lr(method: str, lrs: Sequence[float]) -> float:
    """Return the papers' rate of a method, or where that was not run the nearest one that was.

    Example:
        >>> find_papers_lr("gmp", (0.01, 0.1)), find_papers_lr("gmp", (0.01, 0.03))
        (0.1, 0.03)
    """
    return min(lrs, key=lambda lr: abs(np.log(lr / methods_table.get(method).lr)))


def find_common_lr(run: Run) -> float:
    """Return the one rate at which methods are compared: that of the papers' figures 2c and 3i."""
    return find_papers_lr("gmp", run.config["lrs"])


def find_compared(run: Run, method: str) -> list[Record]:
    """Return a method's records at the common rate, or at the rates that were chosen for it."""
    if run.config.get("folds"):
        return select_records(run.records(), method=method, chosen=True)
    return select_records(run.records(), method=method, lr=find_common_lr(run))


def compare_gmp_with_sp(run: Run, text: str, measure: str, motion: str) -> str:
    """Fill a text with what the tables show of GmP and SP; empty where one is missing.

    {gmp} and {sp} are means with their standard errors, {gmp_most} and {sp_most} the largest
    motions, {rates} says at which rates.
    """
    numbers: dict[str, Any] = {"rates": f"all methods at rate {find_common_lr(run):g}"}
    if run.config.get("folds"):
        numbers["rates"] = "rates chosen by cross-validation"
    for method in ("gmp", "sp"):
        records = find_compared(run, method)
        results = [r[measure] for r in records if math.isfinite(r[measure])]
        if not results:
            return ""
        numbers[method] = f"{np.mean(results):.3f}"
        if len(results) > 1:
            error = np.std(results, ddof=1) / math.sqrt(len(results))
            numbers[method] += f" ± {error:.3f}"
        largest = float(f"{max(record[motion] for record in records):.3g}")
        numbers[f"{method}_most"] = f"{largest:,.0f}" if largest > 999 else f"{largest:g}"
    return text.format(**numbers)


class Median(NamedTuple):
    """The network of a method whose seed has the median test result."""

    method: str
    title: str  # with the rate
    result: float
    curves: Arrays


def load_medians(run: Run, measure: str, lr: float | None = None) -> list[Median]:
    """Return each method's median network, at a rate or else at the papers' own."""
    medians = []
    for method in run.config["methods"]:
        rate = lr or find_papers_lr(method, run.config["lrs"])
        record = find_median(select_records(run.records(), method=method, lr=rate), measure)
        curves = run.curves(Network(method, rate, record["seed"]).name)
        title = f"{methods_table.title(method)}, rate {rate:g}"
        medians.append(Median(method, title, record[measure], curves))
    return medians


def find_median(records: Sequence[Record], measure: str) -> Record:
    """Return the record with the median result; of two in the middle, the one with the lower.

    Example:
        >>> find_median([{"seed": s, "rmse": x} for s, x in enumerate((0.4, 1.2, 1.1))], "rmse")
        {'seed': 2, 'rmse': 1.1}
    """
    finite = [record for record in records if math.isfinite(record[measure])] or records
    order = sorted(finite, key=lambda record: (record[measure], record["seed"]))
    return order[(len(order) - 1) // 2]


def load_motions(run: Run, name: str, lr: float) -> dict[str, Array]:
    """Return each method's largest motions in all updates, (seeds, updates), NaN after its end."""
    motions = {}
    for method in run.config["methods"]:
        networks = [Network(method, lr, seed) for seed in range(run.config["seeds"])]
        curves = [run.curves(network.name)[name] for network in networks]
        padded = np.full((len(curves), max(map(len, curves))), np.nan)
        for row, curve in zip(padded, curves, strict=True):
            row[: len(curve)] = curve
        motions[method] = padded
    return motions


def film_seeds(run: Run, frames: Mapping[str, str], motion: str, per_epoch: int = 1) -> Arrays:
    """Return what the slider shows of training: several seeds, all methods at the common rate.

    The result has the arrays of `frames`, by their names in the curves, as (S, M, T, ...) on one
    time axis; `motion`, the largest of any update since the frame before; the `steps` of its
    frames, the rate, the methods' titles and the seeds.
    """
    names, lr = run.config["methods"], find_common_lr(run)
    seeds = choose_seeds(load_motions(run, motion, lr)[names[0]])
    films = [run.curves(Network(name, lr, seed).name) for seed in seeds for name in names]
    arrays = snapshots.align(films, [*frames.values()])
    steps = arrays.pop("steps")
    shown = {name: arrays[kept] for name, kept in frames.items()}
    shown[motion] = np.array(
        [snapshots.find_largest_since(film[motion], steps, per_epoch) for film in films]
    )
    for name, array in shown.items():
        shown[name] = array.reshape(len(seeds), len(names), *array.shape[1:])
    return shown | {
        "steps": steps,
        "rate": np.array(lr),
        "methods": np.array([methods_table.title(name) for name in names]),
        "seeds": np.array(seeds),
    }


def choose_seeds(motions: Array) -> list[int]:
    """Return the seeds of a slider by their motions: the first, and the one that moves most.

    Example:
        >>> choose_seeds(np.array([*[[1.0]] * 18, [9.0], [2.0]]))
        [0, 1, 2, 3, 18]
    """
    farthest = int(np.nan_to_num(motions, posinf=0.0).max(axis=1).argmax())
    first = [seed for seed in range(len(motions)) if seed != farthest]
    return sorted([farthest, *first[: SHOWN - 1]])
