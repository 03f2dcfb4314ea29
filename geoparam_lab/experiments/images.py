"""Classification of images: VGG-6 on ImageNet32 (table 2, figure 4) and ResNets on ImageNet.

A sweep is a grid: methods x batch sizes x learning rates x seeds, each point one run of
`training.images.train`; a method may have a grid of its own (`images.settings`). Without rates,
every method has the papers' own: 0.1 for geometric units and 0.01 for the others with VGG-6, 0.1
for all with ResNets.

A run that diverges is a record like any other, with NaN for its results, and the sweep goes on.

**Resuming.** A run's record is written when it is finished; until then it has checkpoints in
checkpoints/NAME of the folder, from which the same command with `resume` goes on. What the numbers
depend on, the images' checksum too, is in config.json, and a resumed sweep must have the same.

**Several processes.** Under torchrun or accelerate launch all processes train each network
together; the main one chooses it and writes. Otherwise, processes or machines that are called with
the same `storage` take runs in turn (`shared_study`), and each ends with all records and curves.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from geoparam_lab import methods as all_methods
from geoparam_lab import networks
from geoparam_lab.checks import check_counts, check_names, check_rates
from geoparam_lab.data.image_source import Source
from geoparam_lab.experiments import image_text, papers
from geoparam_lab.experiments.experiment import TOP1, TOP5, Experiment, Layout
from geoparam_lab.run_folder import Record, Run
from geoparam_lab.training import shared_study, sweeps
from geoparam_lab.training.images.loop import BOUNDARIES
from geoparam_lab.training.images.settings import COMMON, ImageTask, Settings, list_tasks
from geoparam_lab.training.processes import check_jobs, check_processes, make_accelerator
from geoparam_lab.training.run_checkpoints import FINISHED, WEIGHTS
from geoparam_lab.training.tasks import Done, Progress, Tick

if TYPE_CHECKING:
    from accelerate import Accelerator

PAPERS_METHODS = {
    "imagenet32": ("sp", "wn", "wn+mbn", "bn", "gmp", "gmp+imn"),
    "imagenet": ("wn+mbn", "bn", "gmp+imn"),
}
_MAY_CHANGE = ("methods", "batch_sizes", "lrs", "seeds")  # when a sweep is resumed


def run(
    out: str | Path,
    experiment: str = "imagenet32",
    *,
    data: str | Path | Source,
    network: str = "vgg6",
    methods: Sequence[str] | None = None,
    method: list[str] | None = None,
    batch_sizes: Sequence[int] = (256, 512, 1024),
    lrs: Sequence[float] | None = None,
    seeds: int = 3,
    size: int = 32,
    workers: int | None = None,
    jobs: int = 1,
    keep_weights: bool = False,
    track: int | None = None,
    storage: str | None = None,
    resume: bool = False,
    command: str | None = None,
    progress: Progress | None = None,
    **settings: Any,
) -> Run | None:
    """Train a network under some methods; write records, curves and figure 4 to a folder.

    Args:
        experiment: "imagenet32", images in npz files, or "imagenet", a folder of JPEG files.
        data: folder with the images (train_data_batch_*.npz and val_data.npz, or
            train/CLASS/*.JPEG and val/CLASS/*.JPEG).
        network: network to train: vgg6, resnet18, resnet34 or resnet50.
        methods: methods to train, with options after a colon; by default the papers'.
        method: one more method, with a grid of its own, as in bn:decay=5e-4:lr=0.4,0.8; may be
            repeated.
        batch_sizes: batch sizes, each over all processes together.
        lrs: learning rates of methods that give none of their own; by default the papers'.
        seeds: number of seeds, 0, 1, ...
        size: width of the images in pixels; npz files have 32 or 64.
        workers: processes that decode JPEG files; by default one per core.
        jobs: networks trained side by side on one GPU, each in its own process; small networks
            leave most of a GPU idle.
        keep_weights: keep each network's weights in weights/.
        track: record the units' boundaries every this many steps.
        storage: share a sweep between machines through this file or database URL: start the same
            command on each, with its own --out.
        settings: `Settings` of all runs, such as epochs and schedule.

    Returns:
        The sweep's folder; None in all but the leading one of several processes.
    """
    methods = [*(methods or ()), *method] if method else methods
    check_counts(track=track, size=size, seeds=seeds, jobs=jobs)
    if workers is not None and workers < 0:
        raise ValueError(f"workers is a number of processes, 0 or more; got {workers}.")
    config = _check_options(experiment, network, methods, batch_sizes, lrs, seeds, settings)
    source = _load_images(experiment, data, size, workers)
    config["data"] = source.fingerprint
    accelerator = _check_runs(config, source, jobs, storage)
    load = functools.partial(_load_once, experiment, data, size, workers)
    work = _Work(Path(out), load if jobs > 1 else lambda: source, keep_weights, track)
    known: Record = {"key": ["name"], "may_change": _MAY_CHANGE, "defaults": COMMON}

    def start() -> tuple[Run, Any]:
        study = None if storage is None else shared_study.open_study(storage, experiment, config)
        return Run.create(out, experiment, config, command, resume=resume, **known), study

    def draw(folder: Run) -> None:
        from geoparam_lab.experiments import image_figures

        image_figures.draw(folder)

    is_main = accelerator.is_main_process
    return sweeps.conduct(
        work, list_tasks(config), start, draw, is_main=is_main, jobs=jobs, progress=progress
    )


@dataclass(frozen=True)
class _Work(sweeps.Work):
    """Trains one network on images."""

    load: Callable[[], Source]
    keep_weights: bool
    track: int | None

    def train(self, task: ImageTask, tick: Tick | None = None) -> Done:
        from geoparam_lab.training.images import train

        one, source = task.settings, self.load()
        part = source.hold_out(one.select) if one.select else source
        steps = part.fingerprint["train"] // one.batch_size

        def report(epoch: int, step: int, speed: float) -> None:
            left = 1 - (epoch + step / steps) / one.epochs  # share of this run that is left
            if tick is not None:
                tick(epoch + 1, left, f"{speed:,.0f} images/s")

        outcome = train.train(one, source, self.folder(task), track=self.track, report=report)
        named = {"name": task.name, "method": task.method, "tuned": task.tuned}
        return Done([outcome.record | named], {task.name: outcome.curves})

    def clean(self, task: ImageTask) -> None:
        """Move files that are whole to their place, and remove what else a run has left."""
        folder, name = self.folder(task), task.name
        places = {BOUNDARIES: f"boundaries/{name}.npy"}
        if self.keep_weights:
            places |= {WEIGHTS: f"weights/{name}.pt"}
        for left, place in places.items():
            if (folder / FINISHED).exists() and (folder / left).exists():
                (self.out / place).parent.mkdir(exist_ok=True)
                (folder / left).replace(self.out / place)
        super().clean(task)


def _load_images(
    experiment: str, data: str | Path | Source, size: int, workers: int | None
) -> Source:
    """Return the images, checked as far as that is quick."""
    if not isinstance(data, (str, Path)):
        return data
    if experiment == "imagenet32":
        from geoparam_lab.data.packed_images import PackedImages

        return PackedImages.load(data, size)
    from geoparam_lab.data.image_folders import ImageFolders

    return ImageFolders(data, size, workers)


@functools.lru_cache(maxsize=1)  # a working process trains many runs on the same images
def _load_once(*arguments: Any) -> Source:
    return _load_images(*arguments)


def _check_options(
    experiment: str,
    network: str,
    names: Sequence[str] | None,
    batch_sizes: Sequence[int],
    lrs: Sequence[float] | None,
    seeds: int,
    settings: Record,
) -> Record:
    """Return the configuration; raise ValueError where some of it is wrong."""
    check_names("experiment", PAPERS_METHODS, experiment)
    check_names("network", networks.NETWORKS, network)
    chosen = all_methods.check_methods(PAPERS_METHODS[experiment] if names is None else names)
    if not batch_sizes:
        raise ValueError("batch_sizes must not be empty.")
    unknown = [name for name in settings if name not in COMMON]
    if unknown:
        raise ValueError(f"settings are {', '.join(COMMON)}; got {', '.join(unknown)}.")
    config: Record = {
        "network": network,
        "methods": chosen,
        "batch_sizes": sorted(set(batch_sizes)),
        "lrs": None if lrs is None else check_rates(lrs),
        "seeds": seeds,
    }
    for name, value in (COMMON | settings).items():
        config[name] = list(value) if isinstance(value, tuple) else value
    list_tasks(config)  # raises where settings are wrong
    return config


def _check_runs(config: Record, source: Source, jobs: int, storage: str | None) -> "Accelerator":
    """Return the Accelerator of all runs.

    Raises ValueError where a run could not begin: hours later, it would end the sweep.
    """
    from geoparam_lab.training.images import preparation

    accelerator, todo = make_accelerator(config["precision"]), list_tasks(config)
    place: Record = {"device": accelerator.device, "world": accelerator.num_processes}
    for one in (task.settings for task in todo):
        check_processes(accelerator, one.precision, one.batch_size, one.accumulate)
        part = source.hold_out(one.select) if one.select else source
        part.train(one.batch_size, seed=0, crop=one.crop, **place)
    for one in {task.method: task.settings for task in todo}.values():
        preparation.make_optimizer(one, preparation.build(one, source))
    check_jobs(accelerator, jobs, storage)
    return accelerator


def _make_experiment(name: str, **fields: Any) -> Experiment:
    return Experiment(
        name=name,
        settings=Settings,
        baseline="bn",
        names=image_text.NETWORKS,
        retitle=functools.partial(image_text.make_title, name),
        mismatch=functools.partial(image_text.explain_mismatch, name),
        remarks=image_text.remark,
        choose=image_text.choose_shown,
        **fields,
    )


IMAGENET32 = _make_experiment(
    "imagenet32",
    title="VGG-6 on ImageNet32",
    about="A convolutional network learns to tell classes of small images apart.",
    summary="VGG-6 on images of 32 by 32 pixels: table 2, figure 4. Wants a GPU.",
    run=run,
    layouts=(Layout((TOP1, TOP5), {"batch_size": "batch size"}),),
    papers=papers.VGG6,
    papers_fields={"network": "vgg6"},
)
IMAGENET = _make_experiment(
    "imagenet",
    title="ResNet on ImageNet",
    about="A residual network learns to tell classes of images apart.",
    summary="A ResNet on ImageNet: table 3. Wants several GPUs.",
    run=functools.partial(
        run, experiment="imagenet", network="resnet18", batch_sizes=(256,), size=224
    ),
    layouts=(Layout((TOP1, TOP5), {"network": "network", "batch_size": "batch size"}),),
    papers=papers.RESNET,
    rates=dict.fromkeys(all_methods.METHODS, 0.1),
    papers_fields={"batch_size": 256},
)
