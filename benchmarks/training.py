"""What a training step costs without BatchNorm, and with the geometry, over the model with it.

    python -m benchmarks.training [--device cuda|cpu] [--networks resnet50,vgg6]
        [--batches 2,8,32,128,256] [--modes eager,compiled,graphs] [--methods bn,none,...]
        [--steps 50] [--profile]

One step is forward, backward and SGD with momentum on a fixed batch: bfloat16 autocast and
channels_last on a GPU, cudnn.benchmark on; float32 on a CPU. Each model has the device for itself,
and its time is the median over rounds of steps that follow one another as in training:
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
import gc
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch._functorch.config
import torch.nn.functional as F
from torch import Tensor, nn

import geoparam as gp
from benchmarks.timing import (
    hardware,
    make_images,
    make_parser,
    medians,
    print_heading,
    print_row,
    profile_kernels,
    training_step,
)
from geoparam_lab import networks

METHODS = ("bn", "none", "bn+geometric", "imn", "imn+geometric", "layers", "budget", "tune")
SIZES = {"cuda": {"resnet50": 224, "vgg6": 32}, "cpu": {"resnet50": 64, "vgg6": 32}}
BATCHES = {"cuda": {"resnet50": 256, "vgg6": 1024}, "cpu": {"resnet50": 8, "vgg6": 64}}
CALLS = 10  # steps of a round on a GPU, which follow one another


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


class Cost(NamedTuple):
    """What a training step costs."""

    seconds: float
    memory: float  # GiB allocated at most, parameters and optimizer included; on a GPU
    first: float  # seconds of the first step, in which code is compiled
    busy: float = 0.0  # milliseconds that the device is busy; with --profile
    kernels: float = 0.0


def measure(step: Callable[[], None], device: str, steps: int, profile: bool) -> Cost:
    start = time.perf_counter()
    step()
    if device == "cpu":
        first = time.perf_counter() - start
        return Cost(medians({"": step}, device, steps, warmup=1)[""], 0.0, first)

    torch.cuda.synchronize()
    first = time.perf_counter() - start
    torch.cuda.reset_peak_memory_stats()
    rounds = max(1, steps // CALLS)
    seconds = medians({"": step}, device, rounds, warmup=1, calls=CALLS)[""]
    cost = Cost(seconds, torch.cuda.max_memory_allocated() / 2**30, first)
    if profile:
        busy, kernels = profile_kernels(step, repeats=3)
        cost = cost._replace(busy=busy * 1e3, kernels=kernels)
    return cost


def measure_method(
    network: str, method: str, mode: str, batch: int, given: argparse.Namespace
) -> Cost:
    """Build a model, measure it, and give its memory back."""
    torch.compiler.reset()
    model = build(network, method, given.device)
    if given.device == "cuda":
        model = model.to(memory_format=torch.channels_last)
    x, y = make_images(batch, SIZES[given.device][network], given.device)
    budget = 0.5 if method == "budget" else 1.0
    with torch._functorch.config.patch(activation_memory_budget=budget):
        step = training_step(model, x, y, mode, optimizer_for(model, method))
        cost = measure(step, given.device, given.steps, given.profile)
    del model, step
    gc.collect()
    if given.device == "cuda":
        torch.cuda.empty_cache()
    return cost


def format_cost(cost: Cost, base: Cost | None, mode: str, device: str) -> str:
    """Return the cell of a method: ratios to the first one, which itself is in numbers."""
    has_memory = device == "cuda" and mode != "graphs"
    if base is None:
        cell = f"{cost.seconds * 1e3:.1f} ms" + (f", {cost.memory:.1f} GiB" if has_memory else "")
    else:
        cell = f"{cost.seconds / base.seconds:.2f}"
        cell += f" / {cost.memory / base.memory:.2f}" if has_memory else ""
    if mode != "eager":
        cell += f" ({cost.first:.0f} s)"
    return cell


def compare(
    network: str, mode: str, batch: int, methods: list[str], given: argparse.Namespace
) -> dict[str, Cost]:
    """Print one row of the table; return the costs by method."""
    costs: dict[str, Cost] = {}
    cells = []
    for method in methods:
        if method == "budget" and mode == "eager":
            cells.append("")
            continue
        try:
            cost = measure_method(network, method, mode, batch, given)
        except RuntimeError as error:  # out of memory, or what a compiler does not take
            cells.append(type(error).__name__)
            continue
        base = next(iter(costs.values()), None)
        cells.append(format_cost(cost, base, mode, given.device))
        costs[method] = cost
    print_row(name_row(network, mode, batch, given.device), *cells)
    return costs


def name_row(network: str, mode: str, batch: int, device: str) -> str:
    return f"{network}, {batch}x{SIZES[device][network]}², {mode}"


def main() -> None:
    options = {"networks": "resnet50,vgg6", "batches": "", "modes": "eager,compiled"}
    options |= {"methods": ",".join(METHODS)}
    given = make_parser(__doc__, **options, steps=50, profile=False).parse_args()
    device = given.device
    torch.backends.cudnn.benchmark = True
    methods = given.methods.split(",")
    cell = "time / memory" if device == "cuda" else "time"
    print(f"One training step, {hardware(device)}; {cell} over the first column\n")
    print_heading("", *methods)
    rows = {}
    for network in given.networks.split(","):
        batches = given.batches or str(BATCHES[device][network])
        for mode in given.modes.split(","):
            for batch in map(int, batches.split(",")):
                costs = compare(network, mode, batch, methods, given)
                rows[name_row(network, mode, batch, device)] = costs

    if given.profile and device == "cuda":
        print()
        print_heading("", "method", "busy, ms", "kernels")
        for name, costs in rows.items():
            for method, cost in costs.items():
                print_row(name, method, f"{cost.busy:.1f}", f"{cost.kernels:.0f}")


if __name__ == "__main__":
    main()
