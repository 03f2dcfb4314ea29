"""What to do around an optimizer's step: keep unit vectors on the sphere, find decayed angles."""

import warnings
from collections.abc import Callable

from torch import nn
from torch.optim import Optimizer

from geoparam.base_layer import GmPLayer
from geoparam.storage import list_few


def retract(model: nn.Module) -> Callable[..., None]:
    """Return a hook that keeps the unit vectors of intrinsic layers on the sphere.

    Call it once after every optimizer step; angles need nothing. The model's function does not
    change by it. As a hook it also checks the optimizer, once.

    Example:
        >>> import torch
        >>> from geoparam import GmPLinear
        >>> model = GmPLinear(3, 2, coordinates="intrinsic")
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> handle = optimizer.register_step_post_hook(retract(model))
    """
    checked: list[object] = []

    def hook(optimizer: object = None, *_: object) -> None:
        if isinstance(optimizer, Optimizer) and optimizer not in checked:
            checked.append(optimizer)
            check_optimizer(optimizer, model)
        for module in model.modules():
            if isinstance(module, GmPLayer):
                module.retract_()

    return hook


def check_optimizer(optimizer: Optimizer, model: nn.Module) -> None:
    """Warn if weight decay acts on directions, which no decay of a plain weight does.

    It turns every unit towards the axis at which its angles are 0. `param_groups` leaves
    directions, r and lam out of the decay.
    """
    groups = [group for group in optimizer.param_groups if group.get("weight_decay")]
    decayed = {id(parameter) for group in groups for parameter in group["params"]}
    layers = {name: m for name, m in model.named_modules() if isinstance(m, GmPLayer)}
    if found := [name for name, layer in layers.items() if id(layer._stored) in decayed]:
        warnings.warn(
            f"weight decay acts on the directions of {list_few(found, most=3)}. Build the "
            "optimizer from geoparam.param_groups(model, lr=..., weight_decay=...).",
            stacklevel=3,
        )
