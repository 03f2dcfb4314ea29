"""Checks of options, made where they come in."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any


def check_names(what: str, allowed: Collection[object], *names: object) -> None:
    """Raise ValueError where a name is not allowed, or there is none.

    Example:
        >>> check_names("skip", ("centred", "plain"), "both")
        Traceback (most recent call last):
        ValueError: skip is one of centred, plain; got 'both'.
    """
    wrong = [name for name in names if name not in allowed]
    if wrong or not names:
        got = ", ".join(map(repr, wrong)) or "none"
        raise ValueError(f"{what} is one of {', '.join(map(str, allowed))}; got {got}.")


def check_counts(**counts: int | None) -> None:
    """Raise ValueError where a number of things is below 1; None stands for no number."""
    for name, count in counts.items():
        if count is not None and count < 1:
            raise ValueError(f"{name} must be >= 1; got {count}.")


RULES: dict[str, Callable[[float], bool]] = {
    ">= 1": lambda value: value >= 1,
    "from 0 to below 1": lambda value: 0 <= value < 1,
    "above 0 and finite": lambda value: 0 < value < math.inf,
    "0 or more and finite": lambda value: 0 <= value < math.inf,
    "above 0 and at most 1": lambda value: 0 < value <= 1,
}


def check_fields(
    settings: object,
    choices: Mapping[str, Collection[object]],
    rules: Mapping[str, Collection[str]],
) -> None:
    """Raise ValueError where a field has a wrong value; None stands for no value.

    Args:
        settings: has the fields.
        choices: names of fields, and what each may be.
        rules: some of RULES, and the fields that each is for.
    """
    for name, allowed in choices.items():
        value = getattr(settings, name)
        if value is not None:
            check_names(name, allowed, value)
    for rule, names in rules.items():
        for name in names:
            value = getattr(settings, name)
            if value is not None and not RULES[rule](value):
                raise ValueError(f"{name} must be {rule}; got {value}.")


# Names of settings, and for each which runs use it, in words and as a test.
Users = Mapping[str, tuple[str, Callable[[Any], bool]]]


def check_effect(runs: Sequence[object], users: Users) -> None:
    """Raise ValueError where a setting was given that changes nothing in any run.

    Args:
        runs: settings of all runs.
        users: settings that only some runs use.
    """
    defaults = find_defaults(type(runs[0]))
    for name, (kind, is_user) in users.items():
        given = [run for run in runs if getattr(run, name) != defaults[name]]
        if given and not any(map(is_user, given)):
            raise ValueError(f"{name} is for {kind}, and there is no such run. Leave {name} out.")


def find_defaults(settings: type) -> dict[str, Any]:
    """Return the fields of a dataclass that have a default, with it."""
    return {
        field.name: field.default for field in fields(settings) if field.default is not MISSING
    }


def read_options(
    text: str, readers: Mapping[str, Callable[[str], Any]]
) -> tuple[str, dict[str, list[Any]]]:
    """Return a method and the values of its options.

    Example:
        >>> read_options("muon:lr=0.01,0.02:decay=0.3", {"lr": float, "decay": float})
        ('muon', {'lr': [0.01, 0.02], 'decay': [0.3]})
    """
    method, *parts = text.split(":")
    options: dict[str, list[Any]] = {}
    for part in parts:
        name, _, values = part.partition("=")
        if name in options:
            raise ValueError(f"{method!r} has {name} twice: give its values between commas.")
        try:
            options[name] = [readers[name](value) for value in values.split(",")]
        except (KeyError, ValueError):
            raise ValueError(
                f"options of {method} are {', '.join(readers)}, each as NAME=VALUE, or with "
                f"several values between commas; got {part!r}."
            ) from None
    return method, options


def check_folds(folds: int, points: int) -> None:
    """Raise ValueError where training points cannot be divided into so many folds."""
    if not 2 <= folds <= points:
        raise ValueError(f"{points} training points cannot be divided into {folds} folds.")


def check_rates(lrs: Sequence[float]) -> list[float]:
    """Return learning rates in order, each once; raise ValueError where one cannot be."""
    if not lrs or not all(0 < lr < math.inf for lr in lrs):
        raise ValueError(f"lrs must be learning rates above 0 and finite; got {list(lrs)}.")
    rates = sorted({float(lr) for lr in lrs})
    if len({f"{rate:g}" for rate in rates}) < len(rates):  # which name files and rows
        raise ValueError(f"lrs must differ in their first six digits; got {list(lrs)}.")
    return rates
