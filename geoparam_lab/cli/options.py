"""The options of an experiment's command.

They are the arguments of the experiment's `run`, with their help in its docstring, and the fields
of its settings.
"""

import inspect
import re
import types
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, get_args, get_origin

if TYPE_CHECKING:
    from geoparam_lab.experiments.experiment import Experiment

_READ_BY_TYPER = (bool, int, float, str, Path, list[str])
_LEFT_OUT = ("out", "resume", "command", "progress", "experiment")  # no option, or of all commands


class Described(NamedTuple):
    """An option as the command line reads it."""

    type: Any  # what typer reads it as: text where several values stand between commas
    each: Callable[[str], Any] | None  # what each of these is read as; None for a single value
    is_required: bool
    is_setting: bool  # of each network, not of the sweep
    help: str  # with the default


def list_options(experiment: "Experiment") -> dict[str, Described]:
    """Return an experiment's options, from its `run` and its settings."""
    assert experiment.run is not None
    own = inspect.signature(experiment.run).parameters
    parameters = dict(own)
    if experiment.settings is not None:
        hints = typing.get_type_hints(experiment.settings)
        for name, field in inspect.signature(experiment.settings).parameters.items():
            if field.default is not field.empty:
                parameters.setdefault(name, field.replace(annotation=hints[name]))

    texts = _read_docstring(experiment.settings)
    texts |= _read_docstring(getattr(experiment.run, "func", experiment.run))
    options = {}
    for name, parameter in parameters.items():
        reading = find_reading(parameter.annotation)
        if reading is None or name in _LEFT_OUT:
            continue
        text, default = texts.get(name, ""), _show(parameter.default)
        if default:
            text += f" Default: {default}."
        is_required = parameter.default is parameter.empty
        options[name] = Described(*reading, is_required, name not in own, text)
    return options


def find_reading(annotation: Any) -> tuple[Any, Callable[[str], Any] | None] | None:
    """Return how an argument of this type is read, as in `Described`; None if it is no option.

    Example:
        >>> find_reading(float), find_reading(Sequence[float] | None), find_reading(dict)
        ((<class 'float'>, None), (<class 'str'>, <class 'float'>), None)
    """
    members = [annotation]
    if get_origin(annotation) in (types.UnionType, typing.Union):
        members = [member for member in get_args(annotation) if member is not type(None)]
    kind = Path if Path in members else members[0]
    if kind in _READ_BY_TYPER:
        return kind, None
    if get_origin(kind) in (Sequence, tuple):
        return str, get_args(kind)[0]
    return None


def _show(default: Any) -> str:
    """Return a default as a user would type it; empty where there is nothing to show."""
    if default is None or default is inspect.Parameter.empty or default is False:
        return ""
    if isinstance(default, (list, tuple)):
        return ",".join(map(str, default))
    return str(default)


def _read_docstring(source: Any) -> dict[str, str]:
    """Return what a docstring says of each argument."""
    text = inspect.cleandoc(getattr(source, "__doc__", None) or "").partition("Args:\n")[2]
    texts = {}
    for name, words in re.findall(r"(?m)^    (\w+): ((?:.+)(?:\n        .+)*)", text):
        sentence = " ".join(words.replace("`", "").split())
        texts[name] = sentence[:1].upper() + sentence[1:]
    return texts
