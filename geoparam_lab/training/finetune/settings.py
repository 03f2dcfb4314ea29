"""The settings of one run of fine-tuning, and the runs of a sweep.

A sweep goes by what it has found. Each method at each batch size gets the same rates with the
first seed. Where the best of them, on the images held out, is at an edge of the grid, the grid is
extended by one rate, at most `EXTENSIONS` times. The best rate then gets the other seeds.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any

from geoparam_lab.checks import check_counts, check_names
from geoparam_lab.run_folder import Record
from geoparam_lab.training.processes import PRECISIONS
from geoparam_lab.training.schedules import SCHEDULES

METHODS = {
    "bn": "BatchNorm in training mode",
    "bn-eval": "BatchNorm in evaluation mode, its scale and offset trained",
    "gn": "GroupNorm in place of BatchNorm, with its scale and offset",
    "fold": "BatchNorm folded into plain weights",
    "fold+geometric": "BatchNorm folded, r and u apart in GeometricOptimizer",
    "imn": "BatchNorm out, input mean normalization in",
    "frozen": "the same, its means constant",
}
EXTENSIONS = 3


@dataclass(frozen=True)
class FinetuneSettings:
    """Everything that decides the numbers of one run, apart from images and weights.

    The command line shows what is said here of each.

    Args:
        method: one of `METHODS`.
        batch_size: images in a step.
        lr: the rate at the schedule's peak.
        seed: of the output layer, the images' order, flips and dropout.
        images: how many of the training images are trained on.
        held_out: how many other training images choose the rate.
        test_images: how many of the validation images the networks are tested on, equally spaced;
            all by default.
        size: pixels that images are enlarged to, in height and width.
        width: of the network, as torchvision's width_mult.
        head_epochs: epochs in which the output layer alone is trained first, by Adam, on features
            of the pretrained network.
        steps: of the optimizer.
        momentum: of SGD, for all parameters.
        schedule: after the warmup: "linear", "cosine", "power" (1 - t^p), "hold" (and fall).
        warmup: share of all steps in which the rate rises from 0.
        running_momentum: share of a new batch in running statistics: of bn and of imn.
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
    head_epochs: int = 0
    steps: int = 1500
    momentum: float = 0.9
    schedule: str = "cosine"
    warmup: float = 0.05
    running_momentum: float = 0.01
    precision: str = "fp32"

    def __post_init__(self) -> None:
        check_names("each of methods", METHODS, self.method)
        check_names("schedule", SCHEDULES, self.schedule)
        check_names("precision", PRECISIONS, self.precision)
        counted = ("batch_size", "images", "held_out", "test_images", "steps")
        check_counts(**{name: getattr(self, name) for name in counted})
        if self.head_epochs < 0:
            raise ValueError(f"head_epochs must be >= 0; got {self.head_epochs}.")
        if self.size < 32:  # MobileNetV2 halves it five times
            raise ValueError(f"size must be >= 32; got {self.size}.")
        for name in ("momentum", "warmup"):
            value = getattr(self, name)
            if not 0 <= value < 1:
                raise ValueError(f"{name} must be from 0 to below 1; got {value}.")
        if not 0 < self.running_momentum <= 1:
            raise ValueError(
                f"running_momentum must be above 0 and at most 1; got {self.running_momentum}."
            )
        for name in ("lr", "width"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ValueError(f"{name} must be above 0 and finite; got {value}.")


COMMON: Record = {  # what all runs of a sweep share, and its defaults
    field.name: field.default for field in fields(FinetuneSettings) if field.default is not MISSING
}


@dataclass(frozen=True)
class FinetuneTask:
    """One run of a sweep, as a task of `training.tasks.Session`."""

    settings: FinetuneSettings

    @property
    def keys(self) -> list[tuple[Any, ...]]:
        return [(self.name,)]

    @property
    def name(self) -> str:
        one = self.settings
        return f"{one.method}-batch{one.batch_size}-lr{one.lr:g}-seed{one.seed}"

    def __str__(self) -> str:
        one = self.settings
        return f"{one.method}, batch {one.batch_size}, rate {one.lr:g}, seed {one.seed}"


def list_tasks(config: Record, records: Sequence[Record] = ()) -> list[FinetuneTask]:
    """Return the runs of a sweep, as far as they are known from the records of those done."""
    common = {name: config[name] for name in COMMON}
    first: list[FinetuneTask] = []
    others: list[FinetuneTask] = []
    for batch_size in config["batch_sizes"]:
        for method in config["methods"]:
            top1 = _find_top1(records, method, batch_size)
            rates = extend_grid(config["lrs"], top1)
            problem = {**common, "method": method, "batch_size": batch_size}
            first += [FinetuneTask(FinetuneSettings(**problem, lr=lr, seed=0)) for lr in rates]
            if top1.keys() >= set(rates):
                best = _choose_rate(rates, top1)
                for seed in range(1, config["seeds"]):
                    settings = FinetuneSettings(**problem, lr=best, seed=seed)
                    others.append(FinetuneTask(settings))
    others.sort(key=lambda task: task.settings.seed)
    return first + others


def _find_top1(records: Sequence[Record], method: str, batch_size: int) -> dict[float, float]:
    """Return the first seed's accuracy on images held out, by rate."""
    problem = method, batch_size, 0
    return {
        record["lr"]: record["select_top1"]
        for record in records
        if (record["method"], record["batch_size"], record["seed"]) == problem
    }


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
