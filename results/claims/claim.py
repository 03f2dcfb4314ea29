"""What the scripts of this folder share: tasks, small networks in training, records.

A script measures its claim anew and prints means over seeds:

    python results/claims/NAME.py [--data DIR] [--write]

`--data` is the folder with the UCI and Banana data, looked into before $GEOPARAM_DATA, the cache
and the network; `--write` replaces the stored records, NAME.jsonl beside the script. Targets of
UCI sets are in units of their deviation. A fifth of the training part is held out; it decides
which weights are kept. All methods have the same rates.
"""

import argparse
import functools
import itertools
import json
import math
import multiprocessing
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import geoparam as gp
from geoparam_lab import methods
from geoparam_lab.data import banana_data, splits, uci_data
from geoparam_lab.run_folder import group_records
from geoparam_lab.session import count_cores
from geoparam_lab.training.stacks import stacked
from geoparam_lab.training.stacks.stacked import Protocol

Record = dict[str, Any]
Sets = Mapping[str, tuple[np.ndarray, np.ndarray]]

BATCH_SIZE = 128
FRAMES = 8  # about as many moments of a training are measured


class Case(NamedTuple):
    """A network, or a layer, that is measured: the fields that tell its record apart."""

    part: str  # the name of the script
    dataset: str
    method: str  # perhaps with options, as in "gmp:init=sphere"
    size: float
    lr: float | None
    seed: int


Cases = Sequence[Case]
Measure = Callable[[Cases, Sets], list[Record]]
Load = Callable[[str, Path | None], tuple[np.ndarray, np.ndarray]]


def make_tasks(
    part: str,
    datasets: Sequence[str],
    methods: Sequence[str],
    sizes: Sequence[float],
    lrs: Sequence[float | None] = (None,),
    seeds: int = 5,
    together: str = "",
) -> list[Cases]:
    """Return the cases that are measured together, one sequence a task.

    They agree in data set, method and size; those of all values of the field `together` share a
    task.
    """
    fields = [field for field in ("dataset", "method", "size") if field != together]
    tasks: dict[tuple[Any, ...], list[Case]] = defaultdict(list)
    for values in itertools.product(datasets, methods, sizes, lrs, range(seeds)):
        case = Case(part, *values)
        tasks[tuple(getattr(case, field) for field in fields)].append(case)
    return list(tasks.values())


def run(
    name: str,
    tasks: Sequence[Cases],
    measure: Measure,
    conclude: Callable[[list[Record]], list[Record]] = lambda records: [],
    *,
    datasets: Sequence[str] = (),
    load: Load | None = None,
    jobs: int | None = None,
) -> None:
    """Measure all tasks, print means, and store the records if asked.

    Args:
        name: the script's.
        tasks: see `make_tasks`.
        measure: takes the cases of a task and the data; returns a record for each case.
        conclude: returns further records, which follow from all of these.
        datasets: names of the sets to load.
        load: loads one of them; by default `load_scaled`.
        jobs: processes; by default one for each core.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, help="folder with the UCI and Banana data")
    parser.add_argument("--write", action="store_true", help="replace the stored records")
    options = parser.parse_args()

    load = load or load_scaled
    sets = {dataset: load(dataset, options.data) for dataset in datasets}
    work = functools.partial(measure_task, measure, sets)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs or count_cores(), context) as pool:
        records = list(itertools.chain.from_iterable(pool.map(work, tasks)))
    records += conclude(records)

    print_means(records)
    if options.write:
        lines = [json.dumps(record) + "\n" for record in records]
        Path(__file__).with_name(f"{name}.jsonl").write_text("".join(lines))


def measure_task(measure: Measure, sets: Sets, cases: Cases) -> list[Record]:
    """Return the records of a task, with the fields that tell them apart."""
    torch.set_num_threads(1)
    measured = measure(cases, sets)
    return [case._asdict() | values for case, values in zip(cases, measured, strict=True)]


def load_scaled(name: str, data: Path | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs and targets; regression targets with mean 0 and deviation 1."""
    if name == "banana":
        x_train, y_train, x_test, y_test = banana_data.load(data)[:4]
        return np.concatenate([x_train, x_test]), np.concatenate([y_train, y_test])
    x, y = uci_data.load(name, data)
    return x, (y - y.mean()) / y.std()


def print_means(records: Iterable[Record]) -> None:
    """Print the mean over seeds of every number, a line for each part, data set, method ..."""
    fields = [field for field in Case._fields if field != "seed"]
    for key, group in group_records(records, *fields).items():
        means = []
        for name, value in group[0].items():
            if name not in Case._fields and isinstance(value, int | float):
                means.append(f"{name} {np.mean([record[name] for record in group]):.4g}")
        print(*(part for part in key if part is not None), *means, sep="  ")


class Trained(NamedTuple):
    """A trained network: its test error, its training inputs, and itself at each frame."""

    error: float  # root mean square, or the share of wrong classes; NaN where it diverged
    x: Tensor
    models: list[nn.Sequential]  # in evaluation mode


def train(
    cases: Cases,
    sets: Sets,
    hidden: Sequence[int],
    frames: Sequence[int],
    dtype: torch.dtype = torch.float64,
) -> list[Trained]:
    """Train a stack of one method up to the last frame, each network on a split of its own."""
    dataset, method = cases[0].dataset, cases[0].method
    seeds = [case.seed for case in cases]
    parts = splits.stack(*sets[dataset], seeds, "heldout")
    is_classification = dataset == "banana"
    epochs = frames[-1]
    protocol = Protocol(
        stacked.binary_cross_entropy if is_classification else stacked.absolute_error,
        stacked.binary_accuracy if is_classification else stacked.squared_error,
        higher_is_better=is_classification,
        batch_size=BATCH_SIZE,
        epochs=epochs,
        patience=max(1, epochs // 5),
        stop_patience=epochs,
    )

    widths = (parts.x_train.shape[2], *hidden, 1)
    models = [methods.mlp(method, widths, seed=seed, dtype=dtype) for seed in seeds]

    result = stacked.train(
        models,
        (parts.x_train, parts.y_train),
        [case.lr or 0.0 for case in cases],
        protocol,
        (parts.x_val, parts.y_val),
        seeds=seeds,
        snapshots=frames,
    )

    outputs = result.predict(parts.x_test)
    if is_classification:
        errors = ((outputs > 0) != (parts.y_test > 0.5)).mean(axis=1)
    else:
        errors = np.sqrt(((outputs - parts.y_test) ** 2).mean(axis=1))
    errors = np.where(result.best_epoch < 0, np.nan, errors)
    inputs = torch.from_numpy(parts.x_train).to(dtype)
    return [
        Trained(error, inputs[i], [result.model(i, frame) for frame in frames])
        for i, error in enumerate(errors.tolist())
    ]


def find_layers(model: nn.Sequential) -> list[Any]:
    """Return the layers with weights."""
    return [module for module in model if isinstance(module, nn.Linear | gp.GmPLinear)]


@torch.no_grad()
def collect_inputs(model: nn.Sequential, x: Tensor) -> list[Tensor]:
    """Return the input of each layer with weights; with IMN, the centred one."""
    inputs, layers = [], find_layers(model)
    for module in model:
        if module in layers:
            inputs.append(x)
        x = module(x)
    return inputs


def find_exponents(part: str, exponents: Mapping[str, str], records: list[Record]) -> list[Record]:
    """Return a record for each data set and method: slopes of log values over log sizes.

    `exponents` has their names, and the fields that they are of.
    """
    answers = []
    for (dataset, method), group in group_records(records, "dataset", "method").items():
        answer: Record = dict.fromkeys(Case._fields)
        answer |= {"part": part, "dataset": dataset, "method": method}
        sizes = np.log([record["size"] for record in group])
        for name, field in exponents.items():
            if field in group[0]:
                values = np.log([record[field] for record in group])
                answer[name] = round(float(np.polyfit(sizes, values, 1)[0]), 4)
        answers.append(answer)
    return answers


def draw_correlated(correlation: float, rows: int, features: int, seed: int) -> Tensor:
    """Return normal inputs, any two of them with this correlation, minus their mean."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, features + 1, generator=generator, dtype=torch.float64)
    x = math.sqrt(1 - correlation) * x[:, 1:] + math.sqrt(correlation) * x[:, :1]
    return x - x.mean(dim=0)
