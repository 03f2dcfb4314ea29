"""The options of an experiment's command.

They are the arguments of the experiment's `run`, with their help in its docstring, and the fields
of its settings.
"""

import inspect
import re
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args, get_origin

from geoparam_lab import experiments

_KINDS = {bool: "flag", int: "int", float: "float", str: "text", Path: "path"}
_LEFT_OUT = ("out", "resume", "command", "progress", "experiment")  # no option, or of all commands


def describe_command(name: str) -> dict[str, Any]:
    """Return what an experiment's help says, from its `run` and its settings."""
    experiment = experiments.find(name)
    assert experiment.run is not None
    arguments = inspect.signature(experiment.run).parameters
    parameters = [p for p in arguments.values() if p.kind is not p.VAR_KEYWORD]
    if experiment.settings is not None:
        hints = typing.get_type_hints(experiment.settings)
        for field in inspect.signature(experiment.settings).parameters.values():
            if field.name not in arguments and field.default is not field.empty:
                parameters.append(field.replace(annotation=hints[field.name]))

    texts = _read_docstring(experiment.settings)
    texts |= _read_docstring(getattr(experiment.run, "func", experiment.run))
    options = {
        parameter.name: {
            "kind": name_kind(parameter.annotation),
            "default": _show(parameter.default),
            "required": parameter.default is parameter.empty,
            "help": texts.get(parameter.name, ""),
        }
        for parameter in parameters
        if parameter.name not in _LEFT_OUT and name_kind(parameter.annotation)
    }
    return {"about": f"{experiment.summary}\n\n{experiment.about}", "options": options}


def name_kind(annotation: Any) -> str:
    """Return how an argument of this type is typed; empty where no option can give it.

    Example:
        >>> name_kind(float), name_kind(Sequence[float] | None), name_kind(list[str])
        ('float', 'floats', 'several texts')
    """
    is_union = get_origin(annotation) in (types.UnionType, typing.Union)
    members = [kind for kind in get_args(annotation) if kind is not type(None)]
    members = members if is_union else [annotation]
    kind = Path if Path in members else members[0]
    if kind in _KINDS:
        return _KINDS[kind]
    if kind == list[str]:
        return "several texts"
    if get_origin(kind) in (Sequence, tuple):
        return f"{_KINDS[get_args(kind)[0]]}s"
    return ""


def _show(default: Any) -> str | None:
    """Return a default as a user would type it; None where there is nothing to show."""
    if default is None or default is inspect.Parameter.empty or default is False:
        return None
    if isinstance(default, (list, tuple)):
        return ",".join(map(str, default)) or None
    return str(default)


def _read_docstring(source: Any) -> dict[str, str]:
    """Return what a docstring says of each argument."""
    text = inspect.cleandoc(getattr(source, "__doc__", None) or "").partition("Args:\n")[2]
    texts = {}
    for name, words in re.findall(r"(?m)^    (\w+): ((?:.+)(?:\n        .+)*)", text):
        sentence = " ".join(words.replace("`", "").split())
        texts[name] = sentence[:1].upper() + sentence[1:]
    return texts
