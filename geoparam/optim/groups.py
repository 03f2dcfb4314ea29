"""Parameter groups that any torch optimizer takes: what is decayed, and how fast angles turn."""

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, Literal

from torch import nn

from geoparam.unit import GmPLayer

AngleRate = float | Literal["fan_in"] | None


def param_groups(
    model: nn.Module, lr: float, weight_decay: float = 0.0, angle_lr: AngleRate = None
) -> list[dict[str, Any]]:
    r"""Return groups in which each parameter of `model` is once, with its rate and its decay.

    Directions (`latitude`, `unit`), r and lam are never decayed: decay would drag every unit to
    one direction. Neither are biases and the parameters of normalization layers. All else is.

    Args:
        model: any model, converted or not.
        lr: learning rate of everything but the directions.
        weight_decay: decay of the weights that are decayed.
        angle_lr: learning rate of the directions; None for `lr`; `"fan_in"` for lr / sqrt(n), with
            which one Adam step turns a unit by about as much whatever its fan-in n.

    Example:
        >>> from geoparam import GmPLinear
        >>> model = nn.Sequential(GmPLinear(16, 8), nn.ReLU(), nn.Linear(8, 1))
        >>> for group in param_groups(model, lr=0.1, weight_decay=0.05, angle_lr="fan_in"):
        ...     print(group["name"], len(group["params"]), group["lr"], group["weight_decay"])
        directions 1 0.025 0.0
        undecayed 3 0.1 0.0
        decayed 1 0.1 0.05
    """
    is_rate = isinstance(angle_lr, int | float) and angle_lr >= 0
    if angle_lr is not None and angle_lr != "fan_in" and not is_rate:
        raise ValueError(f"angle_lr is a rate, 'fan_in' or None; got {angle_lr!r}.")
    members: dict[tuple[str, float, float], list[nn.Parameter]] = defaultdict(list)
    for parameter, owner, name in _unique_parameters(model):
        if isinstance(owner, GmPLayer) and name in ("latitude", "unit"):
            members["directions", _angle_rate(lr, angle_lr, owner.fan_in), 0.0].append(parameter)
        elif _is_undecayed(parameter, owner, name):
            members["undecayed", lr, 0.0].append(parameter)
        else:
            members["decayed", lr, weight_decay].append(parameter)
    return [
        {"params": parameters, "lr": rate, "weight_decay": decay, "name": name}
        for (name, rate, decay), parameters in members.items()
    ]


def undecayed_names(model: nn.Module) -> set[str]:
    """Return the names of biases, of norms' parameters and of all others that decay spares."""
    names = {id(p): name for name, p in model.named_parameters()}
    found = _unique_parameters(model)
    return {names[id(p)] for p, owner, key in found if _is_undecayed(p, owner, key)}


def _unique_parameters(model: nn.Module) -> Iterator[tuple[nn.Parameter, nn.Module, str]]:
    """Yield each parameter once, with the module that holds it and its name there."""
    seen = set()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield parameter, module, name


def _angle_rate(lr: float, angle_lr: AngleRate, fan_in: int) -> float:
    if angle_lr is None:
        return lr
    return lr / math.sqrt(fan_in) if angle_lr == "fan_in" else float(angle_lr)


def _is_undecayed(parameter: nn.Parameter, owner: nn.Module, name: str) -> bool:
    is_norm = re.search(r"norm(act)?\d*d?$", type(owner).__name__.lower()) is not None
    return isinstance(owner, GmPLayer) or is_norm or parameter.ndim <= 1 or name.endswith("bias")
