"""The settings of one run on images, its outcome, and the runs of a sweep.

A sweep has methods, each perhaps with options of its own, in all combinations:

    bn                                           the sweep's settings and rates
    bn:decay=5e-4:lr=0.4,0.8                     two settings
    bn:optimizer=geometric:base=muon:turn=1,2    two settings of another optimizer

Options in words make another method of it, with a row of its own in tables; options in numbers are
settings of that method, of which the best may be chosen.
"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from geoparam_lab import methods
from geoparam_lab.checks import check_fields, read_options
from geoparam_lab.networks import CONSTANTS
from geoparam_lab.run_folder import Record
from geoparam_lab.training.images.plateau import PLATEAUS
from geoparam_lab.training.processes import PRECISIONS
from geoparam_lab.training.rival_optimizers import RIVALS
from geoparam_lab.training.schedules import fall

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
        network: as `networks.build` takes it.
        method: one of `methods.METHODS`.
        lr: the schedule scales it.
        batch_size: images in a step, over all processes.
        seed: of the weights, the order of the images and their augmentation.
        epochs: how many there are at most.
        schedule: "steps", as in the papers' v2, "plateau-top1", as in v1, "plateau-top5", as in
            the released code, "linear" or "cosine".
        patience: epochs without a better accuracy after which a plateau schedule cuts rates to a
            tenth; after twice as many a run ends.
        warmup: share of all steps in which rates rise from 0.
        optimizer: "sgd", "adamw", "muon", "airbench", "rotational", "angularmuown", or "geometric"
            for `gp.GeometricOptimizer`.
        momentum: None for the optimizer's own: 0.9 for SGD.
        nesterov: whether SGD's momentum is Nesterov's.
        weight_decay: of the weights that `param_groups` lets decay: never of angles.
        scale_decay: of r and lambda of geometric layers.
        scales: r of geometric layers: "free", or "relative" to its layer's mean, by which it is
            divided after every step.
        dropout: share of the output layer's inputs that are dropped in training.
        base: with "geometric", the optimizer of units: "sgd", "adamw" or "muon".
        turn: with "geometric", degrees by which units turn in a step.
        coordinates: with "geometric", "intrinsic" or "angles".
        rest: "sgd" or "adamw", for what is no unit; by default as the optimizer has it.
        rest_lr: None for `lr`, or for 1e-3 with a rival's AdamW.
        label_smoothing: of the training loss.
        accumulate: parts in which a batch goes through the network, one after the other.
        precision: "fp32", or "bf16" for autocast.
        compile: use torch.compile.
        deterministic: the same run gives the same bits on a GPU too.
        init: "glorot", as the papers' code, "sphere", as their text, or "released", as the code
            with its inverse of u(theta), which loses a sign.
        imn: where IMN is: "output", as in the papers' code, or "input", as in their text.
        mbn: where MBN's offset is: "after" the mean, or "before" it, as the papers' code, where it
            has no effect.
        skip: a ResNet's skip connections: "centred", as in the authors' ResNet-34, or "plain".
        constants: epsilon and momentum of a ResNet's BatchNorm: "torchvision", or "keras" for
            those of the authors' ResNet-34, 1e-3 and 0.01.
        crop: pixels by which an image of 32 or 64 is shifted at most.
        widths: VGG-6's channels, or a ResNet's first stage's.
        select: share of the training images kept back for choosing settings.
        recalibrate: training batches that recompute running statistics at the end.
        time_to: top-1 in percent; epochs and seconds to each are recorded.
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


@dataclass(frozen=True)
class Outcome:
    """The results of a run; docs/experiments.md ("What is written") lists the fields."""

    record: dict[str, Any]
    curves: Mapping[str, np.ndarray] = field(default_factory=dict)  # by epoch


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def find_rate_factor(schedule: str, epochs: int, warmup: float, epoch: float) -> float:
    """Return what rates are multiplied by after so many epochs, 0.5 being within the first.

    "steps" is the papers' v2: to a tenth at 1/3, 2/3 and 8/9 of all epochs (30, 60 and 80 of 90).
    The others fall to 0 at the end, along a line or half a cosine, from the end of the warmup on.
    """
    if schedule == "steps":
        return 1 / 10 ** sum(9 * int(epoch) >= n * epochs for n in (3, 6, 8))
    share = max(0.0, epoch - warmup * epochs) / (epochs - warmup * epochs)
    return fall(schedule, share)


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

_VARIED = ("network", "method", "lr", "batch_size", "seed")
COMMON = {field.name: field.default for field in fields(Settings) if field.name not in _VARIED}


def list_points(text: str) -> list[tuple[str, str, dict[str, Any]]]:
    """Return for each combination the method with its words, its numbers, and its settings.

    The rate is not among the numbers: it has a place of its own everywhere.

    Example:
        >>> for point in list_points("bn:lr=0.4,0.8:optimizer=muon:decay=5e-4"):
        ...     print(*point)
        bn:optimizer=muon decay=0.0005 {'optimizer': 'muon', 'lr': 0.4, 'weight_decay': 0.0005}
        bn:optimizer=muon decay=0.0005 {'optimizer': 'muon', 'lr': 0.8, 'weight_decay': 0.0005}
    """
    name, chosen = read_options(text, OPTIONS)
    methods.check_options(name, chosen)
    grid = {option: chosen[option] for option in OPTIONS if option in chosen}
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


@dataclass(frozen=True)
class ImageTask:
    """One run of a sweep, as a task of `training.tasks.Session`."""

    settings: Settings
    method: str  # with its options in words; see `list_points`
    tuned: str = ""  # its options in numbers, without the rate

    @property
    def keys(self) -> list[tuple[Any, ...]]:
        return [(self.name,)]

    @property
    def name(self) -> str:
        one, options = self.settings, self._options.replace(":", "-")
        return f"{one.network}-{options}-batch{one.batch_size}-lr{one.lr:g}-seed{one.seed}"

    def __str__(self) -> str:
        one, title = self.settings, methods.title(self._options)
        return f"{title}, batch {one.batch_size:,}, rate {one.lr:g}, seed {one.seed}"

    @property
    def _options(self) -> str:
        return ":".join(filter(None, (self.method, self.tuned)))


def list_tasks(config: Record) -> list[ImageTask]:
    """Return the runs of a sweep with this configuration, the first seed's first."""
    names = {field.name for field in fields(Settings)}
    common = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in config.items()
        if name in names
    }
    by_name: dict[str, ImageTask] = {}
    grid = itertools.product(range(config["seeds"]), config["batch_sizes"], config["methods"])
    for seed, batch_size, text in grid:
        method = methods.without_options(text)
        papers = 0.1 if config["network"].startswith("resnet") else methods.METHODS[method].lr
        place = {"method": method, "batch_size": batch_size, "seed": seed}
        for label, tuned, options in list_points(text):
            lrs = config["lrs"] or [papers]
            if "lr" in options:
                lrs = [options["lr"]]
            for lr in lrs:
                settings = Settings(**{**common, **options, **place, "lr": lr})
                task = ImageTask(settings, label, tuned)
                by_name.setdefault(task.name, task)
    return list(by_name.values())
