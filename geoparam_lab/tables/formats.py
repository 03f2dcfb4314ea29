"""A table of results, and how it is written in Markdown."""

import re
from dataclasses import dataclass

SAME, OTHER, EMPTY = "≈", "≠", "–"

# A star with space on both sides is only a star: a terminal need not show it with a backslash.
_MARKDOWN = re.compile(r"([\\|_`\[\]<]|(?<!\s)\*|\*(?=\S))")


@dataclass(frozen=True)
class Row:
    """One row of a table: what it is of, its cells, and whether its numbers are the papers'."""

    label: str
    cells: tuple[str, ...]
    papers: bool = False

    @property
    def texts(self) -> tuple[str, ...]:
        """What a reader sees of it; the papers' row stands below ours and need not name it."""
        return ("papers" if self.papers else self.label, *self.cells)


@dataclass(frozen=True)
class Table:
    """A table with a title above and notes below.

    Example:
        >>> print(Table("Errors", "method", ("Yacht",), (Row("SP", ("0.64",)),)).markdown())
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


def _markdown(text: str) -> str:
    return _MARKDOWN.sub(r"\\\1", " ".join(text.split()))
