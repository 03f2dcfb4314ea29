"""What a run needs before its first step: processes, network, optimizer, and torch's switches."""

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn

import geoparam as gp
from geoparam.data.imagenet import Source
from geoparam.experiments import networks
from geoparam.experiments.imaging.settings import PRECISIONS, Settings

if TYPE_CHECKING:
    from accelerate import Accelerator


def make_accelerator(precision: str = "bf16") -> "Accelerator":
    """Return Accelerate's view of this process: its device, its fellows, its precision.

    Args:
        precision: "bf16" or "fp32". Accelerate has one for the life of a process.
    """
    try:
        from accelerate import Accelerator
    except ModuleNotFoundError as error:
        message = (
            "training on images needs accelerate: pip install 'geoparam[experiments]', or "
            "pip install accelerate."
        )
        raise ModuleNotFoundError(message, name="accelerate") from error
    # Without this, processes of torchrun on CPUs would each believe that they are alone.
    no_gpu = not torch.accelerator.is_available()
    return Accelerator(cpu=no_gpu, mixed_precision=PRECISIONS[precision])


def check(settings: Settings, accelerator: "Accelerator") -> None:
    """Raise where the settings do not fit the processes that are there."""
    expected = PRECISIONS[settings.precision]
    if accelerator.mixed_precision != expected:
        raise ValueError(
            f"precision {settings.precision!r} needs an Accelerator with "
            f"mixed_precision={expected!r}; got {accelerator.mixed_precision!r}. Start with "
            f"--mixed_precision {expected}, or choose the other precision."
        )
    parts = accelerator.num_processes * settings.accumulate
    if settings.batch_size % parts:
        raise ValueError(
            f"{accelerator.num_processes} processes that go through a batch in "
            f"{settings.accumulate} parts need a batch size that is a multiple of {parts}; got "
            f"{settings.batch_size}."
        )


def make_network(settings: Settings, source: Source, accelerator: "Accelerator") -> nn.Module:
    """Return the network on its device, with norms that know of all processes."""
    model = networks.build(
        settings.network,
        settings.method,
        source.classes,
        size=source.size,
        seed=settings.seed,
        **settings.network_options,
    )
    if settings.synchronise and accelerator.num_processes > 1:
        model = _synchronised(model, accelerator.device)
    last = settings.channels_last and not accelerator.is_fsdp2  # which takes no such parameters
    layout = torch.channels_last if last else torch.contiguous_format
    return model.to(accelerator.device, memory_format=layout)  # type: ignore[call-overload]


def _synchronised(model: nn.Module, device: torch.device) -> nn.Module:
    if any(isinstance(module, gp.InputMeanNorm) for module in model.modules()):
        gp.synchronise_means_(model)
    if device.type == "cuda":  # torch has no other SyncBatchNorm
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return model


def make_optimizer(settings: Settings, model: nn.Module) -> torch.optim.SGD:
    """Return SGD over the groups that decay and do not, which keeps unit vectors on the sphere."""
    groups = gp.param_groups(model, settings.lr, settings.weight_decay, settings.angle_lr)
    optimizer = torch.optim.SGD(groups, settings.lr, settings.momentum)
    optimizer.register_step_post_hook(gp.retract(model))
    return optimizer


@contextlib.contextmanager
def surroundings(settings: Settings, device: torch.device) -> Iterator[None]:
    """Set torch's random numbers and switches for a run, and put them back after it."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark = torch.backends.cudnn.benchmark
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(settings.seed)
        try:
            torch.backends.cudnn.benchmark = not settings.deterministic
            if settings.deterministic:
                os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS asks for it
                torch.use_deterministic_algorithms(True, warn_only=True)  # torch names the others
            yield
        finally:
            torch.backends.cudnn.benchmark = benchmark
            torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
