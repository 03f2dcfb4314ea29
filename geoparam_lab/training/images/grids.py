"""The runs of a sweep: methods, each perhaps with options of its own, and all combinations.

    bn                                           the sweep's settings and rates
    bn:decay=5e-4:lr=0.4,0.8                     two settings
    bn:optimizer=geometric:base=muon:turn=1,2    two settings of another optimizer

Options in words make another method of it, with a row of its own in tables; options in numbers are
settings of that method, of which the best may be chosen.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from geoparam_lab import methods
from geoparam_lab.run_folder import Record
from geoparam_lab.training.images.settings import Settings

WORDS = ("optimizer", "base", "rest", "coordinates", "schedule", "init", "imn", "mbn", "skip")
NUMBERS = ("lr", "decay", "turn", "rest_lr", "momentum", "warmup", "label_smoothing")
_FIELDS = {"decay": "weight_decay"}  # where an option is not called as in Settings

_VARIED = ("network", "method", "lr", "batch_size", "seed")
COMMON = {field.name: field.default for field in fields(Settings) if field.name not in _VARIED}

Point = tuple[str, str, dict[str, Any]]


def list_points(text: str) -> list[Point]:
    """Return for each combination the method with its words, its numbers, and its settings.

    The rate is not among the numbers: it has a place of its own everywhere.

    Example:
        >>> for point in list_points("bn:lr=0.4,0.8:optimizer=muon:decay=5e-4"):
        ...     print(*point)
        bn:optimizer=muon decay=0.0005 {'optimizer': 'muon', 'lr': 0.4, 'weight_decay': 0.0005}
        bn:optimizer=muon decay=0.0005 {'optimizer': 'muon', 'lr': 0.8, 'weight_decay': 0.0005}
    """
    name, *parts = text.split(":")
    options = dict(map(_read_option, parts))
    grid = {option: options[option] for option in (*WORDS, *NUMBERS) if option in options}
    points = []
    for combination in itertools.product(*grid.values()):
        values = dict(zip(grid, combination, strict=True))
        words = [f"{option}={values[option]}" for option in WORDS if option in values]
        numbers = [f"{option}={values[option]:g}" for option in NUMBERS[1:] if option in values]
        settings = {_FIELDS.get(option, option): value for option, value in values.items()}
        points.append((":".join([name, *words]), ":".join(numbers), settings))
    return points


def _read_option(part: str) -> tuple[str, list[Any]]:
    option, _, values = part.partition("=")
    try:
        read = {**dict.fromkeys(WORDS, str), **dict.fromkeys(NUMBERS, float)}[option]
        return option, [read(value) for value in values.split(",")]
    except (KeyError, ValueError):
        raise ValueError(
            f"a method's options are {', '.join((*WORDS, *NUMBERS))}, with values between commas "
            f"as in bn:decay=5e-4:lr=0.4,0.8; got {part!r}."
        ) from None


# --- runs ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """One run of a sweep."""

    settings: Settings
    method: str  # with its options in words; see `list_points`
    tuned: str = ""  # its options in numbers, without the rate

    @property
    def keys(self) -> list[tuple[Any, ...]]:
        return [(self.name,)]

    @property
    def name(self) -> str:
        one, options = self.settings, self._options.replace(":", "-")
        return f"{one.network}-{options}-batch{one.batch_size}-lr{one.lr:g}-seed{one.seed}"

    def __str__(self) -> str:
        one, title = self.settings, methods.title(self._options)
        return f"{title}, batch {one.batch_size:,}, rate {one.lr:g}, seed {one.seed}"

    @property
    def _options(self) -> str:
        return ":".join(filter(None, (self.method, self.tuned)))


def papers_rate(network: str, method: str) -> float:
    """Return the learning rate that a method has in the papers, or would have by their rule."""
    return 0.1 if network.startswith("resnet") else methods.LEARNING_RATES[method]


def tasks(config: Record) -> list[Task]:
    """Return the runs of a sweep with this configuration, the first seed's first."""
    names = {field.name for field in fields(Settings)}
    common = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in config.items()
        if name in names
    }
    by_name: dict[str, Task] = {}
    for seed in range(config["seeds"]):
        for batch_size in config["batch_sizes"]:
            for text in config["methods"]:
                for task in _list_runs(text, config, common | {"batch_size": batch_size}, seed):
                    by_name.setdefault(task.name, task)
    return list(by_name.values())


def _list_runs(text: str, config: Record, common: Record, seed: int) -> Iterator[Task]:
    """Yield the runs of a method with one batch size and seed."""
    method = methods.without_options(text)
    for label, tuned, own in list_points(text):
        usual = config["lrs"] or [papers_rate(config["network"], method)]
        for lr in [own["lr"]] if "lr" in own else usual:
            settings = {**common, **own, "method": method, "lr": lr, "seed": seed}
            yield Task(Settings(**settings), label, tuned)
