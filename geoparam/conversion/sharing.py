"""What else in a model holds a layer, or memory of its parameters.

Conversion replaces registered modules. Whatever reaches a layer otherwise would go on with the old
one, and parameters that share memory would part: both are found here, without running the model,
but for what a function reads from global names or context variables.
"""

import gc
from collections.abc import Iterable, Iterator
from types import FrameType, FunctionType, GeneratorType, ModuleType, TracebackType

from torch import Tensor, nn

from geoparam.model.run import group_by_memory
from geoparam.removed_norm import RemovedNorm


def ties_and_holders(model: nn.Module) -> tuple[dict[nn.Module, list[str]], dict[nn.Module, str]]:
    """Return what each module's tensors share memory with, and which attribute holds it besides.

    Ties go by memory: `nn.Parameter(encoder.weight.data.t())` is a parameter of its own, with the
    encoder's elements.
    """
    # Each tensor, and who holds it: a module's state, or an attribute if the owner is None.
    claims: list[tuple[Tensor, tuple[nn.Module | None, str]]] = []
    held: dict[nn.Module, str] = {}
    for name, owner in model.named_modules():
        for key, tensor in (*owner._parameters.items(), *owner._buffers.items()):
            if tensor is not None:
                claims.append((tensor, (owner, f"{name}.{key}".lstrip("."))))
        if isinstance(owner, RemovedNorm):  # which follows its layer
            continue
        for key, value in vars(owner).items():
            if key in ("_modules", "_parameters", "_buffers"):
                continue
            place = f"{key!r} of {name or 'the model'!r}"
            for item in _walk(value):
                if isinstance(item, Tensor):
                    claims.append((item, (None, place)))
                elif item is not owner:
                    held[item] = place

    ties: dict[nn.Module, list[str]] = {}
    for group in group_by_memory(claims):
        attributes = [place for owner, place in group if owner is None]
        states = [(owner, place) for owner, place in group if owner is not None]
        for module, place in states:
            if attributes:
                held[module] = attributes[0]
            others = [other for _, other in states if other != place]
            if others:
                ties.setdefault(module, []).extend(others)
    return ties, held


def _walk(value: object) -> Iterator[nn.Module | Tensor]:
    """Yield the modules and tensors in nested containers, functions and objects."""
    waiting, seen = [value], set[int]()
    while waiting:
        item = waiting.pop()
        if isinstance(item, nn.Module | Tensor):
            yield item
        elif id(item) not in seen:
            seen.add(id(item))
            waiting += _list_parts(item)


def _list_parts(value: object) -> Iterable[object]:
    """Return what an object refers to, but for a function's global names."""
    if isinstance(value, type | ModuleType | FrameType | TracebackType):
        return ()
    if isinstance(value, FunctionType):
        return value.__closure__, value.__defaults__, value.__kwdefaults__
    if isinstance(value, GeneratorType):
        return () if value.gi_frame is None else value.gi_frame.f_locals.values()
    return gc.get_referents(value)
