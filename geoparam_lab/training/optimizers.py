"""The optimizer of a run, from its name: torch's, a rival, or the geometric one over torch's.

A rival updates the rows of the hidden layers, plain weights, and torch's optimizer all the rest.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

import geoparam as gp
from geoparam.optim import RowMuon
from geoparam_lab.training.rival_optimizers import (
    Airbench,
    AngularMuown,
    MuonH,
    RotationalSGD,
    Together,
)

RIVALS: dict[str, Any] = {
    "muon": RowMuon,
    "airbench": Airbench,
    "rotational": RotationalSGD,
    "angularmuown": AngularMuown,
    "muonh": MuonH,
}
MOMENTA = {  # where a run names none
    "sgd": 0.9,
    "adamw": 0.9,
    "muon": 0.95,
    "airbench": 0.6,
    "rotational": 0.9,
    "angularmuown": 0.95,
    "muonh": 0.95,
}


def make_torchs(
    name: str, momentum: float | None = None, *, beta2: float = 0.999, nesterov: bool = False
) -> partial[Any]:
    """Return a constructor of torch's "sgd", "adamw" or "muon"; it takes parameters and a rate."""
    momentum = MOMENTA[name] if momentum is None else momentum
    if name == "muon":
        return partial(torch.optim.Muon, momentum=momentum)
    if name == "adamw":
        return partial(torch.optim.AdamW, betas=(momentum, beta2))
    return partial(torch.optim.SGD, momentum=momentum, nesterov=nesterov)


def make_rival(
    name: str,
    rows: Sequence[nn.Parameter],
    rest: torch.optim.Optimizer,
    *,
    lr: float,
    momentum: float | None,
    weight_decay: float,
) -> Together:
    """Return a rival over the rows of some weights, together with the optimizer of the rest."""
    momentum = MOMENTA[name] if momentum is None else momentum
    options = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
    return Together(RIVALS[name](rows, **options), rest)


def make_geometric(model: nn.Module, base: partial[Any], **options: Any) -> gp.GeometricOptimizer:
    """Return the geometric optimizer over one of torch's, with that one's options."""
    return gp.GeometricOptimizer(model, base.func, **base.keywords, **options)


def leave_out(
    groups: Sequence[dict[str, Any]], params: Sequence[nn.Parameter]
) -> list[dict[str, Any]]:
    """Return optimizer groups without some parameters, and without groups that are then empty."""
    left_out = set(map(id, params))
    remaining = [
        group | {"params": [p for p in group["params"] if id(p) not in left_out]}
        for group in groups
    ]
    return [group for group in remaining if group["params"]]
