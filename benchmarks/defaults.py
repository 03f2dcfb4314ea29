"""What should a first try be? Four small tasks, all methods, five rates, three seeds.

    python -m benchmarks.defaults --out results/benchmarks/defaults.json --jobs 2 [--resume]
    python -m benchmarks.defaults --out results/benchmarks/defaults.json --draw

Every run has one thread, batches in the seed's order, a linear warmup over the first tenth of its
steps and then a linear fall to 0. Accuracy and loss of the validation and the test part are taken
after the first epoch and at the end. The tasks are in `benchmarks.default_tasks`; the tables and
the figure beside the JSON file come from `benchmarks.default_tables`. Under 20 minutes on two
idle cores.
"""

import argparse
import functools
import itertools
import json
import math
import multiprocessing
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import geoparam as gp
from benchmarks import default_tables
from benchmarks.default_tasks import TASKS, Part, Task, batches
from geoparam.optim.muon import RowMuon

RATES = {
    "adam": (1e-3, 3e-3, 1e-2, 3e-2, 1e-1),
    "sgd": (1e-2, 3e-2, 1e-1, 3e-1, 1.0),
    "muon": (3e-3, 1e-2, 3e-2, 1e-1, 3e-1),
    "turn": (0.6, 1.2, 2.4, 4.8, 9.6),
    "snippet": (2.4,),  # the README's, with lr=1e-3
}
# AdamW's rate for what Muon does not step; 1e-2 is about the plain model's best here.
REST = {"muon": 1e-2, "turn": 1e-2, "snippet": 1e-3}
TURNS = ("turn", "snippet")
BOTH = ("adam", "sgd")
WORST = 10.0  # the loss of a run that is not finite


@dataclass(frozen=True)
class Method:
    """One line of the tables.

    Args:
        norm: the network has its norms (BatchNorm; LayerNorm in the transformer).
        layers: "wn", or the coordinates of geometric layers.
        imn: input mean normalization, with new parameters by Glorot's rule.
        optimizer: the coordinates of GeometricOptimizer.
        families: the optimizers that are tried, keys of RATES.
        scale: rate of r over `lr`; None for the square root of the mean fan-in.
        momentum: Muon's.
    """

    norm: bool = False
    layers: str | None = None
    imn: bool = False
    optimizer: str | None = None
    families: tuple[str, ...] = BOTH
    scale: float | None = 1.0
    momentum: float = 0.95


METHODS = {
    "plain": Method(),
    "norm": Method(norm=True),
    "wn": Method(layers="wn"),
    "gmp layers": Method(layers="angles"),
    "gmp+imn layers": Method(layers="angles", imn=True),
    "intrinsic layers": Method(layers="intrinsic"),
    "intrinsic+imn layers": Method(layers="intrinsic", imn=True),
    "optimizer, intrinsic": Method(optimizer="intrinsic"),
    "optimizer, intrinsic, norm": Method(optimizer="intrinsic", norm=True),
    "optimizer, angles": Method(optimizer="angles"),
    "optimizer, angles, norm": Method(optimizer="angles", norm=True),
    "optimizer, intrinsic, imn": Method(optimizer="intrinsic", imn=True),
    "muon": Method(families=("muon",)),
    "muon, norm": Method(families=("muon",), norm=True),
    "muon, norm, momentum 0.6": Method(families=("muon",), norm=True, momentum=0.6),
    "optimizer, turn": Method(optimizer="intrinsic", families=TURNS),
    "optimizer, turn, norm": Method(optimizer="intrinsic", families=TURNS, norm=True),
    "optimizer, turn, norm, momentum 0.6": Method(
        optimizer="intrinsic", families=("turn",), norm=True, momentum=0.6
    ),
    "optimizer, turn, imn": Method(optimizer="intrinsic", families=TURNS, imn=True),
    "optimizer, intrinsic, r 3x": Method(optimizer="intrinsic", families=("adam",), scale=3.0),
    "optimizer, intrinsic, r sqrt(n)x": Method(
        optimizer="intrinsic", families=("adam",), scale=None
    ),
}
Key = tuple[str, str, str, float, int]  # task, method, family, rate, seed


def hidden_layers(model: nn.Module) -> list[nn.Module]:
    """Return all Linear and Conv2d but the output layer, which is the last."""
    return [m for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d)][:-1]


def build(method: Method, task: Task, example: Tensor) -> nn.Module:
    """Return a fresh network under a method."""
    model = task.build("bn" if method.norm else None)
    if method.layers == "wn":
        for layer in hidden_layers(model):
            weight_norm(layer)
        return model
    options: dict[str, Any] = {"coordinates": method.layers} if method.layers else {}
    if method.imn:
        options |= {"norm": "imn", "init": "glorot"}
        options |= {} if method.layers else {"weights": "plain"}
    return gp.convert_(model, example_inputs=(example,), **options) if options else model


def make_optimizers(
    method: Method, model: nn.Module, family: str, rate: float, example: Tensor
) -> list[torch.optim.Optimizer]:
    """Return what steps the model; Muon on plain rows needs a second optimizer for the rest."""
    if family == "muon":
        rows = [layer.weight for layer in hidden_layers(model)]
        rest = [p for p in model.parameters() if all(p is not row for row in rows)]
        rest_optimizer = torch.optim.AdamW(rest, lr=REST[family], weight_decay=0.0)
        muon = RowMuon(rows, lr=rate, weight_decay=0.0, momentum=method.momentum)
        return [muon, rest_optimizer]
    if family in TURNS:
        options: dict[str, Any] = {"turn": rate, "lr": REST[family], "momentum": method.momentum}
        return [
            gp.GeometricOptimizer(model, torch.optim.Muon, example_inputs=(example,), **options)
        ]
    base = torch.optim.Adam if family == "adam" else torch.optim.SGD
    options = {} if family == "adam" else {"momentum": 0.9}
    if method.optimizer:
        factor = method.scale or math.sqrt(mean_fan_in(model))
        return [
            gp.GeometricOptimizer(
                model,
                base,
                lr=rate,
                coordinates=method.optimizer,
                scale_lr=factor * rate,
                example_inputs=(example,),
                **options,
            )
        ]
    optimizer = base(gp.param_groups(model, lr=rate, kind=family), **options)
    if method.layers == "intrinsic":
        optimizer.register_step_post_hook(gp.retract(model))
    return [optimizer]


def mean_fan_in(model: nn.Module) -> float:
    sizes = [layer.weight[0].numel() for layer in hidden_layers(model)]
    return sum(sizes) / len(sizes)


def train(key: Key, epochs: int | None = None) -> dict[str, Any]:
    """Train once; return the key, and losses and accuracies after the first and last epoch."""
    name, method_name, family, rate, seed = key
    task, method = TASKS[name], METHODS[method_name]
    parts = task.load()
    example = parts[0][0][:2]
    torch.manual_seed(seed)
    model = build(method, task, example)
    optimizers = make_optimizers(method, model, family, rate, example)
    epochs = epochs or task.epochs
    steps = epochs * (len(parts[0][0]) // task.batch)
    warmup = max(1, steps // 10)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda k: min((k + 1) / warmup, (steps - k) / (steps - warmup))
        )
        for optimizer in optimizers
    ]
    generator = torch.Generator().manual_seed(seed)
    evaluations = []
    for epoch in range(epochs):
        for x, y in batches(parts[0], task.batch, generator):
            loss = F.cross_entropy(model(x), y)
            model.zero_grad()
            loss.backward()
            for optimizer, schedule in zip(optimizers, schedules, strict=True):
                optimizer.step()
                schedule.step()
        if epoch in (0, epochs - 1):
            evaluations.append([evaluate(model, part) for part in parts[1:]])
    (first_validation, first), (validation, last) = evaluations[0], evaluations[-1]
    return {
        "task": name,
        "method": method_name,
        "family": family,
        "rate": rate,
        "seed": seed,
        "first": first,
        "last": last,
        "validation": [first_validation, validation],
    }


def evaluate(model: nn.Module, part: Part) -> list[float]:
    """Return the mean loss and the accuracy in percent, of a model in evaluation mode."""
    model.eval()
    with torch.no_grad():
        output = model(part[0])
        loss = F.cross_entropy(output, part[1]).item()
        accuracy = (output.argmax(1) == part[1]).float().mean().item()
    model.train()
    return [round(min(loss, WORST), 4) if loss == loss else WORST, round(100 * accuracy, 2)]


def all_keys(tasks: list[str], methods: list[str], seeds: int) -> Iterator[Key]:
    """Yield one seed of everything first, so that an interrupted sweep is of use."""
    for seed, task, method in itertools.product(range(seeds), tasks, methods):
        for family in METHODS[method].families:
            for rate in RATES[family]:
                yield task, method, family, rate, seed


def key_of(record: dict[str, Any]) -> Key:
    return (
        record["task"],
        record["method"],
        record["family"],
        record["rate"],
        record["seed"],
    )


def write(path: Path, records: list[dict[str, Any]]) -> None:
    """Write all records, one in a line; a kill leaves the file before."""
    lines = ",\n".join(json.dumps(record) for record in records)
    new = path.with_suffix(".new")
    new.write_text(f"[\n{lines}\n]\n")
    os.replace(new, path)


def sweep(path: Path, keys: list[Key], jobs: int, epochs: int | None) -> list[dict[str, Any]]:
    """Run what is not in the file yet, and write the file every half minute."""
    records = json.loads(path.read_text()) if path.exists() else []
    done = {key_of(record) for record in records}
    left = [key for key in keys if key not in done]
    print(f"{len(left)} runs, {len(done)} of which there are results", flush=True)
    start = written = time.monotonic()
    for count, record in enumerate(_run(left, jobs, epochs), start=1):
        records.append(record)
        if time.monotonic() - written > 30:
            written = time.monotonic()
            write(path, records)
            minutes = (written - start) / 60
            print(f"{count} of {len(left)} runs in {minutes:.1f} minutes", flush=True)
    order = {key: at for at, key in enumerate(keys)}
    records.sort(key=lambda record: order.get(key_of(record), len(order)))
    write(path, records)
    return records


def _run(keys: list[Key], jobs: int, epochs: int | None) -> Iterator[dict[str, Any]]:
    """Yield the records of all keys, in any order; each process has one thread."""
    one = functools.partial(train, epochs=epochs)
    torch.set_num_threads(1)
    if jobs == 1:
        yield from map(one, keys)
        return
    with multiprocessing.get_context("spawn").Pool(jobs, torch.set_num_threads, (1,)) as pool:
        yield from pool.imap_unordered(one, keys)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("defaults.json"))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--methods", default=";".join(METHODS), help="separated by ;")
    parser.add_argument("--epochs", type=int, help="instead of each task's own number")
    parser.add_argument("--resume", action="store_true", help="go on with the file in --out")
    parser.add_argument("--draw", action="store_true", help="tables and figure of --out alone")
    given = parser.parse_args(arguments)
    if given.draw:
        records = json.loads(given.out.read_text())
    else:
        if given.out.exists() and not given.resume:
            parser.error(f"{given.out} exists: give --resume, or another --out")
        keys = list(all_keys(given.tasks.split(","), given.methods.split(";"), given.seeds))
        records = sweep(given.out, keys, given.jobs, given.epochs)
    given.out.with_suffix(".md").write_text(default_tables.to_markdown(records))
    default_tables.draw(records, given.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
