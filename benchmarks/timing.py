"""How all benchmarks time functions and print tables.

Functions are measured in turn, so that drift hits all alike, in rounds of calls that follow one
another as in training. A GPU's rounds are timed from its first to its last kernel. A CPU's are
timed by the process's own time, which other processes disturb less: give it one thread
(OMP_NUM_THREADS=1).
"""

import argparse
import platform
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Function = Callable[[], object]


def make_parser(text: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """Return a parser with --device and these options; a default tells an option's type."""
    kind = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=text, formatter_class=kind)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for name, default in defaults.items():
        if default is False:
            parser.add_argument(f"--{name}", action="store_true")
        else:
            parser.add_argument(f"--{name}", type=type(default), default=default)
    return parser


def medians(
    functions: dict[str, Function],
    device: str,
    repeats: int = 50,
    warmup: int = 5,
    calls: int = 1,
) -> dict[str, float]:
    """Return each function's median seconds per call, over `repeats` rounds of `calls` calls."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(warmup + repeats):
        for name, function in functions.items():
            seconds = _time_round(function, device, calls)
            if turn >= warmup:
                times[name].append(seconds / calls)
    return {name: statistics.median(values) for name, values in times.items()}


def _time_round(function: Function, device: str, calls: int) -> float:
    if device == "cpu":
        start = time.process_time()
        for _ in range(calls):
            function()
        return time.process_time() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for _ in range(calls):
        function()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def profile_kernels(function: Function, repeats: int = 20) -> tuple[float, float]:
    """Return the seconds that a call keeps a GPU busy, and its number of kernels."""
    kernels = list_kernels(function, repeats)
    seconds = sum(sum(times) for times in kernels.values())
    return seconds / repeats, sum(map(len, kernels.values())) / repeats


def list_kernels(function: Function, repeats: int) -> dict[str, list[float]]:
    """Return the seconds of each kernel that calls have launched, by its name."""
    function()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        for _ in range(repeats):
            function()
        torch.cuda.synchronize()
    kernels = defaultdict[str, list[float]](list)
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            kernels[event.name].append(event.device_time / 1e6)
    return kernels


def peak_memory(function: Function, device: str) -> int:
    """Return the most bytes that `function` held at once beyond what was there before."""
    function()
    if device == "cpu":
        return _peak_on_cpu(function)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _peak_on_cpu(function: Function) -> int:
    with torch.profiler.profile(profile_memory=True) as profile:
        function()
    held = peak = 0
    for event in profile.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


def training_step(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    mode: str = "eager",
    optimizer: torch.optim.Optimizer | None = None,
) -> Callable[[], None]:
    """Return one training step on a fixed batch, in bfloat16 on a GPU; by default of SGD.

    The mode is "eager", "compiled", or "graphs", compiled with CUDA graphs.
    """
    device = x.device.type
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    run = model
    if mode != "eager":
        run = torch.compile(model, mode="reduce-overhead" if mode == "graphs" else None)

    def step() -> None:
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = F.cross_entropy(run(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def make_images(batch: int, size: int, device: str) -> tuple[Tensor, Tensor]:
    """Return random colour images and labels of 1,000 classes; channels last on a GPU."""
    layout = torch.channels_last if device == "cuda" else torch.contiguous_format
    x = torch.randn(batch, 3, size, size, device=device).contiguous(memory_format=layout)
    return x, torch.randint(1000, (batch,), device=device)


def hardware(device: str) -> str:
    """Name the machine and the versions that a number belongs to."""
    name = f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    if device == "cuda":
        name = torch.cuda.get_device_name()
    return f"{name}, torch {torch.__version__}, Python {platform.python_version()}"


def print_heading(*titles: str) -> None:
    """Print the first two lines of a table in Markdown."""
    print_row(*titles)
    print_row(*["---"] * len(titles))


def print_row(*cells: str) -> None:
    """Print a line of a table in Markdown."""
    print(f"| {' | '.join(cells)} |", flush=True)
