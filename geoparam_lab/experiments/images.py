"""Classification of images: VGG-6 on ImageNet32 (table 2, figure 4) and ResNets on ImageNet.

A sweep is a grid: methods x batch sizes x learning rates x seeds, each point one run of
`training.images.loop.train`; a method may have a grid of its own (`images.settings`). Without
rates, every method has the papers' own: 0.1 for geometric units and 0.01 for the others with
VGG-6, 0.1 for all with ResNets. `training.sweeps` says how a sweep is resumed and shared.
"""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from geoparam_lab import methods as all_methods
from geoparam_lab import networks
from geoparam_lab.checks import check_counts, check_names, check_rates
from geoparam_lab.data.image_source import Source
from geoparam_lab.experiments import image_text, papers
from geoparam_lab.experiments.experiment import TOP1, TOP5, Experiment, Layout
from geoparam_lab.run_folder import Record, Run
from geoparam_lab.training.images import loop, preparation
from geoparam_lab.training.images.settings import USERS, Settings, list_tasks
from geoparam_lab.training.processes import check_runs
from geoparam_lab.training.run_checkpoints import WEIGHTS
from geoparam_lab.training.sweeps import Sweep, Work, load_once
from geoparam_lab.training.tasks import Progress, Task

if TYPE_CHECKING:
    from accelerate import Accelerator

PAPERS_METHODS = {
    "imagenet32": ("sp", "wn", "wn+mbn", "bn", "gmp", "gmp+imn"),
    "imagenet": ("wn+mbn", "bn", "gmp+imn"),
}
_AXES = ("methods", "batch_sizes", "lrs", "seeds")


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
        batch_sizes: images in a step, over all processes together.
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
    check_counts(track=track, size=size, seeds=seeds, jobs=jobs)
    if workers is not None and workers < 0:
        raise ValueError(f"workers is a number of processes, 0 or more; got {workers}.")
    check_names("experiment", PAPERS_METHODS, experiment)
    check_names("network", networks.NETWORKS, network)
    names = [*(methods or ()), *(method or ())]
    if methods is None and not method:
        names = list(PAPERS_METHODS[experiment])
    axes = {
        "network": network,
        "methods": all_methods.check_methods(names),
        "batch_sizes": sorted(set(batch_sizes)),
        "lrs": None if lrs is None else check_rates(lrs),
        "seeds": seeds,
    }
    sweep = Sweep(experiment, Settings, _AXES, list_tasks, _draw, USERS, unit="epoch")
    config = sweep.make_config(axes, settings)
    tasks = list_tasks(config)  # raises where settings are wrong

    source = _load_images(experiment, data, size, workers)
    config["data"] = source.fingerprint
    runs = [task.settings for task in tasks]
    sweep.check_effect(runs, out)
    accelerator = check_runs(config["precision"], runs, jobs, storage)
    _check_runs(tasks, source, accelerator)
    kept = {loop.BOUNDARIES: ("boundaries", ".npy")}
    if keep_weights:
        kept[WEIGHTS] = ("weights", ".pt")
    load = functools.partial(load_once, _load_images, experiment, data, size, workers)
    train = functools.partial(loop.train, track=track)
    return sweep.conduct(
        Work(Path(out), train, load if jobs > 1 else lambda: source, kept),
        config,
        is_main=accelerator.is_main_process,
        command=command,
        resume=resume,
        jobs=jobs,
        storage=storage,
        progress=progress,
    )


def _draw(folder: Run) -> None:
    from geoparam_lab.experiments import image_figures

    image_figures.draw(folder)


def _load_images(
    experiment: str, data: str | Path | Source, size: int, workers: int | None
) -> Source:
    """Return the images, checked as far as that is quick."""
    if not isinstance(data, (str, Path)):
        return data
    if experiment == "imagenet32":
        if workers is not None:
            raise ValueError(f"workers decode JPEG files, and npz files need none; got {workers}.")
        from geoparam_lab.data.packed_images import PackedImages

        return PackedImages.load(data, size)
    from geoparam_lab.data.image_folders import ImageFolders

    return ImageFolders(data, size, workers)


def _check_runs(tasks: Sequence[Task], source: Source, accelerator: "Accelerator") -> None:
    """Raise ValueError where a run could not begin: hours later, it would end the sweep."""
    place: Record = {"device": accelerator.device, "world": accelerator.num_processes}
    by_method = {}
    for task in tasks:
        settings = task.settings
        part = source.hold_out(settings.select) if settings.select else source
        part.train(settings.batch_size, seed=0, crop=settings.crop, **place)
        by_method[task.labels["method"]] = settings
    for settings in by_method.values():
        preparation.make_optimizer(settings, preparation.build(settings, source))


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
