"""Which results a difference is between: a method's, and the baseline's at which learning rate.

A rate that suits one method need not suit another, so that a difference at equal rates and one
where each method has a rate of its own say different things. The papers compare in the second
way: GmP at 0.1 with the others at 0.01. Where a run has both, both are shown; where a rate was
chosen for each split, there is one comparison, between what was chosen.
"""

from collections.abc import Mapping
from typing import NamedTuple

from geoparam_lab.tables import reference
from geoparam_lab.tables.blocks import Block, Line
from geoparam_lab.tables.layouts import number


class Comparison(NamedTuple):
    """Rows and the baseline's rows that they are compared with.

    Args:
        rates: how the two rates were matched, in two words; empty where no rate is known.
        pairs: the baseline's row for each row that has one.
        note: the same in a sentence.
    """

    rates: str
    pairs: Mapping[Line, Line]
    note: str = ""


def comparisons(block: Block, baseline: str) -> list[Comparison]:
    """Return the comparisons that a table's results allow, the papers' own first.

    Args:
        block: the results.
        baseline: the method that others are compared with.

    Example:
        >>> from geoparam_lab.tables.blocks import arrange
        >>> from geoparam_lab.tables.layouts import LAYOUTS
        >>> [layout] = LAYOUTS["levy"]
        >>> records = [{"method": method, "seed": 0, "lr": rate}
        ...            for method in ("sp", "gmp") for rate in (0.01, 0.1)]
        >>> block = Block("levy", layout.measures[0], layout, arrange(records, layout))
        >>> for found in comparisons(block, "sp"):
        ...     print(found.rates, {row.label: base.label for row, base in found.pairs.items()})
        papers' rates {'GmP, rate 0.1': 'SP, rate 0.01'}
        same rate {'GmP, rate 0.01': 'SP, rate 0.01', 'GmP, rate 0.1': 'SP, rate 0.1'}
    """
    rows = [line for line in block.cells if line.method == baseline]
    if not rows:
        return []
    if not any("lr" in dict(row.variant) for row in rows):
        return [_only(block, rows)]
    return [each for each in (_papers(block, rows), _same(block, rows)) if each.pairs]


def _only(block: Block, rows: list[Line]) -> Comparison:
    """Compare with a baseline that has one rate, or one for each split, and say which it is."""
    pairs = {line: _alike(line, rows) or rows[0] for line in _others(block, rows)}
    found = {line: _rates(block, line) for line in (*rows, *pairs)}
    if block.group == "heldout":
        note = "Chosen rates: each method at the rate that the validation part chose on the split."
        return Comparison("chosen rates", pairs, note)
    if not any(found.values()):
        return Comparison("", pairs)
    if _has_papers(block) and all(_is_theirs(block, line) for line in found):
        return Comparison("papers' rates", pairs, _papers_note(block, list(found)))
    if len(set(map(frozenset, found.values()))) == 1 and len(found[rows[0]]) == 1:
        return Comparison("same rate", pairs, f"Same rate: all at {min(found[rows[0]]):g}.")
    return Comparison("own rates", pairs, "Own rates: each method at the rates that it ran with.")


def _papers(block: Block, rows: list[Line]) -> Comparison:
    theirs = [line for line in block.cells if _has_papers(block) and _is_theirs(block, line)]
    base = next((line for line in theirs if line in rows), None)
    pairs = {line: base for line in theirs if base and line not in rows}
    return Comparison("papers' rates", pairs, _papers_note(block, theirs))


def _same(block: Block, rows: list[Line]) -> Comparison:
    pairs = {}
    for line in _others(block, rows):
        equal = [row for row in rows if _rates(block, row) == _rates(block, line)]
        if equal:
            pairs[line] = _alike(line, equal) or equal[0]
    return Comparison("same rate", pairs, "Same rate: both at the rate of the row.")


def _others(block: Block, rows: list[Line]) -> list[Line]:
    return [line for line in block.cells if line not in rows]


def _alike(line: Line, rows: list[Line]) -> Line | None:
    """Return the row that differs from a line in nothing but its method."""
    return next((row for row in rows if row.variant == line.variant), None)


def _rates(block: Block, line: Line) -> set[float]:
    records = (record for cell in block.cells[line].values() for record in cell)
    return {number(record["lr"]) for record in records if "lr" in record}


def _has_papers(block: Block) -> bool:
    return block.compare and bool(reference.source(block.experiment, block.measure.name))


def _is_theirs(block: Block, line: Line) -> bool:
    rate = reference.rate(block.experiment, line.method)
    return block.is_the_papers(line) and _rates(block, line) == {rate}


def _papers_note(block: Block, lines: list[Line]) -> str:
    methods = dict.fromkeys(line.method for line in lines)
    each = (f"{Line(m).label} {reference.rate(block.experiment, m):g}" for m in methods)
    return f"Papers' rates: each method at the rate that the papers chose ({', '.join(each)})."
