"""geoparam demo: what GmP is about, in pictures, without any file and without the network.

Three experiments of the papers with a few seeds each, then one page with all of it.
"""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from rich.markup import escape
from typer import Option

from geoparam_lab import experiments
from geoparam_lab.cli.running import Force, explain_end, progress

if TYPE_CHECKING:
    from geoparam_lab.run_folder import Run

BEGINNING = """\
A ReLU unit divides its inputs by a boundary. Training moves that boundary through the unit's \
parameters: its weight and bias (SP), a normalised weight (WN, BN), or the direction and the \
distance of the boundary itself (GmP). Three experiments show what difference that makes.
"""


def command(
    out: Annotated[Path, Option(help="Folder for the runs and the page.")] = Path("demo"),
    seeds: Annotated[int, Option(min=1, help="Number of initial weights to train from.")] = 5,
    epochs: Annotated[
        int | None, Option(min=1, help="Stop after this many epochs, for a quick look.")
    ] = None,
    jobs: Annotated[
        int | None, Option(min=1, help="Processes that train; by default one per core.")
    ] = None,
    resume: Annotated[
        bool, Option("--resume/--no-resume", help="Continue the demo in the folder, if any.")
    ] = True,
    force: Force = False,
) -> None:
    """Show what GmP is about: three small experiments and one page, in about a minute."""
    from geoparam.storage import refuse_overwrite
    from geoparam_lab import report

    with explain_end(out):
        refuse_overwrite(out / "report.html", force, report.MARK)
        size = {"seeds": seeds} | ({} if epochs is None else {"epochs": epochs})
        console = Console(highlight=False)  # words such as None are words here
        console.print(BEGINNING)
        units = _run("perturbation", out, resume)
        lines = _run("levy", out, resume, jobs, **size)
        planes = _run("banana", out, resume, 1, **size, source="generated")
        done = [lines, planes, units]

        console.print("[bold]What we found[/]")
        for run in done:
            console.print("-", experiments.find(run.info["experiment"]).finding(run))
        console.print("\n[bold]Limits.[/] None of this shows that GmP is always better.")
        for run in done:
            console.print("-", experiments.find(run.info["experiment"]).describe_limits(run))

        again = shlex.join(["geoparam", "demo", *_to_words(size), "--out", str(out)])
        page = report.write(done, out / "report.html", command=again)
        console.print("\n[bold]Every seed, in tables and pictures:[/] open this in a browser.")
        console.print(escape(str(page)), soft_wrap=True)


def _run(name: str, out: Path, resume: bool, jobs: int | None = None, **options: Any) -> "Run":
    """Run an experiment under a progress bar; its folder keeps the command that repeats it."""
    run = experiments.find(name).run
    assert run is not None
    folder = out / name
    again = ["--resume"] if resume and (folder / "config.json").exists() else []
    words = [name, *_to_words(options), "--out", str(folder), *again]
    command = shlex.join(["geoparam", "run", *words])
    if jobs is not None:
        options["jobs"] = jobs
    with progress() as bar:
        done = run(folder, **options, resume=resume, command=command, progress=bar)
    assert done is not None
    return done


def _to_words(options: dict[str, Any]) -> list[str]:
    return [part for name, value in options.items() for part in (f"--{name}", str(value))]
