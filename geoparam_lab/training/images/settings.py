"""The settings of one run on images, and its outcome."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from geoparam_lab import methods
from geoparam_lab.training.images.schedules import SCHEDULES

PRECISIONS = {"fp32": "no", "bf16": "bf16"}  # and what Accelerate calls them
_RIVALS = dict.fromkeys(("muon", "airbench", "rotational", "angularmuown"), ("rest", "rest_lr"))
OPTIMIZERS: dict[str, tuple[str, ...]] = {  # and the settings that are theirs alone
    "sgd": (),
    "adamw": (),
    **_RIVALS,
    "geometric": ("rest", "rest_lr", "base", "turn", "coordinates"),
}
BASES = ("sgd", "adamw", "muon")


@dataclass(frozen=True)
class Settings:
    """Everything that decides the numbers of one run, apart from the images.

    A run's checkpoints hold its settings; a run with others does not resume from them. The command
    line shows what is said here of each.

    Args:
        network: as `networks.build` takes it.
        method: one of `methods.METHODS`.
        lr: the schedule scales it.
        batch_size: images in a step, over all processes.
        seed: of the weights, the order of the images and their augmentation.
        epochs: the most there are.
        schedule: "steps" (v2), "plateau-top1" (v1), "plateau-top5" (the released code), "linear"
            or "cosine".
        warmup: share of all steps in which rates rise from 0.
        optimizer: "sgd", "adamw", "muon", "airbench", "rotational", "angularmuown", or "geometric"
            for `gp.GeometricOptimizer`.
        momentum: None for the optimizer's own: 0.9 for SGD.
        nesterov: whether SGD's momentum is Nesterov's.
        weight_decay: of the weights that `param_groups` lets decay: never of angles.
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
        init: "glorot", as the papers' code, or "sphere", as their text.
        imn: where IMN is: "output", as in the papers' code, or "input", as in their text.
        mbn: where MBN's offset is: "after" the mean, or "before" it, as the papers' code, where it
            has no effect.
        skip: a ResNet's skip connections: "centred", as the authors', or "plain".
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
    warmup: float = 0.0
    optimizer: str = "sgd"
    momentum: float | None = None
    nesterov: bool = False
    weight_decay: float = 0.0
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
    crop: int = 0
    widths: tuple[int, ...] | None = None
    select: float = 0.0
    recalibrate: int = 0
    time_to: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        method = methods.get(self.method, init=self.init, imn=self.imn, mbn=self.mbn)
        _check(not method.decay, "decay is an option of images: bn:decay=5e-4; got bn+decay.")
        _check_name("schedule", self.schedule, SCHEDULES)
        _check_name("precision", self.precision, PRECISIONS)
        _check_name("skip", self.skip, ("centred", "plain"))
        _check_name("optimizer", self.optimizer, OPTIMIZERS)
        _check_name("base", self.base or "sgd", BASES)
        _check_name("rest", self.rest or "sgd", BASES[:2])
        for name in ("batch_size", "epochs", "accumulate"):
            _check(getattr(self, name) >= 1, f"{name} is at least 1; got {getattr(self, name)}.")
        for name in ("momentum", "label_smoothing", "warmup", "select"):
            value = getattr(self, name)
            _check(0 <= (value or 0) < 1, f"{name} is from 0 to below 1; got {value}.")
        _check(
            0 < self.lr < math.inf and 0 <= self.weight_decay < math.inf and self.crop >= 0,
            "lr is above 0 and finite, weight_decay and crop are not below; got "
            f"lr={self.lr}, weight_decay={self.weight_decay}, crop={self.crop}.",
        )
        self._check_combinations()

    def _check_combinations(self) -> None:
        """Raise where a setting does not go with another one."""
        for name in OPTIMIZERS["geometric"]:
            fits = getattr(self, name) is None or name in OPTIMIZERS[self.optimizer]
            _check(fits, f"{name} is not for optimizer {self.optimizer!r}.")
        _check(
            self.optimizer != "rotational" or self.weight_decay > 0,
            "rotational turns units by decay's angle: weight_decay is above 0.",
        )
        _check(
            self.schedule != "plateau-top5" or not (self.select or self.recalibrate),
            "select and recalibrate are for the weights at the end, and plateau-top5 reports "
            "those of an earlier epoch. Choose another schedule.",
        )
        if self.widths is not None:
            is_one = self.network.startswith("resnet")
            fits = 0 < len(self.widths) <= (1 if is_one else math.inf) and min(self.widths) >= 1
            _check(
                fits,
                f"widths are numbers of channels from 1 on, {'one' if is_one else 'one or more'} "
                f"for {self.network}; got {list(self.widths)}.",
            )

    @property
    def network_options(self) -> dict[str, Any]:
        """What `networks.build` is given besides network, method, classes, size and seed."""
        options: dict[str, Any] = {"init": self.init, "imn": self.imn, "mbn": self.mbn}
        if self.network.startswith("resnet"):
            options["skip"] = self.skip
        if self.widths is not None and self.network.startswith("resnet"):
            options["width"] = self.widths[0]
        elif self.widths is not None:
            options["widths"] = tuple(self.widths)
        return options

    def as_dict(self) -> dict[str, Any]:
        """Return the settings as they are written into files."""
        values = asdict(self).items()
        return {name: list(v) if isinstance(v, tuple) else v for name, v in values}


@dataclass(frozen=True)
class Outcome:
    """The results of a run, of the best epoch where the schedule keeps the best weights and of the
    last one elsewhere; docs/experiments.md ("What is written") has the fields."""

    record: dict[str, Any]
    curves: Mapping[str, np.ndarray] = field(default_factory=dict)  # by epoch


def _check_name(what: str, name: str, known: Any) -> None:
    if name not in known:
        raise ValueError(f"{what} is one of {', '.join(known)}; got {name!r}.")


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
