"""Records sorted into the rows and columns of a table.

A row is a method. Where a method has several results for one seed and column, because a run varies
its learning rate or its initialisation, each variant is a row. A rate that was chosen for each
split is not a variant: there is one result for each split, whatever its rate.
"""

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from geoparam_lab import methods
from geoparam_lab.experiments.experiment import Experiment, Layout, Measure, options_in_words
from geoparam_lab.experiments.papers import Printed
from geoparam_lab.run_folder import Record
from geoparam_lab.tables.estimates import Estimate, agrees, estimate, number

Cells = Mapping["Line", Mapping[Any, Sequence[Record]]]

INITS = {"glorot": "Glorot", "he": "He", "sphere": "sphere"}
_VARIANTS = {  # fields that may tell rows of a method apart, and what they are called
    "init": "init",
    "width": "width",
    "batch_size": "batch",
    "lr": "rate",
    "tuned": "",
}


@dataclass(frozen=True)
class Line:
    """A method, with the fields in which its variants differ.

    Example:
        >>> Line("gmp+imn", (("lr", 0.3),)).label
        'GmP+IMN, rate 0.3'
    """

    method: str
    variant: tuple[tuple[str, Any], ...] = ()

    @property
    def label(self) -> str:
        """What the row is called."""
        said = [
            options_in_words(value) if name == "tuned" else f"{_VARIANTS[name]} {_write(value)}"
            for name, value in self.variant
        ]
        return ", ".join([methods.title(self.method), *said])


def _write(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(INITS.get(value, value))


@dataclass(frozen=True)
class Results:
    """The results of one row in one column, and what the papers print for them."""

    measure: Measure
    records: Sequence[Record]
    printed: Printed | None

    @property
    def values(self) -> dict[Any, float]:
        """The results by seed or split; NaN where there is none."""
        return {sample(record): number(record.get(self.measure.name)) for record in self.records}

    @cached_property
    def estimate(self) -> Estimate | None:
        """The mean of the results."""
        return estimate(number(record.get(self.measure.name)) for record in self.records)

    @property
    def diverged(self) -> int:
        """How many runs diverged, or left a result that is not finite."""
        name = self.measure.name
        return sum(
            record.get("outcome") == "diverged"
            or (name in record and not math.isfinite(number(record[name])))
            for record in self.records
        )

    @property
    def agrees(self) -> bool | None:
        """Whether the mean agrees with the papers' number; None where that cannot be said."""
        return agrees(self.estimate, self.printed)


@dataclass(frozen=True)
class Block:
    """The records of one table, sorted into rows and columns."""

    experiment: Experiment
    measure: Measure
    layout: Layout
    cells: Cells
    config: Mapping[str, Any] = field(default_factory=dict)
    group: Any = ""  # the value of the layout's group that the records have

    @property
    def title(self) -> str:
        """What is measured, over what, and by which protocol."""
        return self.measure.title + self.place

    @property
    def place(self) -> str:
        """The title without what is measured."""
        place = f" by {self.layout.column_title}" if len(self.columns) > 1 else ""
        if len(self.columns) == 1 and self.columns != [""]:
            [column] = self.columns
            what = "" if isinstance(column, str) else f"{self.layout.column_title} "
            place = f", {what}{self.heading(column)}"
        named = "" if self.layout.column else self.experiment.name
        return place + in_brackets(self.experiment, self.group or named)

    def heading(self, column: Any) -> str:
        """What a column is called."""
        return name_value(self.experiment, column)

    @property
    def rates_chosen_by(self) -> str:
        """What chose the learning rate of each split; empty where rates are given."""
        return {"heldout": "the validation part", "cv": "cross-validation"}.get(self.group, "")

    @cached_property
    def columns(self) -> list[Any]:
        """The values of the field that makes the columns, in order."""
        found = {column for cells in self.cells.values() for column in cells}
        return sorted(found, key=lambda value: (isinstance(value, str), value))

    @cached_property
    def results(self) -> dict[tuple[Line, Any], Results]:
        """The results by row and column."""
        found = {}
        for line, column in itertools.product(self.cells, self.columns):
            records = self.cells[line].get(column, ())
            printed = self._find_printed(line, column, records)
            found[line, column] = Results(self.measure, records, printed)
        return found

    def list_results(self, column: Any) -> list[Results]:
        """The results in a column, row by row."""
        return [self.results[line, column] for line in self.cells]

    @property
    def all_records(self) -> list[Record]:
        """The records in all cells."""
        return [r for cells in self.cells.values() for records in cells.values() for r in records]

    @property
    def samples(self) -> str:
        """What means are over: "splits", "seeds" or, where there is one result, nothing."""
        if any("split" in record for record in self.all_records):
            return "splits"
        return "seeds" if any(sample(record) != "" for record in self.all_records) else ""

    @property
    def counts(self) -> Counter[int]:
        """How many cells have how many results."""
        return Counter(each.estimate.n for each in self.results.values() if each.estimate)

    @property
    def usual_n(self) -> int:
        """How many results most cells have."""
        return max(self.counts, key=self.counts.__getitem__, default=0)

    def _find_printed(self, line: Line, column: Any, records: Sequence[Record]) -> Printed | None:
        """Return the papers' number for a cell, in the row of their variant, or in the first."""
        rows = [other for other in self.cells if other.method == line.method]
        is_same = self.group in ("", "paper") and not self.experiment.mismatch(self.config)
        if not is_same or line != next(filter(self.is_the_papers, rows), rows[0]):
            return None
        theirs = self.experiment.theirs.items()
        if any(record.get(k, v) != v for record in records for k, v in theirs):
            return None
        return self.experiment.find_printed(self.measure.name, line.method, column)

    def is_the_papers(self, line: Line) -> bool:
        """Whether a row's variant, if it has one, is what the papers have."""
        theirs: dict[str, Any] = {"init": "glorot", **self.experiment.theirs}
        theirs["lr"] = self.experiment.rates.get(line.method)
        return all(theirs.get(name, value) == value for name, value in line.variant)

    def rates(self, line: Line) -> set[float]:
        """The learning rates in a row."""
        records = itertools.chain.from_iterable(self.cells[line].values())
        return {number(record["lr"]) for record in records if "lr" in record}


def name_value(experiment: Experiment, value: Any) -> str:
    """Return what a value of a record is called in tables, such as "Yacht" for "yacht"."""
    known = experiment.names.get(value)
    return known or (_write(value) if isinstance(value, float) else str(value).capitalize())


def in_brackets(experiment: Experiment, group: Any) -> str:
    """Return what the records of a table have in common, to stand behind its title."""
    said = name_value(experiment, group)
    return f" ({said})" if said else ""


def sample(record: Record) -> Any:
    """Return what a result is paired by: the split, or else the seed."""
    return make_sortable(record.get("split", record.get("seed")))


def make_sortable(value: Any) -> Any:
    """Return a value that can be looked up and sorted: numbers and strings as they are."""
    if isinstance(value, (str, int, float)):
        return value
    return "" if value is None else str(value)


def arrange(records: Sequence[Record], layout: Layout) -> Cells:
    """Sort records into rows, methods in their usual order, and columns."""
    names = [name for name in _VARIANTS if name != layout.column]
    varied = {name: _find_varied(records, name, layout.column) for name in names}
    varied["lr"] = varied["tuned"] = varied["lr"] | varied["tuned"]  # these are one setting
    cells: dict[Line, dict[Any, list[Record]]] = {}
    for record in records:
        method = record["method"]
        shown = [name for name in names if method in varied[name]]
        values = {name: make_sortable(record.get(name)) for name in shown}
        variant = tuple((n, value) for n, value in values.items() if n != "tuned" or value)
        column = make_sortable(record.get(layout.column))
        cells.setdefault(Line(method, variant), {}).setdefault(column, []).append(record)
    return {line: cells[line] for line in sorted(cells, key=_rank)}


def _find_varied(records: Sequence[Record], name: str, column: str) -> set[str]:
    """Return the methods that have several values of a field for one column and seed or split."""
    values: dict[Any, set[Any]] = {}
    for record in records:
        key = record["method"], make_sortable(record.get(column)), sample(record)
        values.setdefault(key, set()).add(make_sortable(record.get(name)))
    return {method for (method, *_), found in values.items() if len(found) > 1}


def _rank(line: Line) -> tuple[Any, ...]:
    rank = methods.rank(line.method)
    return rank, line.method, [(isinstance(value, str), value) for _, value in line.variant]
