"""Putting modules in others' places: everywhere they are used, with their hooks and mode."""

from collections import defaultdict
from collections.abc import Iterable

from torch import nn


def replace_modules(model: nn.Module, pairs: Iterable[tuple[nn.Module, nn.Module]]) -> nn.Module:
    """Put the new of each (old, new) into all places of the old one, and return the model.

    A pair may be built when it is asked for: the one before is in its place by then.
    """
    places = defaultdict(list)
    for parent in model.modules():
        for name, child in parent._modules.items():
            places[child].append((parent, name))
    for old, new in pairs:
        for key, value in old.__dict__.items():
            if key.endswith("_hooks") or "_hooks_" in key:
                new.__dict__[key] = value  # the same dict, so that handles can still remove a hook
        new.train(old.training)
        for parent, name in places.pop(old, ()):  # with the last place, the old memory goes
            parent._modules[name] = new
        model = new if old is model else model
    return model


def refuse_wrapped(model: nn.Module, verb: str) -> None:
    """Raise where a wrapper has noted the model's parameters: new ones would not be reduced."""
    for module in model.modules():
        kinds = {kind.__name__ for kind in type(module).__mro__}
        if found := kinds & {"DistributedDataParallel", "FullyShardedDataParallel"}:
            raise ValueError(
                f"the model is wrapped in {found.pop()}, which would not see its new parameters: "
                f"processes would drift apart. First {verb} the model, then wrap it."
            )
