"""The settings of one run on images, and the runs of a sweep.

A sweep has methods, each perhaps with options of its own, in all combinations:

    bn                                           the sweep's settings and rates
    bn:decay=5e-4:lr=0.4,0.8                     two settings
    bn:optimizer=geometric:base=muon:turn=1,2    two settings of another optimizer

Options in words make another method of it, with a row of its own in tables; options in numbers are
settings of that method, of which the best may be chosen.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from geoparam_lab import methods
from geoparam_lab.checks import Users, check_fields, find_defaults, read_options
from geoparam_lab.networks import CONSTANTS
from geoparam_lab.run_folder import Record
from geoparam_lab.training.images.plateau import PLATEAUS
from geoparam_lab.training.optimizers import RIVALS
from geoparam_lab.training.processes import PRECISIONS
from geoparam_lab.training.tasks import Task

OPTIMIZERS: dict[str, tuple[str, ...]] = {  # and the settings that are theirs alone
    "sgd": (),
    "adamw": (),
    **dict.fromkeys(RIVALS, ("rest", "rest_lr")),
    "geometric": ("rest", "rest_lr", "base", "turn", "coordinates"),
}
_CHOICES: dict[str, Any] = {
    "schedule": ("steps", *PLATEAUS, "linear", "cosine"),
    "precision": PRECISIONS,
    "skip": ("centred", "plain"),
    "constants": CONSTANTS,
    "scales": ("free", "relative"),
    "optimizer": OPTIMIZERS,
    "base": ("sgd", "adamw", "muon"),
    "rest": ("sgd", "adamw"),
}
_RULES = {
    ">= 1": ("batch_size", "epochs", "accumulate", "patience"),
    "from 0 to below 1": ("momentum", "label_smoothing", "dropout", "warmup", "select"),
    "above 0 and finite": ("lr", "turn", "rest_lr"),
    "0 or more and finite": ("weight_decay", "scale_decay", "crop", "recalibrate"),
}


@dataclass(frozen=True)
class Settings:
    """Everything that decides the numbers of one run, apart from the images.

    The command line shows what is said here of each.

    Args:
        network: name of the network, as `networks.build` takes it.
        method: one of `methods.METHODS`.
        lr: learning rate at the schedule's peak.
        batch_size: images in a step, over all processes.
        seed: seed of the weights, the order of the images and their augmentation.
        epochs: passes over the training images; a plateau schedule may end a run before.
        schedule: how the rate falls: "steps", as in the papers' v2, "plateau-top1", as in v1,
            "plateau-top5", as in the released code, "linear" or "cosine".
        patience: epochs without a better accuracy after which a plateau schedule cuts rates to a
            tenth; after twice as many a run ends.
        warmup: share of all steps in which rates rise from 0, from 0 to below 1.
        optimizer: "sgd", "adamw", "muon", "airbench", "rotational", "angularmuown", "muonh", or
            "geometric" for `gp.GeometricOptimizer`.
        momentum: momentum of SGD and Muon, or AdamW's first beta; by default the optimizer's own,
            0.9 for SGD and AdamW and 0.95 for Muon.
        nesterov: use Nesterov's momentum in SGD.
        weight_decay: weight decay of the weights that `param_groups` lets decay: never of angles.
        scale_decay: weight decay of r and lambda of geometric layers.
        scales: what bounds r of geometric layers: "free" for nothing, or "relative" to divide it
            by its layer's mean after every step.
        dropout: share of the output layer's inputs that are dropped in training.
        base: with "geometric", the optimizer of units: "sgd", "adamw" or "muon"; by default sgd.
        turn: with "geometric", degrees by which units turn in a step at the schedule's peak; lr
            is then the rate of all other parameters.
        coordinates: with "geometric", what a step of a unit moves: its "intrinsic" direction, the
            default, or its "angles".
        rest: optimizer of all parameters but units, "sgd" or "adamw", with "geometric" or a rival;
            by default the base, or adamw with a rival (sgd with "rotational").
        rest_lr: learning rate of `rest`; by default lr, or 1e-3 for a rival's AdamW.
        label_smoothing: share of the training target that is spread over all classes.
        accumulate: parts in which a batch goes through the network, one after the other.
        precision: "fp32", or "bf16" for autocast.
        compile: use torch.compile.
        deterministic: make a run give the same bits every time on a GPU too; slower.
        init: how weights start: "glorot", as the papers' code, "sphere", as their text, or
            "released", as the code with its inverse of u(theta), which loses a sign.
        imn: where IMN is: "output", as in the papers' code, or "input", as in their text.
        mbn: where MBN's offset is: "after" the mean, or "before" it, as the papers' code, where it
            has no effect.
        skip: a ResNet's skip connections: "centred", as in the authors' ResNet-34, or "plain".
        constants: epsilon and momentum of a ResNet's BatchNorm: "torchvision", or "keras" for
            those of the authors' ResNet-34, 1e-3 and 0.01.
        crop: largest shift, in pixels, of a training image of 32 or 64 pixels; 0 for none.
        widths: channels of VGG-6's six convolutions, or of a ResNet's first stage; by default the
            papers'.
        select: share of the training images kept back for choosing settings.
        recalibrate: number of training batches over which running statistics are recomputed at
            the end; 0 for never.
        time_to: top-1 accuracies in percent; epochs and seconds to each are recorded.
    """

    network: str
    method: str
    lr: float
    batch_size: int
    seed: int
    epochs: int = 90
    schedule: str = "steps"
    patience: int = 5
    warmup: float = 0.0
    optimizer: str = "sgd"
    momentum: float | None = None
    nesterov: bool = False
    weight_decay: float = 0.0
    scale_decay: float = 0.0
    scales: str = "free"
    dropout: float = 0.0
    base: str | None = None
    turn: float | None = None
    coordinates: str | None = None
    rest: str | None = None
    rest_lr: float | None = None
    label_smoothing: float = 0.0
    accumulate: int = 1
    precision: str = "bf16"
    compile: bool = False
    deterministic: bool = False
    init: str = "glorot"
    imn: str = "output"
    mbn: str = "after"
    skip: str = "centred"
    constants: str = "torchvision"
    crop: int = 0
    widths: tuple[int, ...] | None = None
    select: float = 0.0
    recalibrate: int = 0
    time_to: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        method = methods.get(self.method, init=self.init, imn=self.imn, mbn=self.mbn)
        check_fields(self, _CHOICES, _RULES)
        _check(not method.decay, "decay is an option of images: bn:decay=5e-4; got bn+decay.")
        wrong = [level for level in self.time_to if not 0 <= level <= 100]
        _check(not wrong, f"time_to is in percent, from 0 to 100; got {wrong}.")
        self._check_combinations()

    def _check_combinations(self) -> None:
        """Raise where a setting does not go with another one."""
        for name in OPTIMIZERS["geometric"]:
            fits = getattr(self, name) is None or name in OPTIMIZERS[self.optimizer]
            _check(fits, f"{name} is not for optimizer {self.optimizer!r}.")
        is_geometric = methods.get(self.method).is_geometric and self.optimizer in ("sgd", "adamw")
        _check(
            is_geometric or not (self.scale_decay or self.scales != "free"),
            "scale_decay and scales are for geometric layers under sgd or adamw; got "
            f"{self.method!r} under {self.optimizer!r}.",
        )
        _check(
            self.turn is None or self.rest_lr is None,
            "with turn, lr is the rate of what is no unit: leave rest_lr out, and give lr.",
        )
        _check(
            self.optimizer != "rotational" or self.weight_decay > 0,
            "rotational turns units by decay's angle: weight_decay is above 0.",
        )
        _check(
            self.schedule in PLATEAUS or self.patience == Settings.patience,
            f"patience is for {' and '.join(PLATEAUS)}; got schedule {self.schedule!r}.",
        )
        is_resnet = self.network.startswith("resnet")
        _check(is_resnet or self.skip == "centred", f"{self.network} has no skip connections.")
        _check(
            is_resnet or self.constants == "torchvision",
            f"constants are of a ResNet's BatchNorm: {self.network} always has Keras's.",
        )
        if self.widths is not None:
            most = 1 if is_resnet else math.inf
            _check(
                0 < len(self.widths) <= most and min(self.widths) >= 1,
                "widths are numbers of channels from 1 on, and a ResNet has one; got "
                f"{list(self.widths)}.",
            )


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


OPTIONS: dict[str, Any] = {  # of a method, and what each value is
    "optimizer": str,
    "base": str,
    "rest": str,
    "coordinates": str,
    "schedule": str,
    "init": str,
    "imn": str,
    "mbn": str,
    "skip": str,
    "constants": str,
    "scales": str,
    "lr": float,
    "decay": float,
    "turn": float,
    "rest_lr": float,
    "momentum": float,
    "warmup": float,
    "label_smoothing": float,
    "scale_decay": float,
    "dropout": float,
    "accumulate": int,
    "crop": int,
    "patience": int,
}
_FIELDS = {"decay": "weight_decay"}  # where an option is not called as in Settings

USERS: Users = {  # of settings of single methods
    "init": (
        "geometric layers, or he for plain ones",
        lambda run: run.init not in methods.DIRECTIONS or methods.get(run.method).is_geometric,
    ),
    "imn": ("methods with IMN", lambda run: "imn" in run.method),
    "mbn": ("methods with MBN", lambda run: "mbn" in run.method),
}

COMMON = find_defaults(Settings)  # what all runs of a sweep share


def list_points(text: str) -> list[tuple[str, str, dict[str, Any]]]:
    """Return for each combination the method with its words, its numbers, and its settings.

    The rate is not among the numbers: it has a place of its own everywhere.

    Example:
        >>> for point in list_points("bn:lr=0.4,0.8:optimizer=muon:decay=5e-4"):
        ...     print(*point)
        bn:optimizer=muon decay=0.0005 {'optimizer': 'muon', 'lr': 0.4, 'weight_decay': 0.0005}
        bn:optimizer=muon decay=0.0005 {'optimizer': 'muon', 'lr': 0.8, 'weight_decay': 0.0005}
    """
    name, given = read_options(text, OPTIONS)
    methods.check_options(name, given)
    grid = {option: given[option] for option in OPTIONS if option in given}
    points = []
    for combination in itertools.product(*grid.values()):
        words, numbers, settings = [name], [], {}
        for option, value in zip(grid, combination, strict=True):
            settings[_FIELDS.get(option, option)] = value
            if OPTIONS[option] is str:
                words.append(f"{option}={value}")
            elif option != "lr":
                numbers.append(f"{option}={value:g}")
        points.append((":".join(words), ":".join(numbers), settings))
    return points


def make_task(settings: Settings, method: str, tuned: str) -> Task:
    """Return a run as a task; `method` has its options in words, and `tuned` those in numbers."""
    full = ":".join(filter(None, (method, tuned)))
    options, lr, seed = full.replace(":", "-"), settings.lr, settings.seed
    name = f"{settings.network}-{options}-batch{settings.batch_size}-lr{lr:g}-seed{seed}"
    title = f"{methods.title(full)}, batch {settings.batch_size:,}, rate {lr:g}, seed {seed}"
    return Task(title, ((name,),), settings, {"method": method, "tuned": tuned})


def list_tasks(config: Record, records: Sequence[Record] = ()) -> list[Task]:
    """Return the runs of a sweep with this configuration, the first seed's first."""
    names = {field.name for field in fields(Settings)}
    common = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in config.items()
        if name in names
    }
    tasks: dict[str, Task] = {}
    grid = itertools.product(range(config["seeds"]), config["batch_sizes"], config["methods"])
    for seed, batch_size, text in grid:
        method = methods.without_options(text)
        for label, tuned, options in list_points(text):
            lrs = config["lrs"] or [_find_papers_rate(config["network"], method)]
            if "lr" in options:
                lrs = [options["lr"]]
            for lr in lrs:
                place = {"method": method, "batch_size": batch_size, "seed": seed, "lr": lr}
                task = make_task(Settings(**{**common, **options, **place}), label, tuned)
                tasks.setdefault(task.name, task)
    return list(tasks.values())


def _find_papers_rate(network: str, method: str) -> float:
    return 0.1 if network.startswith("resnet") else methods.METHODS[method].lr
