"""What else in a model holds a layer, or memory of its parameters.

Conversion replaces registered modules. Whatever reaches a layer otherwise would go on with the old
one, and parameters that share memory would part: both are found here, without running the model,
but for what a function reads from global names or context variables.
"""

import gc
from collections.abc import Iterable, Iterator
from types import FrameType, FunctionType, GeneratorType, ModuleType, TracebackType
from typing import NamedTuple

from torch import Tensor, nn


class Claim(NamedTuple):
    """A tensor's place in memory, and who holds it: a module's state, or an attribute if None."""

    device: str
    start: int
    end: int
    place: str
    owner: nn.Module | None


def ties_and_holders(model: nn.Module) -> tuple[dict[nn.Module, list[str]], dict[nn.Module, str]]:
    """Return what each module's tensors share memory with, and which attribute holds it besides.

    Ties go by memory: `nn.Parameter(encoder.weight.data.t())` is a parameter of its own, with the
    encoder's elements.
    """
    claims: list[Claim] = []
    held: dict[nn.Module, str] = {}
    for name, owner in model.named_modules():
        for key, tensor in (*owner._parameters.items(), *owner._buffers.items()):
            if tensor is not None:
                claims.append(_build_claim(tensor, f"{name}.{key}".lstrip("."), owner))
        for key, value in owner.__dict__.items():
            place = f"{key!r} of {name or 'the model'!r}"
            for item in () if key in ("_modules", "_parameters", "_buffers") else _walk(value):
                if isinstance(item, Tensor):
                    claims.append(_build_claim(item, place))
                elif item is not owner:
                    held[item] = place
    ties: dict[nn.Module, list[str]] = {}
    for group in _group_overlapping(claims):
        attributes = [claim.place for claim in group if claim.owner is None]
        owned = [(c.owner, c.place) for c in group if c.owner is not None]
        for module, place in owned:
            if attributes:
                held[module] = attributes[0]
            if others := [other for _, other in owned if other != place]:
                ties.setdefault(module, []).extend(others)
    return ties, held


def _build_claim(tensor: Tensor, place: str, owner: nn.Module | None = None) -> Claim:
    try:
        start = tensor.data_ptr()
    except (RuntimeError, ValueError):  # a lazy parameter, or a subclass that wraps tensors
        start = 0
    if start == 0:  # no memory, as on the meta device: the object itself stands for it
        return Claim("", id(tensor), id(tensor), place, owner)
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    end = start + last * tensor.element_size()
    return Claim(str(tensor.device), start, end, place, owner)


def _group_overlapping(claims: list[Claim]) -> Iterator[list[Claim]]:
    """Yield the claims in groups that have memory in common."""
    group: list[Claim] = []
    end = 0
    for claim in sorted(claims, key=lambda claim: claim[:3]):
        if group and (claim.device != group[0].device or claim.start > end):
            yield group
            group, end = [], 0
        group.append(claim)
        end = max(end, claim.end)
    yield group


def _walk(value: object) -> Iterator[nn.Module | Tensor]:
    """Yield the modules and tensors in nested containers, functions and objects."""
    waiting, seen = [value], set()
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
