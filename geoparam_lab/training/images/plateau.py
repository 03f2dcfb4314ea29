"""The papers' plateau schedules: the accuracy after each epoch decides when the rate falls.

    plateau-top1    v1's text: to a tenth after 5 epochs without a better top-1, end after 10
    plateau-top5    the released code of VGG-6: the same by top-5, and the best weights are kept;
                    its runs have at most 500 epochs

Epochs are counted as Keras counts them (`stacks.keras_rules`): the rate falls when 5 are reached,
and better means by 1e-4 of all images for the rate, by any amount for the end. The images are the
validation images, or those kept back for choosing (`select`).
"""

from typing import Any

import numpy as np

from geoparam_lab.training.stacks.keras_rules import PlateauRule

PLATEAUS = {"plateau-top1": "top1", "plateau-top5": "top5"}  # and the accuracy that decides
KEEPS_BEST = "plateau-top5"
STOP = 2  # a run ends after so many times the patience


class Plateau:
    """The plateau rule of one run."""

    def __init__(self, schedule: str, patience: int) -> None:
        self.measure = PLATEAUS[schedule]
        self.keeps_best = schedule == KEEPS_BEST
        self._rule = PlateauRule(np.ones(1), patience, STOP * patience, higher_is_better=True)

    @property
    def factor(self) -> float:
        """The factor of all rates in the next epoch."""
        return float(self._rule.rates[0])

    def judge(self, percent: float) -> tuple[bool, bool]:
        """Take an epoch's accuracy; return whether it is the best so far, and whether to stop."""
        better, stops = self._rule(np.array([percent / 100]))
        return bool(better[0]), bool(stops[0])

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self._rule, name)[0].item() for name in PlateauRule.ARRAYS}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in PlateauRule.ARRAYS:
            setattr(self._rule, name, np.array([state[name]]))
