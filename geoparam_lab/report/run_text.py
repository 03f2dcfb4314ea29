"""What a run was, in words: title, settings, hardware, versions, and how to run it again."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from geoparam_lab import experiments, methods
from geoparam_lab.experiments.experiment import Experiment
from geoparam_lab.experiments.image_text import NETWORKS, describe_images
from geoparam_lab.run_folder import Record, Run
from geoparam_lab.tables.blocks import INITS, name_value


def find_experiment(run: Run) -> Experiment:
    """Return the record of a run's experiment."""
    return experiments.find(str(run.info.get("experiment", "experiment")))


def make_title(run: Run) -> str:
    """Return what the experiment of a run is called."""
    experiment = find_experiment(run)
    return experiment.retitle(run.config) or experiment.title


def make_heading(run: Run) -> str:
    """Return the title with the run's folder, where that says more."""
    folder, title = run.folder.resolve().name, make_title(run)
    return title if folder == run.info.get("experiment") else f"{title}: {folder}"


def describe(run: Run) -> str:
    """Return what the experiment is, in a sentence or two; empty where it is not known."""
    about, data = find_experiment(run).about, describe_images(run.config)
    return f"{about} The data: {data}." if data else about


def say(what: Callable[[Run], str], run: Run) -> str:
    """Return what an experiment says of a run; nothing where the run lacks what that needs."""
    try:
        return what(run)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError):
        return ""


def describe_config(config: Mapping[str, Any], experiment: Experiment) -> dict[str, str]:
    """Return a configuration as words.

    Example:
        >>> config = {"methods": ["sp", "gmp"], "lrs": None, "epochs": 5000}
        >>> describe_config(config, Experiment("levy"))
        {'methods': 'SP, GmP', 'lrs': 'not given', 'epochs': '5,000'}
    """
    return {key.replace("_", " "): _write(value, key, experiment) for key, value in config.items()}


def _write(value: Any, key: str, experiment: Experiment) -> str:
    if value is None:
        return "not given"
    if said := describe_images({"data": value}):
        return f"{said}, checksum {value.get('checksum', 'not known')}"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and abs(value) >= 1000:
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, (list, tuple)):
        return ", ".join(_write(each, key, experiment) for each in value) or "none"
    if isinstance(value, Mapping):
        return json.dumps(value)
    if key in ("datasets", "protocol"):
        return name_value(experiment, value)
    return INITS.get(value) or NETWORKS.get(value) or methods.title(str(value))


def describe_sessions(run: Run) -> dict[str, str]:
    """Return how far a run is, and with what it was made; what is not known is left out."""
    sessions = run.sessions()
    first = sessions[0]["started"].replace("T", " ").replace("+00:00", " UTC")
    more = len(sessions) - 1
    found = {
        "results": f"{len(run.records()):,}",
        "started": first + (f", resumed {more} time{'s' * (more > 1)}" if more else ""),
        "hardware": _list_each(sessions, "hardware", _describe_hardware),
        "versions": _list_each(sessions, "versions", _describe_versions),
        "commit": _list_each(sessions, "commit", _describe_commit),
    }
    return {name: text for name, text in found.items() if text}


def _list_each(sessions: list[Record], name: str, describe: Callable[[Record], str]) -> str:
    """Return what the sessions had, each once: a run may be resumed on another machine."""
    found = (describe(session[name]) for session in sessions if session.get(name))
    return "; then ".join(dict.fromkeys(found))


def _describe_hardware(found: Record) -> str:
    counts = [
        f"{found.get(name)} {name[:-1] if found.get(name) == 1 else name}"
        for name in ("cores", "threads")
    ]
    gpus = [str(gpu) for gpu in found.get("gpus") or ["no GPU"]]
    return ", ".join([str(found.get("cpu", "processor not known")), *counts, *gpus])


def _describe_versions(found: Record) -> str:
    return ", ".join(f"{name} {version}" for name, version in found.items())


def _describe_commit(found: Record) -> str:
    changed = ", with changes that are in no commit" if found.get("dirty") else ""
    return f"{str(found.get('id'))[:12]}{changed}"


def list_commands(run: Run) -> list[str]:
    """Return the commands that made a run; those of later sessions end with --resume."""
    return list(dict.fromkeys(session["command"] for session in run.sessions()))
