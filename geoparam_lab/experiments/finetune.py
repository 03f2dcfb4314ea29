"""Fine-tuning of a pretrained MobileNetV2 at small batch sizes: what to do with its BatchNorm?

A sweep is every method at every batch size, each at the best of equally many rates, chosen on
images held out (`training.finetune.settings`). Which runs there are depends on the results of
others. `training.sweeps` says how a sweep is resumed.
"""

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from geoparam_lab.checks import check_counts, check_names, check_rates
from geoparam_lab.data.packed_images import PackedImages
from geoparam_lab.experiments.choice import choose_best
from geoparam_lab.experiments.experiment import TOP1, Config, Experiment, Layout, Measure
from geoparam_lab.run_folder import Record, Run, group_records
from geoparam_lab.training.finetune import loop, pretrained
from geoparam_lab.training.finetune.enlarged_images import EnlargedImages
from geoparam_lab.training.finetune.settings import (
    METHODS,
    OPTIMIZERS,
    USERS,
    FinetuneSettings,
    list_tasks,
)
from geoparam_lab.training.processes import check_runs, make_accelerator
from geoparam_lab.training.sweeps import Sweep, Work, load_once
from geoparam_lab.training.tasks import Progress, Task

_AXES = ("methods", "batch_sizes", "lrs", "seeds")


def run(
    out: str | Path,
    *,
    data: str | Path,
    weights: str | Path,
    methods: Sequence[str] = tuple(METHODS),
    batch_sizes: Sequence[int] = (2, 8, 32),
    lrs: Sequence[float] = (1e-3, 3e-3, 1e-2, 3e-2),
    seeds: int = 3,
    jobs: int = 1,
    resume: bool = False,
    command: str | None = None,
    progress: Progress | None = None,
    **settings: Any,
) -> Run | None:
    """Fine-tune a network under some methods; write records, curves and figures to a folder.

    Args:
        data: folder with the images: train_data_batch_*.npz and val_data.npz, 32 by 32 pixels.
        weights: safetensors file with torchvision's keys of MobileNetV2.
        methods: methods to train: some of bn, bn-eval, gn, fold, fold+geometric, imn and frozen.
        batch_sizes: images in a step.
        lrs: learning rates at which each method is tried with the first seed; rates beyond an edge
            are added where the best is there.
        seeds: number of seeds, 0, 1, ..., of each method's best rate.
        jobs: networks trained side by side, each in its own process.
        settings: `FinetuneSettings` of all runs, such as steps and size.

    Returns:
        The sweep's folder.
    """
    check_counts(seeds=seeds, jobs=jobs)
    check_names("each of methods", METHODS, *methods)
    axes = {
        "methods": list(dict.fromkeys(methods)),
        "batch_sizes": sorted(set(batch_sizes)),
        "lrs": check_rates(lrs),
        "seeds": seeds,
    }
    sweep = Sweep("finetune", FinetuneSettings, _AXES, list_tasks, _draw, USERS)
    config = sweep.make_config(axes, settings)
    tasks = list_tasks(config)  # raises where settings are wrong
    sweep.check_effect([task.settings for task in tasks], out)
    _check_processes(config["precision"], jobs)
    source, state = _load(data, weights)
    _check_runs(tasks, source, state)
    config["data"] = source.fingerprint
    config["weights"] = pretrained.find_checksum(state)

    load = functools.partial(load_once, _load, data, weights)
    return sweep.conduct(
        Work(Path(out), loop.train, load if jobs > 1 else lambda: (source, state)),
        config,
        is_main=True,
        command=command,
        resume=resume,
        jobs=jobs,
        progress=progress,
    )


def _load(data: str | Path, weights: str | Path) -> tuple[PackedImages, pretrained.State]:
    state = pretrained.read_weights(weights)
    return PackedImages.load(data), state


def _check_processes(precision: str, jobs: int) -> None:
    processes = make_accelerator(precision).num_processes
    if processes > 1:
        raise ValueError(
            "finetune trains each network in one process: start it without torchrun and "
            f"accelerate launch, and use --jobs; got {processes} processes."
        )
    check_runs(precision, (), jobs)


def _check_runs(tasks: Sequence[Task], source: PackedImages, state: pretrained.State) -> None:
    """Raise ValueError where a run could not begin: hours later, it would end the sweep."""
    pretrained.build_plain(tasks[0].settings, state, source.classes)
    for task in tasks:
        EnlargedImages(source, task.settings, torch.device("cpu"))


def _draw(folder: Run) -> None:
    from geoparam_lab.experiments import finetune_figures

    finetune_figures.draw(folder)


def choose(records: Sequence[Record]) -> list[Record]:
    """Return the records at the best rate of each method and batch size, on images held out."""
    problem = ("method", "batch_size")
    by_problem = group_records(records, *problem)
    best = []
    for record in choose_best(records, "select_top1", problem):
        same = by_problem[record["method"], record["batch_size"]]
        rates = {other["lr"] for other in same}
        is_edge = len(rates) > 1 and record["lr"] in (min(rates), max(rates))
        best.append(record | {"edge": 1 if is_edge else None})
    return best


def _find_for_tables(records: Sequence[Record]) -> list[Record]:
    """Return the records for two tables: the best rate of each method, and all rates."""
    best = [record | {"table": "best"} for record in choose(records)]
    return best + [record | {"table": "all"} for record in records]


def _remark(config: Config) -> Iterator[str]:
    """Say what was trained on what, and how."""
    data = config.get("data")
    if not isinstance(data, dict):
        return
    tested = config.get("test_images") or data["val"]
    optimizer = OPTIMIZERS[config.get("optimizer", "sgd")]  # runs of before the choice had SGD
    yield (
        f"MobileNetV2 on {config['images']:,} images of {data['classes']:,} classes, enlarged to "
        f"{config['size']} pixels, {config['steps']:,} steps, momentum {config['momentum']:g}, "
        f"{optimizer}; rates chosen on {config['held_out']:,} images held out, tested on "
        f"{tested:,} others."
    )
    yield (
        "Each method has as many rates to begin with; where the best was at the edge of the grid, "
        'the grid was extended, and more settings were tried. A 1 under "edge" says that the '
        "best is still at the edge."
    )
    yield (
        "Memory saved is what one forward pass keeps for the backward pass, parameters aside. "
        + " ".join(f"{name}: {what}." for name, what in METHODS.items())
    )


_SELECT = Measure("select_top1", "top-1 on images held out (%)", 2)
_COSTS = (
    Measure("steps_per_second", "steps/s", 1),
    Measure("cpu_ms", "CPU ms per step", 0),
    Measure("saved_mb", "memory saved (MB)", 0),
    Measure("peak_mb", "peak memory (MB)", 0),
)
_KEYS = {"batch_size": "batch size"}
EXPERIMENT = Experiment(
    name="finetune",
    title="A pretrained MobileNetV2, fine-tuned",
    about="A network that was trained with BatchNorm is fine-tuned at small batch sizes.",
    summary="A pretrained MobileNetV2 fine-tuned at small batches, BatchNorm kept, frozen or "
    "taken out. Wants a GPU, or an hour.",
    run=run,
    settings=FinetuneSettings,
    layouts=(
        Layout(
            (TOP1,),
            _KEYS,
            where={"table": "best"},
            details=(_SELECT, Measure("tries", "settings tried", 0), Measure("edge", "edge", 0))
            + _COSTS,
            title="The best rate of each method",
        ),
        Layout(
            (TOP1,),
            _KEYS,
            where={"table": "all"},
            compare=False,
            details=(_SELECT, Measure("train_loss", "training loss at the end", 2)),
            title="All rates",
        ),
    ),
    rates={},
    baseline="bn-eval",
    choose=_find_for_tables,
    remarks=_remark,
)
