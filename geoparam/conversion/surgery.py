"""Putting one module in another's place: everywhere it is used, with its hooks and its mode."""

from torch import nn

Places = dict[nn.Module, list[tuple[nn.Module, str]]]


def find_places(model: nn.Module) -> Places:
    """Return for each submodule the parents that hold it, and under which name."""
    found: Places = {}
    for parent in model.modules():
        for name, child in parent._modules.items():
            if child is not None:
                found.setdefault(child, []).append((parent, name))
    return found


def replace_module(new: nn.Module, old: nn.Module, where: Places) -> nn.Module:
    """Put `new` into all places of `old`, with its hooks and its mode, and return it."""
    for key, value in old.__dict__.items():
        if key.endswith("_hooks") or "_hooks_" in key:
            new.__dict__[key] = value  # the same dict, so that handles can still remove a hook
    new.train(old.training)
    for parent, name in where.get(old, ()):
        parent._modules[name] = new
    return new


def refuse_wrapped(model: nn.Module, verb: str) -> None:
    """Raise where a wrapper has noted the model's parameters: new ones would not be reduced."""
    for module in model.modules():
        kinds = {kind.__name__ for kind in type(module).__mro__}
        if found := kinds & {"DistributedDataParallel", "FullyShardedDataParallel"}:
            raise ValueError(
                f"the model is wrapped in {found.pop()}, which would not see its new parameters: "
                f"processes would drift apart. First {verb} the model, then wrap it."
            )
