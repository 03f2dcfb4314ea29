"""What a run on text needs before its first step: network and optimizer."""

import functools
from typing import Any

import torch
from torch import nn

from geoparam_lab import gpt
from geoparam_lab.training import optimizers
from geoparam_lab.training.text.settings import TextSettings

REST_BETA1 = 0.9


def find_precision(settings: TextSettings) -> str:
    """Return the precision: autocast is for GPUs alone."""
    return settings.precision if torch.accelerator.is_available() else "fp32"


def build(settings: TextSettings) -> gpt.GPT:
    """Return the network."""
    shape = ("width", "depth", "context", "norm", "mlp")
    names = (*shape, "zero_projections", "dropout", "tied", "std", "seed")
    options: Any = {name: getattr(settings, name) for name in names}
    return gpt.build(heads=settings.head_count, **options)


def make_optimizer(settings: TextSettings, model: gpt.GPT) -> torch.optim.Optimizer:
    """Return the method's optimizer over all parameters."""
    if settings.method == "adamw":
        make = optimizers.make_torchs("adamw", settings.momentum, beta2=settings.beta2)
        adamw: torch.optim.Optimizer = make(_make_groups(model, settings.decay), lr=settings.lr)
        return adamw
    make_rest = optimizers.make_torchs("adamw", REST_BETA1, beta2=settings.beta2)
    if settings.method in ("turn", "geometric"):
        return _make_geometric(settings, model, make_rest)
    rows = model.hidden_weights()
    others = optimizers.leave_out(_make_groups(model, settings.rest_decay), rows)
    return optimizers.make_rival(
        settings.method,
        rows,
        make_rest(others, lr=settings.rest_lr),
        lr=settings.lr,
        momentum=settings.momentum,
        weight_decay=settings.decay or 0.0,
    )


def _make_groups(model: nn.Module, decay: float | None) -> list[dict[str, Any]]:
    """Return matrices, which decay, and the gains of norms, which do not."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    gains = [p for p in model.parameters() if p.ndim == 1]
    return [
        {"params": matrices, "weight_decay": decay or 0.0},
        {"params": gains, "weight_decay": 0.0},
    ]


def _make_geometric(
    settings: TextSettings, model: gpt.GPT, make_rest: Any
) -> torch.optim.Optimizer:
    base = optimizers.make_torchs(
        settings.base, settings.momentum, beta2=settings.beta2, nesterov=True
    )
    if settings.turn is None:  # with a turn, lr is the rest's
        make_rest = functools.partial(make_rest, lr=settings.rest_lr)
    return optimizers.make_geometric(
        model,
        base,
        turn=settings.turn,
        lr=settings.lr,
        coordinates=settings.coordinates,
        scale=settings.scale,
        scale_lr=settings.scale_lr,
        rest=make_rest,
        weight_decay=settings.rest_decay or 0.0,
    )
