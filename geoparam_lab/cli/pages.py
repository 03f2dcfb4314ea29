"""geoparam table and geoparam report: run folders in, tables or one page out."""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from geoparam_lab.cli.running import Force, explain_end

if TYPE_CHECKING:
    from geoparam_lab.run_folder import Run

Runs = Annotated[
    list[Path], Argument(help="Folders of runs, or folders that hold several, such as demo's.")
]


def table(
    runs: Runs,
    out: Annotated[Path | None, Option(help="Write to this file instead of printing.")] = None,
    baseline: Annotated[
        str | None, Option(help="Compare the other methods with this one, such as gmp.")
    ] = None,
    force: Force = False,
) -> None:
    """Print the tables of some runs, beside the papers' numbers."""
    from geoparam.storage import printable, refuse_overwrite, replacing
    from geoparam_lab.tables import tables

    with explain_end():
        if out is not None:
            refuse_overwrite(out, force)
        readable, problems = open_runs(runs)
        text = tables.export(readable, baseline)
        if out is None:
            print(printable(text))
        else:
            with replacing(out) as unfinished:
                # The name of a folder may be no Unicode.
                unfinished.write_text(text, encoding="utf-8", errors="backslashreplace")
        _name_left_out(problems)


def report(
    runs: Runs,
    out: Annotated[Path, Option(help="The HTML file to write.")] = Path("report.html"),
    force: Force = False,
) -> None:
    """Put some runs on one page: tables, figures and sliders, in one file."""
    from geoparam.storage import refuse_overwrite
    from geoparam_lab import report as pages
    from geoparam_lab.session import format_command

    with explain_end():
        refuse_overwrite(out, force, pages.MARK)
        readable, problems = open_runs(runs)
        path = pages.write(readable, out, format_command(sys.argv))
        print(f"The page is {path}")
        _name_left_out(problems)


def open_runs(folders: Iterable[Path]) -> tuple[list["Run"], list[str]]:
    """Return the runs in these folders, and what is wrong with those that cannot be read.

    A folder that holds no run stands for the folders in it. If no run can be read, the first
    problem is raised.
    """
    from geoparam_lab.run_folder import Run
    from geoparam_lab.tables import tables

    readable, problems = [], []
    for folder in folders:
        inside = sorted(path.parent for path in folder.glob("*/config.json"))
        is_run = (folder / "config.json").exists() or not inside
        for path in [folder] if is_run else inside:
            try:
                run = Run.open(path)
                tables.check(run)
                readable.append(run)
            except (ValueError, OSError) as error:
                problems.append(error)
    if problems and not readable:
        raise problems[0]
    return readable, list(map(str, problems))


def _name_left_out(problems: Sequence[str]) -> None:
    """End with the reasons why some of the runs are not shown."""
    from geoparam.storage import printable

    if problems:
        lines = [f"Left out: {problem}" for problem in problems]
        raise SystemExit(printable("\n".join(lines)))
