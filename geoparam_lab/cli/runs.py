"""geoparam run: one command for each experiment; it ends with the table of what came out.

A command's options are the arguments of the experiment's `run`, with their help in its docstring,
and the fields of its settings. A sequence is given as values between commas. An experiment is
imported when its own command is called; the list of commands needs none of them.
"""

import inspect
import os
import re
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, get_args, get_origin

import typer
from typer import Option
from typer.core import TyperGroup

from geoparam_lab import experiments
from geoparam_lab.cli.running import explain_errors, progress, read_list

if TYPE_CHECKING:
    from geoparam_lab.experiments.experiment import Experiment

PANELS = {  # of the help; options that are not named here are about training
    "Methods and rates": (
        *("methods", "method", "seeds", "lrs", "turns", "momenta", "decays"),
        *("rest_lrs", "rest_decays", "scale_lrs", "schedules", "one_factor", "folds"),
    ),
    "Data": (
        *("data", "datasets", "source", "draws", "protocol", "validation"),
        *("size", "crop", "select", "workers", "windows", "context"),
    ),
    "Network": (
        *("network", "widths", "depths", "heads", "norm", "mlp", "zero_projections", "tied"),
        *("std", "init", "imn", "mbn", "skip", "constants"),
    ),
    "Output": (*("out", "resume", "jobs", "storage", "keep_weights", "track", "time_to"),),
}
_PLAIN = (bool, int, float, str, Path)
_INTERNAL = ("out", "command", "progress", "experiment")  # arguments that are not options


class Reader(NamedTuple):
    """How an option is typed, and how what was typed becomes the argument."""

    kind: Any
    read: Callable[[str, Any], Any]  # takes the option's name, for errors, and what was typed


class Experiments(TyperGroup):
    """The group of commands; a command has its options once it is called."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the name, the command and the rest of the words."""
        name, command, rest = super().resolve_command(ctx, args)
        if name is not None:
            command = make_command(experiments.find(name))
        return name, command, rest


def make_application() -> typer.Typer:
    """Return the group, with names and lines alone."""
    application = typer.Typer(
        cls=Experiments, no_args_is_help=True, help="Run an experiment and print its tables."
    )
    for name, entry in experiments.ENTRIES.items():
        application.command(name, help=entry.line)(lambda: None)
    return application


def make_command(experiment: "Experiment") -> Any:
    """Return an experiment's command, with its options in panels."""
    options = {parameter.name: reader for parameter, reader in find_options(experiment)}

    def command(out: Path, **given: Any) -> None:
        with explain_errors(out):
            arguments = {}
            for name, typed in given.items():
                if typed is not None:
                    arguments[name] = options[name].read(_make_flag(name), typed)
            run(experiment, out, arguments)

    signature = _make_signature(experiment)
    command.__signature__ = signature  # type: ignore[attr-defined]
    command.__annotations__ = {n: each.annotation for n, each in signature.parameters.items()}
    application = typer.Typer(add_completion=False)
    application.command(experiment.name, help=f"{experiment.summary}\n\n{experiment.about}")(
        command
    )
    return typer.main.get_command(application)


def _make_signature(experiment: "Experiment") -> inspect.Signature:
    """Return the options as typer reads them, those of a panel together."""
    texts = read_help(experiment)
    out = inspect.Parameter(
        "out", inspect.Parameter.KEYWORD_ONLY, default=Path("runs", experiment.name)
    )
    known = [*find_options(experiment), (out, Reader(Path, lambda option, value: value))]
    made = {
        parameter.name: _make_option(parameter, reader, texts.get(parameter.name, ""))
        for parameter, reader in known
    }
    order = ["Methods and rates", "Data", "Network", "Training", "Output"]
    ranked = sorted(made, key=lambda name: order.index(find_panel(name)))
    return inspect.Signature([made[name] for name in ranked])


def find_panel(option: str) -> str:
    """Return the panel of the help that an option is in.

    Example:
        >>> find_panel("lrs"), find_panel("epochs")
        ('Methods and rates', 'Training')
    """
    return next((panel for panel, names in PANELS.items() if option in names), "Training")


def _make_flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _make_option(parameter: inspect.Parameter, reader: Reader, text: str) -> inspect.Parameter:
    default = parameter.default
    if isinstance(default, (list, tuple)):
        default = ",".join(map(str, default)) or None
    required = default is parameter.empty
    option = Option(
        _make_flag(parameter.name),
        help=text,
        show_default=not required,
        rich_help_panel=find_panel(parameter.name),
    )
    kind = reader.kind if required or reader.kind is bool else reader.kind | None
    return parameter.replace(
        kind=parameter.KEYWORD_ONLY, annotation=Annotated[kind, option], default=default
    )


def find_options(experiment: "Experiment") -> Iterator[tuple[inspect.Parameter, Reader]]:
    """Yield the arguments of an experiment's `run` and the fields of its settings as options."""
    assert experiment.run is not None
    arguments = inspect.signature(experiment.run).parameters
    parameters = [each for name, each in arguments.items() if name not in _INTERNAL]
    if experiment.settings is not None:
        hints = typing.get_type_hints(experiment.settings)
        for name, field in inspect.signature(experiment.settings).parameters.items():
            if name not in arguments and field.default is not field.empty:
                parameters.append(field.replace(annotation=hints[name]))

    for parameter in parameters:
        reader = find_reader(parameter.annotation)
        if reader is not None and parameter.kind is not parameter.VAR_KEYWORD:
            yield parameter, reader


def find_reader(annotation: Any) -> Reader | None:
    """Return how an argument of this type is read; None where no option can give it.

    Example:
        >>> find_reader(Sequence[float]).read("--lrs", "0.01,0.1")
        [0.01, 0.1]
    """
    union = get_origin(annotation) in (types.UnionType, typing.Union)
    kinds = [kind for kind in get_args(annotation) if kind is not type(None)]
    kinds = kinds if union else [annotation]
    kind = Path if Path in kinds else kinds[0]
    if kind in _PLAIN or kind == list[str]:
        return Reader(kind, lambda option, value: value)
    if get_origin(kind) in (Sequence, tuple):
        return Reader(str, lambda option, text: read_list(option, text, get_args(kind)[0]))
    return None


def read_help(experiment: "Experiment") -> dict[str, str]:
    """Return the help of each option, from the docstrings' Args."""
    texts = {"out": "Folder of the run.", "resume": "Continue the run in the folder."}
    function = getattr(experiment.run, "func", experiment.run)
    for source in (experiment.settings, function):
        text = inspect.cleandoc(getattr(source, "__doc__", None) or "").partition("Args:\n")[2]
        for name, words in re.findall(r"(?m)^    (\w+): ((?:.+)(?:\n        .+)*)", text):
            sentence = " ".join(words.replace("`", "").split())
            texts[name] = sentence[:1].upper() + sentence[1:]
    return texts


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
