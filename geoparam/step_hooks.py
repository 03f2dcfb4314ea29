"""Hooks around an optimizer's step: checks of its groups, and unit vectors kept on the sphere.

A global pre-step hook, `_inspect`, checks each torch optimizer before its first two steps, after
its groups have changed, and after a conversion. A layer registers itself when it is made, copied
or unpickled. Not checked: optimizers that are not torch.optim's, compiled steps, and flattened or
stacked parameters.
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import nn, optim
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

_PROPORTIONAL = optim.SGD, optim.ASGD
_ADAPTIVE = optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax, optim.RMSprop

_layers: WeakKeyDictionary[Any, None] = WeakKeyDictionary()
_seen: WeakKeyDictionary[Optimizer, tuple[list, list]] = WeakKeyDictionary()
_replaced: Any = WeakIdKeyDictionary()  # parameters that have left their model
_suspects: WeakSet[Optimizer] = WeakSet()  # to be checked again, since a model was converted


def watch(layer: nn.Module) -> None:
    """Check each optimizer that steps the directions of this GmP layer."""
    _register()
    _layers[layer] = None


def note_replaced(before: "list[ref[nn.Parameter]]", model: nn.Module) -> None:
    """Check optimizers again, for parameters that `model` had before and no longer has."""
    _register()
    known = [p for r in before if (p := r()) is not None]
    own, known_ids = {id(p) for p in model.parameters()}, {id(p) for p in known}
    if own <= known_ids:  # some went, but none came that an optimizer could miss
        return
    _replaced.update({p: None for p in known if id(p) not in own})
    _suspects.update(_seen)


@functools.cache
def _register() -> None:
    register_optimizer_step_pre_hook(_inspect)


def _inspect(optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
    """Warn, once, of parameters that left their model, wrong groups and forgotten `retract`."""
    if torch.compiler.is_compiling():
        return
    form = [(len(g["params"]), bool(g.get("weight_decay"))) for g in optimizer.param_groups]
    known, drifting = _seen.get(optimizer, (None, []))
    if form != known or optimizer in _suspects:
        _suspects.discard(optimizer)
        _warn_of_replaced(optimizer)
    if form != known:
        _seen[optimizer] = form, _check_groups(optimizer)
    elif drifting:
        _seen[optimizer] = form, []
        if found := sum(not layer.is_retracted for layer in drifting):
            warnings.warn(
                f"the unit vectors of {found} GmP layers were not brought back to length 1 after "
                "a step. Their function is right, but steps turn them less and less: call "
                "optimizer.register_step_post_hook(geoparam.retract(model)).",
                stacklevel=3,
            )


def _warn_of_replaced(optimizer: Optimizer) -> None:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    found = [p for p in params if p.requires_grad and p in _replaced]
    for p in found:
        _replaced.pop(p, None)  # torch allows a parameter twice in a group
    if found:
        warnings.warn(
            f"{len(found)} parameters of this optimizer have left the model, so it does not train "
            "what replaced them. convert_ and fold_ make new parameters: build the optimizer "
            "afterwards.",
            stacklevel=4,
        )


def _check_groups(optimizer: Optimizer) -> list[Any]:
    """Warn of groups that suit no GmP layer; return the layers whose unit vectors are stepped."""
    decay = {id(p): g.get("weight_decay") for g in optimizer.param_groups for p in g["params"]}
    layers = [layer for ref in _layers.keyrefs() if (layer := ref()) is not None]
    stepped = [x for x in layers if id(x._stored) in decay and x._stored.requires_grad]
    if found := sum(bool(decay[id(layer._stored)]) for layer in stepped):
        warnings.warn(
            f"weight decay acts on the directions of {found} GmP layers: it turns units towards "
            "one axis, or lets their unit vectors shrink, and no decay of a plain weight does. "
            "Build the optimizer from geoparam.param_groups(model, lr=..., weight_decay=...).",
            stacklevel=4,
        )
    kinds = {group.get("kind") for group in optimizer.param_groups}
    wrong, right = ("adam", "sgd") if isinstance(optimizer, _PROPORTIONAL) else ("sgd", "adam")
    if stepped and wrong in kinds and isinstance(optimizer, (*_PROPORTIONAL, *_ADAPTIVE)):
        warnings.warn(
            f"the rates of {len(stepped)} GmP layers are matched to the plain model's for another "
            f"kind of optimizer than {type(optimizer).__name__}. Build it from "
            f"geoparam.param_groups(model, lr=..., kind={right!r}).",
            stacklevel=4,
        )
    drifting = [layer for layer in stepped if layer._coordinates.name == "unit"]
    for layer in drifting:
        layer.is_retracted = False
    return drifting


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

    def hook(*_: object) -> None:
        for module in model.modules():
            if module in _layers:
                module.retract_()  # type: ignore[operator]

    return hook
