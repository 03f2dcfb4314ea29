"""A table of results, and how it is written: Markdown and CSV.

Markdown shows what a reader wants to see, rounded. CSV is for programs: one line for each cell,
with all digits, so that tables of different shapes can be put under each other.
"""

import csv
import io
import re
from collections.abc import Iterable
from dataclasses import dataclass

from geoparam_lab.tables.estimates import Estimate

SAME, OTHER, EMPTY = "≈", "≠", "–"
CSV_COLUMNS = (
    *("table", "row", "source", "column", "text"),
    *("mean", "standard_error", "n", "lowest", "highest", "diverged", "agrees"),
)

# A star with space on both sides is only a star: a terminal need not show it with a backslash.
_MARKDOWN = re.compile(r"([\\|_`\[\]<]|(?<!\s)\*|\*(?=\S))")


@dataclass(frozen=True)
class Cell:
    """One entry of a table."""

    text: str = EMPTY
    estimate: Estimate | None = None  # the numbers behind it, where there are some
    diverged: int = 0  # runs behind it
    agrees: bool | None = None  # ours with the papers'; None where that was not judged


@dataclass(frozen=True)
class Row:
    """One row of a table: what it is of, its cells, and whether its numbers are the papers'."""

    label: str
    cells: tuple[Cell, ...]
    papers: bool = False

    @property
    def texts(self) -> tuple[str, ...]:
        """What a reader sees of it; the papers' row stands below ours and need not name it."""
        return ("papers" if self.papers else self.label, *(cell.text for cell in self.cells))


@dataclass(frozen=True)
class Table:
    """A table with a title above and notes below.

    Example:
        >>> print(Table("Errors", "method", ("Yacht",), (Row("SP", (Cell("0.64"),)),)).markdown())
        **Errors**
        <BLANKLINE>
        | method | Yacht |
        | ------ | ----- |
        | SP     | 0.64  |
        <BLANKLINE>
    """

    title: str
    corner: str  # what the rows are
    columns: tuple[str, ...]  # their headings, without the corner
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()

    def markdown(self) -> str:
        """Return it in Markdown, its columns aligned so that it can be read as it is."""
        texts = [(self.corner, *self.columns), *(row.texts for row in self.rows)]
        lines = [[_markdown(text) for text in line] for line in texts]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        lines.insert(1, ["-" * width for width in widths])
        body = "\n".join("| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in lines)
        notes = " ".join(map(_markdown, self.notes))
        return f"**{_markdown(self.title)}**\n\n{body}\n" + (f"\n{notes}\n" if notes else "")


def to_csv(tables: Iterable[Table]) -> str:
    """Return the cells of several tables as one CSV."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for table in tables:
        for row in table.rows:
            for column, cell in zip(table.columns, row.cells, strict=True):
                writer.writerow(_csv_line(table, row, column, cell))
    return out.getvalue()


def _csv_line(table: Table, row: Row, column: str, cell: Cell) -> list[object]:
    numbers = list(cell.estimate or [None] * 5)
    if cell.estimate and not cell.estimate.n:
        numbers[2:] = [None] * 3
    source = "papers" if row.papers or column == "papers" else "ours"
    what = [table.title, row.label, source, column, cell.text]
    return [*what, *numbers, cell.diverged, cell.agrees]


def _markdown(text: str) -> str:
    return _MARKDOWN.sub(r"\\\1", " ".join(text.split()))
