"""What a run was, in words: experiment, configuration, results so far, hardware, versions."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from geoparam_lab import methods
from geoparam_lab.run_folder import Record, Run
from geoparam_lab.tables import image_tables
from geoparam_lab.tables.blocks import INITS
from geoparam_lab.tables.blocks import heading as name_of
from geoparam_lab.tables.layouts import PROTOCOLS

EXPERIMENTS = {
    "levy": (
        "Levy regression",
        "A network with one hidden layer of 100 ReLU units fits 50 noisy points of a function of "
        "one variable. Each unit switches on at one point of the line, and training moves it.",
    ),
    "banana": (
        "Banana classification",
        "A network with one hidden layer of 10 ReLU units tells two classes of points in the "
        "plane apart. Each unit switches on along a line, and training turns and shifts it.",
    ),
    "perturbation": (
        "Perturbed units",
        "Every stored parameter of one small unit in the plane is moved by the same amount, and "
        "the turn of its boundary is measured.",
    ),
    "uci": (
        "UCI regression",
        "A network with one hidden layer of 100 ReLU units is trained on random 80/20 splits of "
        "small regression data sets.",
    ),
    "width": (
        "Initialisation and width",
        "The same network is built at several widths, to see what depends on the width.",
    ),
    "imagenet32": (
        "VGG-6 on ImageNet32",
        "A convolutional network learns to tell classes of small images apart.",
    ),
    "imagenet": (
        "ResNet on ImageNet",
        "A residual network learns to tell classes of images apart.",
    ),
}
LABELS = {
    "lr": "learning rate",
    "lrs": "learning rates",
    "rates": "learning rates",
    "epochs": "epochs at most",
    "init": "initialisation",
    "datasets": "data sets",
    "hidden": "hidden units",
    "patience": "patience (epochs)",
    "steps": "steps of training",
    "data_seed": "seed of the data",
    "dtype": "number type",
    "skip": "skip connections",
    "imn": "IMN at a block's",
    "ema": "decay of averaged weights",
    "crop": "shift of images in pixels",
    "angle_lr": "learning rate of angles",
    "accumulate": "parts of a batch",
}
_NONE = dict.fromkeys(("lr", "lrs", "rates", "widths"), "the papers' own") | {
    "angle_lr": "that of the others"
}
_NAMES: dict[str, Callable[[str], str]] = {
    "datasets": name_of,
    "init": lambda value: INITS.get(value, value),
    "protocol": lambda value: PROTOCOLS.get(value, value).replace(" protocol:", ":"),
}


def title(run: Run) -> str:
    """Return what the experiment of a run is called."""
    name, config = str(run.info.get("experiment", "experiment")), run.config
    if name in image_tables.THEIRS and "network" in config:
        return image_tables.title(name, config)
    return EXPERIMENTS.get(name, (name,))[0]


def heading(run: Run) -> str:
    """Return the same with the run's folder, where that says more."""
    folder = run.folder.resolve().name
    return title(run) if folder == run.info.get("experiment") else f"{title(run)}: {folder}"


def about(run: Run) -> str:
    """Return what the experiment is, in a sentence or two; empty where it is not known."""
    about = EXPERIMENTS.get(str(run.info.get("experiment")), ("", ""))[1]
    data = image_tables.images(run.config)
    return f"{about} The data: {data}." if data else about


def configuration(config: Mapping[str, Any], experiment: str = "") -> dict[str, str]:
    """Return a configuration as words.

    Args:
        config: of a run.
        experiment: its name; UCI's seeds are splits.

    Example:
        >>> configuration({"methods": ["sp", "gmp"], "lrs": [0.01, 0.1], "epochs": 5000})
        {'methods': 'SP, GmP', 'learning rates': '0.01, 0.1', 'epochs at most': '5,000'}
        >>> configuration({"lrs": None})
        {'learning rates': "the papers' own"}
        >>> configuration({"datasets": ["wine"], "seeds": 10}, "uci")
        {'data sets': 'Wine', 'splits': '10'}
    """
    labels = LABELS | ({"seeds": "splits"} if experiment == "uci" else {})
    return {
        labels.get(key, key.replace("_", " ")): _words(value, key) for key, value in config.items()
    }


def _words(value: Any, key: str = "") -> str:
    if value is None:
        return _NONE.get(key, "none")
    if said := image_tables.images({"data": value}):
        return f"{said}, checksum {value.get('checksum', 'not known')}"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and abs(value) >= 1000:
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, (list, tuple)):
        return ", ".join(_words(each, key) for each in value) or "none"
    if isinstance(value, Mapping):
        return json.dumps(value)
    if key in _NAMES:
        return _NAMES[key](str(value))
    return image_tables.NETWORKS.get(value) or methods.title(str(value))


def circumstances(run: Run) -> dict[str, str]:
    """Return how far a run is, and with what it was made; what is not known is left out."""
    sessions = run.sessions()
    found = {
        "results": f"{len(run.records()):,}",
        "started": _times(sessions),
        "hardware": _each(sessions, "hardware", _hardware),
        "versions": _each(sessions, "versions", _versions),
        "commit": _each(sessions, "commit", _commit),
    }
    return {name: text for name, text in found.items() if text}


def commands(run: Run) -> list[str]:
    """Return the commands that made a run, each once."""
    found = (session.get("command") for session in run.sessions())
    return list(dict.fromkeys(str(command) for command in found if command))


def _times(sessions: list[Record]) -> str:
    times = [str(session.get("started", "")) for session in sessions]
    first = times[0].replace("T", " ").replace("+00:00", " UTC")
    more = len(times) - 1
    return first + (f", resumed {more} time{'s' * (more > 1)}" if more else "")


def _each(sessions: list[Record], name: str, words: Any) -> str:
    """Return what the sessions had, each once: a run may be resumed on another machine."""
    found = (words(session.get(name)) for session in sessions)
    return "; then ".join(dict.fromkeys(text for text in found if text))


def _hardware(found: Any) -> str:
    if not isinstance(found, Mapping):
        return ""
    counts = [_count(found.get(name), name) for name in ("cores", "threads")]
    gpus = [str(gpu) for gpu in found.get("gpus") or ["no GPU"]]
    return ", ".join([str(found.get("cpu", "processor not known")), *counts, *gpus])


def _count(value: Any, things: str) -> str:
    return f"{value} {things[:-1] if value == 1 else things}"


def _versions(found: Any) -> str:
    names = {"python": "Python"}
    pairs = found.items() if isinstance(found, Mapping) else ()
    return ", ".join(f"{names.get(name, name)} {version}" for name, version in pairs)


def _commit(found: Any) -> str:
    if not isinstance(found, Mapping):
        return ""
    changed = ", with changes that are in no commit" if found.get("dirty") else ""
    return f"{str(found.get('id'))[:12]}{changed}"
