"""Records sorted into the rows of a table.

A row has the results of one method over seeds or splits, at one value of each of the layout's keys
(a data set, a batch size). Where a seed has several results, because a run varies the learning
rate, each rate is a row. A rate that was chosen for each split is not: there is one result for
each split, whatever its rate.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from geoparam_lab import methods
from geoparam_lab.run_folder import Record
from geoparam_lab.tables.estimates import Estimate, estimate, number
from geoparam_lab.tables.formats import EMPTY


@dataclass(frozen=True, eq=False)
class Row:
    """The records of one row, and what they have in common."""

    method: str
    keys: tuple[Any, ...]  # the values of the layout's keys
    records: Sequence[Record]

    @property
    def settings(self) -> Counter[tuple[float, str]]:
        """How many records have which rate and other tuned options."""
        with_rate = [record for record in self.records if record.get("lr") is not None]
        return Counter((number(r["lr"]), str(r.get("tuned", ""))) for r in with_rate)

    @property
    def rates(self) -> set[float]:
        """The learning rates of its records."""
        return {rate for rate, _ in self.settings}

    @property
    def rate_text(self) -> str:
        """The learning rates, with how many records have each where they differ.

        Example:
            >>> Row("sp", (), [{"lr": 0.1}, {"lr": 0.1}, {"lr": 0.03}]).rate_text
            '0.03 (1), 0.1 (2)'
            >>> Row("bn", (), [{"lr": 0.4, "tuned": "decay=0.0005:turn=2.4"}] * 3).rate_text
            '0.4, decay 0.0005, turn 2.4'
        """
        settings = []
        for (rate, tuned), count in sorted(self.settings.items()):
            options = re.sub("[=_]", " ", tuned).split(":")
            text = ", ".join([f"{rate:g}", *filter(None, options)])
            if len(self.settings) > 1:
                text += f" ({count})"
            settings.append(text)
        return ", ".join(settings) or EMPTY

    def estimate(self, measure: str) -> Estimate | None:
        """The mean of its results."""
        return estimate(number(record.get(measure)) for record in self.records)

    def values(self, measure: str) -> dict[Any, float]:
        """The results by seed or split; NaN where there is none."""
        return {sample(record): number(record.get(measure)) for record in self.records}

    def count_diverged(self, measures: Iterable[str]) -> int:
        """How many runs diverged, or left a result that is not finite."""
        return sum(
            record.get("outcome") == "diverged"
            or any(not math.isfinite(number(record.get(name, 0.0))) for name in measures)
            for record in self.records
        )

    def count_collapsed(self) -> int:
        """How many runs collapsed."""
        return sum(record.get("outcome") == "collapsed" for record in self.records)


def arrange(records: Iterable[Record], keys: Iterable[str]) -> list[Row]:
    """Return the rows of a table: by keys, then methods in their usual order, then rates."""
    groups: dict[tuple[Any, ...], list[Record]] = defaultdict(list)
    for record in records:
        values = tuple(make_sortable(record.get(name)) for name in keys)
        groups[values, record["method"]].append(record)

    rows: dict[tuple[Any, ...], list[Record]] = defaultdict(list)
    for (values, method), group in groups.items():
        is_varied = len({sample(record) for record in group}) < len(group)
        for record in group:
            setting: tuple[Any, ...] = ()
            if is_varied:  # a seed or split has several settings: a row for each
                setting = tuple(make_sortable(record.get(name)) for name in ("lr", "tuned"))
            rows[values, method, setting].append(record)

    def rank(row: tuple[Any, ...]) -> tuple[Any, ...]:
        values, method, setting = row
        return _rank(values), methods.rank(method), method, _rank(setting)

    ranked = sorted(rows, key=rank)
    return [Row(row[1], row[0], rows[row]) for row in ranked]


def _rank(values: Iterable[Any]) -> list[tuple[bool, Any]]:
    return [(isinstance(value, str), value) for value in values]


def sample(record: Mapping[str, Any]) -> Any:
    """Return what a result is paired by: the split, or else the seed; empty where it has none."""
    return make_sortable(record.get("split", record.get("seed")))


def make_sortable(value: Any) -> Any:
    """Return a value that can be looked up and sorted: numbers and strings as they are."""
    if isinstance(value, (str, int, float)):
        return value
    return "" if value is None else str(value)
