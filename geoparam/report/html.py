"""HTML as nested calls. What comes from files is escaped, because everything is that is not Html.

A string is text, and text is escaped where it becomes part of an element; an `Html` was made here
and is not. So nothing has to be remembered at the place where a name or a caption is used.
"""

import html
import json
import re
from typing import Any

from geoparam.experiments.tabling.formats import Table

_VOID = ("img", "input", "meta")
_MINUS = re.compile(r"(?<![\w-])-(?=[\d.])")


class Html(str):
    """A string that is HTML already."""


def element(name: str, *content: str | None, **attributes: Any) -> Html:
    """Return an element with this content; None is left out, both as content and as attribute.

    Args:
        name: of the element.
        content: text, which is escaped, or Html, which is not.
        attributes: `class_` and `for_` stand for words that Python keeps; `_` in names for `-`.

    Example:
        >>> element("p", "a < b ", element("em", "c"), class_="note", id=None)
        '<p class="note">a &lt; b <em>c</em></p>'
    """
    given = {k.rstrip("_").replace("_", "-"): v for k, v in attributes.items() if v is not None}
    inside = "".join(f' {k}="{html.escape(str(v))}"' for k, v in given.items())
    closing = "" if name in _VOID else f"{join(*content)}</{name}>"
    return Html(f"<{name}{inside}>{closing}")


def join(*content: str | None) -> Html:
    """Return contents one after the other, text escaped.

    Example:
        >>> join("1 & 2", None, Html("<br>"))
        '1 &amp; 2<br>'
    """
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
    """Return names and what they stand for, as a description list.

    Example:
        >>> facts({"seeds": "10"})
        '<dl><div><dt>seeds</dt><dd>10</dd></div></dl>'
    """
    rows = [element("div", element("dt", k), element("dd", v)) for k, v in pairs.items()]
    return element("dl", *rows)


def table(source: Table) -> Html:
    """Return a table with its title and notes; it scrolls by itself where it is too wide.

    Example:
        >>> from geoparam.experiments.tabling.formats import Cell, Row
        >>> "<td>-1 to 0</td>" in table(Table("T", "m", ("x",), (Row("SP", (Cell("-1 to 0"),)),)))
        False
    """
    head = element("tr", *(element("th", name, scope="col") for name in _head(source)))
    rows = [_row(row.texts, row.papers) for row in source.rows]
    grid = element("table", element("thead", head), element("tbody", *rows))
    box = element(
        "div", grid, class_="scroll", tabindex="0", role="group", aria_label=source.title
    )
    notes = [element("li", note) for note in source.notes]
    below = element("ul", *notes, class_="notes") if notes else None
    return element("section", element("h4", source.title), box, below, class_="table")


def _head(source: Table) -> tuple[str, ...]:
    return (source.corner, *source.columns)


def _row(texts: tuple[str, ...], papers: bool) -> Html:
    label, *cells = (_MINUS.sub("−", text) for text in texts)
    entries = [element("td", cell) for cell in cells]
    heading = element("th", label, scope="row")
    return element("tr", heading, *entries, class_="papers" if papers else None)
