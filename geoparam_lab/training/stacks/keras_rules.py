"""Keras's training rules for a stack of models, each with its own rate, plateau and patience.

The papers' numbers come from Keras, and its rules differ from torch's in what they count: Adam's
epsilon joins the root of v before the bias correction; a rate falls when the epochs without a
better value reach the patience, not when they exceed it; it falls unless the loss got better by
1e-4, absolute.
"""

import math

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray
BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-7  # Adam's
FACTOR = 0.1  # what a rate is multiplied by when it falls
MIN_DELTA = 1e-4  # least improvement for the rate to stay; for training to go on, any will do


class Adam:
    """Adam for parameters (S, elements), with a rate for each member.

    `factors` (2, elements) are each element's rate over the member's, and its weight decay, as in
    AdamW.
    """

    def __init__(self, like: Tensor, factors: Tensor | None = None) -> None:
        self.m, self.v = torch.zeros_like(like), torch.zeros_like(like)
        self.factors = factors
        self.steps = 0

    def step(self, parameters: Tensor, gradient: Tensor, rates: Array) -> None:
        """Update the parameters in place."""
        self.steps += 1
        self.m.lerp_(gradient, 1 - BETA1)
        self.v.mul_(BETA2).addcmul_(gradient, gradient, value=1 - BETA2)
        change = self.v.sqrt().add_(EPSILON)
        torch.div(self.m, change, out=change)
        correction = math.sqrt(1 - BETA2**self.steps) / (1 - BETA1**self.steps)
        lr = torch.from_numpy(rates).to(change).unsqueeze(1)
        if self.factors is not None:
            lr = lr * self.factors[0]
            parameters.mul_(1 - lr * self.factors[1])
        parameters.addcmul_(change, lr, value=-correction)

    def keep_only(self, index: Array) -> None:
        """Go on with these members only."""
        self.m, self.v = self.m[index], self.v[index]


class PlateauRule:
    """ReduceLROnPlateau and EarlyStopping as Keras counts them, for each member.

    Rates are (S,); after `patience` epochs without a better value a rate falls, after
    `stop_patience` a member stops.
    """

    ARRAYS = ("rates", "best", "plateau", "wait", "plateau_wait")  # its state, each (S,)

    def __init__(
        self, rates: Array, patience: int, stop_patience: int, higher_is_better: bool = False
    ) -> None:
        self.patience, self.stop_patience = patience, stop_patience
        self.sign = -1.0 if higher_is_better else 1.0
        self.rates = rates.astype(np.float64)
        self.best, self.plateau = np.full((2, len(rates)), np.inf)
        self.wait, self.plateau_wait = np.zeros((2, len(rates)), dtype=int)

    def __call__(self, values: Array) -> tuple[Array, Array]:
        """Take the values of one epoch; return which members are at their best, which stop."""
        values = self.sign * values
        better = values < self.best
        self.best = np.where(better, values, self.best)
        self.wait = np.where(better, 0, self.wait + 1)
        lower = values < self.plateau - MIN_DELTA
        self.plateau = np.where(lower, values, self.plateau)
        self.plateau_wait = np.where(lower, 0, self.plateau_wait + 1)
        late = self.plateau_wait >= self.patience
        self.plateau_wait[late] = 0
        self.rates = np.where(late, self.rates * FACTOR, self.rates)
        return better, self.wait >= self.stop_patience

    def keep_only(self, index: Array) -> None:
        """Go on with these members only."""
        for name in self.ARRAYS:
            setattr(self, name, getattr(self, name)[index])
