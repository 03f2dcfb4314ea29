"""HTML as nested calls. What comes from files is escaped, because everything is that is not Html.

A string is text, and text is escaped where it becomes part of an element; an `Html` was made here
and is not. So nothing has to be remembered at the place where a name or a caption is used.
"""

import html
import json
import re
from typing import Any

from geoparam_lab.tables.formats import Table

_VOID = ("img", "input")
_MINUS = re.compile(r"(?<![\w-])-(?=[\d.])")
_POWER = re.compile(r"(?<=\d)e([+-]\d+)")
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_LONG = 16  # characters from which a heading may have several lines
_INSIDE = re.compile("(?<!,) ")  # a space within a part of "GmP, init Glorot, rate 0.1"


class Html(str):
    """A string that is HTML already."""


def element(name: str, *content: str | None, **attributes: Any) -> Html:
    """Return an element with this content; None is left out, both as content and as attribute.

    In attributes `class_` and `for_` stand for words that Python keeps, and `_` for `-`.

    Example:
        >>> element("p", "a < b ", element("em", "c"), class_="note", id=None)
        '<p class="note">a &lt; b <em>c</em></p>'
    """
    given = {k.rstrip("_").replace("_", "-"): v for k, v in attributes.items() if v is not None}
    inside = "".join(f' {k}="{html.escape(str(v))}"' for k, v in given.items())
    closing = "" if name in _VOID else f"{join(*content)}</{name}>"
    return Html(f"<{name}{inside}>{closing}")


def join(*content: str | None) -> Html:
    """Return contents one after the other, text escaped."""
    return Html(
        "".join(c if isinstance(c, Html) else html.escape(c) for c in content if c is not None)
    )


def data(value: Any) -> Html:
    """Return a value as JSON in an element that no browser runs, for the page's script to read.

    Example:
        >>> data({"title": "</script>"})
        '<script type="application/json">{"title":"\\\\u003c/script>"}</script>'
    """
    text = json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return Html(f'<script type="application/json">{text}</script>')


def facts(pairs: dict[str, str | Html]) -> Html:
    """Return names and what they stand for, as a description list."""
    rows = [element("div", element("dt", k), element("dd", v)) for k, v in pairs.items()]
    return element("dl", *rows)


def scroll_box(content: Html, label: str) -> Html:
    """Return a box that scrolls by itself where its content is too wide."""
    return element("div", content, class_="scroll", tabindex="0", role="group", aria_label=label)


def table(source: Table) -> Html:
    """Return a table with its title and notes."""
    names = (source.corner, *source.columns)
    head = element("tr", *(_heading(name, "col") for name in names))
    rows = [_row(row.texts, row.papers) for row in source.rows]
    grid = element("table", element("thead", head), element("tbody", *rows))
    box = scroll_box(grid, source.title)
    notes = [element("li", typeset(note)) for note in source.notes]
    below = element("ul", *notes, class_="notes") if notes else None
    return element("section", element("h4", source.title), box, below, class_="table")


def _row(texts: tuple[str, ...], papers: bool) -> Html:
    label, *cells = map(typeset, texts)
    entries = [_entry(cell) for cell in cells]
    heading = _heading(_INSIDE.sub("\u00a0", label), "row")
    return element("tr", heading, *entries, class_="papers" if papers else None)


def _heading(text: str, scope: str) -> Html:
    return element("th", text, scope=scope, class_="long" if len(text) > _LONG else None)


def _entry(text: str) -> Html:
    """Return a cell; a list such as "0.01 (3), 0.1 (7)" may have several lines."""
    if ", " not in text:
        return element("td", text)
    return element("td", text.replace(" (", "\u00a0("), class_="long")


def typeset(text: str) -> str:
    """Return a text with a true minus and powers of ten.

    Example:
        >>> typeset("-1.5 ± 0.2"), typeset("1.48e+06"), typeset("8.9e-14")
        ('−1.5 ± 0.2', '1.48·10⁶', '8.9·10⁻¹⁴')
    """
    text = _POWER.sub(lambda found: "·10" + str(int(found[1])).translate(_RAISED), text)
    return _MINUS.sub("−", text)
