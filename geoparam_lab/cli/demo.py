"""geoparam demo: what GmP is about, in pictures, without any file and without the network.

Three experiments of the papers with a few seeds each, then one page with all of it. The numbers of
every seed are printed, since one seed is an anecdote.
"""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from typer import Option

from geoparam.storage import refuse_overwrite
from geoparam_lab.cli.running import Force, Jobs, explain_errors, progress
from geoparam_lab.experiments import banana, levy, perturbation, toy_figures
from geoparam_lab.experiments.experiment import Experiment
from geoparam_lab.methods import TITLES

if TYPE_CHECKING:
    from geoparam_lab.run_folder import Run

BEGINNING = """\
A ReLU unit divides its inputs by a boundary. Training moves that boundary through the unit's \
parameters: its weight and bias (SP), a normalised weight (WN, BN), or the direction and the \
distance of the boundary itself (GmP). Three experiments show what difference that makes.
"""
HEADINGS = {
    "test_rmse": "test RMSE of each seed",
    "test_accuracy": "test accuracy of each seed",
    "largest_move": "largest move of a unit in one update",
    "largest_rotation": "largest turn of a unit in one update, all at rate 0.1 (°)",
}

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

    with explain_errors(out):
        refuse_overwrite(out / "report.html", force, report.MARK)
        show(out, {"seeds": seeds} | ({} if epochs is None else {"epochs": epochs}), jobs, resume)


def show(out: Path, size: dict[str, int], jobs: int | None, resume: bool) -> None:
    """Run the experiments in this size, print what came out, and write the page."""
    from geoparam_lab import report

    console = Console()
    console.print(BEGINNING)
    units = _run(perturbation.EXPERIMENT, out, resume)
    lines = _run(levy.EXPERIMENT, out, resume, jobs, **size)
    console.print(f"[bold]{levy.EXPERIMENT.title}.[/] {levy.EXPERIMENT.about}\n")
    console.print(list_seeds(lines, "test_rmse", "largest_move"))
    planes = _run(banana.EXPERIMENT, out, resume, 1, **size, source="generated")
    console.print(f"[bold]{banana.EXPERIMENT.title}.[/] {banana.EXPERIMENT.about}\n")
    console.print(list_seeds(planes, "test_accuracy", "largest_rotation", 0.1))
    shown = [
        (levy.EXPERIMENT, lines),
        (banana.EXPERIMENT, planes),
        (perturbation.EXPERIMENT, units),
    ]
    console.print("[bold]What was found[/]")
    for experiment, run in shown:
        console.print("-", experiment.finding(run))
    console.print("\n[bold]What this does not show:[/] that GmP is always better.")
    for experiment, run in shown:
        console.print("-", experiment.limits(run))
    command = shlex.join(["geoparam", "demo", "--out", str(out)])
    page = report.write([lines, planes, units], out / "report.html", command=command)
    console.print("\n[bold]In pictures:[/] open this page in a browser.")
    console.print(escape(str(page)), soft_wrap=True)


def _run(
    experiment: Experiment, out: Path, resume: bool, jobs: int | None = None, **options: Any
) -> "Run":
    """Run an experiment under a bar; what it says of its command is what does it again."""
    assert experiment.run is not None
    folder = out / experiment.name
    words = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    command = shlex.join(["geoparam", "run", experiment.name, *words, "--out", str(folder)])
    if jobs is not None:
        options["jobs"] = jobs
    with progress() as bar:
        done = experiment.run(folder, **options, resume=resume, command=command, progress=bar)
    assert done is not None
    return done


def list_seeds(run: "Run", measure: str, motion: str, lr: float | None = None) -> Table:
    """Return what every seed gave at the papers' rates, and the largest motion in any update.

    Args:
        run: of Levy or Banana.
        measure: the field of what came out.
        motion: the field of how boundaries moved.
        lr: the rate at which they did; by default that of the row.
    """
    table = Table("")
    table.add_column(HEADINGS[measure], no_wrap=True)
    table.add_column(HEADINGS[motion])
    for method in run.config["methods"]:
        rate = toy_figures.papers_lr(method, run.config["lrs"])
        values = " ".join(f"{r[measure]:.2f}" for r in toy_figures.records_of(run, method, rate))
        most = max(r[motion] for r in toy_figures.records_of(run, method, lr or rate))
        moved = f"{most:,.0f}" if most >= 100 else f"{most:.2f}"
        table.add_row(f"{TITLES[method]}, rate {rate:g}", values, moved)
    return table
