"""Putting one module in another's place: everywhere it is used, with its hooks and its mode."""

from torch import nn

Places = dict[nn.Module, list[tuple[nn.Module, str]]]


def places(model: nn.Module) -> Places:
    """Return for each submodule the parents that hold it, and under which name."""
    found: Places = {}
    for parent in model.modules():
        for name, child in parent._modules.items():
            if child is not None:
                found.setdefault(child, []).append((parent, name))
    return found


def put(new: nn.Module, old: nn.Module, where: Places) -> nn.Module:
    """Put `new` into all places of `old`, with its hooks and its mode, and return it."""
    for key, value in old.__dict__.items():
        if key.endswith("_hooks") or "_hooks_" in key:
            new.__dict__[key] = value  # the same dict, so that handles can still remove a hook
    new.train(old.training)
    for parent, name in where.get(old, ()):
        parent._modules[name] = new
    return new
