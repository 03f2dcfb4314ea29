"""Tables from the records of a run: means over seeds or splits, beside the papers' numbers.

A row is a method, or a variant of one where the run has several (two learning rates, two
initialisations); columns are data sets, batch sizes or widths. Where an experiment has one column
only, the columns say more about it: the papers' number, the range, the difference to the baseline.

Nothing is left out: a run that diverged is counted, and what it left behind that is finite is in
the mean, since dropping it would favour the method; a cell says how many results are in it.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from geoparam.experiments import reference
from geoparam.experiments.estimates import (
    Estimate,
    agrees,
    decimals,
    estimate,
    paired,
    short,
    written,
)
from geoparam.experiments.formats import OTHER, SAME, Cell, Row, Table, to_csv
from geoparam.experiments.methods import METHODS
from geoparam.experiments.results import Record, Run

FORMATS = ("markdown", "latex", "csv")


@dataclass(frozen=True)
class Measure:
    """A result that a table shows.

    Args:
        name: its field in a record.
        title: what it is.
        digits: the least decimals to show; None for three significant digits.
        better: "lower" or "higher"; empty where neither is.
    """

    name: str
    title: str
    digits: int | None = 3
    better: str = ""


@dataclass(frozen=True)
class Layout:
    """How the tables of an experiment are laid out.

    Args:
        measures: one table each.
        column: the field whose values are the columns; empty where there is one column.
        column_title: what these are.
        group: a field whose values are in separate tables.
        notes: what a reader must know besides.
    """

    measures: tuple[Measure, ...]
    column: str = ""
    column_title: str = ""
    group: str = ""
    notes: tuple[str, ...] = ()


_RMSE = Measure("test_rmse", "Test RMSE", 3, "lower")
_ACCURACY = Measure("test_accuracy", "Test accuracy", 3, "higher")
_TOP1 = Measure("top1", "Top-1 accuracy (%)", 2, "higher")
_TOP5 = Measure("top5", "Top-5 accuracy (%)", 2, "higher")
_TURNS = (
    Measure("rotation", "Turn of the papers' unit, in degrees", None),
    Measure("rotation_median", "Median turn of many such units, in degrees", None),
    Measure("rotation_max", "Largest turn of many such units, in degrees", None),
)
_MIRRORED = (
    "The papers' picture loses a sign (arccos), so that it shows the mirror image of the unit and "
    "smaller turns of SP and WN than they make."
)

LAYOUTS = {
    "levy": Layout((_RMSE,)),
    "banana": Layout((_ACCURACY,)),
    "perturbation": Layout(_TURNS, "delta", "perturbation", notes=(_MIRRORED,)),
    "uci": Layout((_RMSE,), "dataset", "data set", "protocol"),
    "width": Layout((_RMSE,), "width", "width"),
    "imagenet32": Layout((_TOP1, _TOP5), "batch_size", "batch size"),
    "imagenet": Layout((_TOP1, _TOP5), "network", "network"),
}
_ANY = Layout((_RMSE, _ACCURACY, _TOP1, _TOP5))
PROTOCOLS = {
    "paper": "the papers' protocol: rate and stopping judged on the test split itself",
    "heldout": "held-out protocol: every choice made on a validation part",
}
VARIANTS = ("init", "width", "batch_size", "lr")  # fields that may tell rows of a method apart
WORDS = {"lr": "rate", "batch_size": "batch", "init": "init"}
DETAILS = {
    "epochs": "epochs",
    "best_epoch": "best epoch",
    "largest_move": "largest move of a unit in one update",
    "largest_rotation": "largest turn of a unit in one update (°)",
}


# --- what a table is made of -------------------------------------------------------------------


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
        title = METHODS[self.method].title if self.method in METHODS else self.method
        return ", ".join([title, *(f"{WORDS.get(k, k)} {v}" for k, v in self.variant)])


@dataclass(frozen=True)
class Block:
    """The records of one table, sorted into rows and columns.

    Args:
        experiment: as in the run's folder.
        measure: what the table shows.
        layout: of the experiment.
        cells: the records by row and column.
        config: of the run, or {}.
        baseline: the row that others are compared with, or None.
        notes: what a reader must know besides.
    """

    experiment: str
    measure: Measure
    layout: Layout
    cells: Mapping[Line, Mapping[Any, Sequence[Record]]]
    config: Mapping[str, Any] = field(default_factory=dict)
    baseline: Line | None = None
    compare: bool = True

    @property
    def columns(self) -> list[Any]:
        """The values of the field that makes the columns, in order."""
        found = {column for cells in self.cells.values() for column in cells}
        return sorted(found, key=lambda value: (isinstance(value, str), value))

    def values(self, line: Line, column: Any) -> dict[Any, float]:
        """The results in a cell, by seed or split."""
        records = self.cells[line].get(column, ())
        return {_sample(record, i): self.value(record) for i, record in enumerate(records)}

    def value(self, record: Record) -> float:
        """The result in a record; NaN where there is none."""
        value = record.get(self.measure.name)
        known = isinstance(value, (int, float)) and not isinstance(value, bool)
        return float(value) if known else float("nan")

    def estimate(self, line: Line, column: Any) -> Estimate | None:
        """The mean in a cell."""
        return estimate(map(self.value, self.cells[line].get(column, ())))

    def diverged(self, line: Line, column: Any) -> int:
        """How many runs in a cell diverged."""
        records = self.cells[line].get(column, ())
        return sum(record.get("outcome") == "diverged" for record in records)

    def papers(self, line: Line, column: Any) -> reference.Printed | None:
        """The papers' number for a cell: below the variant that is theirs, or the only one."""
        if not self.compare or not self._is_the_papers(line):
            return None
        return reference.printed(self.experiment, self.measure.name, line.method, column)

    def _is_the_papers(self, line: Line) -> bool:
        if sum(other.method == line.method for other in self.cells) == 1:
            return True
        theirs = {"init": "glorot", "lr": reference.rate(self.experiment, line.method)}
        return all(theirs.get(name, value) == value for name, value in line.variant)


def _sample(record: Record, i: int) -> Any:
    return record.get("split", record.get("seed", i))


# --- records to tables -------------------------------------------------------------------------


def tables(run: Run, baseline: str = "sp") -> list[Table]:
    """Return the tables of a run, finished or not.

    Args:
        run: its folder.
        baseline: the method that others are compared with on the same seeds or splits.
    """
    return from_records(
        run.records(),
        run.info["experiment"],
        key=run.info.get("key") or VARIANTS,
        config=run.config,
        baseline=baseline,
    )


def from_records(
    records: Iterable[Record],
    experiment: str,
    *,
    key: Sequence[str] = VARIANTS,
    config: Mapping[str, Any] | None = None,
    baseline: str = "sp",
) -> list[Table]:
    """Return the tables of some records.

    Args:
        records: one for each method and seed or split, and what else the experiment varies.
        experiment: its name; it decides what is in rows and columns.
        key: the fields that tell one piece of work from another.
        config: of the run, to say what differs from the papers'.
        baseline: the method that others are compared with on the same seeds or splits.

    Example:
        >>> records = [{"method": method, "seed": seed, "test_rmse": rmse + seed / 10}
        ...            for method, rmse in (("sp", 1.0), ("gmp", 0.4)) for seed in (0, 1)]
        >>> table, = from_records(records, "levy")
        >>> [cell.text for cell in table.rows[1].cells]
        ['0.450 ± 0.050', '≈ 0.496', '0.400 to 0.500', '-0.600 ± 0.000', '2']
    """
    layout = LAYOUTS.get(experiment, _ANY)
    records = [record for record in records if isinstance(record.get("method"), str)]
    found: list[Table] = []
    for group, part in _groups(records, layout.group):
        cells = _sorted(part, layout, key)
        compare = layout.group != "protocol" or group in ("paper", None)
        for measure in layout.measures:
            if any(measure.name in record for record in part):
                block = Block(experiment, measure, layout, cells, config or {}, None, compare)
                found += _tables(block, baseline, group)
    return found


def export(runs: Iterable[Run], form: str = "markdown", baseline: str = "sp") -> str:
    """Return the tables of some runs as one text.

    Args:
        runs: their folders.
        form: "markdown", "latex" or "csv".
        baseline: the method that others are compared with.
    """
    if form not in FORMATS:
        raise ValueError(f"a table is written as one of {', '.join(FORMATS)}; got {form!r}.")
    found = [table for run in runs for table in tables(run, baseline)]
    if form == "csv":
        return to_csv(found)
    return "\n".join(getattr(table, form)() for table in found)


def _groups(records: Sequence[Record], name: str) -> list[tuple[Any, list[Record]]]:
    values = dict.fromkeys(record.get(name) for record in records)
    return [(value, [r for r in records if r.get(name) == value]) for value in values]


def _sorted(
    records: Sequence[Record], layout: Layout, key: Sequence[str]
) -> dict[Line, dict[Any, list[Record]]]:
    """Sort records into rows, methods in their usual order, and columns."""
    names = [name for name in VARIANTS if name in key and name != layout.column]
    varied = {name: _varied(records, name) for name in names}
    cells: dict[Line, dict[Any, list[Record]]] = {}
    for record in records:
        method = record["method"]
        shown = tuple((n, record.get(n)) for n in names if method in varied[n])
        column = record.get(layout.column, "") if layout.column else ""
        cells.setdefault(Line(method, shown), {}).setdefault(column, []).append(record)
    order = {method: i for i, method in enumerate(METHODS)}
    return dict(
        sorted(
            cells.items(),
            key=lambda item: (order.get(item[0].method, 99), [str(v) for _, v in item[0].variant]),
        )
    )


def _varied(records: Sequence[Record], name: str) -> set[str]:
    """Return the methods of which there are several values of a field."""
    pairs = {(record["method"], record.get(name)) for record in records}
    return {method for method, count in Counter(m for m, _ in pairs).items() if count > 1}
