"""geoparam table and geoparam report: run folders in, tables or one page out."""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from geoparam.storage import printable, refuse_overwrite, replacing
from geoparam_lab.cli.running import Force, explained
from geoparam_lab.methods import METHODS, without_options
from geoparam_lab.run_folder import Run
from geoparam_lab.training.tasks import check_names

Runs = Annotated[
    list[Path], Argument(help="Folders of runs, or folders of such folders, as demo makes.")
]
Baseline = Annotated[
    str, Option(help="The method that others are compared with; bn in runs without it.")
]


def table(
    runs: Runs,
    form: Annotated[str, Option("--format", help="markdown, latex or csv.")] = "markdown",
    out: Annotated[Path | None, Option(help="File to write; else it is printed.")] = None,
    baseline: Baseline = "sp",
    force: Force = False,
) -> None:
    """Print the tables of some runs, beside the papers' numbers."""
    from geoparam_lab.tables import tables

    with explained():
        check_names("baseline", [without_options(baseline)], tuple(METHODS))
        if out is not None:
            refuse_overwrite(out, force)
        text = tables.export(open_runs(runs), form, baseline)
        if out is None:
            print(printable(text))
        else:
            with replacing(out) as unfinished:
                unfinished.write_text(text, encoding="utf-8")


def report(
    runs: Runs,
    out: Annotated[Path, Option(help="The HTML file to write.")] = Path("report.html"),
    baseline: Baseline = "sp",
    force: Force = False,
) -> None:
    """Put some runs on one page: tables, figures and sliders, in one file."""
    from geoparam_lab import report as pages

    with explained():
        check_names("baseline", [without_options(baseline)], tuple(METHODS))
        refuse_overwrite(out, force, pages.MARK)
        command = " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])
        path = pages.write(open_runs(runs), out, baseline, command)
        print(f"The page is {path}")


def open_runs(folders: Iterable[Path]) -> list[Run]:
    """Return the runs in these folders; one that holds none stands for the folders in it."""
    found = []
    for folder in folders:
        inside = sorted(path.parent for path in folder.glob("*/config.json"))
        alone = (folder / "config.json").exists() or not inside
        found += [Run.open(each) for each in ([folder] if alone else inside)]
    return found
