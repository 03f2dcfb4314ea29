"""What every long command shares: a bar with the time left, Ctrl-C, a reader that has stopped."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Column
from typer import Option

if TYPE_CHECKING:
    from geoparam_lab.training.tasks import Progress as Report

Force = Annotated[bool, Option("--force", help="Overwrite the output.")]


@contextlib.contextmanager
def progress(leads: bool = True) -> Iterator["Report | None"]:
    """Show a bar on standard error while the block runs; None where none can be drawn.

    Of several processes, only the one that leads draws it. Work of several kinds may come one
    after the other: when the numbers start again from 0, so does the estimate of the time left.
    """
    console = Console(stderr=True)
    if not leads or not console.is_terminal or console.is_dumb_terminal:
        yield None
        return
    columns = (
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("time left"),
        TimeRemainingColumn(table_column=Column(min_width=7)),  # titles give way to it
        TextColumn("{task.description}", table_column=Column(overflow="ellipsis", no_wrap=True)),
    )
    with Progress(*columns, console=console, transient=True) as bars:
        bar = bars.add_task("", total=None)

        def show(title: str, done: float, total: int) -> None:
            [now] = bars.tasks
            if total != now.total or done < now.completed:
                bars.reset(bar, total=total)
            bars.update(bar, completed=done, description=title)

        yield show


@contextlib.contextmanager
def explain_end(out: Path | None = None) -> Iterator[None]:
    """After Ctrl-C, say how to continue the run in `out`; after a closed pipe, end in silence."""
    from geoparam_lab.session import format_command

    try:
        yield
        if sys.stdout is not None:  # as after `geoparam table >&-`
            sys.stdout.flush()
    except BrokenPipeError:  # as of `geoparam table | head`: the reader has stopped
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        message = "\nInterrupted."
        if out is not None and out.exists():
            command = format_command([word for word in sys.argv if word != "--resume"])
            message += f" What is finished is in {out}. Continue with:\n  {command} --resume"
        print(message, file=sys.stderr)
        raise SystemExit(130) from None


def read_list(option: str, text: str, kind: Callable[[str], Any] = str) -> list[Any]:
    """Return the values between commas that an option was given.

    Example:
        >>> read_list("--methods", "sp, gmp,"), read_list("--widths", "256,1024", int)
        (['sp', 'gmp'], [256, 1024])
    """
    try:
        return [kind(part.strip()) for part in text.split(",") if part.strip()]
    except ValueError as error:
        what = "whole numbers" if kind is int else "numbers"
        raise ValueError(f"{option} needs {what} between commas; got {text!r}.") from error
