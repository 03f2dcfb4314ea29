"""Tables from the records of a run: means over seeds or splits, beside the papers' numbers.

Where an experiment has several columns (data sets, batch sizes), a row of the papers' numbers
stands below each of ours, and the differences to a baseline are a second table. Where it has one,
the columns say more about it: the papers' number, the range, the difference.

Nothing is left out. A run that diverged is counted, and what it left behind that is finite is in
the mean, since dropping it would favour the method. A cell says how many results are in it.
"""

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from geoparam_lab.run_folder import Record, Run
from geoparam_lab.tables import image_tables, reference
from geoparam_lab.tables.blocks import Block, Line, arrange, groups, heading, in_brackets
from geoparam_lab.tables.comparisons import Comparison, comparisons
from geoparam_lab.tables.estimates import Estimate, decimals, estimate, paired, short, written
from geoparam_lab.tables.footnotes import difference_notes, result_notes
from geoparam_lab.tables.formats import EMPTY, OTHER, SAME, Cell, Row, Table, to_csv
from geoparam_lab.tables.layouts import (
    ANY,
    DETAILS,
    LAYOUTS,
    Layout,
    Measure,
    measures,
    number,
    times,
)

FORMATS = ("markdown", "latex", "csv")
_SEVERAL = "see below"


def tables(run: Run, baseline: str = "sp") -> list[Table]:
    """Return the tables of a run, finished or not.

    Args:
        run: its folder.
        baseline: the method that others are compared with on the same seeds or splits.
    """
    return from_records(run.records(), run.info["experiment"], run.config, baseline)


def from_records(
    records: Iterable[Record],
    experiment: str,
    config: Mapping[str, Any] | None = None,
    baseline: str = "sp",
) -> list[Table]:
    """Return the tables of some records.

    Args:
        records: one for each method and seed or split, and what else the experiment varies.
        experiment: its name; it decides what is in rows and columns.
        config: of the run, to say where it is not the papers'.
        baseline: the method that others are compared with on the same seeds or splits.

    Example:
        >>> records = [{"method": method, "seed": seed, "test_rmse": rmse + seed / 10}
        ...            for method, rmse in (("sp", 1.0), ("gmp", 0.4)) for seed in range(3)]
        >>> [table] = from_records(records, "levy")
        >>> [cell.text for cell in table.rows[1].cells]
        ['0.500 ± 0.058', '≈ 0.496', '0.400 to 0.600', '-0.600 ± 0.000', '3']
    """
    known = [record for record in records if isinstance(record.get("method"), str)]
    known = [record for record in known if record.get("chosen") is not False]  # a search's trials
    if any("select_top1" in record for record in known):
        known = image_tables.choose(known, "select_top1")
    found: list[Table] = []
    for layout in LAYOUTS.get(experiment, ANY):
        own = [r for r in known if all(r.get(k) == v for k, v in layout.where.items())]
        for group, part in groups(own, layout.group):
            if layout.fields:
                found += _fields(part, layout, group)
            for measure in measures(part, layout):
                cells = arrange([r for r in part if _belongs(r, measure)], layout)
                block = Block(experiment, measure, layout, cells, config or {}, group)
                found += _of_block(block, baseline)
    return found


def _belongs(record: Record, measure: Measure) -> bool:
    """Return whether a record has a result to show, or should have had one."""
    return measure.name in record or record.get("outcome") == "diverged"


def export(runs: Iterable[Run], form: str = "markdown", baseline: str = "sp") -> str:
    """Return the tables of some runs as one text.

    Args:
        runs: their folders.
        form: "markdown", "latex" or "csv".
        baseline: the method that others are compared with.
    """
    if form not in FORMATS:
        raise ValueError(f"a table is written as one of {', '.join(FORMATS)}; got {form!r}.")
    runs = list(runs)
    alike = Counter(run.info["experiment"] for run in runs)
    found = [
        table if alike[run.info["experiment"]] == 1 else _named(table, run)
        for run in runs
        for table in tables(run, baseline)
    ]
    if not found:
        raise ValueError("no table can be made: there is no finished piece of work yet.")
    if form == "csv":
        return to_csv(found)
    return "\n".join(getattr(table, form)() for table in found)


def _named(table: Table, run: Run) -> Table:
    """Return a table whose title begins with its run's folder."""
    return replace(table, title=f"{run.folder.resolve().name}: {table.title}")


# --- kinds of table ----------------------------------------------------------------------------


def _of_block(block: Block, baseline: str) -> list[Table]:
    base = _baseline(block, baseline) if block.layout.compare else None
    compared = comparisons(block, base) if base else []
    if len(block.columns) == 1:
        return [_list(block, base, compared)]
    found = [_matrix(block)]
    found += [_differences(block, base, comparison) for comparison in compared]
    if any(_common_rate(block, line) == _SEVERAL for line in block.cells):
        found.append(_rate_table(block))
    return found


def _list(block: Block, base: str | None, compared: Sequence[Comparison]) -> Table:
    """Return the table of an experiment with one column: its columns are what is known of it."""
    [column] = block.columns
    digits = _digits(block, column)
    said = _rate_is_in_labels(block)
    differences = {
        _difference_title("difference", base, comparison): functools.partial(
            _difference_cell, block, comparison, column, digits
        )
        for comparison in compared
    }
    kinds: dict[str, Callable[[Line], Cell]] = {
        block.measure.title: lambda line: _cell(block, line, column, digits),
        "papers": lambda line: _papers_cell(block, line, column),
        "range": lambda line: _range_cell(block, line, column, digits),
        **differences,
        "n": lambda line: _count_cell(block, line, column),
        "diverged": lambda line: Cell(f"{block.diverged(line, column) or EMPTY}"),
        "rate": lambda line: Cell(EMPTY if said else rates(block.records(line, column))),
    }
    named = {name: [kind(line) for line in block.cells] for name, kind in kinds.items()}
    for detail in (*times(list(block.all_records())), *DETAILS):
        cells = [_detail_cell(block.records(line, column), detail) for line in block.cells]
        named[detail.title] = cells
    notes = [*result_notes(block), *(difference_notes(block, compared) if compared else ())]
    if any("largest_move" in record for record in block.all_records()):
        notes.append("Largest move and turn: of any unit of any seed in one update.")
    return _assemble(block.title, block, named, {}, notes)


def _fields(records: Sequence[Record], layout: Layout, group: Any) -> list[Table]:
    """Return a table of some fields of records, one a row; none where no record has any."""
    shown = [each for each in layout.fields if any(each.name in record for record in records)]
    rows = [
        Row(line.label, tuple(_field_cell(record.get(f.name), f.digits) for f in shown))
        for line, cells in arrange(records, layout).items()
        for record in itertools.chain.from_iterable(cells.values())
    ]
    columns = tuple(each.title for each in shown)
    title = layout.title + in_brackets(group)
    return [Table(title, "method", columns, tuple(rows), layout.notes)] if shown else []


def _matrix(block: Block) -> Table:
    """Return methods by columns, the papers' numbers below ours."""
    usual = block.usual_n
    papers = {"rate": [_papers_rate_cell(block, line) for line in block.cells]}
    ours = [_common_rate(block, line) for line in block.cells]
    said = _rate_is_in_labels(block) or set(ours) == {_SEVERAL}
    said = said and all(cell.text == EMPTY for cell in papers["rate"])
    named = {"rate": [Cell(EMPTY if said else rate) for rate in ours]}
    for column in block.columns:
        digits, name = _digits(block, column), heading(column)
        named[name] = [_cell(block, line, column, digits, usual) for line in block.cells]
        papers[name] = [_papers_cell(block, line, column) for line in block.cells]
    return _assemble(block.title, block, named, papers, list(result_notes(block)))


def _differences(block: Block, base: str | None, comparison: Comparison) -> Table:
    named = {}
    for column in block.columns:
        digits = _digits(block, column)
        named[heading(column)] = [
            _difference_cell(block, comparison, column, digits, line) for line in block.cells
        ]
    same = f" on the same {block.samples[:-1]}"
    title = f"{_difference_title('Difference', base, comparison, same)}: {block.title}"
    return _assemble(title, block, named, {}, list(difference_notes(block, [comparison])))


def _rate_table(block: Block) -> Table:
    named = {
        heading(column): [Cell(rates(block.records(line, column))) for line in block.cells]
        for column in block.columns
    }
    notes = [f"How many {block.samples} have a rate is in brackets, where not all have the same."]
    return _assemble(f"Learning rates{block.place}", block, named, {}, notes)


def _assemble(
    title: str,
    block: Block,
    named: Mapping[str, Sequence[Cell]],
    papers: Mapping[str, Sequence[Cell]],
    notes: Sequence[str],
) -> Table:
    """Put cells, by column and row, into a table without the columns and rows that are empty."""
    kept = [name for name, cells in named.items() if any(cell.text != EMPTY for cell in cells)]
    blank = [Cell("")] * len(block.cells)
    rows = []
    for i, line in enumerate(block.cells):
        rows.append(Row(line.label, tuple(named[name][i] for name in kept)))
        rows.append(Row(line.label, tuple(papers.get(n, blank)[i] for n in kept), papers=True))
    rows = [row for row in rows if any(cell.text not in ("", EMPTY) for cell in row.cells)]
    return Table(title, "method", tuple(kept), tuple(rows), tuple(notes))


# --- cells -------------------------------------------------------------------------------------


def _cell(block: Block, line: Line, column: Any, digits: int | None, usual: int = 0) -> Cell:
    """Return a mean with its error; what differs from the `usual` number of results is said."""
    found, diverged = block.estimate(line, column), block.diverged(line, column)
    if found is None:
        return Cell(f"{diverged} diverged" if diverged else EMPTY, diverged=diverged)
    verdict = block.agrees(line, column)
    remarks = [f"n = {found.n}"] * (usual not in (0, found.n))
    remarks += [f"{diverged} diverged"] * (usual > 0 and diverged > 0)
    text = written(found, digits) + (f" ({', '.join(remarks)})" if remarks else "")
    return Cell(text, found, diverged, verdict)


def _papers_cell(block: Block, line: Line, column: Any) -> Cell:
    papers, verdict = block.papers(line, column), block.agrees(line, column)
    if papers is None or not block.records(line, column):
        return Cell()
    mark = "" if verdict is None else f"{SAME if verdict else OTHER} "
    theirs = Estimate(papers.value, papers.error, 0, papers.value, papers.value)
    return Cell(mark + papers.text, theirs, agrees=verdict)


def _papers_rate_cell(block: Block, line: Line) -> Cell:
    shown = any(block.papers(line, column) for column in block.columns)
    rate = reference.rate(block.experiment, line.method) if shown else None
    return Cell(EMPTY if rate is None else f"{rate:g}")


def _range_cell(block: Block, line: Line, column: Any, digits: int | None) -> Cell:
    found = block.estimate(line, column)
    if found is None or found.error is None:
        return Cell()
    low, high = (written(Estimate(x, None, 1, x, x), digits) for x in (found.low, found.high))
    return Cell(f"{low} to {high}")


def _difference_cell(
    block: Block, comparison: Comparison, column: Any, digits: int | None, line: Line
) -> Cell:
    """Return the paired difference to the baseline's row for this one, where there is one."""
    base = comparison.pairs.get(line)
    found = paired(block.values(line, column), block.values(base, column)) if base else None
    if found is None:
        return Cell()
    clear = found.n >= 5 and found.error is not None and abs(found.mean) > 2 * found.error
    return Cell(written(found, digits) + (" *" if clear else ""), found)


def _field_cell(value: Any, digits: int | None) -> Cell:
    if isinstance(value, list):
        return Cell(", ".join(_field_cell(each, digits).text for each in value) or EMPTY)
    found = estimate([number(value)])
    if found is None:
        return Cell(EMPTY if value is None else short(number(value)))
    return Cell(f"{found.mean:g}" if digits is None else written(found, digits), found)


def _count_cell(block: Block, line: Line, column: Any) -> Cell:
    found = block.estimate(line, column)
    return Cell(f"{found.n if found else 0}")


def _detail_cell(records: Sequence[Record], detail: Measure) -> Cell:
    """Return the mean of a field; without digits, the largest value."""
    found_in = [record for record in records if record.get(detail.name) is not None]
    values = [number(record[detail.name]) for record in found_in]
    if not values:
        return Cell()
    if detail.digits is None:
        return Cell(short(math.nan if any(map(math.isnan, values)) else max(values)))
    found = estimate(values)
    some = f" ({len(values)} of {len(records)})" if len(values) < len(records) else ""
    return Cell(f"{found.mean:,.{detail.digits}f}{some}", found) if found else Cell()


def rates(records: Iterable[Record]) -> str:
    """Return the learning rates of some records, with how many have each where they differ.

    What else was tuned is with them.

    Example:
        >>> rates([{"lr": 0.1}, {"lr": 0.1}, {"lr": 0.03}]), rates([{"lr": 0.1}] * 3)
        ('0.03 (1), 0.1 (2)', '0.1')
        >>> rates([{"lr": 0.4, "tuned": "decay=0.0005"}])
        '0.4, decay 0.0005'
    """
    found = ((number(each["lr"]), each.get("tuned", "")) for each in records if "lr" in each)
    counts = Counter(found)
    said = [
        ", ".join(filter(None, (f"{rate:g}", image_tables.in_words(tuned))))
        + f" ({count})" * (len(counts) > 1)
        for (rate, tuned), count in sorted(counts.items())
    ]
    return ", ".join(said) or EMPTY


# --- what cells and notes share ----------------------------------------------------------------


def _baseline(block: Block, wanted: str) -> str | None:
    """Return the method that was asked for, or else BN; None without it, or without seeds."""
    methods = {line.method for line in block.cells}
    for method in (wanted, "bn"):
        if method in methods and len(methods) > 1 and block.samples:
            return method
    return None


def _difference_title(word: str, base: str | None, comparison: Comparison, how: str = "") -> str:
    rates = f", {comparison.rates}" if comparison.rates else ""
    return f"{word} to {Line(base or '').label}{how}{rates}"


def _digits(block: Block, column: Any) -> int | None:
    found = [block.estimate(line, column) for line in block.cells]
    least = block.measure.digits
    return None if least is None else decimals((each.error for each in found if each), least)


def _rate_is_in_labels(block: Block) -> bool:
    return all("lr" in dict(line.variant) for line in block.cells)


def _common_rate(block: Block, line: Line) -> str:
    """Return the rate of a row; that there are several is said elsewhere."""
    found = {rates(records) for records in block.cells[line].values()}
    return found.pop() if len(found) == 1 and "(" not in "".join(found) else _SEVERAL
