"""Finds the weights of a model whose rows are units, and says why others stay plain.

What is a unit depends on modules and names, never on values, so that weights may be loaded before
or after the optimizer is built. One exception is said in the table: a row of zeros can only grow
where its r is free.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from geoparam.arguments import warn_user
from geoparam.base_layer import GmPLayer
from geoparam.model.graph import Graph
from geoparam.model.roles import find_embeddings, find_norms, find_outputs, is_router
from geoparam.model.run import group_by_memory, refuse_lazy, strip_wrappers
from geoparam.model.trace import Filter, trace
from geoparam.model.unit_layers import LAYERS, Layout, Split, Stacks, UnitWeight, find_unit_weights
from geoparam.storage import list_few

MAYBE_EXPERTS = "not in a known layer; experts? Then give stacks="


@dataclass(frozen=True)
class Unit:
    """A weight whose rows are units: its name, layout, sizes, bias and norm."""

    name: str
    layout: Layout
    shape: torch.Size
    parts: tuple[int, ...]  # rows of each layer in it
    fan_in: int
    bias: str | None  # stepped as b = r lam
    norm: str | None  # the norm that reads its output, so that r has no effect
    is_fixed: bool  # whether r is held

    @property
    def rows(self) -> int:
        return sum(self.parts)

    def fit(self, shape: torch.Size) -> "Unit":
        """Return the unit for a weight of this shape: pruning may have cut rows."""
        rows, fan_in = self.layout.to_rows(torch.empty(shape, device="meta")).shape
        parts = self.parts
        if rows != self.rows:
            if len(parts) > 1:
                raise ValueError(
                    f"{self.name!r} had {self.rows} rows in {len(parts)} parts and has {rows} "
                    "now: build the optimizer anew."
                )
            parts = (rows,)
        return replace(self, shape=shape, parts=parts, fan_in=fan_in)


def find_units(
    model: nn.Module,
    filter_fn: Filter | None = None,
    example_inputs: Any = None,
    scale: str = "auto",
    split: Split | None = None,
    stacks: Stacks | None = None,
) -> tuple[list[Unit], dict[str, str]]:
    """Return the units, and why other matrices stay plain.

    Arguments are as in `GeometricOptimizer`.

    Example:
        >>> units, plain = find_units(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
        >>> plain
        {'2.weight': 'the output layer'}
    """
    _check_model(model)
    graph = None if example_inputs is None else trace(model, example_inputs)
    candidates = list(find_unit_weights(model, split, stacks))
    parameters = dict(model.named_parameters())
    names = {id(p): name for name, p in parameters.items()}
    overlaps = _find_overlaps(parameters)
    norms = find_norms(model, candidates, graph)
    plain = {name: why for name, why in overlaps.items() if parameters[name].ndim > 1}
    plain.update(_find_reasons(model, candidates, names, filter_fn, graph))

    units: dict[str, Unit] = {}
    holders = Counter(id(p) for m in model.modules() for p in m._parameters.values())
    for candidate in candidates:
        weight, bias = candidate.weight, candidate.bias
        name = names[id(weight)]
        if name in plain or name in units:
            continue
        norm = norms.get(candidate.layer)
        is_fixed = scale == "fixed" or (scale == "auto" and norm is not None)
        if is_fixed and _has_zero_row(candidate):
            plain[name] = "a row of zeros cannot grow while r is fixed"
            continue

        bias_name = None
        if bias is not None and holders[id(bias)] == holders[id(weight)]:  # tied alike
            bias_name = names[id(bias)]
        if bias_name in overlaps:
            bias_name = None
        units[name] = Unit(
            name,
            candidate.layout,
            weight.shape,
            candidate.parts,
            fan_in=weight.numel() // sum(candidate.parts),
            bias=bias_name,
            norm=norm,
            is_fixed=is_fixed,
        )

    known = {*units, *(unit.bias for unit in units.values())}
    for name, p in parameters.items():
        if p.ndim > 1 and name not in known:
            plain.setdefault(name, _describe_owner(model, name))
    if not units:
        raise ValueError(_say_why_none(plain, graph is None))
    return list(units.values()), plain


def _describe_owner(model: nn.Module, name: str) -> str:
    """Return why a parameter of an unrecognised module stays plain."""
    owner = model.get_submodule(name.rpartition(".")[0])
    if isinstance(owner, nn.Embedding | nn.EmbeddingBag) and name.endswith("weight"):
        return "an embedding"
    if type(owner).__name__.endswith("Router"):
        return "a router"
    p = model.get_parameter(name)
    computes_its_weight = isinstance(owner, (*LAYERS, ParametrizationList))
    if p.ndim == 3 and len(p) > 1 and not computes_its_weight:
        return MAYBE_EXPERTS
    return "not in a known layer"


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"the first argument is the model, an nn.Module; got {type(model)}. For Trainer's "
            "optimizer_cls_and_kwargs, give geoparam.integrations.transformers.Geometric."
        )
    for name, module in model.named_modules():
        if isinstance(module, GmPLayer):
            raise ValueError(
                f"{name!r} has its geometry in the layer already. Give such a model's "
                "param_groups to a torch optimizer, or fold it with fold_ first."
            )
    refuse_lazy(model)


def _say_why_none(plain: Mapping[str, str], is_guessed: bool) -> str:
    why = "; ".join(f"{name}: {reason}" for name, reason in plain.items()) or "none was found"
    hint = " With example_inputs, output layers are found in a run." if is_guessed else ""
    return f"no layer of this model has units to train ({why}).{hint}"


def _find_reasons(
    model: nn.Module,
    candidates: Sequence[UnitWeight],
    names: Mapping[int, str],
    filter_fn: Filter | None,
    graph: Graph | None,
) -> dict[str, str]:
    """Return why layers stay plain, by the names of their weights."""
    embedded = {id(weight) for weight in find_embeddings(model)}
    outputs = {} if filter_fn else find_outputs(model, candidates, graph)
    reasons = {}
    for candidate in candidates:
        name = names[id(candidate.weight)]
        if id(candidate.weight) in embedded:
            reasons[name] = "tied to an embedding"
        elif filter_fn is not None:
            if not filter_fn(candidate.module, strip_wrappers(candidate.layer)):
                reasons[name] = "filter_fn"
        elif candidate.layer in outputs:
            reasons[name] = outputs[candidate.layer]
        elif candidate.layer and name.endswith(".weight") and is_router(model, candidate.layer):
            reasons[name] = "a router"
    return reasons


def _find_overlaps(parameters: dict[str, nn.Parameter]) -> dict[str, str]:
    """Return parameters in one memory, as after `w.data = v.data.t()`: their steps would mix."""
    parts = []
    for name, p in parameters.items():
        part = p.to_local() if hasattr(p, "to_local") else p
        parts.append((part, name))

    overlaps: dict[str, str] = {}
    for group in group_by_memory(parts):
        for first, second in pairwise(group):
            overlaps[second] = f"shares memory with {first}"
            overlaps[first] = f"shares memory with {second}"
    return overlaps


def _has_zero_row(candidate: UnitWeight) -> bool:
    weight: Any = candidate.weight
    if weight.is_meta:
        return False
    part = weight.to_local() if hasattr(weight, "to_local") else weight
    is_zero = ~candidate.layout.to_rows(part.detach()).any(dim=1)
    has_zero = is_zero.any().int()
    if hasattr(weight, "device_mesh"):
        dist.all_reduce(has_zero, dist.ReduceOp.MAX)
    return bool(has_zero)


def looks_packed(unit: Unit) -> bool:
    """Return whether a weight that counts as one layer looks like q, k and v, by its name.

    Gate and up in one need no question: in a tiny Phi-3 they turned by 2.41 and 2.39 of 2.4
    degrees undivided, q, k and v by 1.79, 2.15 and 3.47.
    """
    name = unit.name.removesuffix(".weight").rpartition(".")[2].lower()
    is_packed = "qkv" in name or name in ("query_key_value", "c_attn")
    is_packed = is_packed or (name.endswith("in_proj") and unit.rows == 3 * unit.fan_in)
    return is_packed and len(unit.parts) == 1


def tell_of_stacks(names: Sequence[str]) -> None:
    """Warn of 3-D parameters that stay plain, though they may be experts."""
    if names:
        ends = sorted({".".join(name.split(".")[-2:]) for name in names})
        stacks = ", ".join(f"{end!r}: 'eoi'" for end in ends)
        warn_user(
            f"parameters with three dimensions do not turn: {list_few(names, most=2)}. If they "
            f"are experts, give stacks={{{stacks}}}, or 'eio' where inputs come before outputs; "
            "stacks={} if they are not."
        )


def tell_of_packed(units: Sequence[Unit]) -> None:
    """Warn of q, k and v that would share one angle."""
    parts = {}
    for unit in filter(looks_packed, units):
        is_equal = unit.rows == 3 * unit.fan_in
        parts[unit.name.removesuffix(".weight")] = 3 if is_equal else "(rows of q, of k, of v)"
    if parts:
        by_end = {name.rpartition(".")[2]: count for name, count in parts.items()}
        split = ", ".join(f"{end!r}: {count}" for end, count in sorted(by_end.items()))
        warn_user(
            f"q, k and v seem to be one matrix in {list_few([*parts], most=2)}, and would share "
            "an angle: one of the three may turn ten times as far as another. If their rows "
            f"follow each other, give split={{{split}}}; split={{}} if each is one layer, or "
            "heads alternate."
        )
