"""Remark 3.5: is the text's initialisation independent of the width, and is its learning rate?

The papers' text starts GmP from uniform directions, lam = 0 and r = 1, whatever the layer's size;
their code from Glorot-uniform weights, turned into angles and r = ||w||. Beside these two, SP with
Glorot's and with He's initialisation. (Output layers are Glorot's throughout.) Two questions:

    start     the Levy and Energy networks before training, for widths 16 ... 16384: how large are
              hidden activations, outputs and gradients, and how far does one step of Adam at rate
              0.01 move the outputs? (Its first step is rate x sign of the gradient.)
    trained   test error after a fixed number of steps, for each width and rate: does one rate
              serve all widths?

**What to expect.** Uniform directions with r = 1 are SP with variance 1 / n, and He's are the same
up to sqrt(2): both know the fan-in n only, and keep activations whatever the width. Glorot's
variance 2 / (n + units) lets them fall as 1 / sqrt(units). Gradients of hidden parameters fall
with the output weights, as 1 / sqrt(units), under all.

Steps are of 128 rows of Energy, split by seed, or all 50 points of Levy; the rate falls to a tenth
after a tenth of all epochs without a better training loss, nothing stops early, the test part is
met once. In float32: this is no table of the papers, and there is much to compute.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from geoparam_lab import methods
from geoparam_lab.data import splits as parts
from geoparam_lab.data import uci_data as data_sets
from geoparam_lab.data.synthetic import levy_regression
from geoparam_lab.experiments.experiment import RMSE, Experiment, Layout, Measure
from geoparam_lab.run_folder import Record, Run, select_records
from geoparam_lab.training.stacks import stacked
from geoparam_lab.training.stacks.stacked import Protocol
from geoparam_lab.training.tasks import Progress, Task, Tick, check_names, measure_missing

Array = np.ndarray

VARIANTS = {  # method and initialisation
    ("gmp", "sphere"): "GmP, text (r = 1)",
    ("gmp", "glorot"): "GmP, code (r = ‖w‖)",
    ("sp", "glorot"): "SP, Glorot",
    ("sp", "he"): "SP, He",
}
DATASETS = ("levy", "energy")
WIDTHS = tuple(4**k for k in range(2, 8))  # 16 ... 16384
RATES = (0.01, 0.03, 0.1, 0.3, 1.0)
SEEDS, STEPS, BATCH_SIZE = 3, 1000, 128
STEP = 0.01  # rate of the step that is measured before training
BEFORE = 20  # seeds of what is measured before training
IN_CACHE = 2**21  # activations of a stack and batch: 8 MB


class Member(NamedTuple):
    """A network: the fields that tell its record apart."""

    kind: str  # "start" or "trained"
    dataset: str  # "levy" or "energy"
    method: str
    init: str
    width: int  # of the hidden layer
    lr: float | None  # None before training
    seed: int

    def build(self, inputs: int, dtype: torch.dtype = torch.float64) -> nn.Sequential:
        """Return the network."""
        widths = (inputs, self.width, 1)
        return methods.mlp(self.method, widths, seed=self.seed, init=self.init, dtype=dtype)


@dataclass(frozen=True)
class Measurer:
    """Measures the members of any task of a run."""

    energy: tuple[Array, Array] | None  # the whole set, where it is asked for
    steps: int = STEPS  # of training

    def __call__(self, members: Sequence[Member], tick: Tick) -> list[Record]:
        if members[0].kind == "trained":
            return self._train(members, tick)
        data = self._data(members[0].dataset, [member.seed for member in members])
        each = zip(members, *map(torch.from_numpy, (data.x_train, data.y_train)), strict=True)
        return [measure_start(m.build(x.shape[-1]), x, y) for m, x, y in each]

    def _train(self, members: Sequence[Member], tick: Tick) -> list[Record]:
        seeds = [member.seed for member in members]
        data = self._data(members[0].dataset, seeds)
        _, rows, inputs = data.x_train.shape
        epochs = math.ceil(self.steps / math.ceil(rows / BATCH_SIZE))
        result = stacked.train(
            [member.build(inputs, torch.float32) for member in members],
            (data.x_train, data.y_train),
            [member.lr or 0.0 for member in members],
            Protocol(
                batch_size=BATCH_SIZE,
                epochs=epochs,
                patience=math.ceil(epochs / 10),
                stop_patience=epochs,
            ),
            seeds=seeds,
            progress=tick,
        )
        errors = np.sqrt(((result.predict(data.x_test) - data.y_test) ** 2).mean(1))
        return [
            {
                "test_rmse": float(errors[i]) if result.best_epoch[i] >= 0 else math.nan,
                "train_mae": float(result.best_metric[i]),
                "epochs": int(result.epochs[i]),
                "best_epoch": int(result.best_epoch[i]),
                "outcome": "diverged" if result.outcomes[i] == "diverged" else "finished",
            }
            for i in range(len(seeds))
        ]

    def _data(self, dataset: str, seeds: Sequence[int]) -> parts.Splits:
        """Return one split a seed; Levy's points are the papers', for all."""
        if dataset == "energy":
            assert self.energy is not None
            return parts.stack(*self.energy, seeds)
        levy = levy_regression()
        x, y, x_test, y_test = (np.stack([part] * len(seeds)) for part in levy)
        return parts.Splits(x, y, x_test, y_test, x_test, y_test)


def measure_start(model: nn.Sequential, x: Tensor, y: Tensor) -> Record:
    """Return root mean squares of what a new network computes, of its gradients, and of how far
    Adam's first step moves its outputs: every parameter by the rate, against its gradient's sign.
    """
    hidden = model[:-1](x)
    output = model[-1](hidden).squeeze(-1)
    stacked.absolute_error(output[None], y[None]).backward()
    gradients = {
        f"gradient_{group}": _rms(parameter.grad)
        for group, parameter in _group_parameters(model).items()
        if parameter.grad is not None
    }
    found = {"activation": _rms(hidden), "output": _rms(output), **gradients}
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(STEP * parameter.grad.sign())
    return found | {"output_change": _rms(model(x).squeeze(-1) - output)}


def _group_parameters(model: nn.Sequential) -> dict[str, nn.Parameter]:
    """Return the hidden units' parameters by what they are for, and the output weights."""
    names = {"latitude": "direction", "weight": "direction", "lam": "offset", "bias": "offset"}
    hidden = dict(model[0].named_parameters())
    found = {names.get(name, "scale"): parameter for name, parameter in hidden.items()}
    output = dict(model[-1].named_parameters())["weight"]
    return {group: found[group] for group in sorted(found)} | {"output": output}


def _rms(values: Tensor | None) -> float:
    assert values is not None
    return float(values.detach().square().mean().sqrt())


# --- a run --------------------------------------------------------------------------------------


def run(
    out: str | Path,
    *,
    widths: Sequence[int] = WIDTHS,
    datasets: Sequence[str] = DATASETS,
    rates: Sequence[float] = RATES,
    seeds: int = SEEDS,
    steps: int = STEPS,
    data: str | Path | None = None,
    jobs: int | None = None,
    resume: bool = False,
    command: str | None = None,
    progress: Progress | None = None,
) -> Run:
    """Measure and train networks of all widths; write records to a folder.

    Args:
        widths: numbers of hidden units.
        datasets: "levy", "energy" or both.
        rates: learning rates, for each width and initialisation.
        seeds: how many initial weights.
        steps: of training.
        data: folder with the Energy data, before $GEOPARAM_DATA, the cache and the network.
        jobs: how many processes of this machine work; by default as many as there are cores.
    """
    check_names("datasets", datasets, DATASETS)
    config: Record = {
        "datasets": list(dict.fromkeys(datasets)),
        "widths": sorted(set(widths)),
        "rates": sorted({float(rate) for rate in rates}),
        "seeds": seeds,
        "steps": steps,
    }
    given = (*widths, *rates, seeds, steps)
    if not (widths and rates) or not all(0 < number < math.inf for number in given):
        rule = "widths, rates, seeds and steps must be above 0 and finite"
        raise ValueError(f"{rule}; got {config}.")
    energy = data_sets.load("energy", data) if "energy" in datasets else None
    folder = Run.create(out, "width", config, command, key=Member._fields, resume=resume)
    measure_missing(folder, make_tasks(config), Measurer(energy, steps), jobs, progress)
    folder.append_missing(find_answers(folder.records(), config))
    return folder


def make_tasks(config: Record) -> list[Task]:
    """Return all tasks of a run, the long ones first."""
    before = [(None, seed) for seed in range(BEFORE)]
    trained = [(rate, seed) for rate in config["rates"] for seed in range(config["seeds"])]
    found = []
    for width, variant in itertools.product(sorted(config["widths"], reverse=True), VARIANTS):
        size = max(1, IN_CACHE // (BATCH_SIZE * width))
        stacks = [trained[i : i + size] for i in range(0, len(trained), size)]
        for dataset in config["datasets"]:
            found += [_make_task("trained", dataset, variant, width, stack) for stack in stacks]
            found.append(_make_task("start", dataset, variant, width, before))
    return found


def _make_task(
    kind: str,
    dataset: str,
    variant: tuple[str, str],
    width: int,
    own: Sequence[tuple[float | None, int]],
) -> Task:
    """Return the task of members with their own rates and seeds."""
    title = f"{kind} {dataset}, {VARIANTS[variant]}, width {width:,}"
    return Task(title, tuple(Member(kind, dataset, *variant, width, *pair) for pair in own))


# --- what comes out -----------------------------------------------------------------------------


def find_answers(records: Sequence[Record], config: Record) -> list[Record]:
    """Return a record for each data set and variant that says how things depend on the width.

    `exponent_X` is the slope of log X over log width: 0 where X does not depend on it.
    `best_rates` has the best rate for each width, from the narrowest on. A rate's factor is the
    highest ratio over widths of its test error to that of the best rate: `one_rate` has the lowest
    factor, `one_rate_factor`; `papers_rate` and `papers_rate_factor` are the papers' choice.
    """
    found = []
    for dataset, (method, init) in itertools.product(config["datasets"], VARIANTS):
        own = select_records(records, dataset=dataset, method=method, init=init)
        answer = find_exponents(select_records(own, kind="start"))
        errors = _errors(select_records(own, kind="trained"), config)
        answer |= compare_rates(errors, config["rates"], methods.LEARNING_RATES[method])
        key = {"kind": "answer", "dataset": dataset, "method": method, "init": init}
        found.append(dict.fromkeys(Member._fields) | key | answer)
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


def _errors(records: Iterable[Record], config: Record) -> Array:
    """Return mean test errors (widths, rates); infinite where a network has none."""
    sums = np.zeros((len(config["widths"]), len(config["rates"])))
    for record in records:
        at = config["widths"].index(record["width"]), config["rates"].index(record["lr"])
        sums[at] += record["test_rmse"] if math.isfinite(record["test_rmse"]) else math.inf
    return sums / config["seeds"]


def compare_rates(errors: Array, rates: Sequence[float], papers: float) -> Record:
    """Return which rates are best for errors (widths, rates), and what one for all would cost.

    Example:
        >>> compare_rates(np.array([[1.0, 2.0], [3.0, 2.0]]), rates=(0.01, 0.1), papers=0.1)
        {'best_rates': [0.01, 0.1], 'one_rate': 0.01, 'one_rate_factor': 1.5, 'papers_rate': 0.1, \
'papers_rate_factor': 2.0}
    """
    factors = (errors / errors.min(axis=1, keepdims=True)).max(axis=0)
    found = {
        "best_rates": [rates[i] for i in errors.argmin(axis=1)],
        "one_rate": rates[int(factors.argmin())],
        "one_rate_factor": round(float(factors.min()), 4),
    }
    if papers in rates:
        factor = round(float(factors[list(rates).index(papers)]), 4)
        found |= {"papers_rate": papers, "papers_rate_factor": factor}
    return found


# --- what it says -------------------------------------------------------------------------------

_EXPONENTS = Layout(
    group="dataset",
    where={"kind": "answer"},
    fields=(
        Measure("exponent_activation", "activations"),
        Measure("exponent_output", "outputs"),
        Measure("exponent_output_change", "change of outputs in a step"),
        Measure("exponent_gradient_direction", "gradient of directions"),
        Measure("exponent_gradient_offset", "gradient of offsets"),
        Measure("exponent_gradient_scale", "gradient of scales"),
        Measure("exponent_gradient_output", "gradient of output weights"),
    ),
    title="Exponent with which things grow with the width, before training",
    notes=(
        "0: does not depend on the width; 0.5: grows with its square root; -0.5: shrinks with it.",
        "GmP's scales r begin at 1 with init sphere, the papers' text, and at the norms of "
        "weights with init Glorot, the papers' code.",
    ),
)
_ONE_RATE = Layout(
    group="dataset",
    where={"kind": "answer"},
    fields=(
        Measure("best_rates", "best rate for each width", None),
        Measure("one_rate", "best rate for all widths", None),
        Measure("one_rate_factor", "error with it, at most", 2),
        Measure("papers_rate", "papers' rate", None),
        Measure("papers_rate_factor", "error with the papers' rate, at most", 2),
    ),
    title="Whether one learning rate serves all widths",
    notes=(
        "Best rates from the narrowest network to the widest. Errors are multiples of the best "
        "rate's, at the width where they are highest.",
    ),
)

EXPERIMENT = Experiment(
    name="width",
    title="Initialisation and width",
    about="The same network is built at several widths, to see what depends on the width.",
    summary="What depends on the width: scales at the start, the best rate. Half an hour.",
    run=run,
    layouts=(
        _EXPONENTS,
        _ONE_RATE,
        Layout((RMSE,), "width", "width", "dataset", where={"kind": "trained"}, compare=False),
    ),
    names={"normal": "normal inputs, over their number"},  # of an earlier run
)
