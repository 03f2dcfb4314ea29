"""What every run of a network needs of its processes: an Accelerator, a seed, torch's switches."""

import contextlib
import os
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from accelerate import Accelerator

PRECISIONS = {"fp32": "no", "bf16": "bf16"}  # and what Accelerate calls them


def make_accelerator(precision: str = "bf16") -> "Accelerator":
    """Return an Accelerator; Accelerate has one precision for the life of a process."""
    from accelerate import Accelerator

    # Without cpu=True, each of torchrun's processes on CPUs would take itself for the only one.
    no_gpu = not torch.accelerator.is_available()
    return Accelerator(cpu=no_gpu, mixed_precision=PRECISIONS[precision])


def check_processes(
    accelerator: "Accelerator", precision: str, batch_size: int, accumulate: int = 1
) -> None:
    """Raise ValueError where a run does not fit the processes that are there."""
    expected = PRECISIONS[precision]
    if accelerator.mixed_precision != expected:
        raise ValueError(
            f"precision {precision!r} needs an Accelerator with "
            f"mixed_precision={expected!r}; got {accelerator.mixed_precision!r}. Start with "
            f"--mixed_precision {expected}, or choose the other precision."
        )
    parts = accelerator.num_processes * accumulate
    if batch_size % parts:
        raise ValueError(
            f"{accelerator.num_processes} processes that go through a batch in "
            f"{accumulate} parts need a batch size that is a multiple of {parts}; got "
            f"{batch_size}."
        )


def check_runs(
    precision: str, runs: Iterable[Any], jobs: int, storage: str | None = None
) -> "Accelerator":
    """Return the Accelerator of a sweep; raise ValueError where its processes do not fit.

    Args:
        precision: of all runs.
        runs: their settings.
        jobs: runs side by side.
        storage: what machines share the runs through.
    """
    accelerator = make_accelerator(precision)
    for settings in runs:
        check_processes(accelerator, precision, settings.batch_size, settings.accumulate)
    processes = accelerator.num_processes
    if jobs > 1 and (processes > 1 or storage is not None):
        raise ValueError(
            "jobs are runs side by side on one GPU: use them without torchrun and without "
            f"storage; got jobs={jobs}, {processes} processes, storage={storage!r}."
        )
    return accelerator


@contextlib.contextmanager
def prepare_run(
    settings: Any, precision: str, accelerator: "Accelerator | None" = None
) -> Iterator["Accelerator"]:
    """Yield the Accelerator of one run, this or a new one, with torch's seed and switches set."""
    accelerator = accelerator or make_accelerator(precision)
    check_processes(accelerator, precision, settings.batch_size, settings.accumulate)
    seed = settings.seed + accelerator.process_index
    with prepare_torch(seed, settings.deterministic, accelerator.device):
        try:
            yield accelerator
        finally:
            accelerator.free_memory()  # else it keeps the networks of all runs


@contextlib.contextmanager
def prepare_torch(seed: int, deterministic: bool, device: torch.device) -> Iterator[None]:
    """Set torch's seed and switches for a run, and restore them after it."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark = torch.backends.cudnn.benchmark
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        try:
            torch.backends.cudnn.benchmark = not deterministic
            if deterministic:
                os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for cuBLAS
                torch.use_deterministic_algorithms(True, warn_only=True)
            yield
        finally:
            torch.backends.cudnn.benchmark = benchmark
            torch.use_deterministic_algorithms(before, warn_only=warn_only)
