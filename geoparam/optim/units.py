"""Finds the weights of a model whose rows are units, and says why others stay plain.

What is a unit depends on modules and names, never on values, so that weights may be loaded before
or after the optimizer is built. One exception is said in the table: a row of zeros can only grow
where its r is free.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from geoparam.base_layer import GmPLayer
from geoparam.graph import Graph
from geoparam.inspection import group_by_memory, refuse_lazy, strip_wrappers
from geoparam.model.roles import find_embeddings, find_norms, find_outputs, is_router
from geoparam.model.unit_layers import Layout, Split, Stacks, UnitWeight, find_unit_weights
from geoparam.trace import Filter, trace


@dataclass(frozen=True)
class Unit:
    """A weight whose rows are units: its name, layout, sizes, bias and norm."""

    name: str
    layout: Layout
    parts: tuple[int, ...]  # rows of each layer in it
    rows: int = 0
    fan_in: int = 0
    bias: str | None = None  # stepped as b = r lam
    norm: str | None = None  # the norm that reads its output, so that r has no effect
    is_fixed: bool = False  # whether r is held

    def fit(self, weight: Tensor) -> "Unit":
        """Return the unit with the weight's present sizes: pruning may have cut rows."""
        whole = torch.empty(weight.shape, device="meta")  # also of a sharded weight
        rows, fan_in = self.layout.to_rows(whole).shape
        if rows == sum(self.parts):
            return replace(self, rows=rows, fan_in=fan_in)
        if len(self.parts) > 1:
            raise ValueError(
                f"{self.name!r} had {self.rows} rows in {len(self.parts)} parts and has {rows} "
                "now: build the optimizer anew."
            )
        return replace(self, parts=(rows,), rows=rows, fan_in=fan_in)


@dataclass(frozen=True)
class Found:
    """The units of a model, and why other matrices stay plain."""

    units: list[Unit]
    plain: dict[str, str]


def find_units(
    model: nn.Module,
    filter_fn: Filter | None = None,
    example_inputs: Any = None,
    scale: str = "auto",
    split: Split | None = None,
    stacks: Stacks | None = None,
) -> Found:
    """Find the units; arguments are as in `GeometricOptimizer`.

    Example:
        >>> find_units(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))).plain
        {'2.weight': 'the output layer'}
    """
    _check_model(model)
    graph = None if example_inputs is None else trace(model, example_inputs)
    candidates = list(find_unit_weights(model, split, stacks))
    parameters = dict(model.named_parameters())
    names = {id(p): name for name, p in parameters.items()}
    overlaps = _find_overlaps(parameters)
    norms = find_norms(model, graph)
    plain = {name: why for name, why in overlaps.items() if parameters[name].ndim > 1}
    plain.update(_find_reasons(model, candidates, names, filter_fn, graph))

    units: dict[str, Unit] = {}
    holders = Counter(id(p) for m in model.modules() for p in m._parameters.values())
    for candidate in candidates:
        name = names[id(candidate.weight)]
        if name in plain or name in units:
            continue
        norm = norms.get(candidate.layer)
        is_fixed = scale == "fixed" or (scale == "auto" and norm is not None)
        unit = Unit(name, candidate.layout, candidate.parts, norm=norm, is_fixed=is_fixed)
        unit = unit.fit(candidate.weight)
        bias = candidate.bias
        is_tied_alike = holders[id(bias)] == holders[id(candidate.weight)]
        if bias is not None and is_tied_alike and names[id(bias)] not in overlaps:
            unit = replace(unit, bias=names[id(bias)])
        if is_fixed and _has_zero_row(unit, candidate.weight):
            plain[name] = "a row of zeros cannot grow while r is fixed"
        else:
            units[name] = unit

    known = {*units, *(unit.bias for unit in units.values())}
    for name, p in parameters.items():
        if p.ndim > 1 and name not in known:
            plain.setdefault(name, _name_owner(model, name))
    if not units:
        raise ValueError(_say_why_none(plain, graph is None))
    return Found(list(units.values()), plain)


def _name_owner(model: nn.Module, name: str) -> str:
    """Return why a parameter of a module that is no known layer stays plain."""
    owner = model.get_submodule(name.rpartition(".")[0])
    if isinstance(owner, nn.Embedding | nn.EmbeddingBag) and name.endswith("weight"):
        return "an embedding"
    return "a router" if type(owner).__name__.endswith("Router") else "not in a known layer"


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
    parts = [(p.to_local() if hasattr(p, "to_local") else p, n) for n, p in parameters.items()]
    overlaps: dict[str, str] = {}
    for group in group_by_memory(parts):
        for first, second in pairwise(group):
            overlaps[second] = f"shares memory with {first}"
            overlaps[first] = f"shares memory with {second}"
    return overlaps


def _has_zero_row(unit: Unit, weight: Any) -> bool:
    if weight.is_meta:
        return False
    part = weight.to_local() if hasattr(weight, "to_local") else weight
    has_zero = ~unit.layout.to_rows(part.detach()).any(dim=1).all()
    if hasattr(weight, "device_mesh"):
        flag = has_zero.int()
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        has_zero = flag
    return bool(has_zero)


def format_table(found: Found, trained: Collection[str]) -> str:
    """Return a line for each weight: what its units are, or why it stays plain."""
    names = [*found.plain, *(unit.name for unit in found.units)]
    width = min(max(40, *map(len, names)), 100)
    lines = [f"  {'units of':{width}} {'rows':>6} {'fan-in':>6}  {'bias':5}  scale"]
    plain = dict(found.plain)
    for unit in found.units:
        if unit.name not in trained:
            plain[unit.name] = "frozen, or in no group"
            continue
        scale = "free"
        if unit.is_fixed:
            scale = f"fixed, {unit.norm} follows" if unit.norm else "fixed"
        if len(unit.parts) > 1:
            scale += f"; {len(unit.parts)} layers"
        elif unit.rows == 3 * unit.fan_in and _looks_packed(unit.name):
            scale += "; q, k, v in one? Then give split="
        bias = "lam" if unit.bias else "-"
        lines.append(f"  {unit.name:{width}} {unit.rows:6} {unit.fan_in:6}  {bias:5}  {scale}")
    lines.append("  plain")
    for name, reason in plain.items():
        if name in found.plain and name not in trained:
            reason += "; frozen, or in no group"
        lines.append(f"  {name:{width}} {reason}")
    return "\n".join(lines)


def _looks_packed(name: str) -> bool:
    return name.removesuffix(".weight").lower().endswith(("c_attn", "qkv", "in_proj"))
