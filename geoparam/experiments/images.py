"""Classification of images: VGG-6 on ImageNet32 (table 2, figure 4) and ResNets on ImageNet.

A sweep is a grid: methods x batch sizes x learning rates x seeds, each point one run of
`imaging.training.train`. The first seed of everything comes first, so that a sweep that is looked
at early shows all methods. Without rates, every method has the papers' own: 0.1 for geometric
units and 0.01 for the others with VGG-6, 0.1 for all with ResNets.

A run that diverges is a record like any other, with NaN for its results, and the sweep goes on.

**Cut anywhere.** A run's record is written when it is finished; until then it has checkpoints in
checkpoints/NAME of the folder, from which the same command with `resume` goes on. What the numbers
depend on, the images' checksum too, is in config.json, and a resumed sweep must have the same.

**In company.** Under torchrun or accelerate launch all processes train each network together
(`imaging.crew`). Apart from that, processes or machines that are called with the same `storage`
take runs in turn (`search`), and each ends with the records and curves of all.
"""

import contextlib
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from geoparam.experiments import methods as all_methods
from geoparam.experiments import networks, search
from geoparam.experiments.imaging.checkpoints import WEIGHTS
from geoparam.experiments.imaging.settings import Settings
from geoparam.experiments.imaging.watching import BOUNDARIES
from geoparam.experiments.results import Record, Run
from geoparam.experiments.tasks import Done, Progress, Session, Tick, check_names

if TYPE_CHECKING:
    from geoparam.data.imagenet import Source
    from geoparam.experiments.imaging.crew import Crew
KEY = ("network", "method", "batch_size", "lr", "seed")


@dataclass(frozen=True)
class Experiment:
    """What an experiment is where nothing else is asked for.

    Args:
        network: its name.
        methods: those that the papers compare.
        batch_sizes: the papers'.
        size: of the images.
    """

    network: str
    methods: tuple[str, ...]
    batch_sizes: tuple[int, ...]
    size: int


EXPERIMENTS = {
    "imagenet32": Experiment(
        "vgg6", ("sp", "wn", "wn+mbn", "bn", "gmp", "gmp+imn"), (256, 512, 1024), 32
    ),
    "imagenet": Experiment("resnet18", ("wn+mbn", "bn", "gmp+imn"), (256,), 224),
}
_MAY_CHANGE = ("methods", "batch_sizes", "lrs", "seeds")  # when a sweep is resumed


@dataclass(frozen=True)
class Task:
    """One run of a sweep."""

    settings: Settings

    @property
    def keys(self) -> list[tuple[Any, ...]]:
        return [tuple(getattr(self.settings, name) for name in KEY)]

    @property
    def name(self) -> str:
        one = self.settings
        rate = f"batch{one.batch_size}-lr{one.lr:g}"
        return f"{one.network}-{one.method}-{rate}-seed{one.seed}"

    def __str__(self) -> str:
        one = self.settings
        title = all_methods.TITLES[one.method]
        return f"{title}, batch {one.batch_size:,}, rate {one.lr:g}, seed {one.seed}"


def papers_rate(network: str, method: str) -> float:
    """Return the learning rate that a method has in the papers, or would have by their rule.

    Example:
        >>> [papers_rate("vgg6", method) for method in ("bn", "gmp+imn", "intrinsic+imn")]
        [0.01, 0.1, 0.1]
        >>> papers_rate("resnet18", "bn")
        0.1
    """
    return 0.1 if network.startswith("resnet") else all_methods.LEARNING_RATES[method]


def tasks(config: Record) -> list[Task]:
    """Return the runs of a sweep with this configuration, the first seed's first.

    Example:
        >>> config = {"network": "vgg6", "methods": ["bn", "gmp"], "batch_sizes": [256]}
        >>> [str(task) for task in tasks(config | {"lrs": None, "seeds": 1})]
        ['BN, batch 256, rate 0.01, seed 0', 'GmP, batch 256, rate 0.1, seed 0']
    """
    names = {field.name for field in fields(Settings)}
    common = {name: value for name, value in config.items() if name in names}
    if common.get("widths") is not None:
        common["widths"] = tuple(common["widths"])
    return [
        Task(Settings(**common, method=method, lr=lr, batch_size=batch_size, seed=seed))
        for seed in range(config["seeds"])
        for batch_size in config["batch_sizes"]
        for method in config["methods"]
        for lr in config["lrs"] or [papers_rate(config["network"], method)]
    ]


# --- a sweep ------------------------------------------------------------------------------------


def run(
    out: str | Path,
    experiment: str = "imagenet32",
    *,
    data: "str | Path | Source",
    network: str | None = None,
    methods: Sequence[str] | None = None,
    batch_sizes: Sequence[int] | None = None,
    lrs: Sequence[float] | None = None,
    seeds: int = 3,
    size: int | None = None,
    workers: int | None = None,
    check_images: bool = False,
    checkpoint_every: int | None = None,
    keep_weights: bool = False,
    tensorboard: bool = False,
    track: int | None = None,
    storage: str | None = None,
    resume: bool = False,
    command: str | None = None,
    progress: Progress | None = None,
    **settings: Any,
) -> Run | None:
    """Train a network under some methods; write records, curves and figure 4 to a folder.

    Args:
        out: the sweep's folder.
        experiment: "imagenet32", images in npz files, or "imagenet", a folder of JPEG files.
        data: the folder with the images, or these themselves.
        network: one of `networks.NETWORKS`; by default the experiment's.
        methods: names of `methods.METHODS`; by default those that the papers compare.
        batch_sizes: over all processes; by default the papers'.
        lrs: learning rates for every method; by default the papers' own of each.
        seeds: how many, from 0 on.
        size: of the images: 32 or 64 in npz files, 224 for JPEG files where nothing else is said.
        workers: processes that decode JPEG files; by default as many as there are cores.
        check_images: decode all JPEG files before training.
        checkpoint_every: steps between two checkpoints; there is one after every epoch anyway.
        keep_weights: keep each run's weights, the best ones where its schedule does, in weights/.
        tensorboard: write scalars for TensorBoard.
        track: follow the units' boundaries, every so many steps.
        storage: an Optuna storage, to share the runs with processes and machines that are called
            with it too: see `search.share`.
        resume: go on with the sweep in the folder.
        command: what a user types to do it again.
        progress: called with a title, how many images are done and how many there are.
        settings: `imaging.Settings` of all runs, such as epochs and schedule.

    Returns:
        The sweep's folder; None in all but the leading one of several processes.
    """
    from geoparam.experiments.imaging.crew import Crew
    from geoparam.experiments.imaging.preparation import make_accelerator

    config = _checked(experiment, network, methods, batch_sizes, lrs, seeds, settings)
    source = _source(experiment, data, size, workers, check_images)
    crew = Crew(make_accelerator(config["precision"]))
    _check_fits(tasks(config), source, crew)
    kinds = {"checkpoint_every": checkpoint_every, "tensorboard": tensorboard, "track": track}
    work = _Work(Path(out), source, crew, keep_weights, kinds)
    if not crew.leads:
        for task in crew.told():
            work.train(task)
        return None
    config |= {"data": {**source.fingerprint, "classes": source.classes, "size": source.size}}
    try:
        if storage is not None:
            search.check(storage)
        options: Record = {"key": KEY, "resume": resume, "may_change": _MAY_CHANGE}
        folder = Run.create(out, experiment, config, command, **options)
    except BaseException:
        crew.tell(None)
        raise
    _sweep(folder, work, storage, progress)
    crew.tell(None)
    return folder


def _sweep(folder: Run, work: "_Work", storage: str | None, progress: Progress | None) -> None:
    """Do all runs that are not done."""
    config, experiment = folder.config, folder.info["experiment"]
    todo = tasks(config)
    session = Session(
        folder,
        work,
        len(todo),
        progress=progress,
        weight=config["epochs"] * config["data"]["train"],
        threads=None,
        finished=_finisher(folder, work),
        arrays=True,
    )
    for task in todo:
        if folder.done(**dict(zip(KEY, task.keys[0], strict=True))):
            work.clean(task)  # a kill may have come between the record and this
    if storage is None:
        session.spread(todo)
    else:
        study = search.study_name(experiment, config, [])
        session.share([(_point(task, config), task) for task in todo], "val_loss", storage, study)
    with contextlib.suppress(OSError):  # there may be others, or none
        (work.out / "checkpoints").rmdir()


def _finisher(folder: Run, work: "_Work") -> Callable[[Task], None]:
    """Return what is done after each run: a sweep takes days, and is looked at before its end."""
    from geoparam.experiments.imaging import figures

    names = all_methods.METHODS
    papers = {name: papers_rate(folder.config["network"], name) for name in names}

    def finished(task: Task) -> None:
        work.clean(task)
        figures.draw(folder, papers)

    return finished


def _point(task: Task, config: Record) -> search.Point:
    """Return the point of the grid; the rate is no axis of it where each method has its own."""
    names = ("method", "batch_size", "seed", *(("lr",) if config["lrs"] else ()))
    return {name: getattr(task.settings, name) for name in names}


@dataclass(frozen=True)
class _Work:
    """Does one run, with all processes that were started together."""

    out: Path
    source: "Source"
    crew: "Crew"
    keep_weights: bool
    kinds: Record

    def __call__(self, task: Task, tick: Tick) -> Done:
        self.crew.tell(task)
        return self.train(task, tick)

    def train(self, task: Task, tick: Tick | None = None) -> Done:
        from geoparam.experiments.imaging import training

        one, images = task.settings, self.source.fingerprint["train"]
        steps = images // one.batch_size

        def told(epoch: int, step: int, speed: float) -> None:
            left = one.epochs * images - (epoch * steps + step) * one.batch_size
            if tick is not None:
                tick(epoch + 1, max(left, 0), f"{speed:,.0f} images/s")

        outcome = training.train(
            one,
            self.source,
            self.folder(task),
            accelerator=self.crew.accelerator,
            tick=told,
            **self.kinds,
        )
        record = outcome.record | {"name": task.name, "processes": self.crew.size}
        return Done([record], outcome.curves)

    def folder(self, task: Task) -> Path:
        return self.out / "checkpoints" / task.name

    def clean(self, task: Task) -> None:
        """Remove the checkpoints of a run whose record is written; put the rest in its place."""
        folder, name = self.folder(task), task.name
        places = {"tensorboard": f"tensorboard/{name}", BOUNDARIES: f"boundaries/{name}.npy"}
        if self.keep_weights:
            places |= {WEIGHTS: f"weights/{name}.pt"}
        for left, place in places.items():
            if (folder / left).exists():
                (self.out / place).parent.mkdir(exist_ok=True)
                shutil.rmtree(self.out / place, ignore_errors=True)  # of a run that began anew
                shutil.move(folder / left, self.out / place)
        shutil.rmtree(folder, ignore_errors=True)


# --- what is asked for --------------------------------------------------------------------------


def _source(
    experiment: str,
    data: "str | Path | Source",
    size: int | None,
    workers: int | None,
    check: bool,
) -> "Source":
    """Return the images, checked as far as that is quick, or all of them with `check`."""
    if not isinstance(data, (str, Path)):
        return data
    size = size or EXPERIMENTS[experiment].size
    if experiment == "imagenet32":
        from geoparam.data.imagenet import PackedImages

        return PackedImages.load(data, size)
    from geoparam.data.folders import ImageFolders

    return ImageFolders(data, size, workers, check)


def _checked(
    experiment: str,
    network: str | None,
    names: Sequence[str] | None,
    batch_sizes: Sequence[int] | None,
    lrs: Sequence[float] | None,
    seeds: int,
    settings: Record,
) -> Record:
    """Return the configuration, if all of it exists."""
    check_names("experiment", [experiment], tuple(EXPERIMENTS))
    usual = EXPERIMENTS[experiment]
    network, names = network or usual.network, list(names if names is not None else usual.methods)
    check_names("network", [network], networks.NETWORKS)
    check_names("methods", names, tuple(all_methods.METHODS))
    sizes = list(batch_sizes if batch_sizes is not None else usual.batch_sizes)
    if seeds < 1 or not sizes:
        raise ValueError(f"seeds must be >= 1 and batch_sizes some; got {seeds} and {sizes}.")
    if lrs is not None and not lrs:
        raise ValueError("lrs must be learning rates above 0, or left out; got none.")
    _check_settings(settings)
    common = Settings(network, names[0], 1.0, sizes[0], 0, **settings).as_dict()
    config = {
        "network": network,
        "methods": list(dict.fromkeys(names)),
        "batch_sizes": sorted(set(sizes)),
        "lrs": lrs and sorted({float(lr) for lr in lrs}),
        "seeds": seeds,
    }
    config |= {name: value for name, value in common.items() if name not in KEY}
    tasks(config)  # raises where a run cannot be
    return config


def _check_settings(settings: Record) -> None:
    known = [field.name for field in fields(Settings) if field.name not in KEY]
    unknown = [name for name in settings if name not in known]
    if unknown:
        raise ValueError(f"settings are {', '.join(known)}; got {', '.join(unknown)}.")


def _check_fits(todo: Sequence[Task], source: "Source", crew: "Crew") -> None:
    """Raise ValueError where a run could not begin: hours later, it would end the sweep."""
    from geoparam.experiments.imaging import preparation

    place: Record = {"device": crew.accelerator.device, "world": crew.size}
    for one in (task.settings for task in todo):
        preparation.check(one, crew.accelerator)
        source.train(one.batch_size, seed=0, crop=one.crop, **place)
    for one in {task.settings.method: task.settings for task in todo}.values():
        options = {"size": source.size, "seed": 0, **one.network_options}
        model = networks.build(one.network, one.method, source.classes, **options)
        preparation.make_optimizer(one, model)
