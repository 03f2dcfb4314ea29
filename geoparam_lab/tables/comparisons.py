"""Which results a difference is between: a method's, and the baseline's at which learning rate.

A rate that suits one method need not suit another, so that a difference at equal rates and one
where each method has a rate of its own say different things. The papers compare in the second
way: GmP at 0.1 with the others at 0.01. Where a run has both, both are shown; where a rate was
chosen for each split, there is one comparison, between what was chosen.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from geoparam_lab.data.splits import TEST_SHARE
from geoparam_lab.experiments.rank_correlations import adjust
from geoparam_lab.tables.blocks import Block, Line
from geoparam_lab.tables.estimates import Estimate, find_p_value, pair

OVERLAP = TEST_SHARE / (1 - TEST_SHARE)  # of random splits: test points over training points
LEVEL, LEAST = 0.05, 5  # of tests: the p-value below which a difference is marked, and its n


class Comparison(NamedTuple):
    """Rows and the baseline's rows that they are compared with."""

    rates: str  # how the two rates were matched, in two words; empty where no rate is known
    pairs: Mapping[Line, Line]  # the baseline's row for each row that has one
    note: str = ""  # the same in a sentence
    differences: Mapping[tuple[Line, Any], Estimate] = {}  # by row and column
    marks: Mapping[tuple[Line, Any], str] = {}  # " *" for p < 0.05, " **" by Holm
    tested: int = 0  # how many of the differences were tested


def compare(block: Block) -> list[Comparison]:
    """Return the comparisons that a table's results allow, the papers' own first.

    They are with the experiment's baseline, or else with BN.
    """
    methods = {line.method for line in block.cells}
    baseline = block.experiment.baseline if block.experiment.baseline in methods else "bn"
    rows = [line for line in block.cells if line.method == baseline]
    others = [line for line in block.cells if line.method != baseline]
    if not (block.layout.compare and block.samples and rows and others):
        return []
    if not any("lr" in dict(row.variant) for row in rows):
        return [_judge(block, _compare_only_rate(block, rows, others))]
    both = (_compare_papers_rates(block, rows), _compare_same_rates(block, rows, others))
    return [_judge(block, each) for each in both if each.pairs]


def _judge(block: Block, comparison: Comparison) -> Comparison:
    """Add the differences, each with its mark."""
    overlap = OVERLAP if block.samples == "splits" else 0.0
    found = {}
    for line, base in comparison.pairs.items():
        for column in block.columns:
            own, theirs = (block.results[row, column].values for row in (line, base))
            if difference := pair(own, theirs, overlap):
                found[line, column] = difference
    p_values = {place: find_p_value(each) for place, each in found.items() if each.n >= LEAST}
    holm = adjust(p_values)
    marks = {p: " **" if holm[p] < LEVEL else " *" for p in holm if p_values[p] < LEVEL}
    return comparison._replace(differences=found, marks=marks, tested=len(holm))


def _compare_only_rate(block: Block, rows: list[Line], others: list[Line]) -> Comparison:
    """Compare with a baseline that has one rate, or one for each split, and say which it is."""
    pairs = {line: _find_alike(line, rows) for line in others}
    found = {line: block.rates(line) for line in (*rows, *others)}
    if block.rates_chosen_by:
        how = block.rates_chosen_by
        note = f"Chosen rates: each method at the rate that {how} chose on the split."
        return Comparison("chosen rates", pairs, note)
    if not any(found.values()):
        return Comparison("", pairs)
    if all(_is_theirs(block, line) for line in found):
        return Comparison("papers' rates", pairs, _papers_note(block, list(found)))
    if len(set(map(frozenset, found.values()))) == 1 and len(found[rows[0]]) == 1:
        return Comparison("same rate", pairs, f"Same rate: all at {min(found[rows[0]]):g}.")
    return Comparison("own rates", pairs, "Own rates: each method at the rates that it ran with.")


def _compare_papers_rates(block: Block, rows: list[Line]) -> Comparison:
    theirs = [line for line in block.cells if _is_theirs(block, line)]
    base = next((line for line in theirs if line in rows), None)
    pairs = {line: base for line in theirs if base and line not in rows}
    return Comparison("papers' rates", pairs, _papers_note(block, theirs))


def _compare_same_rates(block: Block, rows: list[Line], others: list[Line]) -> Comparison:
    pairs = {}
    for line in others:
        equal = [row for row in rows if block.rates(row) == block.rates(line)]
        if equal:
            pairs[line] = _find_alike(line, equal)
    return Comparison("same rate", pairs, "Same rate: both at the rate of the row.")


def _find_alike(line: Line, rows: list[Line]) -> Line:
    """Return the row that differs from a line in nothing but its method, or else the first."""
    return next((row for row in rows if row.variant == line.variant), rows[0])


def _is_theirs(block: Block, line: Line) -> bool:
    """Return whether the papers have numbers of this row's variant, at its rate."""
    if not block.experiment.source(block.measure.name) or block.group not in ("", "paper"):
        return False
    rate = block.experiment.rates.get(line.method)
    return block.is_the_papers(line) and block.rates(line) == {rate}


def _papers_note(block: Block, lines: list[Line]) -> str:
    methods = dict.fromkeys(line.method for line in lines)
    each = (f"{Line(m).label} {block.experiment.rates[m]:g}" for m in methods)
    return f"Papers' rates: each method at the rate that the papers chose ({', '.join(each)})."
