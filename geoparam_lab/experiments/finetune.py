"""Fine-tuning of a pretrained MobileNetV2 at small batch sizes: what to do with its BatchNorm?

A sweep is every method at every batch size, each at the best of equally many rates, chosen on
images held out (`training.finetune.settings`). Which runs there are depends on what was found, so
a sweep goes on until nothing is left to do. Records and resuming are as in sweeps over images.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from geoparam_lab.checks import check_counts, check_names, check_rates
from geoparam_lab.data.packed_images import PackedImages
from geoparam_lab.experiments.choice import choose_best
from geoparam_lab.experiments.experiment import TOP1, Config, Experiment, Layout, Measure
from geoparam_lab.run_folder import Record, Run, group_records
from geoparam_lab.training import sweeps
from geoparam_lab.training.finetune.settings import (
    COMMON,
    METHODS,
    FinetuneSettings,
    FinetuneTask,
    list_tasks,
)
from geoparam_lab.training.tasks import Done, Progress, Tick

_AXES = ("methods", "batch_sizes", "lrs", "seeds")  # may change when a sweep is resumed


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
        data: the folder with the images: train_data_batch_*.npz and val_data.npz, 32 by 32.
        weights: a safetensors file with torchvision's keys of MobileNetV2.
        methods: some of bn, bn-eval, gn, fold, fold+geometric, imn and frozen.
        batch_sizes: images in a step.
        lrs: the rates that each method is tried at with the first seed; more beyond an edge that
            is the best.
        seeds: how many the best rate of each method gets, from 0 on.
        jobs: networks that are trained side by side, each in a process of its own.
        settings: `FinetuneSettings` of all runs, such as steps and size.

    Returns:
        The sweep's folder.
    """
    from geoparam_lab.training.finetune import pretrained

    check_counts(seeds=seeds, jobs=jobs)
    config = _make_config(methods, batch_sizes, lrs, seeds, settings)
    first = list_tasks(config)  # raises where settings are wrong
    _check_processes(config["precision"])
    state = pretrained.read_weights(weights)
    source = PackedImages.load(data)
    _check_runs(first, source, state)
    config["data"] = source.fingerprint
    config["weights"] = pretrained.find_checksum(state)

    load = functools.partial(_load_once, data, weights)
    work = _Work(Path(out), load if jobs > 1 else lambda: (source, state))
    known: Record = {"key": ["name"], "may_change": _AXES, "defaults": COMMON}
    folder = Run.create(out, "finetune", config, command, resume=resume, **known)
    todo: list[FinetuneTask] = []
    while (more := list_tasks(config, folder.records())) != todo:
        todo = more
        options: Any = {"is_main": True, "jobs": jobs, "progress": progress, "unit": "step"}
        sweeps.conduct(work, todo, lambda: (folder, None), _draw, **options)
    return folder


@dataclass(frozen=True)
class _Work(sweeps.Work):
    """Fine-tunes one network."""

    load: Callable[[], tuple[PackedImages, Any]]

    def train(self, task: FinetuneTask, tick: Tick | None = None) -> Done:
        from geoparam_lab.training.finetune import loop
        from geoparam_lab.training.finetune.enlarged_images import EnlargedImages
        from geoparam_lab.training.processes import make_accelerator

        def report(step: int, speed: float) -> None:
            if tick is not None:
                tick(step, 1 - step / task.settings.steps, f"{speed:.1f} steps/s")

        source, state = self.load()
        device = make_accelerator(task.settings.precision).device
        images = EnlargedImages(source, task.settings, device)
        return loop.train(task, images, state, report)


@functools.lru_cache(maxsize=1)  # a working process trains many networks on the same images
def _load_once(data: Path, weights: Path) -> tuple[PackedImages, Any]:
    from geoparam_lab.training.finetune import pretrained

    return PackedImages.load(data), pretrained.read_weights(weights)


def _make_config(
    methods: Sequence[str],
    batch_sizes: Sequence[int],
    lrs: Sequence[float],
    seeds: int,
    settings: Record,
) -> Record:
    """Return the configuration; raise ValueError where an option is unknown or empty."""
    check_names("each of methods", METHODS, *methods)
    if not batch_sizes:
        raise ValueError("batch_sizes must not be empty.")
    unknown = [name for name in settings if name not in COMMON]
    if unknown:
        raise ValueError(f"settings are {', '.join(COMMON)}; got {', '.join(unknown)}.")
    config: Record = {
        "methods": list(dict.fromkeys(methods)),
        "batch_sizes": sorted(set(batch_sizes)),
        "lrs": check_rates(lrs),
        "seeds": seeds,
    }
    return config | COMMON | settings


def _check_processes(precision: str) -> None:
    from geoparam_lab.training.processes import check_processes, make_accelerator

    accelerator = make_accelerator(precision)
    check_processes(accelerator, precision, accelerator.num_processes)
    if accelerator.num_processes > 1:
        raise ValueError(
            "finetune trains each network in one process: start it without torchrun and "
            f"accelerate launch, and use --jobs; got {accelerator.num_processes} processes."
        )


def _check_runs(todo: Sequence[FinetuneTask], source: PackedImages, state: Any) -> None:
    """Raise ValueError where a run could not begin: hours later, it would end the sweep."""
    import torch

    from geoparam_lab.training.finetune import pretrained
    from geoparam_lab.training.finetune.enlarged_images import EnlargedImages

    pretrained.build_plain(todo[0].settings, state, source.classes)
    for task in todo:
        EnlargedImages(source, task.settings, torch.device("cpu"))


def _draw(folder: Run) -> None:
    from geoparam_lab.experiments import finetune_figures

    finetune_figures.draw(folder)


def choose(records: Sequence[Record]) -> list[Record]:
    """Return the records at the best rate of each method and batch size, on images held out."""
    problem = ("method", "batch_size")
    tried = group_records(records, *problem)
    chosen = []
    for record in choose_best(records, "select_top1", problem):
        rates = [each["lr"] for each in tried[record["method"], record["batch_size"]]]
        is_edge = len(set(rates)) > 1 and record["lr"] in (min(rates), max(rates))
        chosen.append(record | {"edge": 1 if is_edge else None})
    return chosen


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
    yield (
        f"MobileNetV2 on {config['images']:,} images of {data['classes']:,} classes, enlarged to "
        f"{config['size']} pixels, {config['steps']:,} steps of SGD with momentum "
        f"{config['momentum']:g}; rates chosen on {config['held_out']:,} images held out, tested "
        f"on {tested:,} others."
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
