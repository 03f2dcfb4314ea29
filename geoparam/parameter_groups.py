"""Parameter groups of a model: those of converted layers have rates and decay of their own."""

import math
import re
from collections import defaultdict
from typing import Any, Literal

import torch
from torch import nn

from geoparam.arguments import check_rate
from geoparam.base_layer import GmPLayer
from geoparam.model.run import full_tensor, refuse_non_model

AngleRate = float | Literal["fan_in"] | None
Match = Literal["plain"] | bool | None
Kind = Literal["adam", "sgd"]
LEAST_R = {"adam": 20, "sgd": 2}  # in units of lr: what r moves by in a few steps


def param_groups(
    model: nn.Module,
    lr: float,
    weight_decay: float = 0.0,
    angle_lr: AngleRate = None,
    *,
    match: Match = "plain",
    kind: Kind = "adam",
) -> list[dict[str, Any]]:
    r"""Return groups in which each parameter of `model` is once, with its rate and its decay.

    Directions (`latitude`, `unit`), r and lam are never decayed: decay would drag every unit to
    one direction. Neither are biases and the parameters of normalization layers. All other
    parameters are.

    With `match="plain"` a first step at `lr` moves W = r u and b = r lam as it would move a plain
    layer's. A layer whose scales have mean R and whose angles have mean metric g gets the rates

        kind      latitude            unit        lam         r
        adam      lr / (R sqrt(g))    lr / R      lr / R      lr
        sgd       lr / (R^2 g)        lr / R^2    lr / R^2    lr

    since SGD's step is proportional to the gradient, which has a factor R of its own, and an
    adaptive optimizer's is not. In intrinsic coordinates this is exact under SGD for rows with |r|
    = R and no bias; under Adam steps are as long, not alike. A bias moves 1 + lam^2 times as fast,
    and r with it. R counts as 20 lr at least (adam) or 2 lr (sgd), up to 0.2: r moves at lr, so in
    a shorter row it soon is many times R, and with it the speed of W and b, which would become
    unstable.
    `GeometricOptimizer` does the same without having to know the kind. Matched groups keep it
    under `kind`: printing SGD with `kind: adam` shows that the rates are for another optimizer.

    Args:
        model: any model, converted or not; it is read as it is now.
        lr: learning rate of a plain model.
        weight_decay: decay of the weights that are decayed.
        angle_lr: learning rate of the directions, in place of the matched one; `"fan_in"` for
            lr / sqrt(n), which turns units by about as much whatever their fan-in n.
        match: `"plain"`, or None for the rate `lr` everywhere, as in the papers.
        kind: `"adam"` for optimizers whose step does not depend on the gradient's size (Adam,
            AdamW, RMSprop, Lion), `"sgd"` for those whose step is proportional to it.

    Example:
        >>> from geoparam import GmPLinear
        >>> model = nn.Sequential(GmPLinear(16, 8), nn.ReLU(), nn.Linear(8, 1))
        >>> groups = param_groups(model, lr=0.1, weight_decay=0.05, angle_lr="fan_in", match=None)
        >>> for group in groups:
        ...     print(group["name"], len(group["params"]), group["lr"], group["weight_decay"])
        directions 1 0.025 0.0
        undecayed 3 0.1 0.0
        decayed 1 0.1 0.05
    """
    refuse_non_model(model, "param_groups(model, lr)")
    check_rate("lr", lr)
    check_rate("weight_decay", weight_decay)
    if kind not in ("adam", "sgd"):
        raise ValueError(f"kind is 'adam' or 'sgd'; got {kind!r}.")
    if match not in ("plain", None, True, False):
        raise ValueError(f"match is 'plain' or None; got {match!r}.")
    is_rate = isinstance(angle_lr, int | float) and 0 <= angle_lr < math.inf
    if angle_lr is not None and angle_lr != "fan_in" and not is_rate:
        raise ValueError(f"angle_lr is a rate, 'fan_in' or None; got {angle_lr!r}.")
    members: dict[tuple[str, float, float], list[nn.Parameter]] = defaultdict(list)
    for path, parameter in model.named_parameters():
        owner, name = _find_owner(model, path)
        if isinstance(owner, GmPLayer) and name == owner._coordinates.name:
            rate = _find_rate(owner, True, kind, lr) if match else lr
            if angle_lr == "fan_in":
                rate = lr / math.sqrt(owner.fan_in)
            elif angle_lr is not None:
                rate = float(angle_lr)
            members["directions", rate, 0.0].append(parameter)
        elif isinstance(owner, GmPLayer) and name == "lam" and match:
            members["undecayed", _find_rate(owner, False, kind, lr), 0.0].append(parameter)
        elif _is_undecayed(parameter, owner, name):
            members["undecayed", lr, 0.0].append(parameter)
        else:
            members["decayed", lr, weight_decay].append(parameter)

    groups = []
    for (name, rate, decay), parameters in members.items():
        group = {"params": parameters, "lr": rate, "weight_decay": decay, "name": name}
        groups.append({**group, "kind": kind} if match else group)
    return groups


def undecayed_names(model: nn.Module) -> set[str]:
    """Return the names of biases, of norms' parameters and of all others that decay spares."""
    named = model.named_parameters()
    return {path for path, p in named if _is_undecayed(p, *_find_owner(model, path))}


def _find_owner(model: nn.Module, path: str) -> tuple[nn.Module, str]:
    """Return the module that holds a parameter, and its name there."""
    owner, _, name = path.rpartition(".")
    return model.get_submodule(owner), name


@torch.no_grad()
def _find_rate(layer: GmPLayer, is_direction: bool, kind: Kind, lr: float) -> float:
    """Return the rate at which directions or lam move the weight as `lr` moves a plain one."""
    if layer.r.is_meta:
        return lr
    mean = float(full_tensor(layer.r).abs().mean())
    length = max(mean, min(0.2, LEAST_R[kind] * lr))
    g = 1.0
    if is_direction:
        g = float(layer._coordinates.metric(full_tensor(layer._stored)).mean())
    if not g:
        return lr
    speed = 1 / (length * math.sqrt(g))
    return lr * (speed if kind == "adam" else speed**2)


def _is_undecayed(parameter: nn.Parameter, owner: nn.Module, name: str) -> bool:
    is_norm = re.search(r"norm(act)?\d*d?$", type(owner).__name__.lower()) is not None
    return isinstance(owner, GmPLayer) or is_norm or parameter.ndim <= 1 or name.endswith("bias")
