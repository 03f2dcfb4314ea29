"""The stacks of a UCI run, and the learning rates that its search has chosen."""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from geoparam_lab import methods as all_methods
from geoparam_lab.run_folder import Record

AT_ONCE = 10  # networks in a stack


class Member(NamedTuple):
    """One network of a stack."""

    split: int
    lr: float


@dataclass(frozen=True)
class Task:
    """Networks that are trained in one stack."""

    dataset: str
    method: str
    members: tuple[Member, ...]
    chosen: bool = True  # whether the search is over, so that the test part may be used
    rate: float | None = None  # of all members, where the search tries several
    fold: int | None = None  # under "cv": 1, 2, ... in the search, 0 for the held-out part

    @property
    def keys(self) -> list[tuple[Any, ...]]:
        end = (self.chosen,) if self.fold is None else (self.chosen, self.fold)
        return [(self.dataset, self.method, *member, *end) for member in self.members]

    @property
    def name(self) -> str:
        first = self.members[0].split
        rate = "" if self.rate is None else f"-lr{self.rate:g}"
        fold = f"-fold{self.fold}" if self.fold else ""
        name = f"{self.dataset}-{self.method}{rate}{fold}".replace(":", "-")
        return name + (f"-split{first}" if first else "")

    def __str__(self) -> str:
        rates = sorted({member.lr for member in self.members})
        rate = f"rate {rates[0]:g}" if len(rates) == 1 else f"{len(rates)} rates"
        fold = f", fold {self.fold}" if self.fold else ""
        return f"{self.dataset}, {all_methods.title(self.method)}, {rate}{fold}"


def list_grid_tasks(config: Record, dataset: str) -> list[Task]:
    """Return the tasks of a data set at given rates: all under "paper", else the search."""
    final, splits, found = config["protocol"] == "paper", range(config["seeds"]), []
    folds = range(1, config["folds"] + 1) if config.get("folds") else [None]
    for method, fold in itertools.product(config["methods"], folds):
        for lr in config["lrs"] or [all_methods.get(method).lr]:
            stacks = _split([Member(split, lr) for split in splits])
            own = lr if config["lrs"] else None
            found += [Task(dataset, method, stack, final, own, fold) for stack in stacks]
    return found


def list_chosen_tasks(config: Record, dataset: str, records: Iterable[Record]) -> list[Task]:
    """Return the tasks of a data set that train each split at the rate chosen for it."""
    chosen, found = choose_rates(r for r in records if r["dataset"] == dataset), []
    for method in config["methods"]:
        members = [Member(s, chosen[dataset, method, s]) for s in range(config["seeds"])]
        fold = 0 if config.get("folds") else None
        found += [Task(dataset, method, stack, fold=fold) for stack in _split(members)]
    return found


def choose_rates(records: Iterable[Record]) -> dict[tuple[str, str, int], float]:
    """Return the rate with the lowest validation error by data set, method and split.

    With folds the errors are sums of squares over them. Of equal ones the lowest rate is chosen. A
    rate whose error is not finite on some fold is the last choice.
    """
    errors = sum_folds(records)
    return {key: min(own, key=lambda lr: (own[lr], lr)) for key, own in errors.items()}


def sum_folds(records: Iterable[Record]) -> dict[tuple[str, str, int], dict[float, float]]:
    """Return a search's squared validation errors by data set, method and split, then by rate."""
    errors: dict[tuple[str, str, int], dict[float, float]] = {}
    for record in records:
        if not record.get("chosen", False):
            own = errors.setdefault((record["dataset"], record["method"], record["split"]), {})
            error = record["val_rmse"] ** 2 if math.isfinite(record["val_rmse"]) else math.inf
            own[record["lr"]] = own.get(record["lr"], 0.0) + error
    return errors


def _split(members: Sequence[Member]) -> list[tuple[Member, ...]]:
    return [tuple(members[i : i + AT_ONCE]) for i in range(0, len(members), AT_ONCE)]
