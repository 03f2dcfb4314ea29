"""What a training step costs under GmP and IMN: time and memory over the model with BatchNorm.

    python -m benchmarks.training [--device cuda|cpu] [--networks resnet50,vgg6,vit]
        [--modes eager,compiled,graphs] [--methods bn,none,...] [--steps 50] [--profile]

One step is forward, backward and SGD with momentum on a fixed batch: bfloat16 autocast and
channels_last on a GPU, cudnn.benchmark on; float32 on a CPU. Each model has the device for itself,
and its time is the median of 50 steps after the warm-up, which follow one another as in training:
on a GPU nobody waits for a step before the next is begun. A cell is time / memory, as ratios to
the model with the norm it was made with, in the same mode and run: BatchNorm, and LayerNorm for
ViT-B/16, which has no form with IMN. Memory (on a GPU) is the most that was allocated, parameters
and optimizer included. `--profile` adds how long a step takes that is waited for, and where the
device's time goes. The mode "graphs", which is not run unless asked for, is compiled code in CUDA
graphs (mode="reduce-overhead"): there no host is too slow, and their memory is not seen.

    bn          torchvision's ResNet-50; VGG-6 of the experiments; for ViT, as it is, with LN
    bn+pool     the same with our max pool, which networks with IMN have, and the experiments' with
                GmP; only if asked for
    none        the same without norms
    naive       GmP, no norm, as one would write it: autograd goes through the cumulative product;
                not compiled, which has not come to an end for a ResNet-50
    wn          torch's weight_norm, no norm
    ln          LayerNorm over channels and positions in place of BN
    gmp         GmP, no norm
    imn         GmP + IMN: convert_(model, norm="imn"), and the experiments' VGG-6
    intrinsic   the same in intrinsic coordinates
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from geoparam.pooling import MaxPool2d
from torch import Tensor, nn
from torch._inductor import config as inductor
from torch.nn.utils.parametrizations import weight_norm

import geoparam as gp
from benchmarks.timing import hardware, training_step
from benchmarks.weight import naive
from geoparam.coordinates import Angles
from geoparam.experiments import networks
from geoparam.surgery import like

METHODS = ("bn", "none", "naive", "wn", "ln", "gmp", "imn", "intrinsic")
TITLES = {"resnet50": "ResNet-50", "vgg6": "VGG-6", "vit": "ViT-B/16"}
BATCHES = {
    "cuda": {"resnet50": (256, 224), "vgg6": (1024, 32), "vit": (256, 224)},
    "cpu": {"resnet50": (8, 64), "vgg6": (64, 32), "vit": (1, 224)},
}
VGG6 = {"none": "sp", "naive": "gmp", "imn": "gmp+imn", "intrinsic": "intrinsic+imn"}
WARMUP = 10
KINDS = {  # of kernels, by what their names contain or begin with
    "convolutions": ("fprop", "dgrad", "wgrad", "gemm", "nvjet", "cutlass", "nhwcAdd", "cudnn"),
    "inductor's": ("triton_",),
}


class Naive(Angles):
    """Latitudes whose weight is left to autograd."""

    def decode(
        self,
        stored: Tensor,
        r: Tensor | None,
        natural: bool,
        dtype: torch.dtype | None,
        shape: tuple[int, ...] | None = None,
        channels_last: bool = False,
    ) -> Tensor:
        scale = torch.ones_like(stored[:, 0]) if r is None else r
        return naive(stored, scale).view(len(stored), *(shape or (-1,))).to(dtype)


# --- models -------------------------------------------------------------------------------------


def build(network: str, method: str, device: str) -> nn.Module | None:
    """Return a network under a method, or None where there is no such thing."""
    if network == "vit" and method in ("none", "ln", "imn"):
        return None
    make = {"resnet50": _resnet50, "vgg6": _vgg6, "vit": _vit}[network]
    torch.manual_seed(0)
    model = make(method.removesuffix("+pool"), device)
    if method.endswith("+pool"):
        _replace(model, nn.MaxPool2d, lambda pool: like(pool, MaxPool2d))
    return model.train()


def _resnet50(method: str, device: str) -> nn.Module:
    from torchvision.models import resnet50

    model = resnet50().to(device)
    if method in ("imn", "intrinsic"):
        coordinates = "angles" if method == "imn" else method
        images = torch.randn(4, 3, 64, 64, device=device)
        return gp.convert_(model, norm="imn", coordinates=coordinates, example_inputs=images)
    if method == "ln":
        new = partial(nn.GroupNorm, 1, device=device)
        _replace(model, nn.BatchNorm2d, lambda norm: new(norm.num_features))
    elif method != "bn":
        _replace(model, nn.BatchNorm2d, lambda norm: nn.Identity())
    if method in ("gmp", "naive", "wn"):
        _give_biases(model)
    return _parametrized(model, method)


def _vgg6(method: str, device: str) -> nn.Module:
    model = networks.vgg6(VGG6.get(method, method), 1000).to(device)
    if method == "naive":
        _make_naive(model)
    return model


def _vit(method: str, device: str) -> nn.Module:
    from torchvision.models import vit_b_16

    model = vit_b_16().to(device)
    if method == "intrinsic":
        return gp.convert_(model, coordinates=method)
    return _parametrized(model, method)


def _parametrized(model: nn.Module, method: str) -> nn.Module:
    """Put all layers but the last under weight normalization or GmP, if the method asks for it."""
    if method in ("gmp", "naive"):
        gp.convert_(model)
    if method == "naive":
        _make_naive(model)
    if method == "wn":
        *layers, _ = [m for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
        for layer in layers:
            if not isinstance(layer, nn.modules.linear.NonDynamicallyQuantizableLinear):
                weight_norm(layer)
    return model


def _make_naive(model: nn.Module) -> None:
    """Leave everything to torch: weights, what is applied to them, and max pools."""
    for module in model.modules():
        if isinstance(module, gp.GmPConv2d | gp.GmPLinear):
            module._coordinates = Naive()
            module._in_few_passes = lambda x: None
    _replace(model, MaxPool2d, lambda pool: like(pool, nn.MaxPool2d))


def _replace(model: nn.Module, kind: type, new: Callable[[Any], nn.Module]) -> None:
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, kind):
                setattr(parent, name, new(child))


def _give_biases(model: nn.Module) -> None:
    """Without BatchNorm its shift is missing: a layer needs one of its own."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.bias = nn.Parameter(torch.zeros_like(module.weight[:, 0, 0, 0]))


# --- measuring ----------------------------------------------------------------------------------


def step_of(model: nn.Module, network: str, device: str, mode: str) -> Callable[[], None]:
    """Return one step on a fixed batch."""
    batch, size = BATCHES[device][network]
    layout = torch.channels_last if device == "cuda" else torch.contiguous_format
    model = model.to(memory_format=layout)
    x = torch.randn(batch, 3, size, size, device=device).contiguous(memory_format=layout)
    y = torch.randint(1000, (batch,), device=device)
    return training_step(model, x, y, mode)


def measure(step: Callable[[], None], device: str, steps: int) -> tuple[float, float]:
    """Return the median of seconds per step, and the most memory allocated, in GiB."""
    for _ in range(WARMUP if device == "cuda" else 1):
        step()
    if device == "cpu":
        return waited(step, device, steps), 0.0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    times = [before.elapsed_time(after) / 1e3 for before, after in pairwise(events)]
    return statistics.median(times), torch.cuda.max_memory_allocated() / 2**30


def waited(step: Callable[[], None], device: str, steps: int = 20) -> float:
    """Return the median of seconds that a step takes from its call to its end."""
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        step()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def one(
    network: str, method: str, mode: str, device: str, steps: int, profiled: bool = False
) -> tuple | None:
    """Build a model, measure it, and give its memory back."""
    torch.compiler.reset()
    if method == "naive" and mode != "eager":
        return None
    model = build(network, method, device)
    if model is None:
        return None
    step = step_of(model, network, device, mode)
    found = measure(step, device, steps)
    busy = profile(step) if profiled and device == "cuda" else None
    del model, step
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    return *found, busy


def profile(step: Callable[[], None], repeats: int = 3) -> dict[str, float]:
    """Return the milliseconds that a step keeps the device busy, by kinds of kernels.

    And those of a step that is waited for, and the number of kernels.
    """
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as found:
        for _ in range(repeats):
            step()
        torch.cuda.synchronize()
    kinds = dict.fromkeys(["waited", "kernels", *KINDS, "geoparam's", "others"], 0.0)
    kinds["waited"] = waited(step, "cuda") * 1e3
    for event in found.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            kinds["kernels"] += 1 / repeats
            kinds[_kind(event.name)] += event.device_time / 1e3 / repeats
    return kinds


def _kind(kernel: str) -> str:
    if kernel.startswith("_") and not kernel.startswith("_Z"):  # Triton's, under Python's name
        return "geoparam's"
    kinds = (kind for kind, parts in KINDS.items() if any(part in kernel for part in parts))
    return next(kinds, "others")


def row(
    network: str, mode: str, device: str, methods: list[str], steps: int, profiled: bool
) -> list[str]:
    """Print one row of the table: the first method in numbers, the others over it.

    Return the rows of the table of profiles.
    """
    batch, size = BATCHES[device][network]
    title = f"{TITLES[network]}, {batch}x{size}², {mode}"
    print(f"| {title} |", end="", flush=True)
    base, profiles = None, []
    for method in methods:
        try:
            found = one(network, method, mode, device, steps, profiled)
        except RuntimeError as error:  # out of memory, or what a compiler does not take
            print(f" {type(error).__name__} |", end="", flush=True)
            continue
        if found is None:
            print(" |", end="", flush=True)
            continue
        has_memory = device == "cuda" and mode != "graphs"
        print(f" {_cell(found, base, has_memory)} |", end="", flush=True)
        base = base or found
        if found[2] is not None:
            profiles.append(f"| {title} | {method} | {_profile_cells(found)} |")
    print(flush=True)
    return profiles


def _cell(found: tuple, base: tuple | None, has_memory: bool) -> str:
    seconds, memory, _ = found
    if base is None:
        return f"{seconds * 1e3:.1f} ms" + (f", {memory:.1f} GiB" if has_memory else "")
    return f"{seconds / base[0]:.2f}" + (f" / {memory / base[1]:.2f}" if has_memory else "")


def _profile_cells(found: tuple) -> str:
    seconds, _, busy = found
    alone, count, *times = busy.values()
    cells = [f"{x:.1f}" for x in (seconds * 1e3, alone, sum(times))]
    return " | ".join([*cells, f"{count:.0f}", *[f"{time:.1f}" for time in times]])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--networks", default="resnet50,vgg6,vit")
    parser.add_argument("--modes", default="eager,compiled")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--profile", action="store_true")
    given = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    inductor.autotune_local_cache = False  # tune now, while nobody else has the device
    methods = given.methods.split(",")
    cell = "time / memory" if given.device == "cuda" else "time"
    print(f"One training step, {hardware(given.device)}; {cell} over the first column\n")
    print(f"| | {' | '.join(methods)} |")
    print("|" + " --- |" * (len(methods) + 1))
    profiles = []
    for network in given.networks.split(","):
        for mode in given.modes.split(","):
            profiles += row(network, mode, given.device, methods, given.steps, given.profile)
    if profiles:
        kinds = ["step", "waited for", "device busy", "kernels", *KINDS, "geoparam's", "others"]
        print(f"\nWhere the device's time goes, ms\n\n| | method | {' | '.join(kinds)} |")
        print("|" + " --- |" * (len(kinds) + 2))
        print("\n".join(profiles))


if __name__ == "__main__":
    main()
