"""Finds the weights of a model whose rows are units, and says why others stay plain.

What is a unit depends on modules and names, never on values, so that weights may be loaded before
or after the optimizer is built. One exception is said in the table: a row of zeros can only grow
where its r is free.
"""

import re
import warnings
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from geoparam.base_layer import GmPLayer
from geoparam.graph import Graph
from geoparam.inspection import group_by_memory, refuse_lazy, strip_wrappers
from geoparam.model.unit_layers import (
    Layout,
    Split,
    Stacks,
    UnitWeight,
    find_unit_weights,
    is_router,
)
from geoparam.trace import Filter, output_layers, trace

CHANNEL_NORMS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)


@dataclass(frozen=True)
class Unit:
    """A weight whose rows are units: its name, layout, sizes, bias and norm."""

    name: str
    layout: Layout
    parts: tuple[int, ...]  # rows of each layer in it
    fan_in: int
    bias: str | None  # stepped as b = r lam
    norm: str | None  # the norm that reads its output, so that r has no effect
    is_fixed: bool  # whether r is held

    @property
    def rows(self) -> int:
        return sum(self.parts)

    def fit(self, weight: Tensor) -> "Unit":
        """Return the unit with the weight's present sizes: pruning may have cut rows."""
        rows, fan_in = self.layout.to_rows(weight).shape
        if rows == self.rows:
            return replace(self, fan_in=fan_in)
        if len(self.parts) > 1:
            raise ValueError(
                f"{self.name!r} had {self.rows} rows in {len(self.parts)} parts and has {rows} "
                "now: build the optimizer anew."
            )
        return replace(self, parts=(rows,), fan_in=fan_in)


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
    norms = _find_norms(model, graph)
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
        unit = Unit(name, candidate.layout, candidate.parts, 0, None, norm, is_fixed)
        unit = unit.fit(candidate.weight)
        bias = candidate.bias
        is_tied_alike = holders[id(bias)] == holders[id(candidate.weight)]
        if bias is not None and is_tied_alike and names[id(bias)] not in overlaps:
            unit = replace(unit, bias=names[id(bias)])
        if is_fixed and _has_zero_row(unit, candidate.weight):
            plain[name] = "a row of zeros cannot grow while r is fixed"
        else:
            units[name] = unit

    embedded = {names.get(id(w)) for w in _embedding_weights(model)}
    for name, p in parameters.items():
        if p.ndim > 1 and name not in units:
            reason = "an embedding" if name in embedded else "not in a known layer"
            plain.setdefault(name, reason)
    if not units:
        raise ValueError(_say_why_none(plain, graph is None))
    return Found(list(units.values()), plain)


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(f"the first argument is the model, an nn.Module; got {type(model)}.")
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
    embedded = {id(weight) for weight in _embedding_weights(model)}
    outputs = {} if filter_fn else _find_outputs(model, candidates, graph)
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


def _embedding_weights(model: nn.Module) -> list[Tensor]:
    kinds = nn.Embedding | nn.EmbeddingBag
    return [m.weight for m in model.modules() if isinstance(m, kinds)]


def _find_outputs(
    model: nn.Module, candidates: Sequence[UnitWeight], graph: Graph | None
) -> dict[str, str]:
    """Return the output layers and why they count as such.

    In a run, those that outputs come from. Without one, the layer that is tied to an embedding or
    the only one of its shape, else the last in order; the order also decides for layers that did
    not run, as heads for training only.
    """
    reason = "the output layer"
    if graph is not None:
        ran = set(graph.layers)
        unseen = [layer for layer in output_layers(model) if layer not in ran]
        return dict.fromkeys([*graph.outputs, *unseen], reason)

    embeddings = _embedding_weights(model)
    if any(c.weight is w for c in candidates for w in embeddings):
        return {}
    shapes = {w.shape for w in embeddings}
    heads = [c.layer for c in candidates if c.weight.shape in shapes]
    if len(heads) == 1:
        return {heads[0]: f"{reason}: shaped as the embedding"}

    last = [layer for layer in output_layers(model) if not is_router(model, layer)]
    for layer in last:
        if _is_in_a_block(model, layer):
            reason += ", by order; it ends a block"
            warnings.warn(
                f"{layer!r} is taken for the output layer because it comes last, but it looks "
                "like the end of one of several equal blocks. If the output layer is another one, "
                "give example_inputs or filter_fn.",
                stacklevel=5,
            )
    return dict.fromkeys(last, reason)


def _is_in_a_block(model: nn.Module, layer: str) -> bool:
    """Return whether a layer has a twin at the same place in the block before."""
    match = re.fullmatch(r"(.*?)(\d+)\.(.+)", layer)
    if match is None or match[2] == "0":
        return False
    twin = f"{match[1]}{int(match[2]) - 1}.{match[3]}"
    modules = dict(model.named_modules())
    return twin in modules and type(modules[twin]) is type(modules[layer])


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


def _find_norms(model: nn.Module, graph: Graph | None) -> dict[str, str]:
    """Return the norm after each layer: by a run, and by order for what did not run."""
    norms = _find_norms_by_order(model)
    if graph is None:
        return norms
    norms = {layer: norm for layer, norm in norms.items() if layer not in graph.layers}
    for layer in graph.layers:
        norm, is_only_reader = graph.norm_after(layer)
        if is_only_reader and norm is not None and norm.name:
            if _undoes_scale(model.get_submodule(norm.name), model.training):
                norms[layer] = norm.name
    return norms


def _undoes_scale(norm: nn.Module, model_trains: bool) -> bool:
    """Return whether a norm divides by its input's scale in training; a frozen one does not."""
    is_trained = [p.requires_grad for p in norm.parameters()] or [True]
    is_frozen = not norm.training and (model_trains or not any(is_trained))
    has_statistics = getattr(norm, "track_running_stats", True)
    return isinstance(norm, CHANNEL_NORMS) and not (is_frozen and has_statistics)


def _find_norms_by_order(model: nn.Module) -> dict[str, str]:
    """Guess without a run: the norm comes next among the modules, and has the layer's width."""
    norms: dict[str, str] = {}
    layer, width = "", 0
    for name, module in model.named_modules():
        if isinstance(module, CHANNEL_NORMS):
            is_beside = name.rpartition(".")[0] == layer.rpartition(".")[0]
            if is_beside and width == module.num_features:
                if _undoes_scale(module, model.training):
                    norms[layer] = name
            width = 0
        elif isinstance(module, nn.Linear | nn.modules.conv._ConvNd):
            layer = name
            width = getattr(module, "out_features", 0) or getattr(module, "out_channels", 0)
        elif next(module.children(), None) is None and not isinstance(module, nn.Identity):
            width = 0
    return norms


def format_table(found: Found, trained: Collection[str]) -> str:
    """Return a line for each weight: what its units are, or why it stays plain."""
    names = [*found.plain, *(unit.name for unit in found.units)]
    width = min(max(40, *map(len, names)), 100)
    lines = [f"  {'units of':{width}} {'rows':>6} {'fan-in':>6}  {'bias':5}  scale"]
    plain = dict(found.plain)
    for unit in found.units:
        if unit.name not in trained:
            plain[unit.name] = "frozen, or in no group at first"
            continue
        scale = "free"
        if unit.is_fixed:
            scale = f"fixed, {unit.norm} follows" if unit.norm else "fixed"
        if len(unit.parts) > 1:
            scale += f"; {len(unit.parts)} layers"
        bias = "lam" if unit.bias else "-"
        lines.append(f"  {unit.name:{width}} {unit.rows:6} {unit.fan_in:6}  {bias:5}  {scale}")
    lines.append("  plain")
    lines += [f"  {name:{width}} {reason}" for name, reason in plain.items()]
    return "\n".join(lines)
