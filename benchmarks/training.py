"""What a training step costs without BatchNorm, and with the geometry, over the model with it.

    python -m benchmarks.training [--device cuda|cpu] [--networks resnet50,vgg6]
        [--batches 2,8,32,128,256] [--modes eager,compiled,graphs] [--methods bn,none,...]
        [--steps 50] [--profile]

One step is forward, backward and SGD with momentum on a fixed batch: bfloat16 autocast and
channels_last on a GPU, cudnn.benchmark on; float32 on a CPU. Each model has the device for itself,
and its time is the median of 50 steps after the warm-up, which follow one another as in training:
on a GPU the next step is launched before the last one has ended. A cell is time / memory, as
ratios to the model with BatchNorm in the same mode and run. Memory (on a GPU) is the most that
was allocated, parameters and optimizer included. In compiled code, and in "graphs", compiled code
in CUDA graphs (mode="reduce-overhead"), the seconds until the first step is done follow in
brackets; the memory of graphs is not seen. `--profile` adds a table: device busy, number of
kernels.

    bn              torchvision's ResNet-50; VGG-6 of the experiments
    none            the same without norms
    bn+geometric    BN kept, GeometricOptimizer around SGD
    imn             convert_(norm="imn", weights="plain"): input means in place of BN
    imn+geometric   the same, GeometricOptimizer around SGD
    layers          convert_(norm="imn"): weights stored as angles, r and lam
    intrinsic       the same, stored as unit vectors
    budget          BN, with activation_memory_budget = 0.5; compiled alone
    tune            Tune mode (You et al., 2024): BN's statistics fixed, and in the weights

The host is named by BN's time at batch 2, where it alone decides.
"""

import argparse
import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
import torch._functorch.config
import torch.nn.functional as F
from torch import Tensor, nn

import geoparam as gp
from benchmarks.timing import hardware, training_step
from geoparam_lab import networks

METHODS = ("bn", "none", "bn+geometric", "imn", "imn+geometric", "layers", "budget", "tune")
SIZES = {"cuda": {"resnet50": 224, "vgg6": 32}, "cpu": {"resnet50": 64, "vgg6": 32}}
BATCHES = {"cuda": {"resnet50": 256, "vgg6": 1024}, "cpu": {"resnet50": 8, "vgg6": 64}}
WARMUP = 10


# --- models -------------------------------------------------------------------------------------


def build(network: str, method: str, device: str) -> nn.Module:
    """Return a network under a method."""
    torch.manual_seed(0)
    model = _network(network).to(device)
    images = torch.randn(4, 3, 64, 64, device=device)
    name = method.removesuffix("+geometric")
    options: Any = {"norm": "imn", "pretrained": True, "example_inputs": images}
    if name == "none":
        _replace_norms(model, lambda norm: nn.Identity())
    elif name == "imn":
        gp.convert_(model, **options, weights="plain")
    elif name in ("layers", "intrinsic"):
        coordinates = "angles" if name == "layers" else name
        gp.convert_(model, **options, coordinates=coordinates)
    elif name == "tune":
        _tune(model, images)
    return model.train()


def _network(network: str) -> nn.Module:
    if network == "vgg6":
        return networks.vgg6("bn", 1000)
    from torchvision.models import resnet50

    return resnet50()


def _replace_norms(model: nn.Module, new: Callable[[Any], nn.Module]) -> None:
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.BatchNorm2d):
                setattr(parent, name, new(child))


class Tuned(nn.Module):
    """A convolution with the statistics of its BatchNorm in its weight, as in Tune mode."""

    def __init__(self, conv: Any, norm: Any) -> None:
        super().__init__()
        self.conv, self.norm = conv, norm

    def forward(self, x: Tensor) -> Tensor:
        conv, norm = self.conv, self.norm
        gain = norm.weight * (norm.running_var + norm.eps).rsqrt()
        bias = norm.bias - gain * norm.running_mean
        weight = conv.weight * gain.view(-1, 1, 1, 1)
        return F.conv2d(x, weight, bias, conv.stride, conv.padding, conv.dilation, conv.groups)


def _tune(model: nn.Module, images: Tensor) -> None:
    for decision in gp.plan(model, norm="imn", example_inputs=images).decisions:
        if decision.norm is not None:
            conv, norm = (model.get_submodule(n) for n in (decision.name, decision.norm))
            model.set_submodule(decision.name, Tuned(conv, norm))
            model.set_submodule(decision.norm, nn.Identity())


def optimizer_for(model: nn.Module, method: str) -> torch.optim.Optimizer:
    options: dict[str, Any] = {"lr": 1e-4, "momentum": 0.9}
    if not method.endswith("+geometric"):
        return torch.optim.SGD(model.parameters(), **options)
    return gp.GeometricOptimizer(model, torch.optim.SGD, **options)


# --- measuring ----------------------------------------------------------------------------------


def step_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: int, size: int, mode: str
) -> Callable[[], None]:
    """Return one step on a fixed batch."""
    device = next(model.parameters()).device.type
    layout = torch.channels_last if device == "cuda" else torch.contiguous_format
    model = model.to(memory_format=layout)
    x = torch.randn(batch, 3, size, size, device=device).contiguous(memory_format=layout)
    y = torch.randint(1000, (batch,), device=device)
    return training_step(model, x, y, mode, optimizer)


def measure(step: Callable[[], None], device: str, steps: int) -> tuple[float, float, float]:
    """Return the median of seconds per step, the most GiB allocated, and the first step's time."""
    first = _waited(step, device)
    for _ in range(WARMUP if device == "cuda" else 1):
        step()
    if device == "cpu":
        return statistics.median(_waited(step, device) for _ in range(steps)), 0.0, first
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    times = [before.elapsed_time(after) / 1e3 for before, after in pairwise(events)]
    return statistics.median(times), torch.cuda.max_memory_allocated() / 2**30, first


def _waited(step: Callable[[], None], device: str) -> float:
    start = time.perf_counter()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def busy(step: Callable[[], None], repeats: int = 3) -> tuple[float, float]:
    """Return the milliseconds that a step keeps the device busy, and the number of kernels."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        for _ in range(repeats):
            step()
        torch.cuda.synchronize()
    kernels = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return sum(e.device_time for e in kernels) / 1e3 / repeats, len(kernels) / repeats


@contextlib.contextmanager
def memory_budget(method: str) -> Iterator[None]:
    with torch._functorch.config.patch(
        activation_memory_budget=0.5 if method == "budget" else 1.0
    ):
        yield


def one(
    network: str, method: str, mode: str, device: str, batch: int, given: argparse.Namespace
) -> tuple[tuple[float, float, float], tuple[float, float] | None] | None:
    """Build a model, measure it, and give its memory back; None where there is no such thing."""
    torch.compiler.reset()
    if method == "budget" and mode == "eager":
        return None
    model = build(network, method, device)
    optimizer = optimizer_for(model, method)
    with memory_budget(method):
        step = step_of(model, optimizer, batch, SIZES[device][network], mode)
        found = measure(step, device, given.steps)
        profile = busy(step) if given.profile and device == "cuda" else None
    del model, optimizer, step
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    return found, profile


def row(network: str, mode: str, batch: int, methods: list[str], given: Any) -> list[str]:
    """Print one row of the table, the first method in numbers; return the rows of profiles."""
    title = f"{network}, {batch}x{SIZES[given.device][network]}², {mode}"
    print(f"| {title} |", end="", flush=True)
    base, profiles = None, []
    for method in methods:
        try:
            found = one(network, method, mode, given.device, batch, given)
        except RuntimeError as error:  # out of memory, or what a compiler does not take
            print(f" {type(error).__name__} |", end="", flush=True)
            continue
        if found is None:
            print(" |", end="", flush=True)
            continue
        numbers, profile = found
        print(f" {_cell(numbers, base, mode, given.device)} |", end="", flush=True)
        base = base or numbers
        if profile is not None:
            profiles.append(f"| {title} | {method} | {profile[0]:.1f} | {profile[1]:.0f} |")
    print(flush=True)
    return profiles


def _cell(found: tuple, base: tuple | None, mode: str, device: str) -> str:
    seconds, memory, first = found
    has_memory = device == "cuda" and mode != "graphs"
    compiling = "" if mode == "eager" else f" ({first:.0f} s)"
    if base is None:
        return (
            f"{seconds * 1e3:.1f} ms" + (f", {memory:.1f} GiB" if has_memory else "") + compiling
        )
    ratio = f" / {memory / base[1]:.2f}" if has_memory else ""
    return f"{seconds / base[0]:.2f}{ratio}{compiling}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--networks", default="resnet50,vgg6")
    parser.add_argument("--batches", help="numbers of images; by default one for each network")
    parser.add_argument("--modes", default="eager,compiled")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--profile", action="store_true")
    given = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    methods = given.methods.split(",")
    cell = "time / memory" if given.device == "cuda" else "time"
    print(f"One training step, {hardware(given.device)}; {cell} over the first column\n")
    print(f"| | {' | '.join(methods)} |")
    print("|" + " --- |" * (len(methods) + 1))
    profiles = []
    for network in given.networks.split(","):
        batches = given.batches or str(BATCHES[given.device][network])
        for mode in given.modes.split(","):
            for batch in map(int, batches.split(",")):
                profiles += row(network, mode, batch, methods, given)
    if profiles:
        print("\n| | method | device busy, ms | kernels |\n| --- | --- | --- | --- |")
        print("\n".join(profiles))


if __name__ == "__main__":
    main()
