"""geoparam run: one command for each experiment; it ends with the table of what came out.

A command has the options of `cli.options`; several values are given between commas. An experiment
is imported when its own command is called: the list of commands needs none of them.
"""

import inspect
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option
from typer.core import TyperGroup

from geoparam_lab import experiments
from geoparam_lab.cli import options
from geoparam_lab.cli.running import explain_end, progress, read_list

if TYPE_CHECKING:
    from geoparam_lab.experiments.experiment import Experiment


class Experiments(TyperGroup):
    """The group of commands; a command has its options once it is called."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the name, the command and the rest of the words."""
        name, command, rest = super().resolve_command(ctx, args)
        if name is not None:
            command = make_command(name)
        return name, command, rest


def make_application() -> typer.Typer:
    """Return the group, with names and lines alone."""
    application = typer.Typer(
        cls=Experiments, no_args_is_help=True, help="Run an experiment and print its tables."
    )
    for name, entry in experiments.ENTRIES.items():
        application.command(name, help=entry.line)(lambda: None)
    return application


def make_command(name: str) -> Any:
    """Return an experiment's command; its help has the settings in a panel of their own."""
    experiment = experiments.find(name)
    described = options.list_options(experiment)

    def command(out: Path, resume: bool, **typed: Any) -> None:
        with explain_end(out):
            given = {option: value for option, value in typed.items() if value is not None}
            for option, value in given.items():
                if each := described[option].each:
                    given[option] = read_list(_make_flag(option), value, each)
            run(experiment, out, given | {"resume": resume})

    parameters = []
    for option, (kind, _, is_required, is_setting, text) in described.items():
        if is_required:
            parameters.append(_make_parameter(option, kind, text, inspect.Parameter.empty))
        else:  # one that is not typed is None, and not passed on
            panel = "Settings" if is_setting else None
            parameters.append(_make_parameter(option, kind | None, text, None, panel))
    parameters.append(_make_parameter("out", Path, "Folder of the run.", Path("runs", name)))
    parameters.append(_make_parameter("resume", bool, "Continue the run in the folder.", False))

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    application = typer.Typer(add_completion=False)
    about = f"{experiment.summary}\n\n{experiment.about}"
    application.command(name, help=about)(command)
    return typer.main.get_command(application)


def _make_parameter(
    name: str, kind: Any, help: str, default: Any, panel: str | None = None
) -> inspect.Parameter:
    option = Option(_make_flag(name), help=help, rich_help_panel=panel)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
    )


def _make_flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def run(experiment: "Experiment", out: Path, options: dict[str, Any]) -> None:
    """Run an experiment under a bar and print its tables; of several processes, one does that."""
    import torch.distributed as dist

    from geoparam.storage import printable
    from geoparam_lab.tables import tables

    assert experiment.run is not None
    with progress(leads=os.environ.get("RANK", "0") == "0") as bar:
        done = experiment.run(out, **options, progress=bar)
    if dist.is_initialized():
        dist.destroy_process_group()  # torch complains of a group that is left open
    if done is None:
        return
    print(printable(tables.export([done])))
    kinds = ["Records", *(name for name in ("curves", "figures") if (out / name).is_dir())]
    print(f"{', '.join(kinds)} are in {out}")
