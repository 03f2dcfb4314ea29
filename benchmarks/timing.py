"""Median times of several functions, measured in turn so that drift hits all alike."""

import platform
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def medians(
    functions: dict[str, Callable[[], object]], device: str, repeats: int = 50, warmup: int = 5
) -> dict[str, float]:
    """Return each function's median time in seconds over `repeats` rounds after `warmup` ones."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(warmup + repeats):
        for name, function in functions.items():
            seconds = _seconds(function, device)
            if turn >= warmup:
                times[name].append(seconds)
    return {name: statistics.median(values) for name, values in times.items()}


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


def _seconds(function: Callable[[], object], device: str) -> float:
    if device == "cpu":
        start = time.perf_counter()
        function()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    function()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def kernel_seconds(function: Callable[[], object], repeats: int = 20) -> float:
    """Return the time a GPU is busy with one call, without what the call costs in Python."""
    function()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        for _ in range(repeats):
            function()
        torch.cuda.synchronize()
    return sum(event.device_time_total for event in profile.key_averages()) / repeats / 1e6


def peak_memory(function: Callable[[], object], device: str) -> int:
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


def _peak_on_cpu(function: Callable[[], object]) -> int:
    with torch.profiler.profile(profile_memory=True) as profile:
        function()
    held = peak = 0
    for event in profile.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


def hardware(device: str) -> str:
    """Name the machine and the versions that a number belongs to."""
    name = (
        torch.cuda.get_device_name()
        if device == "cuda"
        else f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    )
    return f"{name}, torch {torch.__version__}, Python {platform.python_version()}"
