"""When the learning rate falls.

    steps      the papers' v2: to a tenth at 1/3, 2/3 and 8/9 of all epochs (30, 60 and 80 of 90)
    linear     to 0 at the end, along a line from the end of the warmup on, a little in every step
    cosine     likewise along half a cosine

A schedule takes epochs and warmup and returns a function, which takes the epochs so far, 0.5 being
within the first, to a factor of all rates.
"""

import math
from collections.abc import Callable

Factor = Callable[[float], float]


def _fall_in_steps(epochs: int, warmup: float) -> Factor:
    return lambda epoch: 1 / 10 ** sum(9 * int(epoch) >= n * epochs for n in (3, 6, 8))


def _fall_along(curve: Factor) -> Callable[[int, float], Factor]:
    """Return the schedule along a curve over [0, 1]."""
    return lambda epochs, warmup: (
        lambda epoch: curve(max(0.0, epoch - warmup * epochs) / (epochs - warmup * epochs))
    )


SCHEDULES: dict[str, Callable[[int, float], Factor]] = {
    "steps": _fall_in_steps,
    "linear": _fall_along(lambda share: 1 - share),
    "cosine": _fall_along(lambda share: (1 + math.cos(math.pi * share)) / 2),
}
