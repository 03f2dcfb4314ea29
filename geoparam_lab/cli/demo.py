"""geoparam demo: what GmP is about, in pictures, without any file and without the network.

Three experiments of the papers with a few seeds each, then one page with all of it. The numbers of
every seed are printed, since one seed is an anecdote: what is said of twenty was measured with
`geoparam run` on a CPU under torch 2.15 (results/LOG.md).
"""

import math
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from typer import Option

from geoparam.storage import refuse_overwrite
from geoparam_lab.cli.running import Force, Jobs, explained, progress

if TYPE_CHECKING:
    from geoparam_lab.run_folder import Record, Run

BEGINNING = """\
A ReLU unit divides its inputs by a boundary. Training moves that boundary through the unit's \
parameters: its weight and bias (SP), a normalised weight (WN, BN), or the direction and the \
distance of the boundary itself (GmP). Three experiments show what difference that makes.
"""
TURNS = """\
[bold]One small unit, all its parameters moved by δ.[/] Degrees by which its boundary turns: \
under GmP never more than δ in radians, however small the weight is.
"""
LEVY = """
[bold]Levy: 50 noisy points of a curve, 100 units.[/] A unit's boundary is one point of the line. \
Under SP it is -b/w, thrown far from the data where w is near 0; under GmP it is a parameter.
"""
BANANA = """
[bold]Banana: two classes in the plane, 10 units.[/] The points are generated (KEEL's file is not \
needed here), so that the papers' accuracies, on KEEL's, are no yardstick.
"""
ENDING = """
[bold]What it shows.[/] In one update a boundary moves and turns by small amounts under GmP, and \
by almost any amount under the others. On Levy, GmP's units can then spread to where the curve \
bends, and its best fits are far better.

[bold]What it does not show.[/] That GmP is always better. {groups} Of GmP's 20 seeds in our \
runs, 13 ended at a test RMSE of 0.39-0.55, six at 1.06-1.24 and one at 0.92; all six had their \
rate cut before epoch 2,000, all others after 4,000. On Banana the methods differ by less than \
their seeds do, and SP gains as much from the large rate. A few seeds are a few anecdotes: \
geoparam run levy takes 20.
"""

HEADINGS = {
    "test_rmse": "test RMSE of each seed",
    "test_accuracy": "test accuracy of each seed",
    "largest_move": "largest move of a unit in one update",
    "largest_rotation": "largest turn of a unit in one update, all at rate 0.1 (°)",
}
BETWEEN = 0.8  # the test RMSE that parts GmP's good seeds on Levy from the others

Out = Annotated[Path, Option(help="Folder for the runs and the page.")]


def command(
    out: Out = Path("demo"),
    seeds: Annotated[int, Option(min=1, help="Initial weights to train from.")] = 5,
    epochs: Annotated[
        int | None, Option(min=1, help="The most to train for, for a quick look.")
    ] = None,
    jobs: Jobs = None,
    resume: Annotated[
        bool, Option("--resume/--no-resume", help="Go on with the demo in the folder, if any.")
    ] = True,
    force: Force = False,
) -> None:
    """Show what GmP is about: three small experiments and one page, in about a minute."""
    from geoparam_lab import report

    with explained(out):
        refuse_overwrite(out / "report.html", force, report.MARK)
        show(out, {"seeds": seeds} | ({} if epochs is None else {"epochs": epochs}), jobs, resume)


def show(out: Path, size: dict[str, int], jobs: int | None, resume: bool) -> None:
    """Run the experiments in this size, print what came out, and write the page."""
    from geoparam_lab import report
    from geoparam_lab.experiments import banana, levy, perturbation

    console = Console()
    console.print(BEGINNING)
    units = _run(perturbation, out / "perturbation", resume)
    console.print(TURNS)
    console.print(turns(units.records()))
    lines = _run(levy, out / "levy", resume, jobs, **size)
    console.print(LEVY)
    console.print(each_seed(lines, "test_rmse", "largest_move"))
    planes = _run(banana, out / "banana", resume, 1, **size, source="generated")
    console.print(BANANA)
    console.print(each_seed(planes, "test_accuracy", "largest_rotation", lr=0.1))
    console.print(ENDING.format(groups=groups(lines.records(), "epochs" in size)))
    command = f"geoparam demo --out {out}"
    page = report.write([lines, planes, units], out / "report.html", command=command)
    console.print("[bold]In pictures:[/] open this page in a browser.")
    console.print(escape(str(page)), soft_wrap=True)


def _run(
    experiment: Any, out: Path, resume: bool, jobs: int | None = None, **options: Any
) -> "Run":
    """Run an experiment under a bar; what it says of its command is what does it again."""
    extra = {} if jobs is None else {"jobs": jobs}
    given = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    command = shlex.join(["geoparam", "run", out.name, *given, "--out", str(out)])
    with progress() as bar:
        done: Run = experiment.run(
            out, **options, **extra, resume=resume, command=command, progress=bar
        )
    return done


def turns(records: "list[Record]") -> Table:
    """Return the turns of the papers' unit, beside those in the papers' picture."""
    found = {(record["method"], record["delta"]): record for record in records}
    table = Table("δ", "δ in degrees", "SP, WN, BN", "in the papers' picture", "GmP")
    for delta in sorted({delta for _, delta in found}):
        plain, geometric = found["sp", delta], found["gmp", delta]
        table.add_row(
            f"{delta:g}",
            f"{math.degrees(delta):.3g}",
            f"{plain['rotation']:.1f}",
            f"{plain['reference_drawn']:.1f}",
            f"{geometric['rotation']:.3g}",
        )
    return table


def each_seed(run: "Run", measure: str, motion: str, lr: float | None = None) -> Table:
    """Return what every seed gave at the papers' rates, and the largest motion in any update.

    Args:
        run: of Levy or Banana.
        measure: the field of what came out.
        motion: the field of how boundaries moved.
        lr: the rate at which they did; by default that of the row.
    """
    from geoparam_lab.experiments import toys
    from geoparam_lab.methods import TITLES
    from geoparam_lab.tables import reference

    comparable = run.config.get("source") != "generated"
    table = Table(show_header=True)
    for heading in ("", *["papers, one seed"] * comparable, HEADINGS[measure], HEADINGS[motion]):
        table.add_column(heading, no_wrap=heading == HEADINGS[measure])
    for method in run.config["methods"]:
        rate = toys.papers_lr(method, run.config["lrs"])
        own = [record for record in run.records() if record["method"] == method]
        values = " ".join(f"{r[measure]:.2f}" for r in own if r["lr"] == rate)
        most = max(r[motion] for r in own if r["lr"] == (lr or rate))
        printed = reference.printed(run.info["experiment"], measure, method)
        papers = [printed.text if printed else "-"] * comparable
        moved = f"{most:,.0f}" if most >= 100 else f"{most:.2f}"
        table.add_row(f"{TITLES[method]}, rate {rate:g}", *papers, values, moved)
    return table


def groups(records: "list[Record]", short: bool) -> str:
    """Say in how many of the seeds GmP ended far below SP on Levy."""
    if short:
        return "Here training was cut short."
    own = [r["test_rmse"] for r in records if (r["method"], r["lr"]) == ("gmp", 0.1)]
    good = sum(error < BETWEEN for error in own)
    return (
        f"Here GmP fits Levy well in {good} of {len(own)} seeds, and little or no better than "
        "SP in the others, where the papers' schedule cuts its rate too early."
    )
