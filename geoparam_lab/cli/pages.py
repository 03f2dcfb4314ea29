"""geoparam table and geoparam report: run folders in, tables or one page out."""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from geoparam.storage import printable, refuse_overwrite, replacing
from geoparam_lab.cli.running import Force, explain_errors
from geoparam_lab.run_folder import Run
from geoparam_lab.session import format_command

Runs = Annotated[
    list[Path], Argument(help="Folders of runs, or folders of such folders, as demo makes.")
]


def table(
    runs: Runs,
    out: Annotated[Path | None, Option(help="File to write; else it is printed.")] = None,
    baseline: Annotated[
        str | None, Option(help="Method that others are compared with, such as gmp.")
    ] = None,
    force: Force = False,
) -> None:
    """Print the tables of some runs, beside the papers' numbers."""
    from geoparam_lab.tables import tables

    with explain_errors():
        if out is not None:
            refuse_overwrite(out, force)
        text = tables.export(open_runs(runs), baseline)
        if out is None:
            print(printable(text))
        else:
            with replacing(out) as unfinished:
                unfinished.write_text(text, encoding="utf-8")


def report(
    runs: Runs,
    out: Annotated[Path, Option(help="The HTML file to write.")] = Path("report.html"),
    force: Force = False,
) -> None:
    """Put some runs on one page: tables, figures and sliders, in one file."""
    from geoparam_lab import report as pages

    with explain_errors():
        refuse_overwrite(out, force, pages.MARK)
        path = pages.write(open_runs(runs), out, format_command(sys.argv))
        print(f"The page is {path}")


def open_runs(folders: Iterable[Path]) -> list[Run]:
    """Return the runs in these folders; one that holds none stands for the folders in it."""
    found = []
    for folder in folders:
        inside = sorted(path.parent for path in folder.glob("*/config.json"))
        alone = (folder / "config.json").exists() or not inside
        found += [Run.open(each) for each in ([folder] if alone else inside)]
    return found
