"""Finds the weights of a model whose rows are units, and says why others stay plain."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from geoparam.base_layer import GmPLayer
from geoparam.coordinates import STEEPEST
from geoparam.graph import Graph
from geoparam.inspection import group_by_memory, is_conv1d, refuse_lazy, strip_wrappers
from geoparam.trace import Filter, output_layers, trace

BY_VALUES = ("a row of zeros has no direction", f"|bias| > {STEEPEST} |weight| in a row")
CHANNEL_NORMS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)


@dataclass(frozen=True)
class Unit:
    """A weight whose rows are units: its name, sizes, layout, bias and norm.

    A unit is W[i], as in nn.Linear and nn.Conv2d, where `column_groups` is 0. Else it is a column
    W[:, i] of one of so many groups, as in transposed convolutions and transformers' Conv1D.
    """

    name: str
    out: int
    fan_in: int
    column_groups: int
    bias: str | None
    has_distance: bool  # whether the bias is stored as b = r lam
    norm: str | None  # the norm that reads its output, so that r has no effect
    is_fixed: bool  # whether r is held

    def fit(self, weight: Tensor) -> "Unit":
        """Return the unit with the weight's present sizes: pruning may have cut rows."""
        out = weight.shape[1] * self.column_groups if self.column_groups else len(weight)
        return replace(self, out=out, fan_in=weight.numel() // out)

    def to_rows(self, weight: Tensor) -> Tensor:
        """Return the units as rows (out, fan-in); a view where there is one."""
        if self.column_groups:
            weight = weight.unflatten(0, (self.column_groups, -1)).movedim(2, 1).flatten(0, 1)
        return weight.flatten(1)

    def write(self, weight: Tensor, rows: Tensor) -> None:
        """Write units (out, fan-in) into a weight."""
        if self.column_groups:
            shape = (self.column_groups, -1, len(weight) // self.column_groups, *weight.shape[2:])
            rows = rows.reshape(shape).movedim(1, 2)
        weight.copy_(rows.reshape(weight.shape))


def format_table(units: Sequence[Unit], plain: Mapping[str, str], trained: Collection[str]) -> str:
    """Return a line for each weight: what its units are, or why it stays plain."""
    width = min(max(40, *(len(name) for name in (*plain, *(u.name for u in units)))), 100)
    lines = [f"  {'units of':{width}} {'rows':>6} {'fan-in':>6}  {'bias':5}  scale"]
    for u in (u for u in units if u.name in trained):
        norm = f", {u.norm} follows" if u.norm else ""
        scale = f"fixed{norm}" if u.is_fixed else "free"
        bias = "lam" if u.has_distance else "plain" if u.bias else "-"
        lines.append(f"  {u.name:{width}} {u.out:6} {u.fan_in:6}  {bias:5}  {scale}")
    others = {u.name: "frozen, or in no group at first" for u in units if u.name not in trained}
    reasons = [f"  {name:{width}} {why}" for name, why in {**plain, **others}.items()]
    return "\n".join([*lines, "  plain", *reasons])


def find_units(
    model: nn.Module,
    filter_fn: Filter | None = None,
    example_inputs: Any = None,
    scale: str = "auto",
    match: bool = True,
) -> tuple[list[Unit], dict[str, str], list[Unit]]:
    """Return the units, why other matrices stay plain, and all that could be units.

    Arguments are as in `GeometricOptimizer`.

    Example:
        >>> find_units(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))[1]
        {'2.weight': 'the output layer'}
    """
    _check_model(model)
    graph = None if example_inputs is None else trace(model, example_inputs)
    outputs, norms = _outputs_and_norms(model, graph)
    parameters = dict(model.named_parameters())
    names = {id(p): name for name, p in parameters.items()}
    holders = Counter(id(p) for m in model.modules() for p in m._parameters.values())
    embeddings = [m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    embedded = {names.get(id(module.weight)) for module in embeddings}
    shared, found = _find_overlaps(parameters), dict[str, Unit]()
    plain = {name: why for name, why in shared.items() if parameters[name].ndim > 1}
    for layer, module, weight, bias, column_groups in _weights(model):
        name = names[id(weight)]
        public = strip_wrappers(layer)
        is_plain = layer in outputs if filter_fn is None else not filter_fn(module, public)
        if name in embedded:
            plain[name] = "tied to an embedding"
        elif is_plain:
            plain[name] = "the output layer" if filter_fn is None else "filter_fn"
        is_tied_alike = bias is not None and holders[id(bias)] == holders[id(weight)]
        is_own = is_tied_alike and names[id(bias)] not in shared
        own, norm = names.get(id(bias)), norms.get(layer)
        is_fixed = scale == "fixed" or (scale == "auto" and norm is not None)
        unit = Unit(name, 0, 0, column_groups, own, is_own, norm, is_fixed).fit(weight)
        found.setdefault(name, unit)
    candidates = [unit for name, unit in found.items() if name not in plain]
    units = _select_units(parameters, candidates, plain, match)
    for name in (name for name, p in parameters.items() if p.ndim > 1 and name not in found):
        plain.setdefault(name, "an embedding" if name in embedded else "not in a known layer")
    if not units:
        why = "; ".join(f"{name}: {reason}" for name, reason in plain.items()) or "none was found"
        hint = " With example_inputs, output layers are found in a run." if graph is None else ""
        raise ValueError(f"no layer of this model has units to train ({why}).{hint}")
    return units, plain, candidates


def _outputs_and_norms(model: nn.Module, graph: Graph | None) -> tuple[set[str], dict[str, str]]:
    """Return the output layers, and the norms after layers: by order for what did not run."""
    outputs, norms = set(output_layers(model)), _norms_by_order(model)
    if graph is None:
        return outputs, norms
    ran = set(graph.layers)  # heads for training only do not
    norms = {layer: norm for layer, norm in norms.items() if layer not in ran}
    return outputs - ran | set(graph.outputs), norms | _norms_by_graph(model, graph)


def _find_overlaps(parameters: dict[str, nn.Parameter]) -> dict[str, str]:
    """Return parameters in one memory, as after `w.data = v.data.t()`: their steps would mix."""
    local = [(p.to_local() if hasattr(p, "to_local") else p, n) for n, p in parameters.items()]
    found: dict[str, str] = {}
    for first, second in chain.from_iterable(map(pairwise, group_by_memory(local))):
        found |= {second: f"shares memory with {first}", first: f"shares memory with {second}"}
    return found


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


def _weights(
    model: nn.Module,
) -> Iterator[tuple[str, nn.Module, nn.Parameter, nn.Parameter | None, int]]:
    """Yield layer, module, weight, bias and `column_groups` of each weight that has units."""
    for name, module in model.named_modules():
        column_groups, keys = 0, {"weight": "bias"}
        if isinstance(module, nn.modules.conv._ConvTransposeNd):
            column_groups = module.groups
        elif is_conv1d(module):
            column_groups = 1
        elif isinstance(module, nn.MultiheadAttention):  # its three weights share a bias
            keys = {"in_proj_weight": "in_proj_bias"}
            keys |= {f"{x}_proj_weight": "" for x in "qkv"}
        elif not isinstance(module, nn.Linear | nn.modules.conv._ConvNd):
            continue
        for key, bias_key in keys.items():
            weight, bias = module._parameters.get(key), module._parameters.get(bias_key)
            if weight is not None and weight.is_floating_point() and weight.numel():
                layer = name if key == "weight" else f"{name}.{key}".strip(".")
                yield layer, module, weight, bias, column_groups


def _select_units(
    parameters: dict[str, nn.Parameter], units: list[Unit], plain: dict[str, str], match: bool
) -> list[Unit]:
    """Return the weights that have units (no zero row), and whether each bias is stored as lam.

    lam = b / r moves a bias 1 + lam^2 times as fast as plain training, so it is stored only where
    |b| <= |r| in every row. Without `match` the rule is that of `convert_`, which leaves a layer
    with |b| > 100 |r|. Processes that share the rows combine their flags.
    """
    most = 1 if match else STEEPEST
    found = [_value_flags(u, parameters, most) for u in units]
    flags = torch.tensor(found, dtype=torch.int32, device="cpu")
    sharded = next((p for p in parameters.values() if hasattr(p, "device_mesh")), None)
    if sharded is not None:
        flags = flags.to(sharded.device)
        dist.all_reduce(flags, dist.ReduceOp.MAX)
    kept = []
    for unit, (has_zero_row, is_far) in zip(units, flags.view(-1, 2).tolist(), strict=True):
        if has_zero_row:
            plain[unit.name] = BY_VALUES[0]
        elif is_far and not match:
            plain[unit.name] = BY_VALUES[1]
        else:
            kept.append(replace(unit, has_distance=False) if is_far else unit)
    return kept


def _value_flags(
    unit: Unit, parameters: dict[str, nn.Parameter], most: float
) -> tuple[bool, bool]:
    """Return whether a row is zero, and whether a bias is more than `most` times its row."""
    weight: Any = parameters[unit.name]
    bias: Any = parameters[unit.bias] if unit.bias and unit.has_distance else None
    if weight.is_meta:
        return False, False
    weight, bias = (x.to_local() if hasattr(x, "to_local") else x for x in (weight, bias))
    dtype = torch.promote_types(weight.dtype, torch.float32)
    r = torch.linalg.vector_norm(unit.to_rows(weight.detach()), dim=1, dtype=dtype)
    is_far = bias is not None and len(bias) == len(r) and bool((bias.abs() > most * r).any())
    return bool((r == 0).any()), is_far


def _norms_by_graph(model: nn.Module, graph: Graph) -> dict[str, str]:
    """Return for each layer the norm that is the only reader of its output."""
    found = {}
    for layer in graph.layers:
        norm, exclusive = graph.norm_after(layer)
        if exclusive and norm is not None and norm.name:
            if _undoes_scale(model.get_submodule(norm.name), model.training):
                found[layer] = norm.name
    return found


def _undoes_scale(norm: nn.Module, model_trains: bool) -> bool:
    """Return whether a norm divides by its input's scale in training; a frozen one does not."""
    trained = [p.requires_grad for p in norm.parameters()] or [True]
    is_frozen = not norm.training and (model_trains or not any(trained))
    has_statistics = getattr(norm, "track_running_stats", True)
    return isinstance(norm, CHANNEL_NORMS) and not (is_frozen and has_statistics)


def _norms_by_order(model: nn.Module) -> dict[str, str]:
    """Guess the same without a run: the norm comes next among the modules, with equal width."""
    found: dict[str, str] = {}
    layer, width, trains = "", 0, model.training
    for name, module in model.named_modules():
        if isinstance(module, CHANNEL_NORMS):
            is_beside = name.rpartition(".")[0] == layer.rpartition(".")[0]
            if is_beside and width == module.num_features and _undoes_scale(module, trains):
                found[layer] = name
            width = 0
        elif isinstance(module, nn.Linear | nn.modules.conv._ConvNd):
            layer = name
            width = getattr(module, "out_features", 0) or getattr(module, "out_channels", 0)
        elif next(module.children(), None) is None and not isinstance(module, nn.Identity):
            width = 0
    return found
