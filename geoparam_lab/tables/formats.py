"""A table of results, and how it is written in Markdown."""

import re
from dataclasses import dataclass

EMPTY = "–"

# Stars with space on both sides, brackets without a link and a _ within a word are only that:
# a terminal need not show them with a backslash.
_STARS = r"(?<!\S)\*+(?!\S)"
_MARKDOWN = re.compile(rf"{_STARS}|([\\|`*]|<(?=\S)|\](?=[(\[:])|(?<!\w)_|_(?!\w))")


@dataclass(frozen=True)
class Table:
    """A table with notes below, and a title above where a run has several.

    Example:
        >>> print(Table("Errors", ("method", "Yacht"), (("SP", "0.64"),)).markdown())
        **Errors**
        <BLANKLINE>
        | method | Yacht |
        | ------ | ----- |
        | SP     | 0.64  |
        <BLANKLINE>
    """

    title: str
    columns: tuple[str, ...]  # their headings
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()

    def markdown(self) -> str:
        """Return it in Markdown, its columns aligned so that it can be read as it is."""
        lines = [[escape(text) for text in line] for line in (self.columns, *self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        lines.insert(1, ["-" * width for width in widths])
        body = "\n".join("| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in lines)
        title = f"**{escape(self.title)}**\n\n" if self.title else ""
        notes = " ".join(map(escape, self.notes))
        return f"{title}{body}\n" + (f"\n{notes}\n" if notes else "")


def escape(text: str) -> str:
    """Return a text of one line that Markdown shows as it is.

    Example:
        >>> print(escape("widths [4, 4], val_loss ** [a](b) *c*"))
        widths [4, 4], val_loss ** [a\\](b) \\*c\\*
    """
    return _MARKDOWN.sub(lambda m: f"\\{m[0]}" if m[1] else m[0], " ".join(text.split()))
