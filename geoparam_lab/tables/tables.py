"""Tables from the records of a run: means over seeds or splits, beside the papers' numbers.

All tables have one shape. A row is a method at one data set, batch size or rate; columns are its
mean, the papers' number, the difference to a baseline, and then the range and what else is known
of it. Where these would be more than fit a terminal, they are a second table, the details.

Nothing is left out. A run that diverged is counted, and what it left behind that is finite is in
the mean, since dropping it would favour the method.

A rate that suits one method need not suit another. So a method is compared with the baseline at
the same rate, and where the papers gave the two different rates, at theirs too.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from geoparam_lab import experiments, methods
from geoparam_lab.checks import check_names
from geoparam_lab.data.splits import TEST_SHARE
from geoparam_lab.experiments.experiment import Config, Experiment, Layout, Measure
from geoparam_lab.run_folder import Record, Run
from geoparam_lab.tables import estimates
from geoparam_lab.tables.estimates import Estimate, number
from geoparam_lab.tables.formats import EMPTY, Table, escape
from geoparam_lab.tables.rows import Row, arrange, sample

OVERLAP = TEST_SHARE / (1 - TEST_SHARE)  # of random splits: test points over training points
LEVEL, LEAST = 0.05, 5  # of tests: the p-value below which a difference is marked, and its n
MOST_COLUMNS, FEW = 8, 2  # of a table that is not divided; of details that stay in it

_MEANS = (
    "Mean ± standard error over n seeds or splits. Diverged runs are counted, and are in the mean "
    "if their result is finite."
)
_PAPERS = (
    "≈ within two combined standard errors of ours, allowing for rounding; ≠ further apart; no "
    "mark where the papers have one seed or another rate."
)
_DIFFERENCES = (
    "Minus: the mean over seeds or splits of a method's result minus the baseline's, both at the "
    "settings chosen for them, or at the method's rate if the baseline has several."
)
_TESTS = (
    f"* p below {LEVEL:g} in a t-test, with n at least {LEAST}; for splits of one data set "
    "corrected for the points they share (Nadeau and Bengio); ** also after Holm's correction for "
    "the k differences in the column."
)


class Column(NamedTuple):
    """A column of a table: its heading, and a cell for each row."""

    heading: str
    cells: list[str]


def export(runs: Iterable[Run], baseline: str | None = None) -> str:
    """Return the tables of some runs as one text in Markdown, with a heading for each run.

    Differences are those to the method given, in runs that have it, or to the experiment's
    baseline.
    """
    runs = list(runs)
    if baseline is not None:
        check_names("baseline", list_methods(r for run in runs for r in run.records()), baseline)
    has_table = has_record = False
    parts = []
    for run in runs:
        with run.explain_damage():
            heading, tables = make_heading(run), make_tables(run, baseline)
        parts.append(f"## {escape(heading)}\n")
        parts += [table.markdown() for table in tables]
        has_table |= bool(tables)
        has_record |= bool(run.records())

    if has_table:
        return "\n".join(parts)
    if not has_record:
        raise ValueError("no table can be made: there is no finished piece of work yet.")
    raise ValueError(
        "no table can be made: the records have no field that tables show; the known experiments "
        f"are {', '.join(experiments.ENTRIES)}."
    )


def check(run: Run) -> None:
    """Raise ValueError, with the folder's name, where a run's files are damaged."""
    with run.explain_damage():
        make_tables(run)


def make_heading(run: Run) -> str:
    """Return the title of a run's experiment, with the run's folder where that says more."""
    experiment = experiments.find(run.info["experiment"])
    title = experiment.make_title(run.config)
    folder = run.folder.resolve().name
    return title if folder == experiment.name else f"{title}: {folder}"


def make_tables(run: Run, baseline: str | None = None) -> list[Table]:
    """Return the tables of a run, finished or not."""
    return from_records(run.records(), run.info["experiment"], run.config, baseline)


def from_records(
    records: Iterable[Record],
    name: str,
    config: Mapping[str, Any] | None = None,
    baseline: str | None = None,
) -> list[Table]:
    """Return the tables of some records.

    Args:
        records: one for each method and seed or split, and what else the experiment varies.
        name: of the experiment, which decides what is in rows and columns.
        config: of the run, to say where it is not the papers'.
        baseline: the method that others are compared with, if it is there; else the experiment's.

    Example:
        >>> records = [{"method": method, "seed": seed, "test_rmse": rmse + seed / 10}
        ...            for method, rmse in (("sp", 1.0), ("gmp", 0.4)) for seed in range(3)]
        >>> [table] = from_records(records, "levy")
        >>> table.rows[1]
        ('GmP', '0.500 ± 0.058', '0.496', '-0.600 ± 0.000', '3', '0.400 to 0.600')
    """
    experiment = experiments.find(name)
    named = [record for record in records if isinstance(record.get("method"), str)]
    if baseline is not None and baseline in list_methods(named):
        experiment = replace(experiment, baseline=baseline)
    results = [record for record in named if record.get("chosen") is not False]  # no trials
    shown = experiment.choose(results)

    tables = []
    for layout in experiment.layouts:
        wanted = layout.where.items()
        selected = [r for r in shown if all(r.get(name) == value for name, value in wanted)]
        names = {name for record in selected for name in record}
        measures = [measure for measure in layout.measures if measure.name in names]
        if measures:
            tables += _make_tables(experiment, layout, measures, selected, config or {})
    return tables


def list_methods(records: Iterable[Record]) -> list[str]:
    """Return the methods of some records, each once."""
    return list(dict.fromkeys(r["method"] for r in records if isinstance(r.get("method"), str)))


def _make_tables(
    experiment: Experiment,
    layout: Layout,
    measures: Sequence[Measure],
    records: Sequence[Record],
    config: Config,
) -> list[Table]:
    """Return a layout's table, or its results and its details where it has many columns."""
    names = {measure.name for measure in measures}
    shown = [r for r in records if names & r.keys() or r.get("outcome") == "diverged"]
    rows = arrange(shown, layout.keys)

    labels = _make_labels(experiment, layout, rows)
    results: list[Column] = []
    for measure in measures:
        results += _make_results(experiment, layout, measure, rows, config)
    results += _make_counts(measures, rows)
    rates = Column("rate", [row.rate_text for row in rows])
    if len({(row.method, row.keys) for row in rows}) < len(rows):
        labels.append(rates)  # rows of one method differ in their rates
    else:
        results.append(rates)
    details = list(_make_details(layout, measures, rows))

    labels, results, details = (_drop_empty(part) for part in (labels, results, details))
    headings = [column.heading for column in results]
    notes = tuple(_explain(experiment, measures[0], shown, config, headings))
    if len(details) <= FEW or len(labels) + len(results) + len(details) <= MOST_COLUMNS:
        return [_join(layout.title, [*labels, *results, *details], (*notes, *layout.notes))]
    title = f"{layout.title}: details" if layout.title else "Details"
    return [
        _join(layout.title, [*labels, *results], notes),
        _join(title, [*labels, *details], layout.notes),
    ]


def _drop_empty(columns: Iterable[Column]) -> list[Column]:
    return [column for column in columns if any(cell != EMPTY for cell in column.cells)]


def _join(title: str, columns: Sequence[Column], notes: tuple[str, ...]) -> Table:
    rows = zip(*(column.cells for column in columns), strict=True)
    return Table(title, tuple(column.heading for column in columns), tuple(rows), notes)


def _make_labels(experiment: Experiment, layout: Layout, rows: Sequence[Row]) -> list[Column]:
    """Return the columns that tell rows apart: the method, and the layout's keys."""
    titles = [experiment.names.get(row.method) or methods.title(row.method) for row in rows]
    columns = [Column("method", titles)]
    for i, heading in enumerate(layout.keys.values()):
        columns.append(Column(heading, [name_value(experiment, row.keys[i]) for row in rows]))
    return columns


def _make_results(
    experiment: Experiment, layout: Layout, measure: Measure, rows: Sequence[Row], config: Config
) -> Iterator[Column]:
    """Yield the columns of a measure: ours, the papers', differences."""
    means = [row.estimate(measure.name) for row in rows]
    cells = [estimates.format_estimate(mean, measure.digits) for mean in means]
    yield Column(measure.title, cells)
    if not experiment.mismatch(config):
        yield _make_papers_column(experiment, measure, rows, means)
    if layout.compare:
        for heading, pairs in find_pairs(experiment, measure.name, rows).items():
            yield _make_difference_column(heading, pairs, measure, rows)


def _make_counts(measures: Sequence[Measure], rows: Sequence[Row]) -> Iterator[Column]:
    """Yield how many results there are, and how many runs diverged or collapsed."""
    names = [measure.name for measure in measures]
    yield Column("n", [_count(row, names[0]) for row in rows])
    yield Column("diverged", [f"{row.count_diverged(names) or EMPTY}" for row in rows])
    yield Column("collapsed", [f"{row.count_collapsed() or EMPTY}" for row in rows])


def _make_details(
    layout: Layout, measures: Sequence[Measure], rows: Sequence[Row]
) -> Iterator[Column]:
    """Yield ranges, times to an accuracy, and the layout's details."""
    for measure in measures if layout.compare else ():
        heading = "range" if len(measures) == 1 else f"range, {measure.title}"
        means = [row.estimate(measure.name) for row in rows]
        yield Column(heading, [estimates.format_range(mean, measure.digits) for mean in means])
    for detail in (*_find_times(rows), *layout.details):
        yield Column(detail.title, [_detail_cell(row.records, detail) for row in rows])


def _make_papers_column(
    experiment: Experiment, measure: Measure, rows: Sequence[Row], means: Sequence[Estimate | None]
) -> Column:
    """Return what the papers print; in the heading, how many of how many means agree with it."""
    cells, verdicts = [], []
    for row, mean in zip(rows, means, strict=True):
        printed = experiment.find_printed(measure.name, row.method, *row.keys[:1])
        rate = experiment.rates.get(row.method)
        if printed is None or _has_other_fields(row, experiment.papers_fields):
            cells.append(EMPTY)
        elif rate is not None and row.rates - {rate}:
            cells.append(f"{printed.text} (rate {rate:g})")
        else:
            verdict = estimates.agrees(mean, printed)
            mark = ""
            if verdict is not None:
                verdicts.append(verdict)
                mark = "≈ " if verdict else "≠ "
            cells.append(mark + printed.text)

    heading = "papers"
    if verdicts:
        heading += f" (≈ {sum(verdicts)} of {len(verdicts)})"
    return Column(heading, cells)


def _has_other_fields(row: Row, fields: Mapping[str, Any]) -> bool:
    """Return whether a record of the row differs from the papers' setting."""
    return any(
        record.get(name, value) != value
        for record in row.records
        for name, value in fields.items()
    )


def find_pairs(
    experiment: Experiment, measure: str, rows: Sequence[Row]
) -> dict[str, dict[Row, Row]]:
    """Return the baseline's row that each row is compared with, by the heading of the column.

    The baseline is the experiment's, or else BN. Where it has one row, that is taken, whatever its
    rate. Where it has several, the one with the same rate is; and if both are at the papers'
    rates, a second column compares them.
    """
    baseline = experiment.baseline
    if all(row.method != baseline for row in rows):
        baseline = "bn"
    rates = experiment.rates if measure in experiment.papers else {}

    same, papers = {}, {}
    for row in rows:
        if row.method == baseline:
            continue
        bases = [base for base in rows if base.method == baseline and base.keys == row.keys]
        for base in bases:
            if len(bases) == 1 or base.settings.keys() == row.settings.keys():
                same[row] = base
            have_papers_rates = all(r.rates == {rates.get(r.method)} for r in (row, base))
            if len(bases) > 1 and have_papers_rates:
                papers[row] = base
    heading = f"minus {methods.title(baseline)}"
    return {heading: same, f"{heading}, papers' rates": papers}


def _make_difference_column(
    heading: str, pairs: Mapping[Row, Row], measure: Measure, rows: Sequence[Row]
) -> Column:
    """Return paired differences, with stars for tests; in the heading, how many were tested."""
    differences, p_values = {}, {}
    for row, base in pairs.items():
        overlap = OVERLAP if "split" in row.records[0] else 0.0
        values, theirs = row.values(measure.name), base.values(measure.name)
        difference = estimates.pair(values, theirs, overlap)
        if difference is None:
            continue
        differences[row] = difference
        if difference.n >= LEAST:
            p_values[row] = estimates.find_p_value(difference)

    holm = estimates.adjust(p_values)
    cells = []
    for row in rows:
        cell = estimates.format_estimate(differences.get(row), measure.digits)
        if p_values.get(row, 1.0) < LEVEL:
            cell += " **" if holm[row] < LEVEL else " *"
        cells.append(cell)
    if holm:
        heading += f" (k = {len(holm)})"
    return Column(heading, cells)


def name_value(experiment: Experiment, value: Any) -> str:
    """Return what a value of a record is called in tables, such as "Yacht" for "yacht"."""
    number = f"{value:g}" if isinstance(value, float) else str(value).capitalize()
    return experiment.names.get(value) or number or EMPTY


def _count(row: Row, measure: str) -> str:
    if all(sample(record) == "" for record in row.records):
        return EMPTY
    mean = row.estimate(measure)
    return f"{mean.n}" if mean else "0"


def _find_times(rows: Iterable[Row]) -> list[Measure]:
    """Return the measures of how long runs took to an accuracy, such as epochs_to_45."""
    measures = []
    for name in sorted({name for row in rows for record in row.records for name in record}):
        if match := re.fullmatch("(epochs|seconds)_to_(.+)", name):
            unit, accuracy = match.groups()
            measures.append(Measure(name, f"{unit} to {accuracy} % top-1", 1))
    return measures


def _detail_cell(records: Sequence[Record], detail: Measure) -> str:
    """Return the mean of a field; without digits, the largest value."""
    values = []
    for record in records:
        if record.get(detail.name) is not None:
            values.append(number(record[detail.name]))
    if not values:
        return EMPTY
    if detail.digits is None:
        return estimates.shorten(math.nan if any(map(math.isnan, values)) else max(values))

    mean = estimates.estimate(values)
    if mean is None:
        return EMPTY
    digits = f",.{detail.digits}f" if abs(mean.mean) < 1e9 else ".3g"
    cell = f"{mean.mean:{digits}}"
    if len(values) < len(records):
        cell += f" ({len(values)} of {len(records)})"
    return cell


def _explain(
    experiment: Experiment,
    measure: Measure,
    records: Sequence[Record],
    config: Config,
    headings: Sequence[str],
) -> Iterator[str]:
    """Yield what a reader must know of a table with these headings."""
    if any(sample(record) != "" for record in records):
        yield _MEANS
    if cut := experiment.explain_cut(config):
        yield cut.capitalize()
    yield from experiment.remarks(config)
    papers = next((heading for heading in headings if heading.startswith("papers")), "")
    if papers:
        yield f"Papers: {experiment.papers[measure.name].source}."
    if "≈" in papers:
        yield _PAPERS
    elif measure.name in experiment.papers and (reason := experiment.mismatch(config)):
        yield f"{reason}: the papers' numbers are not shown here."
    if any(heading.startswith("minus") for heading in headings):
        yield _DIFFERENCES
    if any("(k = " in heading for heading in headings):
        yield _TESTS
