"""What every long command shares: a bar with the time left, errors in words, Ctrl-C."""

import contextlib
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Column
from typer import Option

from geoparam.storage import printable
from geoparam_lab.training import tasks

Jobs = Annotated[
    int | None, Option(min=1, help="Processes that train; by default one for each core.")
]

Force = Annotated[bool, Option("--force", help="Overwrite the output.")]


class Bar:
    """One bar for work of several kinds, one after the other.

    It is called with a title, how much is done and how much there is; when these start again from
    0, so does the estimate of the time left.
    """

    def __init__(self, bars: Progress) -> None:
        self.bars = bars
        self.task = bars.add_task("", total=None)
        self.done, self.total = 0, 0

    def __call__(self, title: str, done: int, total: int) -> None:
        if total != self.total or done < self.done:
            self.bars.reset(self.task, total=total)
        self.bars.update(self.task, completed=done, description=title)
        self.done, self.total = done, total


@contextlib.contextmanager
def progress() -> Iterator[tasks.Progress | None]:
    """Show a bar on standard error while the block runs; None where none can be drawn."""
    console = Console(stderr=True)
    if not console.is_terminal or console.is_dumb_terminal:
        yield None
        return
    columns = (
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("time left"),
        TimeRemainingColumn(
            table_column=Column(min_width=7)
        ),  # on a narrow screen, titles give way
        TextColumn("{task.description}", table_column=Column(overflow="ellipsis", no_wrap=True)),
    )
    with Progress(*columns, console=console, transient=True) as bars:
        yield Bar(bars)


@contextlib.contextmanager
def explained(out: Path | None = None) -> Iterator[None]:
    """Print what went wrong without a traceback; after Ctrl-C, how to go on with `out`."""
    try:
        yield
    except KeyboardInterrupt:
        message = "\nInterrupted."
        if out is not None:
            message += f" What is finished is in {out}. Go on with:\n  {resume_command(sys.argv)}"
        print(message, file=sys.stderr)
        raise SystemExit(130) from None
    except (ValueError, OSError) as error:
        raise SystemExit(printable(f"{error}")) from error


def resume_command(arguments: Sequence[str]) -> str:
    """Return the command that goes on with what these arguments began.

    Example:
        >>> resume_command(["/usr/bin/geoparam", "run", "levy", "--out", "my runs"])
        "geoparam run levy --out 'my runs' --resume"
    """
    given = [Path(arguments[0]).name, *arguments[1:]]
    return shlex.join(given if "--resume" in given else [*given, "--resume"])


def listed(text: str) -> list[str]:
    """Return the names between commas.

    Example:
        >>> listed("sp, gmp,")
        ['sp', 'gmp']
    """
    return [name.strip() for name in text.split(",") if name.strip()]


def numbers(text: str) -> list[float]:
    """Return the numbers between commas.

    Example:
        >>> numbers("0.01,0.1")
        [0.01, 0.1]
    """
    try:
        return [float(part) for part in listed(text)]
    except ValueError as error:
        raise ValueError(f"an option needs numbers between commas; got {text!r}.") from error


def integers(text: str) -> list[int]:
    """Return the whole numbers between commas.

    Example:
        >>> integers("256,1024")
        [256, 1024]
    """
    try:
        return [int(part) for part in listed(text)]
    except ValueError as error:
        raise ValueError(f"an option needs whole numbers between commas; got {text!r}.") from error
