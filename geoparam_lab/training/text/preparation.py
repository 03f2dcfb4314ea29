"""What a run on text needs before its first step: network and optimizer."""

from functools import partial
from typing import Any

import torch
from torch import nn

import geoparam as gp
from geoparam_lab import gpt
from geoparam_lab.training.rival_optimizers import RIVALS, Together
from geoparam_lab.training.text.settings import TextSettings

FIRST_MOMENTUM = 0.85  # where a momentum that is warmed up starts
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
        betas = (settings.momentum, settings.beta2)
        groups = _group(list(model.parameters()), settings.decay)
        return torch.optim.AdamW(groups, lr=settings.lr, betas=betas)
    if settings.method in ("turn", "geometric"):
        return _make_geometric(settings, model)
    make, _ = RIVALS[settings.method]
    rows = model.hidden_weights()
    known = set(map(id, rows))
    others = [p for p in model.parameters() if id(p) not in known]
    of_matrices = make(
        rows, lr=settings.lr, momentum=settings.momentum, weight_decay=settings.decay or 0.0
    )
    assert settings.rest_lr is not None
    groups, betas = _group(others, settings.rest_decay), (REST_BETA1, settings.beta2)
    return Together(of_matrices, torch.optim.AdamW(groups, lr=settings.rest_lr, betas=betas))


def _group(params: list[nn.Parameter], decay: float | None) -> list[dict[str, Any]]:
    """Return matrices, which decay, and the gains of norms, which do not."""
    matrices = [p for p in params if p.ndim > 1]
    gains = [p for p in params if p.ndim == 1]
    return [
        {"params": matrices, "weight_decay": decay or 0.0},
        {"params": gains, "weight_decay": 0.0},
    ]


def _make_geometric(settings: TextSettings, model: gpt.GPT) -> torch.optim.Optimizer:
    bases: dict[str, tuple[Any, dict[str, Any]]] = {
        "muon": (torch.optim.Muon, {"momentum": settings.momentum}),
        "adamw": (torch.optim.AdamW, {"betas": (settings.momentum, settings.beta2)}),
        "sgd": (torch.optim.SGD, {"momentum": settings.momentum, "nesterov": True}),
    }
    base, options = bases[settings.base]
    rest: dict[str, Any] = {"betas": (REST_BETA1, settings.beta2)}
    if settings.turn is None:  # with a turn, lr is the rest's
        rest["lr"] = settings.rest_lr
    coordinates: Any = settings.coordinates
    scale: Any = settings.scale
    return gp.GeometricOptimizer(
        model,
        base,
        turn=settings.turn,
        lr=settings.lr,
        coordinates=coordinates,
        scale=scale,
        scale_lr=settings.scale_lr,
        rest=partial(torch.optim.AdamW, **rest),
        weight_decay=settings.rest_decay or 0.0,
        **options,
    )


def set_momentum(settings: TextSettings, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Let momentum rise along a line in its warmup."""
    if not settings.momentum_warmup:
        return
    share = min(step / settings.momentum_warmup, 1.0)
    momentum = FIRST_MOMENTUM + share * (settings.momentum - FIRST_MOMENTUM)
    for group in optimizer.param_groups:
        if "momentum" in group:
            group["momentum"] = momentum
