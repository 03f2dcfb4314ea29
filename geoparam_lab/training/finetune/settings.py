"""The settings of one run of fine-tuning, and the runs of a sweep.

Which runs a sweep has depends on its results. Each method at each batch size gets the same rates
with the first seed. Where the best of them, on the images held out, is at an edge of the grid, the
grid is extended by one rate, at most `EXTENSIONS` times. The best rate then gets the other seeds.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from geoparam_lab.checks import Users, check_fields, check_names, find_defaults
from geoparam_lab.run_folder import Record, select_records
from geoparam_lab.training.processes import PRECISIONS
from geoparam_lab.training.schedules import SCHEDULES
from geoparam_lab.training.tasks import Task

METHODS = {
    "bn": "BatchNorm in training mode",
    "bn-eval": "BatchNorm in evaluation mode, its scale and offset trained",
    "gn": "GroupNorm in place of BatchNorm, with its scale and offset",
    "fold": "BatchNorm folded into plain weights",
    "fold+geometric": "BatchNorm folded, r and u apart in GeometricOptimizer",
    "imn": "BatchNorm out, input mean normalization in",
    "frozen": "the same, its means constant",
}
OPTIMIZERS = {
    "sgd": "SGD",
    "adamw": "AdamW",
    "muon": "Muon at ten times the rate, AdamW for the rest",
    "turn": "Muon's directions by an angle of 1,000 degrees times the rate, AdamW for the rest",
}
EXTENSIONS = 3
SMALLEST = 32  # pixels: MobileNetV2 halves an image five times
_CHOICES: dict[str, Any] = {
    "optimizer": OPTIMIZERS,
    "schedule": SCHEDULES,
    "precision": PRECISIONS,
}
_RULES = {
    ">= 1": ("batch_size", "images", "held_out", "test_images", "steps"),
    "from 0 to below 1": ("momentum", "warmup"),
    "above 0 and at most 1": ("running_momentum",),
    "above 0 and finite": ("lr", "width"),
}


@dataclass(frozen=True)
class FinetuneSettings:
    """Everything that decides the numbers of one run, apart from images and weights.

    The command line shows what is said here of each.

    Args:
        method: one of `METHODS`.
        batch_size: images in a step.
        lr: learning rate at the schedule's peak.
        seed: seed of the output layer, the images' order, flips and dropout.
        images: number of training images that are trained on.
        held_out: number of other training images, on which the rate is chosen.
        test_images: number of validation images, equally spaced, that the networks are tested on;
            by default all.
        size: height and width in pixels to which images are enlarged.
        width: width of the network, as torchvision's width_mult; that of the weights.
        steps: number of optimizer steps in a run.
        optimizer: "sgd", "adamw", or for hidden layers "muon" or "turn" (Muon's directions by an
            angle) and AdamW for the rest. The rate is that of all parameters, or of the rest: ten
            times the rate is Muon's, a thousand times the rate are the degrees of a turn.
        momentum: momentum of SGD or Muon, or AdamW's first beta.
        schedule: how the rate falls after the warmup: "linear", "cosine", "power" (1 - the square
            root of the share done) or "hold" (four fifths of the steps, then along a line).
        warmup: share of all steps in which the rate rises from 0, from 0 to below 1.
        running_momentum: share of each new batch in running statistics, of bn and of imn.
        precision: "fp32", or "bf16" for autocast.
    """

    method: str
    batch_size: int
    lr: float
    seed: int
    images: int = 10_000
    held_out: int = 2_000
    test_images: int | None = None
    size: int = 96
    width: float = 1.0
    steps: int = 1500
    optimizer: str = "sgd"
    momentum: float = 0.9
    schedule: str = "cosine"
    warmup: float = 0.05
    running_momentum: float = 0.01
    precision: str = "fp32"
    accumulate: ClassVar[int] = 1
    compile: ClassVar[bool] = False
    deterministic: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_names("each of methods", METHODS, self.method)
        check_fields(self, _CHOICES, _RULES)
        if self.size < SMALLEST:
            raise ValueError(f"size must be >= {SMALLEST}; got {self.size}.")
        if self.method == "fold+geometric" and self.optimizer in ("muon", "turn"):
            raise ValueError(
                "fold+geometric has r and u apart under sgd and adamw; turn does that to every "
                "method. Leave it out."
            )
        if self.method == "bn" and self.batch_size == 1 and self.size == SMALLEST:
            raise ValueError(
                f"bn needs two values of a channel, and one image of size {SMALLEST} has one in "
                "the last layers: use a larger size, a larger batch, or leave bn out."
            )


USERS: Users = {  # of single methods' settings
    "running_momentum": ("the methods bn and imn", lambda run: run.method in ("bn", "imn")),
}

COMMON = find_defaults(FinetuneSettings)  # what all runs of a sweep share


def make_task(settings: FinetuneSettings) -> Task:
    """Return a run as a task."""
    method, batch_size, lr = settings.method, settings.batch_size, settings.lr
    name = f"{method}-batch{batch_size}-lr{lr:g}-seed{settings.seed}"
    title = f"{method}, batch {batch_size}, rate {lr:g}, seed {settings.seed}"
    return Task(title, ((name,),), settings)


def list_tasks(config: Record, records: Sequence[Record] = ()) -> list[Task]:
    """Return the runs of a sweep, as far as they are known from the records of those done."""
    common = {name: config[name] for name in COMMON}
    first: list[FinetuneSettings] = []
    others: list[FinetuneSettings] = []
    for batch_size in config["batch_sizes"]:
        for method in config["methods"]:
            top1 = _find_top1(records, method, batch_size)
            rates = extend_grid(config["lrs"], top1)
            problem = {**common, "method": method, "batch_size": batch_size}
            first += [FinetuneSettings(**problem, lr=lr, seed=0) for lr in rates]
            if top1.keys() >= set(rates):
                best = _choose_rate(rates, top1)
                seeds = range(1, config["seeds"])
                others += [FinetuneSettings(**problem, lr=best, seed=seed) for seed in seeds]
    others.sort(key=lambda settings: settings.seed)
    return [make_task(settings) for settings in first + others]


def _find_top1(records: Sequence[Record], method: str, batch_size: int) -> dict[float, float]:
    """Return the first seed's accuracy on images held out, by rate."""
    same = select_records(records, method=method, batch_size=batch_size, seed=0)
    return {record["lr"]: record["select_top1"] for record in same}


def extend_grid(lrs: Sequence[float], top1: Mapping[float, float]) -> list[float]:
    """Return the rates to try: those given, and more beyond an edge that is the best so far.

    Example:
        >>> extend_grid([0.01, 0.03, 0.1], {0.01: 70.0, 0.03: 60.0, 0.1: 50.0})
        [0.003, 0.01, 0.03, 0.1]
        >>> extend_grid([0.01, 0.03, 0.1], {0.01: 60.0, 0.03: 70.0, 0.1: 50.0})
        [0.01, 0.03, 0.1]
    """
    rates = sorted(lrs)
    if len(rates) < 2:
        return rates
    factor = (rates[-1] / rates[0]) ** (1 / (len(rates) - 1))
    for _ in range(EXTENSIONS):
        if not top1.keys() >= set(rates):  # wait for these
            break
        best = _choose_rate(rates, top1)
        if best == rates[0]:
            rates.insert(0, _round(best / factor))
        elif best == rates[-1]:
            rates.append(_round(best * factor))
    return rates


def _choose_rate(rates: Sequence[float], top1: Mapping[float, float]) -> float:
    """Return the best of some rates; of equal ones, or if all diverged, the lowest."""
    finite = [rate for rate in rates if math.isfinite(top1[rate])]
    if not finite:
        return rates[0]
    return max(finite, key=top1.__getitem__)


def _round(rate: float) -> float:
    return float(f"{rate:.0e}")
