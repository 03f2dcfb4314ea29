"""What GeometricOptimizer costs over its base on the same plain model.

    python -m benchmarks.optimizer [--device cuda|cpu] [--steps 40]
        [--batches 2,8,32,128,256] [--modes eager,compiled]

First the optimizer's step alone, for a ResNet and for 50 small layers, in milliseconds and as a
ratio to the base. Then, on a GPU, whole training steps of ResNet-50 (bfloat16 autocast,
channels_last, SGD with momentum): both optimizers step the same model, compiled once, in rounds
that take turns; a round is `steps` steps that follow one another as in training. A cell is the
median over rounds.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import torchvision
from torch import nn

import geoparam as gp
from benchmarks.timing import hardware

ROUNDS = 5
Make = Callable[[nn.Module], torch.optim.Optimizer]
SGD = {"base": torch.optim.SGD, "lr": 1e-4, "momentum": 0.9}
ADAM = {"base": torch.optim.Adam, "lr": 1e-5}
MUON = {"base": getattr(torch.optim, "Muon", None), "lr": 1e-5}


def plain(base: Any, **options: Any) -> Make:
    return lambda model: base(model.parameters(), **options)


def geometric(**options: Any) -> Make:
    return lambda model: gp.GeometricOptimizer(model, **options)


OPTIMIZERS: dict[str, Make] = {
    "SGD": plain(**SGD),
    "geometric SGD": geometric(**SGD),
    "geometric SGD, turn": geometric(turn=0.1, **SGD),
    "geometric SGD, angles": geometric(coordinates="angles", **SGD),
    "Adam": plain(**ADAM),
    "geometric Adam": geometric(**ADAM),
    "geometric Muon, turn": geometric(turn=0.1, **MUON),
}
IN_TRAINING = ("SGD", "geometric SGD", "geometric SGD, turn", "geometric Muon, turn")


def small_layers() -> nn.Module:
    return nn.Sequential(*[nn.Linear(16, 16) for _ in range(50)], nn.Linear(16, 2))


def step_times(model: nn.Module, device: str, steps: int) -> dict[str, float]:
    """Return the median milliseconds of each optimizer's step."""
    for p in model.parameters():
        p.grad = 1e-3 * torch.randn_like(p)
    functions = {name: make(model).step for name, make in OPTIMIZERS.items()}
    return rounds(functions, device, steps)


def rounds(functions: dict[str, Callable[[], Any]], device: str, steps: int) -> dict[str, float]:
    """Time the functions in turn, `steps` calls each; return milliseconds per call."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(ROUNDS + 1):
        for name, function in functions.items():
            synchronise(device)
            start = time.perf_counter()
            for _ in range(steps):
                function()
            synchronise(device)
            if turn:  # the first round warms up
                times[name].append((time.perf_counter() - start) / steps * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def training_times(batch: int, mode: str, steps: int) -> dict[str, float]:
    """Return the median milliseconds of ResNet-50's training step under each optimizer."""
    torch.manual_seed(0)
    model = torchvision.models.resnet50().cuda().to(memory_format=torch.channels_last)
    run = model if mode == "eager" else torch.compile(model)
    x = torch.randn(batch, 3, 224, 224, device="cuda").to(memory_format=torch.channels_last)
    y = torch.randint(1000, (batch,), device="cuda")

    def train(optimizer: torch.optim.Optimizer) -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.cross_entropy(run(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    functions = {name: partial(train, OPTIMIZERS[name](model)) for name in IN_TRAINING}
    return rounds(functions, "cuda", steps)


def print_table(title: str, columns: dict[str, dict[str, float]], peers: dict[str, str]) -> None:
    names = list(next(iter(columns.values())))
    print(f"\n| {title} | " + " | ".join(columns) + " |")
    print("| --- |" + " --- |" * len(columns))
    for name in names:
        cells = [f"{c[name]:.2f} ({c[name] / c[peers[name]]:.3f})" for c in columns.values()]
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batches", default="2,8,32,128,256")
    parser.add_argument("--modes", default="eager,compiled")
    arguments = parser.parse_args()
    device, steps = arguments.device, arguments.steps
    torch.backends.cudnn.benchmark = True
    print(f"{hardware(device)}; milliseconds per step (ratio to the base on the plain model)")
    resnet = torchvision.models.resnet50 if device == "cuda" else torchvision.models.resnet18
    models = {resnet.__name__: resnet(), "50 layers of 16": small_layers()}
    columns = {name: step_times(m.to(device), device, steps) for name, m in models.items()}
    peers = {name: "Adam" if "Adam" in name else "SGD" for name in OPTIMIZERS}
    print_table("optimizer's step", columns, peers)
    if device == "cuda":
        for mode in arguments.modes.split(","):
            batches = map(int, arguments.batches.split(","))
            columns = {str(b): training_times(b, mode, steps) for b in batches}
            print_table(f"ResNet-50, {mode}, batch", columns, peers)


if __name__ == "__main__":
    main()
