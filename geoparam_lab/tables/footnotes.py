"""The sentences below a table: what its numbers are, and where the run is not the papers'."""

from collections.abc import Iterator, Sequence

from geoparam_lab.tables import image_tables, reference
from geoparam_lab.tables.blocks import Block, Line
from geoparam_lab.tables.comparisons import Comparison
from geoparam_lab.tables.formats import OTHER, SAME
from geoparam_lab.tables.layouts import number


def result_notes(block: Block) -> Iterator[str]:
    """Yield what a reader must know of a table of results.

    Args:
        block: its records.
    """
    counts = sorted({each.n for each in block.estimates})
    better = f" {block.measure.better.capitalize()} is better." * bool(block.measure.better)
    if counts and counts[-1] > 1:
        few = "" if len(counts) == 1 else " where a cell says nothing else"
        yield f"Mean ± standard error over {block.samples}, n = {block.usual_n}{few}.{better}"
    elif better:
        yield f"One seed, which may be an accident.{better}"
    yield from image_tables.notes(block.experiment, block.config, block.all_records())
    yield from _papers_notes(block)
    if block.group == "heldout":
        yield "The learning rate was chosen for each split, by the validation part."
    if any(block.diverged(line, column) for line in block.cells for column in block.columns):
        yield "Diverged runs are counted; those that left a finite result are in the mean."
    yield from _protocol_notes(block, counts)


def _papers_notes(block: Block) -> Iterator[str]:
    places = [(line, column) for line in block.cells for column in block.columns]
    shown = [papers for place in places if (papers := block.papers(*place))]
    source = reference.source(block.experiment, block.measure.name)
    if not shown:
        if source and block.group not in ("", "paper"):
            yield "The papers' numbers are of another protocol and not shown here."
        return
    yield f"papers: {source}."
    yield from block.layout.notes
    if len(block.columns) == 1:  # where there are more, the papers' rows have their rates
        yield from _rate_notes(block)
    if not block.same_data:
        yield "The papers trained on KEEL's points, this run on generated ones: do not compare."
    judged = [verdict for place in places if (verdict := block.agrees(*place)) is not None]
    if judged:
        yield (
            f"{SAME} at most two combined standard errors apart, rounding allowed for "
            f"({sum(judged)} of {len(judged)}); {OTHER} further."
        )
    if judged and any(papers.error is None for papers in shown):
        yield "A number of one seed is judged by the spread of our seeds."


def _rate_notes(block: Block) -> Iterator[str]:
    """Yield at which rates the papers trained, where their numbers stand beside other rates."""
    [column] = block.columns
    found = []
    for line in filter(lambda line: block.papers(line, column), block.cells):
        theirs = reference.rate(block.experiment, line.method)
        ours = {number(record["lr"]) for record in block.records(line, column) if "lr" in record}
        if theirs is not None and ours - {theirs}:
            found.append(f"{Line(line.method).label} {theirs:g}")
    if found:
        yield f"The papers' numbers are of other rates: {', '.join(found)}."


def _protocol_notes(block: Block, counts: Sequence[int]) -> Iterator[str]:
    epochs, theirs = number(block.config.get("epochs")), reference.EPOCHS.get(block.experiment, 0)
    if epochs < theirs:
        most = "one epoch" if epochs == 1 else f"{epochs:,.0f} epochs"
        yield f"Trained for at most {most}; the papers allow {theirs:,}."
    asked = block.config.get("seeds", block.config.get("splits"))
    asked = len(asked) if isinstance(asked, list) else number(asked)
    if block.samples and counts and counts[0] < asked:
        yield f"Not all of the {asked:.0f} {block.samples} that were asked for have a result."


def difference_notes(block: Block, comparisons: Sequence[Comparison]) -> Iterator[str]:
    """Yield what a reader must know of differences to a baseline.

    Args:
        block: the records.
        comparisons: those that the table shows.
    """
    better = {"lower": "negative", "higher": "positive"}.get(block.measure.better)
    yield (
        f"Differences: mean ± standard error over the {block.samples} that both have"
        + (f"; {better} is better" if better else "")
        + ". * more than two standard errors from 0, with n of 5 or more."
    )
    yield from filter(None, (comparison.note for comparison in comparisons))
    if block.samples == "splits":
        yield "Splits of one data set share points, so that these errors are somewhat too small."
