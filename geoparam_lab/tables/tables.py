"""Tables from the records of a run: means over seeds or splits, beside the papers' numbers.

Where an experiment has several columns (data sets, batch sizes), a row of the papers' numbers
stands below each of ours, and the differences to a baseline are a second table. Where it has one,
the columns say more about it: the papers' number, the range, the difference.

Nothing is left out. A run that diverged is counted, and what it left behind that is finite is in
the mean, since dropping it would favour the method. A cell says how many results are in it.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from geoparam_lab import experiments
from geoparam_lab.experiments.experiment import Layout, Measure, options_in_words
from geoparam_lab.run_folder import Record, Run
from geoparam_lab.tables.blocks import Block, Line, Results, arrange, in_brackets, make_sortable
from geoparam_lab.tables.comparisons import Comparison, compare
from geoparam_lab.tables.estimates import (
    Estimate,
    count_decimals,
    estimate,
    number,
    shorten,
    write,
)
from geoparam_lab.tables.footnotes import explain_differences, explain_results
from geoparam_lab.tables.formats import EMPTY, OTHER, SAME, Row, Table

_SEVERAL = "see below"


def make_tables(run: Run) -> list[Table]:
    """Return the tables of a run, finished or not."""
    return from_records(run.records(), run.info["experiment"], run.config)


def from_records(
    records: Iterable[Record],
    name: str,
    config: Mapping[str, Any] | None = None,
) -> list[Table]:
    """Return the tables of some records.

    Args:
        records: one for each method and seed or split, and what else the experiment varies.
        name: of the experiment, which decides what is in rows and columns.
        config: of the run, to say where it is not the papers'.

    Example:
        >>> records = [{"method": method, "seed": seed, "test_rmse": rmse + seed / 10}
        ...            for method, rmse in (("sp", 1.0), ("gmp", 0.4)) for seed in range(3)]
        >>> [table] = from_records(records, "levy")
        >>> table.rows[1].cells
        ('0.500 ± 0.058', '0.496, in our range', '0.400 to 0.600', '-0.600 ± 0.000', '3')
    """
    experiment = experiments.find(name)
    known = [record for record in records if isinstance(record.get("method"), str)]
    known = [record for record in known if record.get("chosen") is not False]  # a search's trials
    shown = experiment.choose(known)
    found: list[Table] = []
    for layout in experiment.layouts:
        own = [r for r in shown if all(r.get(k) == v for k, v in layout.where.items())]
        by_group: dict[Any, list[Record]] = {}
        for record in own:
            by_group.setdefault(make_sortable(record.get(layout.group)), []).append(record)
        for group, part in by_group.items():
            if layout.fields:
                title = layout.title + in_brackets(experiment, group)
                found += _make_field_table(part, layout, title)
            for measure in _find_measures(part, layout):
                with_result = [
                    r for r in part if measure.name in r or r.get("outcome") == "diverged"
                ]
                cells = arrange(with_result, layout)
                block = Block(experiment, measure, layout, cells, config or {}, group)
                found += _make_block_tables(block)
    return found


def _find_measures(records: Sequence[Record], layout: Layout) -> list[Measure]:
    known = [m for m in layout.measures if any(m.name in record for record in records)]
    if len({str(record.get(layout.column)) for record in records}) > 1:
        known += _find_times(records)  # else they are columns of the other tables
    return known


def _find_times(records: Iterable[Record]) -> list[Measure]:
    """Return the measures of how long runs took to an accuracy, such as epochs_to_45."""
    found = []
    for name in sorted({name for record in records for name in record}):
        unit, _, level = name.partition("_to_")
        if level and unit in ("epochs", "seconds"):
            found.append(Measure(name, f"{unit.capitalize()} to {level} % top-1", 1, "lower"))
    return found


def export(runs: Iterable[Run]) -> str:
    """Return the tables of some runs as one text in Markdown."""
    runs, found = list(runs), []
    alike = Counter(run.info["experiment"] for run in runs)
    for run in runs:
        name = f"{run.folder.resolve().name}: " * (alike[run.info["experiment"]] > 1)
        found += [replace(t, title=name + t.title) for t in make_tables(run)]
    if not found:
        raise ValueError("no table can be made: there is no finished piece of work yet.")
    return "\n".join(table.markdown() for table in found)


# --- kinds of table ----------------------------------------------------------------------------


def _make_block_tables(block: Block) -> list[Table]:
    compared = compare(block)
    if len(block.columns) == 1:
        return [_make_list(block, compared)]
    found = [_make_matrix(block)]
    found += [_make_difference_table(block, comparison) for comparison in compared]
    if any(_find_common_rate(block, line) == _SEVERAL for line in block.cells):
        found.append(_make_rate_table(block))
    return found


def _make_list(block: Block, compared: Sequence[Comparison]) -> Table:
    """Return the table of an experiment with one column: its columns are what is known of it."""
    [column] = block.columns
    column_results = block.list_results(column)
    digits = _count_digits(column_results)
    named = {
        block.measure.title: [_cell(each, digits) for each in column_results],
        "papers": [_papers_cell(each) for each in column_results],
        "range": [_range_cell(each, digits) for each in column_results],
    }
    for comparison in compared:
        title = _difference_title("difference", comparison)
        named[title] = _difference_cells(block, comparison, column)
    named["n"] = [f"{each.estimate.n if each.estimate else 0}" for each in column_results]
    named["diverged"] = [f"{each.diverged or EMPTY}" for each in column_results]
    if not _has_rate_in_labels(block):
        named["rate"] = [list_rates(each.records) for each in column_results]
    for detail in (*_find_times(block.all_records), *block.layout.details):
        named[detail.title] = [_detail_cell(each.records, detail) for each in column_results]
    notes = [*explain_results(block), *(explain_differences(block, compared) if compared else ())]
    if any(record.keys() & {"largest_move", "largest_rotation"} for record in block.all_records):
        notes.append("Largest: of any unit of any seed in one update.")
    return _assemble(block.title, block, named, notes)


def _make_field_table(records: Sequence[Record], layout: Layout, title: str) -> list[Table]:
    """Return a table of some fields of records, one a row; none where no record has any."""
    shown = [each for each in layout.fields if any(each.name in record for record in records)]
    rows = [
        Row(line.label, tuple(_field_cell(record.get(f.name), f.digits) for f in shown))
        for line, cells in arrange(records, layout).items()
        for record in itertools.chain.from_iterable(cells.values())
    ]
    columns = tuple(each.title for each in shown)
    return [Table(title, "method", columns, tuple(rows), layout.notes)] if shown else []


def _make_matrix(block: Block) -> Table:
    """Return methods by columns, the papers' numbers below ours."""
    usual = block.usual_n
    papers = {"rate": [_papers_rate_cell(block, line) for line in block.cells]}
    ours = [_find_common_rate(block, line) for line in block.cells]
    said = _has_rate_in_labels(block) or set(ours) == {_SEVERAL}
    said = said and set(papers["rate"]) == {EMPTY}
    named = {"rate": [EMPTY if said else rate for rate in ours]}
    for column in block.columns:
        column_results, name = block.list_results(column), block.heading(column)
        digits = _count_digits(column_results)
        named[name] = [_cell(each, digits, usual) for each in column_results]
        papers[name] = [_papers_cell(each) for each in column_results]
    return _assemble(block.title, block, named, explain_results(block), papers)


def _make_difference_table(block: Block, comparison: Comparison) -> Table:
    named = {
        block.heading(column): _difference_cells(block, comparison, column)
        for column in block.columns
    }
    same = f" on the same {block.samples[:-1]}"
    title = f"{_difference_title('Difference', comparison, same)}: {block.title}"
    return _assemble(title, block, named, explain_differences(block, [comparison]))


def _make_rate_table(block: Block) -> Table:
    named = {
        block.heading(column): [list_rates(each.records) for each in block.list_results(column)]
        for column in block.columns
    }
    notes = [f"How many {block.samples} have a rate is in brackets, where not all have the same."]
    return _assemble(f"Learning rates{block.place}", block, named, notes)


def _assemble(
    title: str,
    block: Block,
    named: Mapping[str, Sequence[str]],
    notes: Iterable[str],
    papers: Mapping[str, Sequence[str]] | None = None,
) -> Table:
    """Put cells, by column and row, into a table without the columns and rows that are empty."""
    kept = [name for name, cells in named.items() if any(cell != EMPTY for cell in cells)]
    rows = []
    for i, line in enumerate(block.cells):
        rows.append(Row(line.label, tuple(named[name][i] for name in kept)))
        if papers:
            rows.append(Row(line.label, tuple(papers[name][i] for name in kept), papers=True))
    rows = [row for row in rows if any(cell not in ("", EMPTY) for cell in row.cells)]
    return Table(title, "method", tuple(kept), tuple(rows), tuple(notes))


# --- cells -------------------------------------------------------------------------------------


def _cell(results: Results, digits: int | None, usual: int = 0) -> str:
    """Return a mean with its error; what differs from the `usual` number of results is said."""
    found, diverged = results.estimate, results.diverged
    if found is None:
        return f"{diverged} diverged" if diverged else EMPTY
    remarks = [f"n = {found.n}"] * (usual not in (0, found.n))
    remarks += [f"{diverged} diverged"] * (usual > 0 and diverged > 0)
    return write(found, digits) + (f" ({', '.join(remarks)})" if remarks else "")


def _papers_cell(results: Results) -> str:
    papers, ours, verdict = results.printed, results.estimate, results.agrees
    if papers is None or not results.records:
        return EMPTY
    mark = "" if verdict is None else f"{SAME if verdict else OTHER} "
    range_ = ""
    if papers.error is None and ours and ours.n >= 3:
        inside = ours.low - papers.rounding <= papers.value <= ours.high + papers.rounding
        range_ = ", in our range" if inside else ", outside our range"
    return mark + papers.text + range_


def _papers_rate_cell(block: Block, line: Line) -> str:
    shown = any(block.results[line, column].printed for column in block.columns)
    rate = block.experiment.rates.get(line.method) if shown else None
    return EMPTY if rate is None else f"{rate:g}"


def _range_cell(results: Results, digits: int | None) -> str:
    found = results.estimate
    if found is None or found.error is None:
        return EMPTY
    low, high = (write(Estimate(x, None, 1, x, x), digits) for x in (found.low, found.high))
    return f"{low} to {high}"


def _difference_cells(block: Block, comparison: Comparison, column: Any) -> list[str]:
    """Return the paired differences to the baseline in a column, for the rows that have one."""
    digits, cells = _count_digits(block.list_results(column)), []
    for line in block.cells:
        found = comparison.differences.get((line, column))
        mark = comparison.marks.get((line, column), "")
        cells.append(write(found, digits) + mark if found else EMPTY)
    return cells


def _field_cell(value: Any, digits: int | None) -> str:
    if isinstance(value, list):
        return ", ".join(_field_cell(each, digits) for each in value) or EMPTY
    found = estimate([number(value)])
    if found is None:
        return EMPTY if value is None else shorten(number(value))
    return f"{found.mean:g}" if digits is None else write(found, digits)


def _detail_cell(records: Sequence[Record], detail: Measure) -> str:
    """Return the mean of a field; without digits, the largest value."""
    found_in = [record for record in records if record.get(detail.name) is not None]
    values = [number(record[detail.name]) for record in found_in]
    if not values:
        return EMPTY
    if detail.digits is None:
        return shorten(math.nan if any(map(math.isnan, values)) else max(values))
    found = estimate(values)
    some = f" ({len(values)} of {len(records)})" if len(values) < len(records) else ""
    return f"{found.mean:,.{detail.digits}f}{some}" if found else EMPTY


def list_rates(records: Iterable[Record]) -> str:
    """Return the learning rates of some records, with how many have each where they differ.

    What else was tuned is with them.

    Example:
        >>> list_rates([{"lr": 0.1}, {"lr": 0.1}, {"lr": 0.03}]), list_rates([{"lr": 0.1}] * 3)
        ('0.03 (1), 0.1 (2)', '0.1')
        >>> list_rates([{"lr": 0.4, "tuned": "decay=0.0005"}])
        '0.4, decay 0.0005'
    """
    found = ((number(each["lr"]), each.get("tuned", "")) for each in records if "lr" in each)
    counts = Counter(found)
    said = [
        ", ".join(filter(None, (f"{rate:g}", options_in_words(tuned))))
        + f" ({count})" * (len(counts) > 1)
        for (rate, tuned), count in sorted(counts.items())
    ]
    return ", ".join(said) or EMPTY


# --- what cells and notes share ----------------------------------------------------------------


def _difference_title(word: str, comparison: Comparison, how: str = "") -> str:
    [baseline] = {line.method for line in comparison.pairs.values()}
    rates = f", {comparison.rates}" if comparison.rates else ""
    return f"{word} to {Line(baseline).label}{how}{rates}"


def _count_digits(column_results: Sequence[Results]) -> int | None:
    least = column_results[0].measure.digits
    errors = (each.estimate.error for each in column_results if each.estimate)
    return None if least is None else count_decimals(errors, least)


def _has_rate_in_labels(block: Block) -> bool:
    return all("lr" in dict(line.variant) for line in block.cells)


def _find_common_rate(block: Block, line: Line) -> str:
    """Return the rate of a row; that there are several is said elsewhere."""
    found = {list_rates(records) for records in block.cells[line].values()}
    return found.pop() if len(found) == 1 and "(" not in "".join(found) else _SEVERAL
