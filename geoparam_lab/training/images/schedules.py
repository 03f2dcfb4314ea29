"""When the learning rate falls and when training stops.

Three versions of the papers' table 2, where the rate changes between epochs:

    steps           v2: a tenth at 1/3, 2/3 and 8/9 of all epochs (30, 60 and 80 of 90)
    plateau-top1    v1: a tenth after 5 epochs without a better validation top-1, stop after 10
    plateau-top5    the released code: the same by top-5, and the best weights are kept

Two newer ones, where it changes with every step and reaches 0 at the end, after the warmup:

    linear          along a line
    cosine          along half a cosine

Plateaus are counted as Keras counts them (`stacks.keras_rules`): the rate falls when 5 epochs are
reached, better means by 1e-4 of all images for the rate and by anything at all for stopping.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from geoparam_lab.training.stacks.keras_rules import Judge

PATIENCE, STOP_PATIENCE = 5, 10


class Verdict(NamedTuple):
    """After an epoch: whether its weights are the ones to report, and whether to stop."""

    counts: bool
    stop: bool


class Decay:
    """The rate is a function of the epoch, and the last weights are reported.

    `factor` takes the epochs so far, 0.5 being within the first, to a factor of all rates.
    """

    keeps_best = False

    def __init__(self, factor: Callable[[float], float]) -> None:
        self.factor = factor

    def judge(self, top1: float, top5: float) -> Verdict:
        """Take the validation results of an epoch, as shares: Keras's 1e-4 is one of 10,000."""
        return Verdict(counts=True, stop=False)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Plateau(Decay):
    """The rate falls to a tenth when the validation top-1 or top-5 was not better for a while.

    With `keeps_best` the best weights are kept and reported, not the last.
    """

    def __init__(self, top: int, keeps_best: bool = False) -> None:
        super().__init__(lambda epoch: float(self._judge.rates[0]))
        self.top, self.keeps_best = top, keeps_best
        self._judge = Judge(np.ones(1), PATIENCE, STOP_PATIENCE, higher_is_better=True)

    def judge(self, top1: float, top5: float) -> Verdict:
        better, stops = self._judge(np.array([top1 if self.top == 1 else top5]))
        return Verdict(bool(better[0]) or not self.keeps_best, bool(stops[0]))

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self._judge, name)[0].item() for name in Judge.ARRAYS}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in Judge.ARRAYS:
            setattr(self._judge, name, np.array([state[name]]))


def _fall_in_steps(epochs: int, warmup: float) -> Decay:
    ninths = (3, 6, 8)
    return Decay(lambda epoch: 1 / 10 ** sum(9 * int(epoch) >= n * epochs for n in ninths))


def _fall_along(curve: Callable[[float], float]) -> Callable[[int, float], Decay]:
    """Return what makes a decay along a curve over [0, 1], which starts after the warmup."""
    return lambda epochs, warmup: Decay(
        lambda epoch: curve(max(0.0, epoch - warmup * epochs) / (epochs - warmup * epochs))
    )


SCHEDULES: dict[str, Callable[[int, float], Decay]] = {  # from epochs and warmup
    "steps": _fall_in_steps,
    "plateau-top1": lambda epochs, warmup: Plateau(top=1),
    "plateau-top5": lambda epochs, warmup: Plateau(top=5, keeps_best=True),
    "linear": _fall_along(lambda share: 1 - share),
    "cosine": _fall_along(lambda share: (1 + math.cos(math.pi * share)) / 2),
}
