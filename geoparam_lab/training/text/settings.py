"""The settings of one run on text, and the runs of a sweep.

A sweep is a grid. Sizes (width, depth, steps, batch size) are combined, or varied one at a time
around the first of each; at each size a method has every combination of those numbers that are its
own: "turn" has angles and no decay, Muon rates and a decay. A method may name its own values:

    muon:lr=0.01,0.02:decay=0.1,0.3
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from geoparam_lab import gpt
from geoparam_lab.checks import Users, check_fields, check_names, read_options
from geoparam_lab.run_folder import Record
from geoparam_lab.training.processes import PRECISIONS
from geoparam_lab.training.schedules import SCHEDULES
from geoparam_lab.training.tasks import Task

_CHOICES: dict[str, Any] = {
    "norm": gpt.NORMS,
    "mlp": gpt.MLPS,
    "base": ("muon", "adamw", "sgd"),
    "coordinates": ("intrinsic", "angles"),
    "scale": ("auto", "free", "fixed"),
    "precision": PRECISIONS,
}
_RULES = {
    ">= 1": ("width", "depth", "steps", "batch_size", "context", "marks", "windows", "heads"),
    "from 0 to below 1": ("momentum", "dropout", "warmup", "final", "hold", "beta2"),
    "above 0 and finite": ("lr", "turn", "rest_lr", "scale_lr", "power", "std"),
    "0 or more and finite": ("decay", "rest_decay", "clip"),
}

# The numbers of each method, and their values where a sweep names none. `lr` is the rate of the
# rows; "turn" has an angle in its place, and its `lr` is that of the rest.
_REST: dict[str, float | None] = {"rest_lr": 3e-3, "rest_decay": None}
_OURS = {**_REST, "scale_lr": None}
METHODS: dict[str, dict[str, float | None]] = {
    "turn": {"turn": 2.4, "momentum": 0.95, **_OURS},
    "geometric": {"lr": 3e-3, "momentum": 0.9, **_OURS},
    "adamw": {"lr": 3e-3, "decay": 0.1, "momentum": 0.9},
    "muon": {"lr": 0.02, "decay": 0.1, "momentum": 0.95, **_REST},
    "angularmuown": {"lr": 0.04, "momentum": 0.95, **_REST},
    "muonh": {"lr": 0.018, "momentum": 0.95, **_REST},
}
SIZES = {"width": "widths", "depth": "depths", "steps": "steps", "batch_size": "batch_sizes"}
NUMBERS = {  # of methods, and what a sweep calls several
    "lr": "lrs",
    "turn": "turns",
    "decay": "decays",
    "momentum": "momenta",
    "rest_lr": "rest_lrs",
    "rest_decay": "rest_decays",
    "scale_lr": "scale_lrs",
}


@dataclass(frozen=True)
class TextSettings:
    """Everything that decides the numbers of one run, apart from the text.

    The command line shows what is said here of each.

    Args:
        method: "adamw", "muon", "angularmuown", "muonh", or `gp.GeometricOptimizer`: "turn", and
            "geometric" without a turn.
        width: width of the residual stream.
        depth: number of blocks.
        steps: number of optimizer steps.
        batch_size: windows in a step, over all processes.
        seed: seed of the weights and the windows.
        lr: learning rate of the hidden matrices at the schedule's peak; with "adamw" of
            everything, with "turn" of all other parameters.
        schedule: how all rates fall after the warmup: "linear", "cosine", "power" (1 - t^p) or
            "hold" (hold, then fall along a line).
        turn: degrees by which units turn in a step, at the schedule's peak.
        decay: weight decay of the hidden matrices; with "adamw", of all matrices.
        momentum: momentum of the hidden matrices; with "adamw", its first beta.
        rest_lr: AdamW's rate for embeddings, norms and the output layer.
        rest_decay: weight decay of embeddings and the output layer.
        scale_lr: learning rate of r, for our methods.
        heads: number of attention heads; by default one for each 64 of the width.
        context: bytes in a window.
        norm: norm before attention and MLP, and at the end: "layernorm" or "rmsnorm".
        mlp: activation of the MLPs: "relu2" (a squared ReLU), "gelu" or "relu".
        zero_projections: let maps into the residual stream start from 0.
        dropout: share of activations dropped in training.
        tied: let embeddings and output layer share their weight.
        std: standard deviation of all hidden weights at the start; by default one that goes by
            the fan-in.
        warmup: share of all steps in which rates rise from 0, from 0 to below 1.
        final: share of the rate that is left at the end.
        power: p of the schedule "power".
        hold: share of the steps at the full rate, with the schedule "hold".
        beta2: AdamW's second beta.
        base: optimizer of units, for our methods: "muon", "adamw" or "sgd".
        coordinates: what a step of a unit moves: its "intrinsic" direction, or with the method
            "geometric" also its "angles".
        scale: how r of units is trained: "free" by a rule of its own, "fixed" not at all, "auto"
            as `gp.GeometricOptimizer` chooses.
        clip: largest norm of the gradient, to which longer ones are shortened; 0 for no limit.
        marks: number of evaluations on the validation text, equally spaced; the last is at the
            end.
        windows: windows of the validation text in an evaluation, the same each time.
        precision: "bf16" for autocast on a GPU, or "fp32"; CPUs always have fp32.
        compile: use torch.compile.
        deterministic: make a run give the same bits every time on a GPU too; slower.
    """

    method: str
    width: int
    depth: int
    steps: int
    batch_size: int
    seed: int
    lr: float
    schedule: str
    turn: float | None
    decay: float | None
    momentum: float
    rest_lr: float | None
    rest_decay: float | None
    scale_lr: float | None
    heads: int | None = None
    context: int = 256
    norm: str = "layernorm"
    mlp: str = "relu2"
    zero_projections: bool = False
    dropout: float = 0.0
    tied: bool = False
    std: float | None = None
    warmup: float = 0.1
    final: float = 0.0
    power: float = 0.5
    hold: float = 0.8
    beta2: float = 0.95
    base: str = "muon"
    coordinates: str = "intrinsic"
    scale: str = "auto"
    clip: float = 1.0
    marks: int = 5
    windows: int = 1024
    precision: str = "bf16"
    compile: bool = False
    deterministic: bool = False
    accumulate: ClassVar[int] = 1

    def __post_init__(self) -> None:
        check_names("each of methods", METHODS, self.method)
        check_names("each of schedules", SCHEDULES, self.schedule)
        check_fields(self, _CHOICES, _RULES)
        if self.width % self.head_count:
            raise ValueError(
                f"width must be a multiple of heads; got width {self.width} and "
                f"{self.head_count} heads."
            )
        if self.method == "turn" and self.coordinates == "angles":
            raise ValueError("turn needs coordinates intrinsic; got angles. Use geometric.")
        if self.method == "muonh" and self.zero_projections:
            raise ValueError(
                "muonh keeps each matrix at the length of its start: projections that start from "
                "0 would stay there. Leave --zero-projections out, or muonh."
            )

    @property
    def head_count(self) -> int:
        """How many heads there are."""
        return self.heads or max(1, self.width // 64)


def _is_ours(settings: TextSettings) -> bool:
    return settings.method in ("turn", "geometric")


USERS: Users = {  # of settings of single methods
    "base": ("the methods turn and geometric", _is_ours),
    "coordinates": ("the methods turn and geometric", _is_ours),
    "scale": ("the methods turn and geometric", _is_ours),
    "power": ("the schedule power", lambda run: run.schedule == "power"),
    "hold": ("the schedule hold", lambda run: run.schedule == "hold"),
}


def get_numbers(settings: TextSettings) -> dict[str, float]:
    """Return the numbers of a run's method."""
    values = {name: getattr(settings, name) for name in METHODS[settings.method]}
    return {name: value for name, value in values.items() if value is not None}


def make_task(settings: TextSettings) -> Task:
    """Return a run as a task; its labels have what was tuned besides the rate."""
    numbers, schedule = get_numbers(settings), settings.schedule
    sizes = [f"{size.removesuffix('_size')}{getattr(settings, size)}" for size in SIZES]
    words = [f"{name}{value:g}" for name, value in numbers.items()]
    rate = "rest_lr" if settings.method == "turn" else "lr"
    tuned = [f"{name}={value:g}" for name, value in numbers.items() if name != rate]
    if schedule != "linear":
        words.append(schedule)
        tuned.append(f"schedule={schedule}")
    name = "-".join([settings.method, *sizes, *words, f"seed{settings.seed}"])

    peak = f"rate {settings.lr:g}"
    if settings.turn is not None:
        peak = f"{settings.turn:g} degrees"
    size = f"width {settings.width}, depth {settings.depth}, batch {settings.batch_size}"
    title = f"{settings.method}, {size}, {peak}, seed {settings.seed}"
    return Task(title, ((name,),), settings, {"tuned": ":".join(tuned)})


def list_sizes(config: Mapping[str, Any]) -> list[dict[str, int]]:
    """Return the sizes of a sweep: all combinations, or one factor at a time.

    Example:
        >>> axes = {"widths": [256, 64], "depths": [6, 3], "steps": [500], "batch_sizes": [96]}
        >>> len(list_sizes({**axes, "one_factor": False}))
        4
        >>> for size in list_sizes({**axes, "one_factor": True}):
        ...     print(*size.values())
        256 6 500 96
        64 6 500 96
        256 3 500 96
    """
    axes = {size: config[several] for size, several in SIZES.items()}
    if not config["one_factor"]:
        combinations = itertools.product(*axes.values())
        return [dict(zip(axes, sizes, strict=True)) for sizes in combinations]
    centre = {size: values[0] for size, values in axes.items()}
    others = [centre | {size: n} for size, values in axes.items() for n in values[1:]]
    return [centre, *others]


def list_tasks(config: Record, records: Sequence[Record] = ()) -> list[Task]:
    """Return the runs of a sweep, the first seed's first, and the methods of a size together."""
    names = [field.name for field in fields(TextSettings) if field.name in config]
    common = {name: config[name] for name in names}
    tasks: dict[str, Task] = {}
    grid = itertools.product(range(config["seeds"]), list_sizes(config), config["methods"])
    for seed, size, method in grid:
        for numbers in _list_numbers(method, config):
            task = make_task(TextSettings(**{**common, **size, **numbers, "seed": seed}))
            tasks.setdefault(task.name, task)
    return list(tasks.values())


def _list_numbers(text: str, config: Record) -> Iterator[dict[str, Any]]:
    """Yield a method's schedule and numbers in all combinations: its own, or the sweep's."""
    method, given = read_method(text)
    axes: dict[str, Any] = {"schedule": given.get("schedule", config["schedules"])}
    for number, usual in METHODS[method].items():
        several = given.get(number, config[NUMBERS[number]])
        axes[number] = [usual] if several is None else several
    absent = dict.fromkeys(NUMBERS)
    for values in itertools.product(*axes.values()):
        numbers = {**absent, **dict(zip(axes, values, strict=True)), "method": method}
        if method == "turn":
            numbers["lr"] = numbers["rest_lr"]
        yield numbers


def read_method(text: str) -> tuple[str, dict[str, list[Any]]]:
    """Return a method and the numbers and schedules that it was given for itself."""
    method = text.partition(":")[0]
    check_names("each of methods", METHODS, method)
    readers: dict[str, Any] = dict.fromkeys(METHODS[method], float)
    return read_options(text, readers | {"schedule": str})


def check_used(config: Record) -> None:
    """Raise ValueError where a sweep has values of a number that none of its methods takes."""
    methods = [read_method(text) for text in config["methods"]]
    for number, several in NUMBERS.items():
        takers = [name for name, numbers in METHODS.items() if number in numbers]
        is_used = any(method in takers and number not in given for method, given in methods)
        if config[several] is not None and not is_used:
            raise ValueError(
                f"{several} are numbers of the methods {', '.join(takers)}; got methods "
                f"{', '.join(config['methods'])}, which take none. Leave {several} out."
            )
