"""Remark 3.5: is the text's initialisation independent of the width?

The papers' text starts GmP from uniform directions, lam = 0 and r = 1, whatever the layer's size;
their code from Glorot-uniform weights, turned into angles and r = ||w||. Beside these two, SP with
Glorot's and with He's initialisation. (Output layers are Glorot's throughout.) The Levy and Energy
networks before training, for widths 16 ... 16384: how large are hidden activations, outputs and
gradients, and how far does one step of Adam at rate 0.01 move the outputs? (Its first step is
rate x sign of the gradient.) Energy is split by seed; Levy has the papers' 50 points.

**What to expect.** Uniform directions with r = 1 are SP with variance 1 / n, and He's are the same
up to sqrt(2): both know the fan-in n only, and keep activations whatever the width. Glorot's
variance 2 / (n + units) lets them fall as 1 / sqrt(units). Gradients of hidden parameters fall
with the output weights, as 1 / sqrt(units), under all.
"""

import functools
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from geoparam_lab import methods
from geoparam_lab.checks import check_counts, check_names
from geoparam_lab.data import splits as parts
from geoparam_lab.data import uci_data as data_sets
from geoparam_lab.data.synthetic import levy_regression
from geoparam_lab.experiments.experiment import Experiment, Layout, Measure
from geoparam_lab.run_folder import Record, Run, select_records
from geoparam_lab.training.stacks import stacked
from geoparam_lab.training.tasks import Done, Progress, Session, Task, Tick

Array = np.ndarray

VARIANTS = {  # method and initialisation
    ("gmp", "sphere"): "GmP, text (r = 1)",
    ("gmp", "glorot"): "GmP, code (r = ‖w‖)",
    ("sp", "glorot"): "SP, Glorot",
    ("sp", "he"): "SP, He",
}
DATASETS = ("levy", "energy")
WIDTHS = tuple(4**k for k in range(2, 8))  # 16 ... 16384
STEP = 0.01  # rate of the step that is measured
GROUPS = {  # parameters by what they are for; an output layer is number 1 under GmP, 2 under SP
    "direction": ("0.latitude", "0.weight"),
    "offset": ("0.lam", "0.bias"),
    "scale": ("0.r",),
    "output": ("1.weight", "2.weight"),
}


class Member(NamedTuple):
    """A network: the fields that tell its record apart."""

    kind: str  # "start", or "answer" for what follows from these
    dataset: str  # "levy" or "energy"
    method: str
    init: str
    width: int  # of the hidden layer
    seed: int


def measure_start(model: nn.Sequential, x: Tensor, y: Tensor) -> Record:
    """Return root mean squares of what a new network computes, of its gradients, and of how far
    Adam's first step moves its outputs: every parameter by the rate, against its gradient's sign.
    """
    hidden = model[:-1](x)
    output = model[-1](hidden).squeeze(-1)
    loss = stacked.absolute_error(output[None], y[None])
    parameters = dict(model.named_parameters())
    slopes = torch.autograd.grad(loss, list(parameters.values()))
    by_name = dict(zip(parameters, slopes, strict=True))
    found = {"activation": _rms(hidden), "output": _rms(output)}
    for group, names in GROUPS.items():
        found |= {f"gradient_{group}": _rms(by_name[name]) for name in names if name in by_name}
    with torch.no_grad():
        for parameter, slope in zip(parameters.values(), slopes, strict=True):
            parameter.sub_(STEP * slope.sign())
    return found | {"output_change": _rms(model(x).squeeze(-1) - output)}


def _rms(values: Tensor) -> float:
    return float(values.detach().square().mean().sqrt())


def run(
    out: str | Path,
    *,
    widths: Sequence[int] = WIDTHS,
    datasets: Sequence[str] = DATASETS,
    seeds: int = 20,
    data: str | Path | None = None,
    resume: bool = False,
    command: str | None = None,
    progress: Progress | None = None,
) -> Run:
    """Measure networks of all widths before training; write records to a folder.

    Args:
        widths: numbers of hidden units.
        datasets: "levy", "energy" or both.
        seeds: how many initial weights.
        data: folder with the Energy data, before $GEOPARAM_DATA, the cache and the network.
    """
    check_names("each of datasets", DATASETS, *datasets)
    check_counts(seeds=seeds, widths=min(widths, default=0))
    datasets, widths = list(dict.fromkeys(datasets)), sorted(set(widths))
    if len(widths) < 2:
        raise ValueError(f"exponents are fitted to two widths or more; got {widths}.")
    config: Record = {"datasets": datasets, "widths": widths, "seeds": seeds}
    energy = data_sets.load("energy", data) if "energy" in datasets else None
    grid = itertools.product(datasets, VARIANTS, widths, range(seeds))
    todo = [Task(f"Width {w:,}", (Member("start", d, *v, w, seed),)) for d, v, w, seed in grid]
    work = functools.partial(measure, energy)
    options: Record = {"key": Member._fields, "resume": resume}
    with Run.create(out, "width", config, command, **options) as folder:
        Session(folder, work, len(todo), 1, progress).spread(todo)
        folder.append_missing(find_answers(folder.records(), config))
    return folder


def measure(energy: tuple[Array, Array] | None, task: Task, tick: Tick) -> Done:
    """Measure one network; `energy` is the whole set, where it is asked for."""
    [member] = task.keys
    x, y = levy_regression()[:2]
    if member.dataset == "energy":
        assert energy is not None
        split = parts.stack(*energy, [member.seed])
        x, y = split.x_train[0], split.y_train[0]
    widths = (x.shape[-1], member.width, 1)
    model = methods.mlp(member.method, widths, seed=member.seed, init=member.init)
    found = measure_start(model, torch.from_numpy(x), torch.from_numpy(y))
    return Done([member._asdict() | found])


def find_answers(records: Sequence[Record], config: Record) -> list[Record]:
    """Return a record for each data set and variant that says how things depend on the width.

    `exponent_X` is the slope of log X over log width: 0 where X does not depend on it.
    """
    found = []
    for dataset, (method, init) in itertools.product(config["datasets"], VARIANTS):
        key = {"dataset": dataset, "method": method, "init": init}
        answer = find_exponents(select_records(records, kind="start", **key))
        found.append(dict.fromkeys(Member._fields) | {"kind": "answer"} | key | answer)
    return found


def find_exponents(records: Sequence[Record]) -> Record:
    """Return the slope of each measure's logarithm over that of the width.

    Example:
        >>> find_exponents([{"width": w, "seed": 0, "output": 3 / w} for w in (16, 64)])
        {'exponent_output': -1.0}
    """
    widths = np.array([record["width"] for record in records])
    if len(set(widths)) < 2:
        return {}
    found = {}
    for name in (name for name in records[0] if name not in Member._fields):
        slope = np.polyfit(np.log(widths), np.log([record[name] for record in records]), 1)[0]
        found[f"exponent_{name}"] = round(float(slope), 4)
    return found


_EXPONENTS = Layout(
    (
        Measure("exponent_activation", "activations"),
        Measure("exponent_output", "outputs"),
        Measure("exponent_output_change", "change of outputs in a step"),
        Measure("exponent_gradient_direction", "gradient of directions"),
        Measure("exponent_gradient_offset", "gradient of offsets"),
        Measure("exponent_gradient_scale", "gradient of scales"),
        Measure("exponent_gradient_output", "gradient of output weights"),
    ),
    {"dataset": "data set", "init": "init"},
    where={"kind": "answer"},
    compare=False,
    title="Exponent with which things grow with the width, before training",
    notes=(
        "0: does not depend on the width; 0.5: grows with its square root; -0.5: shrinks with it.",
        "GmP's scales r begin at 1 with init sphere, the papers' text, and at the norms of "
        "weights with init Glorot, the papers' code.",
    ),
)

EXPERIMENT = Experiment(
    name="width",
    title="Initialisation and width",
    about="The same network is built at several widths, to see what depends on the width.",
    summary="What depends on the width: activations, outputs and gradients at the start. Seconds.",
    run=run,
    layouts=(_EXPONENTS,),
)
