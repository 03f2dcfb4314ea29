"""How learning rates fall: factors from 1 to 0 over a run."""

import math

SCHEDULES = ("linear", "cosine", "power", "hold")


def fall(schedule: str, share: float, power: float = 0.5, hold: float = 0.8) -> float:
    """Return what a rate is multiplied by after this share of a run.

        linear   1 - t
        cosine   (1 + cos(pi t)) / 2
        power    1 - t^p: below 1, a fast early fall and a long tail
        hold     1 until `hold`, then along a line

    Example:
        >>> [fall(schedule, 0.25) for schedule in ("linear", "power", "hold")]
        [0.75, 0.5, 1.0]
        >>> [round(fall(schedule, 0.9), 3) for schedule in ("linear", "cosine", "hold")]
        [0.1, 0.024, 0.5]
    """
    t = min(max(share, 0.0), 1.0)
    if schedule == "linear":
        return 1 - t
    if schedule == "cosine":
        return (1 + math.cos(math.pi * t)) / 2
    if schedule == "power":
        return 1 - t**power
    return min(1.0, (1 - t) / (1 - hold))


def find_factor(
    step: int,
    steps: int,
    schedule: str,
    *,
    warmup: float = 0.0,
    final: float = 0.0,
    power: float = 0.5,
    hold: float = 0.8,
) -> float:
    """Return what rates are multiplied by in a step, from 0 on.

    They rise along a line in the first share `warmup` of all steps, then fall to `final`.
    """
    rise = warmup * steps
    if step + 1 < rise:
        return (step + 1) / rise
    share = (step - rise) / (steps - rise)
    return final + (1 - final) * fall(schedule, share, power, hold)


def find_epoch_factor(schedule: str, epochs: int, warmup: float, epoch: float) -> float:
    """Return what rates are multiplied by after so many epochs, 0.5 being within the first.

    "steps" is the papers' v2: to a tenth at 1/3, 2/3 and 8/9 of all epochs (30, 60 and 80 of 90).
    The others fall to 0 at the end, from the end of the warmup on.
    """
    if schedule == "steps":
        return 1 / 10 ** sum(9 * int(epoch) >= n * epochs for n in (3, 6, 8))
    rise = warmup * epochs
    return fall(schedule, max(0.0, epoch - rise) / (epochs - rise))
