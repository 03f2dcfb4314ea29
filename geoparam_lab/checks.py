"""Checks of options, made where they come in."""

import math
from collections.abc import Collection, Sequence


def check_names(what: str, known: Collection[object], *names: object) -> None:
    """Raise ValueError where a name is not known, or there is none.

    Example:
        >>> check_names("skip", ("centred", "plain"), "both")
        Traceback (most recent call last):
        ValueError: skip is one of centred, plain; got 'both'.
    """
    wrong = [name for name in names if name not in known]
    if wrong or not names:
        got = ", ".join(map(repr, wrong)) or "none"
        raise ValueError(f"{what} is one of {', '.join(map(str, known))}; got {got}.")


def check_counts(**counts: int | None) -> None:
    """Raise ValueError where a number of things is below 1; None stands for no number."""
    for name, count in counts.items():
        if count is not None and count < 1:
            raise ValueError(f"{name} must be >= 1; got {count}.")


def check_folds(folds: int, points: int) -> None:
    """Raise ValueError where training points cannot be divided into so many folds."""
    if not 2 <= folds <= points:
        raise ValueError(f"{points} training points cannot be divided into {folds} folds.")


def check_rates(lrs: Sequence[float]) -> list[float]:
    """Return learning rates in order, each once; raise ValueError where one cannot be."""
    if not lrs or not all(0 < lr < math.inf for lr in lrs):
        raise ValueError(f"lrs must be learning rates above 0 and finite; got {list(lrs)}.")
    return sorted({float(lr) for lr in lrs})
