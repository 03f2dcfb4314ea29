"""Hooks around an optimizer's step: unit vectors kept on the sphere, and one warning.

The warning is for an optimizer that was built before `convert_` or `fold_`, and so steps
parameters that have left the model. Its hook, for all torch optimizers, is registered by the first
conversion that replaces parameters. It checks each optimizer once after every conversion.
"""

import functools
import warnings
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakSet, ref

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from geoparam.base_layer import GmPLayer
from geoparam.model.run import refuse_non_model

_replaced: Any = WeakIdKeyDictionary()  # parameters that have left their model
_checked: WeakSet[Optimizer] = WeakSet()  # optimizers, since the last conversion


def retract(model: nn.Module) -> Callable[..., None]:
    """Return a hook that keeps the unit vectors of intrinsic layers on the sphere.

    Call it once after every optimizer step; angles need nothing. The model's function does not
    change by it.

    Example:
        >>> import torch
        >>> from geoparam import GmPLinear
        >>> model = GmPLinear(3, 2, coordinates="intrinsic")
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> handle = optimizer.register_step_post_hook(retract(model))
    """
    refuse_non_model(model, "retract(model)")

    def hook(*_: object) -> None:
        for module in model.modules():
            if isinstance(module, GmPLayer):
                module.retract_()

    return hook


def note_replaced(before: "Iterable[ref[nn.Parameter]]", model: nn.Module) -> None:
    """Let optimizers be checked for parameters that `model` had before and no longer has."""
    parameters = set(model.parameters())
    known = {p for reference in before if (p := reference()) is not None}
    if parameters <= known:  # an optimizer of the known ones misses none
        return
    _replaced.update(dict.fromkeys(known - parameters))
    _checked.clear()
    _register()


@functools.cache
def _register() -> None:
    register_optimizer_step_pre_hook(_check)


def _check(optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
    """Warn, once, if an optimizer steps parameters that have left their model."""
    if torch.compiler.is_compiling() or optimizer in _checked:
        return
    _checked.add(optimizer)
    stepped = {p for group in optimizer.param_groups for p in group["params"]}
    left = [p for p in stepped if p.requires_grad and p in _replaced]
    for p in left:
        del _replaced[p]
    if left:
        warnings.warn(
            f"{len(left)} parameters of this optimizer have left the model, so it does not train "
            "what replaced them. convert_ and fold_ make new parameters: build the optimizer "
            "afterwards.",
            stacklevel=3,
        )
