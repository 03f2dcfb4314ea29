"""The sentences below a table: what its numbers are, and where the run is not the papers'."""

from collections.abc import Iterator, Sequence

from geoparam_lab.tables.blocks import Block, Line
from geoparam_lab.tables.comparisons import LEVEL, OVERLAP, Comparison
from geoparam_lab.tables.estimates import number
from geoparam_lab.tables.formats import OTHER, SAME


def explain_results(block: Block) -> Iterator[str]:
    """Yield what a reader must know of a table of results."""
    counts = sorted(block.counts)
    better = f" {block.measure.better.capitalize()} is better." * bool(block.measure.better)
    if counts and counts[-1] > 1:
        few = "" if len(counts) == 1 else " where a cell says nothing else"
        yield f"Mean ± standard error over {block.samples}, n = {block.usual_n}{few}.{better}"
    elif better:
        yield f"One seed, which may be an accident.{better}"
    yield from block.experiment.remarks(block.config, block.all_records)
    yield from _explain_papers(block)
    if block.rates_chosen_by:
        yield f"The learning rate was chosen for each split, by {block.rates_chosen_by}."
    if any(each.diverged for each in block.results.values()):
        yield "Diverged runs are counted; those that left a finite result are in the mean."
    yield from _explain_protocol(block, counts)


def _explain_papers(block: Block) -> Iterator[str]:
    source = block.experiment.source(block.measure.name)
    shown = [each.printed for each in block.results.values() if each.printed]
    if not shown:
        if mismatch := block.experiment.mismatch(block.config):
            yield f"{mismatch}: the papers' numbers are not shown here."
        elif source and block.group not in ("", "paper"):
            yield "The papers' numbers are of another protocol and not shown here."
        return
    yield f"papers: {source}."
    yield from block.layout.notes
    if len(block.columns) == 1:  # where there are more, the papers' rows have their rates
        yield from _explain_rates(block)
    judged = [each.agrees for each in block.results.values() if each.agrees is not None]
    if judged:
        yield (
            f"{SAME} at most two combined standard errors apart, rounding allowed for "
            f"({sum(judged)} of {len(judged)}); {OTHER} further."
        )
    if len(block.columns) == 1 and any(printed.error is None for printed in shown):
        yield (
            "The papers' numbers are of one seed each. In our range: between our lowest and "
            "highest seed, which says nothing of the mean."
        )


def _explain_rates(block: Block) -> Iterator[str]:
    """Yield at which rates the papers trained, where their numbers stand beside other rates."""
    [column] = block.columns
    found = []
    for line in block.cells:
        theirs = block.experiment.rates.get(line.method)
        others = block.rates(line) - {theirs}
        if theirs is not None and others and block.results[line, column].printed:
            found.append(f"{Line(line.method).label} {theirs:g}")
    if found:
        yield f"The papers' numbers are of other rates: {', '.join(found)}."


def _explain_protocol(block: Block, counts: Sequence[int]) -> Iterator[str]:
    epochs, theirs = number(block.config.get("epochs")), block.experiment.epochs
    if epochs < theirs:
        most = "one epoch" if epochs == 1 else f"{epochs:,.0f} epochs"
        yield f"Trained for at most {most}; the papers allow {theirs:,}."
    asked = block.config.get("seeds", block.config.get("splits"))
    asked = len(asked) if isinstance(asked, list) else number(asked)
    if block.samples and counts and counts[0] < asked:
        yield f"Not all of the {asked:.0f} {block.samples} that were asked for have a result."


def explain_differences(block: Block, comparisons: Sequence[Comparison]) -> Iterator[str]:
    """Yield what a reader must know of differences to a baseline."""
    better = {"lower": "negative", "higher": "positive"}.get(block.measure.better)
    yield (
        f"Differences: mean ± standard error over the {block.samples} that both have"
        + (f"; {better} is better" if better else "")
        + "."
    )
    if any(each.tested for each in comparisons):
        yield (
            f"* p below {LEVEL:g} in a paired t-test; ** also after Holm's correction (number of "
            f"comparisons: {' and '.join(str(each.tested) for each in comparisons)})."
        )
    yield from filter(None, (comparison.note for comparison in comparisons))
    if block.samples == "splits":
        yield (
            "Splits of one data set share points: errors and tests of differences are corrected "
            f"for it (Nadeau and Bengio; s sqrt(1/n + {OVERLAP:g}))."
        )
