"""Seven regression sets of the UCI archive, under three protocols: table 1 of the papers.

One hidden layer of 100 units, ten random splits 80 to 20, inputs standardised on the training
part, targets as they are. The loss is the mean absolute error, the optimizer Keras's Adam, a batch
1,024 rows, as in the papers' code (the four small sets are one batch, and the last batch of an
epoch may be short), or all of them with `batch_size="full"`, as in their text, all in float64.
After each epoch comes the squared error on the validation part. The rate falls to a tenth after 50
epochs without one better by 1e-4, training stops after 100 without any better one or after 5,000
in all, and the best weights are kept. A split's number also seeds its initial weights and the
order of its batches, so that methods and rates are compared on the same ones.

**paper**: as the papers' code. The validation part is the test split itself: what is reported is
the lowest test error of the whole training. Rates are fixed, 0.1 for GmP and 0.01 for the others.

**heldout**: the validation part is a fifth of the training part. Every method picks its rate from
a grid by the validation error, *for each split alone*: one rate by the mean over splits would have
seen test points, which are training points of other splits. Then each split is trained once more
at its rate, and the result of that, and nothing else ever, meets the test targets.

**cv**: as heldout, but a split's rate is chosen by k-fold cross-validation on its training part,
as the papers say they did: the lowest mean squared error over the folds, each of which stops the
training that it judges.

**Stacks.** A task is a stack of up to ten splits of one set, method and rate: a larger one leaves
the cache (60 networks on Energy took 12 times as long as 10). Processes share the tasks.
"""

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from geoparam_lab import methods as all_methods
from geoparam_lab.checks import check_counts, check_folds, check_names, check_rates
from geoparam_lab.data import splits as parts
from geoparam_lab.data import uci_data as data_sets
from geoparam_lab.data.synthetic import levy
from geoparam_lab.experiments.experiment import RMSE, Config, Experiment, Layout, Measure
from geoparam_lab.experiments.papers import read_table
from geoparam_lab.experiments.rate_tolerance import draw_rates
from geoparam_lab.experiments.toys import COMPARED, save_figures
from geoparam_lab.run_folder import Record, Run, group_records, select_records
from geoparam_lab.training.stacks import stacked
from geoparam_lab.training.stacks.stacked import Protocol, Result
from geoparam_lab.training.tasks import Done, Progress, Session, Task, Tick

Array = np.ndarray
Table = tuple[Array, Array]

NAMES = data_sets.NAMES
COPIES = {f"levy{inputs}": inputs for inputs in (2, 4, 8)}
PROTOCOLS = (*parts.PROTOCOLS, "cv")
RATES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3)  # the papers' grid
GRIDS: dict[str, Sequence[float] | None] = {
    "paper": None,  # each method's own rate
    "heldout": RATES,
    "cv": (*RATES, 1.0, 3.0),  # SP and WN often chose the edge of the papers' grid
}
UNITS, BATCH_SIZE, EPOCHS, PATIENCE = 100, 1024, 5000, 50
FULL = "full"  # the batch size that is all rows
AT_ONCE = 10  # networks in a stack
_MAY_CHANGE = ("datasets", "methods", "seeds")  # when a run is resumed


class Training(NamedTuple):
    """The training of one network: the fields that tell its record apart."""

    dataset: str
    method: str
    split: int
    lr: float
    chosen: bool  # True for the final training at the chosen rate; only these see the test part
    fold: int = 0  # under "cv": 1..k in the search, 0 for the final training


KEY, FOLD_KEY = Training._fields[:-1], Training._fields  # of records without and with folds


def list_grid_tasks(config: Record, dataset: str) -> list[Task]:
    """Return the tasks of a data set at given rates: all under "paper", else the search."""
    is_final = config["protocol"] == "paper"
    folds = range(1, config["folds"] + 1) if "folds" in config else [0]
    splits = range(config["seeds"])
    tasks = []
    for method, fold in itertools.product(config["methods"], folds):
        for lr in config["lrs"] or [all_methods.get(method).lr]:
            trainings = [Training(dataset, method, s, lr, is_final, fold) for s in splits]
            tasks += _stack(config, trainings)
    return tasks


def list_chosen_tasks(config: Record, dataset: str, records: Iterable[Record]) -> list[Task]:
    """Return the tasks of a data set that train each split at the rate chosen for it."""
    rates = choose_rates(select_records(records, dataset=dataset))
    splits = range(config["seeds"])
    tasks = []
    for method in config["methods"]:
        trainings = [Training(dataset, method, s, rates[dataset, method, s], True) for s in splits]
        tasks += _stack(config, trainings)
    return tasks


def _stack(config: Record, trainings: Sequence[Training]) -> list[Task]:
    """Return the trainings of one data set and method as tasks."""
    fields = len(FOLD_KEY if "folds" in config else KEY)
    keys = [tuple(training[:fields]) for training in trainings]
    title = f"{trainings[0].dataset}, {all_methods.title(trainings[0].method)}"
    firsts = range(0, len(keys), AT_ONCE)
    return [Task(title, tuple(keys[first : first + AT_ONCE])) for first in firsts]


def choose_rates(records: Iterable[Record]) -> dict[tuple[str, str, int], float]:
    """Return the rate with the lowest validation error by data set, method and split.

    With folds the errors are sums of squares over them. Of equal ones the lowest rate is chosen. A
    rate whose error is not finite on some fold is the last choice.
    """
    errors = sum_folds(records)
    return {key: min(by_rate, key=lambda lr: (by_rate[lr], lr)) for key, by_rate in errors.items()}


def sum_folds(records: Iterable[Record]) -> dict[tuple[str, str, int], dict[float, float]]:
    """Return a search's squared validation errors by data set, method and split, then by rate."""
    errors: dict[tuple[str, str, int], dict[float, float]] = {}
    for record in records:
        if record.get("chosen", False):
            continue
        error = math.inf
        if math.isfinite(record["val_rmse"]):
            error = record["val_rmse"] ** 2
        by_rate = errors.setdefault((record["dataset"], record["method"], record["split"]), {})
        by_rate[record["lr"]] = by_rate.get(record["lr"], 0.0) + error
    return errors


def train(
    tables: Mapping[str, Table], config: Record, task: Task, tick: Tick | None = None
) -> Done:
    """Train a task's networks on its table: inputs (points, features) and targets (points,)."""
    trainings = [Training(*key) for key in task.keys]
    first, seeds = trainings[0], [training.split for training in trainings]
    method = all_methods.get(first.method)
    protocol = "paper" if config["protocol"] == "paper" else "heldout"
    fold = (first.fold - 1, config["folds"]) if first.fold else None
    x, y = tables[first.dataset]
    order = method.draw_order(x.shape[1]).numpy()
    data = parts.stack(x[:, order], y, seeds, protocol, fold)

    widths = (data.x_train.shape[-1], UNITS, 1)
    rows = config.get("batch_size", BATCH_SIZE)
    schedule = Protocol(
        stacked.absolute_error,
        stacked.squared_error,
        batch_size=None if rows == FULL else rows,
        epochs=config["epochs"],
        patience=PATIENCE,
        decay=method.decay,
        angle_lr=method.angle_lr,
    )
    result = stacked.train(
        [all_methods.mlp(first.method, widths, seed=seed) for seed in seeds],
        (data.x_train, data.y_train),
        [training.lr for training in trainings],
        schedule,
        (data.x_val, data.y_val),
        seeds=seeds,
        progress=tick,
    )

    errors = _find_errors(first.chosen, result, data, protocol)
    records = []
    for i, key in enumerate(task.keys):
        record: Record = dict(zip(FOLD_KEY, key, strict=False))
        record |= {
            "protocol": config["protocol"],
            "init": method.init,
            "epochs": int(result.epochs[i]),
            "best_epoch": int(result.best_epoch[i]),
            "outcome": "diverged" if result.outcomes[i] == "diverged" else "finished",
        }
        records.append(record | {name: float(values[i]) for name, values in errors.items()})
    return Done(records)


def _find_errors(
    chosen: bool, result: Result, data: parts.Splits, protocol: str
) -> dict[str, Array]:
    """Return the errors of the kept weights; on the test part for chosen rates alone."""
    judged = np.sqrt(result.best_metric)
    if protocol == "paper":
        return {"test_rmse": judged}
    if not chosen:
        return {"val_rmse": judged}
    test = np.sqrt(((result.predict(data.x_test) - data.y_test) ** 2).mean(1))
    return {"val_rmse": judged, "test_rmse": np.where(np.isfinite(judged), test, np.nan)}


def run(
    out: str | Path,
    *,
    datasets: Sequence[str] = NAMES,
    methods: Sequence[str] = COMPARED,
    protocol: str = "paper",
    seeds: int = 10,
    data: str | Path | None = None,
    lrs: Sequence[float] | None = None,
    epochs: int = EPOCHS,
    batch_size: str | int = BATCH_SIZE,
    folds: int | None = None,
    jobs: int | None = None,
    resume: bool = False,
    command: str | None = None,
    progress: Progress | None = None,
) -> Run:
    """Train all methods on all splits of all sets; write records to a folder.

    Args:
        datasets: data sets to train on; levy2, levy4 and levy8 are Levy's function summed over 2,
            4 and 8 inputs.
        methods: methods to train, with options after a colon, as in wn+mbn:mbn=before.
        protocol: how training stops and rates are chosen: "paper" stops by the test split,
            "heldout" by a validation part, "cv" also chooses rates by cross-validation.
        seeds: number of random splits.
        data: folder with the data; searched before $GEOPARAM_DATA, the cache and the network.
        lrs: learning rates; by default the papers' own under "paper", the papers' grid under
            "heldout", and that grid up to 3.0 under "cv".
        epochs: maximum number of epochs.
        batch_size: rows per step, or "full" for all of them, as in the papers' text.
        folds: number of folds under "cv"; by default 5.
        jobs: processes that train, by default one per core; results do not depend on it.
    """
    check_names("each of datasets", (*NAMES, *COPIES), *datasets)
    check_names("protocol", PROTOCOLS, protocol)
    names = all_methods.check_methods(methods)
    for name in names:
        all_methods.get(name)  # raises where an option is wrong
    check_counts(seeds=seeds, epochs=epochs, jobs=jobs)
    if folds is not None and protocol != "cv":
        raise ValueError(f"folds are of protocol 'cv'; got {protocol!r}.")

    config: Record = {}
    if protocol == "cv":
        config["folds"] = 5 if folds is None else folds
    if lrs is None:
        lrs = GRIDS[protocol]
    config |= {
        "methods": names,
        "protocol": protocol,
        "seeds": seeds,
        "lrs": None if lrs is None else check_rates(lrs),
        "epochs": epochs,
        "batch_size": _read_batch_size(batch_size),
        "datasets": list(dict.fromkeys(datasets)),
    }
    loaded = {name: load(name, data) for name in config["datasets"]}
    if protocol == "cv":
        fewest = min(len(parts.split(len(x), 0)[0]) for x, _ in loaded.values())
        check_folds(config["folds"], fewest)

    options: Any = {
        "key": FOLD_KEY if protocol == "cv" else KEY,
        "resume": resume,
        "may_change": _MAY_CHANGE,
        "defaults": {"batch_size": BATCH_SIZE},
    }
    with Run.create(out, "uci", config, command, **options) as folder:
        _train_all(folder, loaded, config, jobs=jobs, progress=progress)
    return folder


def _read_batch_size(given: str | int) -> str | int:
    """Return the rows of a batch as a number, or FULL."""
    if given == FULL:
        return FULL
    if not str(given).isdecimal() or int(given) < 1:
        raise ValueError(f"batch_size is a number of rows from 1 on, or 'full'; got {given!r}.")
    return int(given)


def _train_all(folder: Run, loaded: Mapping[str, Table], config: Record, **options: Any) -> None:
    """Train at the rates of the grid; where these are a search, then at the chosen ones."""
    sets = sorted(loaded, key=lambda name: -loaded[name][0].size)  # the large ones first
    grid = [task for name in sets for task in list_grid_tasks(config, name)]
    count = sum(len(task.keys) for task in grid)
    is_search = config["protocol"] != "paper"
    if is_search:
        count += len(sets) * len(config["methods"]) * config["seeds"]

    session = Session(folder, functools.partial(train, loaded, config), count, **options)
    session.spread(grid)
    if is_search:
        records = folder.records()
        session.spread([t for name in sets for t in list_chosen_tasks(config, name, records)])
        _draw_rates(folder)


def load(name: str, data: str | Path | None = None) -> Table:
    """Return the inputs and targets of one of NAMES or COPIES."""
    if name not in COPIES:
        return data_sets.load(name, data)
    random = np.random.RandomState(0)
    x = random.uniform(-10, 10, size=(1000, COPIES[name]))
    return x, levy(x).sum(1) + random.normal(scale=0.1, size=1000)


def _draw_rates(run: Run) -> None:
    """Draw the validation error over the rate."""
    panels: dict[str, list[Record]] = {}
    for (dataset, method, _), errors in sum_folds(run.records()).items():
        panel = panels.setdefault(dataset.capitalize(), [])
        for lr, error in errors.items():
            panel.append({"method": method, "lr": lr, "val_rmse": math.sqrt(error)})
    save_figures(run, draw_rates(run, panels, Measure("val_rmse", "validation RMSE")))


def _finding(run: Run) -> str:
    """Count the data sets on which each of several methods has the lowest mean test error."""
    sets = group_records(select_records(run.records(), chosen=True), "dataset")
    wins: Counter[str] = Counter()
    for results in sets.values():
        means = {}
        for (method,), records in group_records(results, "method").items():
            mean = float(np.mean([record["test_rmse"] for record in records]))
            means[method] = mean if math.isfinite(mean) else math.inf
        best = min(means, key=means.__getitem__)
        if len(means) > 1 and means[best] < math.inf:
            wins[best] += 1

    if not wins:
        return ""
    winners = ", ".join(f"{all_methods.title(name)} on {n}" for name, n in wins.most_common())
    return (
        f"UCI, {run.config['protocol']} protocol: lowest mean test RMSE on {len(sets)} data sets: "
        f"{winners}."
    )


def _limits(run: Run) -> str:
    said = "UCI: the lowest mean may be lowest by chance; the table marks differences that hold."
    if run.config["protocol"] == "paper":
        said += " The test split itself decides when to stop."
    return said


def _explain_mismatch(config: Config) -> str:
    """Say why a run cannot be compared with the papers; empty where it can."""
    if config.get("protocol", "paper") == "paper":
        return ""
    return "The papers use another protocol"


_DECIDED = {
    "paper": "Papers' protocol: the test split itself decides when to stop.",
    "heldout": "A validation part decides when to stop and chooses the rate of each split; the "
    "test split decides nothing.",
    "cv": "Cross-validation on the training part chooses the rate of each split; the test split "
    "decides nothing.",
}


def _remark(config: Config) -> Iterator[str]:
    """Yield what a reader must know of a table."""
    yield _DECIDED[config.get("protocol", "paper")]
    rows = config.get("batch_size", BATCH_SIZE)
    if rows == FULL:
        yield "Every step is on all rows, as in the papers' text; their code has batches of 1,024."
    elif rows != BATCH_SIZE:
        yield f"Batches of {rows:,} rows; the papers' code has 1,024, their text all."


_PRINTED = """\
|boston|concrete|energy|naval|power|wine|yacht
sp|3.370 ± 0.145|5.472 ± 0.144|0.898 ± 0.274|0.002 ± 0.000|4.065 ± 0.029|0.623 ± 0.008|0.639 ± 0.063
wn|3.459 ± 0.156|5.952 ± 0.148|2.093 ± 0.789|0.003 ± 0.000|4.073 ± 0.026|0.632 ± 0.008|0.624 ± 0.076
bn|3.469 ± 0.153|5.695 ± 0.160|1.648 ± 0.302|0.001 ± 0.000|4.164 ± 0.026|0.622 ± 0.011|0.777 ± 0.055
gmp|3.057 ± 0.144|5.153 ± 0.098|0.474 ± 0.013|0.003 ± 0.001|4.022 ± 0.025|0.613 ± 0.006|0.584 ± 0.046"""  # noqa: E501

EXPERIMENT = Experiment(
    name="uci",
    title="UCI regression",
    about="A network with one hidden layer of 100 ReLU units is trained on random 80/20 splits of "
    "small regression data sets.",
    summary="Seven regression sets of the UCI archive: table 1. Minutes; heldout about an hour.",
    run=run,
    layouts=(Layout((RMSE,), {"dataset": "data set"}),),
    papers={"test_rmse": read_table("v2, table 1 (ten splits, at most 5,000 epochs)", _PRINTED)},
    remarks=_remark,
    mismatch=_explain_mismatch,
    finding=_finding,
    limits=_limits,
    epochs=EPOCHS,
)
