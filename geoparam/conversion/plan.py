"""Decide about every layer of a model: converted or left, and why.

Nothing is changed here, so an error leaves the model as it was. What follows a layer, and where
the outputs are, comes from `trace`, or, without example inputs, from the order of the modules.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from geoparam.attention import GmPMultiheadAttention
from geoparam.base_layer import GmPLayer, InputNorm
from geoparam.conversion.sharing import ties_and_holders
from geoparam.coordinates import STEEPEST, Init
from geoparam.graph import Graph
from geoparam.input_mean_layers import InputMeanLayer
from geoparam.inspection import computes_as, is_conv1d, refuse_non_model, refuse_unready
from geoparam.trace import Filter, output_layers, trace

Inputs = Tensor | Sequence[Any] | Mapping[str, Any]

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@dataclass(frozen=True)
class Decision:
    """What happens to one layer and why."""

    name: str
    kind: str
    converted: bool
    notes: tuple[str, ...] = ()
    norm: str | None = None
    input_norm: InputNorm = False
    parameters: int = 0  # converted ones

    def __str__(self) -> str:
        what = [f"absorbs {self.norm}"] if self.norm else []
        what += [f"input_norm={self.input_norm!r}"] if self.input_norm else []
        detail = "; ".join([*what, *self.notes])
        return f"{self.name or '(the model)'}: {self.kind}" + (f" ({detail})" if detail else "")


@dataclass(frozen=True)
class Plan:
    """The decisions about all layers of a model; printing it gives the summary.

    Example:
        >>> print(plan(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))))
        1 of 2 layers under GmP, 40 of 58 parameters
        converted:
          0: Linear
        left:
          2: Linear (the output layer)
    """

    decisions: tuple[Decision, ...]
    parameters: int
    weights: str = "geometric"

    def __str__(self) -> str:
        chosen = [d for d in self.decisions if d.converted]
        left = [d for d in self.decisions if not d.converted]
        what = "under GmP" if self.weights == "geometric" else "with plain weights and IMN"
        lines = [
            f"{len(chosen)} of {len(self.decisions)} layers {what}, "
            f"{sum(d.parameters for d in chosen):,} of {self.parameters:,} parameters"
        ]
        for title, group in (("converted:", chosen), ("left:", left)):
            lines += [title, *(f"  {d}" for d in group)] if group else []
        return "\n".join(lines)


def plan(
    model: nn.Module,
    filter_fn: Filter | None = None,
    *,
    init: Init | None = None,
    norm: Literal["imn"] | None = None,
    weights: Literal["geometric", "plain"] = "geometric",
    example_inputs: Inputs | None = None,
) -> Plan:
    """Return what `convert_` would do with these arguments, or raise what it would raise."""
    _check_options(norm, init, weights, example_inputs)
    refuse_non_model(model, "convert_(model, ...)")
    refuse_unready(model)
    refuse_wrapped(model, "convert")
    graph = None if example_inputs is None else trace(model, example_inputs)
    outputs = set(output_layers(model) if graph is None else graph.outputs)
    ties, held = ties_and_holders(model)
    decisions = []
    for name, module in model.named_modules():
        decision = Decision(weight_name(name, module), type(module).__name__, True)
        if kind_of(module) is None:
            if not (reason := _explain_unknown(module)):
                continue
        elif not (reason := _reason_to_leave(module, decision.name, outputs, filter_fn, ties)):
            _refuse_parametrized(module, name)
            if module in held:
                raise ValueError(
                    f"{name!r} is also held by {held[module]}, outside of the registered modules: "
                    "that would go on with the old layer. Use nn.ModuleList or nn.ModuleDict "
                    "there, or leave it out with filter_fn."
                )
            decision = _decide_norm(decision, module, model, graph, init, norm)
            reason = "" if init else _check_values(module, decision, model)
            if weights == "plain":
                reason = _reason_to_leave_plain(module, decision, init)
            decision = _add_facts(decision, module, model, init)
        left = Decision(decision.name, decision.kind, False, (reason,))
        decisions.append(left if reason else decision)
    if not any(d.converted for d in decisions):
        listed = "\n".join(f"  {d}" for d in decisions) or "  it has no layers"
        raise ValueError(f"nothing to convert in this model:\n{listed}")
    return Plan(tuple(decisions), sum(p.numel() for p in model.parameters()), weights)


def _check_options(norm: Any, init: Any, weights: Any, example_inputs: Any) -> None:
    if norm not in (None, "imn"):
        raise ValueError(f"norm is None or 'imn'; got {norm!r}.")
    if weights not in ("geometric", "plain"):
        raise ValueError(f"weights are 'geometric' or 'plain'; got {weights!r}.")
    if init not in (None, *get_args(Init)):
        raise ValueError(f"init is None or one of {get_args(Init)}; got {init!r}.")
    if weights == "plain" and norm != "imn":
        raise ValueError(
            "weights='plain' leaves weights as they are, and without norm='imn' there is nothing "
            "else to do: for a plain model use GeometricOptimizer alone."
        )
    if norm == "imn" and example_inputs is None:
        raise ValueError(
            "norm='imn' needs example_inputs, to see which BatchNorm follows a layer."
        )


def kind_of(module: nn.Module) -> str | None:
    """Return how a module is converted; a subclass only if it computes what its base does."""
    if isinstance(module, nn.MultiheadAttention):
        return None if isinstance(module, GmPMultiheadAttention) else "attention"
    if is_conv1d(module):
        return "transposed"
    for base, kind in ((nn.Linear, "linear"), *((conv, "conv") for conv in CONVOLUTIONS)):
        if isinstance(module, base) and computes_as(module, base):
            return kind
    return None


def weight_name(name: str, module: nn.Module) -> str:
    """Return a layer's name; attention's is that of its input projection."""
    return f"{name}.in_proj_weight".lstrip(".") if kind_of(module) == "attention" else name


def module_name(weight_name: str, modules: Mapping[str, nn.Module]) -> str:
    """Return the name of the module that holds the weight: a layer, or an attention."""
    if weight_name in modules:
        return weight_name
    return weight_name.removesuffix("in_proj_weight").removesuffix(".")


def _explain_unknown(module: nn.Module) -> str:
    """Return why a module with matrices of its own is left, "" where it is not worth a line.

    Norms and embeddings are not listed.
    """
    if isinstance(module, GmPLayer):
        return "already converted"
    own = [p.shape for p in module.parameters(recurse=False)]
    stacked = any(len(shape) > 2 and min(shape) > 1 for shape in own)  # as fused experts are
    has_matrix = any(len(shape) > 1 for shape in own) and next(module.children(), None) is None
    is_norm = "norm" in type(module).__name__.lower()
    if is_norm or isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return ""
    if isinstance(module, nn.modules.conv._ConvTransposeNd):
        return "there is no such GmP layer; GeometricOptimizer turns its units"
    if isinstance(module, InputMeanLayer):
        return "it has its input's mean already"
    if isinstance(module, nn.Linear | nn.modules.conv._ConvNd):
        return "it computes something else than its base class"
    return "no GmP form of this type" if has_matrix or stacked else ""


def _reason_to_leave(
    module: nn.Module,
    name: str,
    outputs: set[str],
    filter_fn: Filter | None,
    ties: dict[nn.Module, list[str]],
) -> str:
    """Return why a layer that has a GmP form stays as it is, "" if it does not."""
    if isinstance(module, nn.MultiheadAttention) and module._parameters["in_proj_weight"] is None:
        return "separate projections of query, key and value share one bias"
    weight = getattr(module, "weight", None)
    if isinstance(weight, Tensor) and not weight.is_floating_point():
        return f"its weight is {weight.dtype}"
    if isinstance(weight, Tensor) and weight.numel() == 0:
        return f"its weight is empty, {tuple(weight.shape)}"
    if filter_fn is not None and not filter_fn(module, name):
        return "filter_fn"
    if filter_fn is None and name in outputs:
        return "the output layer"
    others = ", ".join(ties.get(module, ()))
    if others and name not in outputs:
        raise ValueError(
            f"{name!r} shares memory with {others}: converting it would cut the tie. Untie them "
            "first, or leave it out with filter_fn."
        )
    return others and f"the output layer, tied to {others}"


def refuse_wrapped(model: nn.Module, verb: str) -> None:
    """Raise where a wrapper has noted the model's parameters: new ones would not be reduced."""
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "to_local"):
            raise ValueError(
                f"{name!r} is sharded already: convert the model before fully_shard, and to fold "
                "it gather its state dict into an unsharded converted model (docs/training.md)."
            )
    for module in model.modules():
        kinds = {kind.__name__ for kind in type(module).__mro__}
        if found := kinds & {"DistributedDataParallel", "FullyShardedDataParallel"}:
            raise ValueError(
                f"the model is wrapped in {found.pop()}, which would not see its new parameters: "
                f"processes would drift apart. First {verb} the model, then wrap it."
            )


def _refuse_parametrized(module: nn.Module, name: str) -> None:
    """Refuse weights that something else computes; torch's weight_norm is absorbed as it is."""
    if parametrize.is_parametrized(module):
        used: Any = module.parametrizations
        kinds = {type(step).__name__ for steps in used.values() for step in steps}
        if kinds == {"_WeightNorm"} and list(used) == ["weight"]:
            return
        raise ValueError(
            f"{name!r} has parametrizations ({', '.join(sorted(kinds))}), which conversion would "
            "lose. Call torch.nn.utils.parametrize.remove_parametrizations on it first, or leave "
            "it out with filter_fn."
        )
    key = "in_proj_weight" if isinstance(module, nn.MultiheadAttention) else "weight"
    if key not in module._parameters:
        raise ValueError(
            f"{name!r} has a {key} that is not a parameter (old weight_norm, spectral_norm or "
            "pruning). Remove that first (torch.nn.utils.remove_weight_norm, prune.remove), or "
            "leave it out with filter_fn."
        )


def _check_values(module: nn.Module, decision: Decision, model: nn.Module) -> str:
    """Check the values: raise for NaN, return a reason where r or r lam cannot hold them."""
    weight, bias = affine_of(module)
    if weight.is_meta:
        return ""
    for key, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and not tensor.isfinite().all():
            raise ValueError(
                f"the {key} of {decision.name!r} holds NaN or infinite values, which have no "
                "direction. Repair or reinitialise that layer, or leave it out with filter_fn."
            )
    r = torch.linalg.vector_norm(weight.flatten(1), dim=1, dtype=torch.float64)
    if decision.norm:
        gain, bias = absorb_norm(bias, model.get_submodule(decision.norm))
        if not (gain.isfinite().all() and bias.isfinite().all()):
            raise ValueError(
                f"{decision.norm!r} has statistics or parameters that are NaN, infinite or of "
                f"negative variance, so {decision.name!r} cannot absorb it. Repair them first."
            )
        r = r * gain.abs()
    if (longest := r.max().item()) > torch.finfo(weight.dtype).max:
        return f"a row of length {longest:.0f}, beyond the largest {weight.dtype}"
    if bias is not None and (steep := int((bias.abs() > STEEPEST * r).sum())):
        return f"{steep} rows with |bias| > {STEEPEST} |weight|"
    return ""


def _reason_to_leave_plain(module: nn.Module, decision: Decision, init: str | None) -> str:
    """Return why weights="plain" leaves a layer: `_check_values` is about r, which it has not."""
    if kind_of(module) not in ("linear", "conv"):
        return "input means are for nn.Linear and nn.Conv1d/2d/3d"
    if parametrize.is_parametrized(module):
        return "its weight is not a Parameter but computed (weight_norm)"
    if decision.norm is None and not decision.input_norm and init is None:
        return decision.notes[0] if decision.notes else "no BatchNorm follows it"
    return ""


def _add_facts(
    decision: Decision, module: nn.Module, model: nn.Module, init: str | None
) -> Decision:
    """Add a layer's number of parameters, and what is worth knowing about them."""
    weight, bias = affine_of(module)
    notes, is_zero = list(decision.notes), ~weight.flatten(1).any(dim=1)
    if decision.norm and init is None:
        is_zero |= absorb_norm(bias, model.get_submodule(decision.norm))[0] == 0
    if not weight.is_meta and (zero := int(is_zero.sum())):
        notes.append(f"{zero} zero rows have r = 0")
    if bias is not None and weight.requires_grad and not bias.requires_grad:
        notes.append("its frozen bias moves with r: bias = r * lam, and only lam stays frozen")
    parameters = weight.numel() + (0 if bias is None else bias.numel())
    return replace(decision, notes=tuple(notes), parameters=parameters)


def _decide_norm(
    decision: Decision,
    module: nn.Module,
    model: nn.Module,
    graph: Graph | None,
    init: str | None,
    norm: str | None,
) -> Decision:
    """Add the BatchNorm that a layer absorbs, and how its input is normalized instead."""
    if graph is not None and decision.name not in graph.layers:
        return replace(decision, notes=("does not run on example_inputs",))
    if norm is None or graph is None or kind_of(module) not in ("linear", "conv"):
        return decision
    absorbed, note = _norm_to_absorb(decision.name, graph, model, init)
    first = decision.name in graph.first
    if init:
        is_called = any(n.is_call for n in graph.nodes if n.name == decision.name)
        form: InputNorm = not first and is_called
        note = note or ("" if is_called else "no input mean: its weight is used without a call")
    else:
        form = "bias" if absorbed and not first else False
    return replace(decision, notes=(note,) if note else (), norm=absorbed, input_norm=form)


def _norm_to_absorb(
    layer: str, graph: Graph, model: nn.Module, init: str | None
) -> tuple[str | None, str]:
    """Return the BatchNorm that a layer absorbs, or why the one that follows it stays."""
    norm, exclusive = graph.norm_after(layer)
    if norm is None or norm.name is None:
        return None, ""
    found = model.get_submodule(norm.name)
    if not isinstance(found, BATCH_NORMS):
        shared = isinstance(found, nn.SyncBatchNorm)  # which would hide means of the joint batch
        return None, f"{norm.name} stays: convert before convert_sync_batchnorm" if shared else ""
    if norm.op == "batch_norm" and next(found.children(), None) is None:
        return None, f"{norm.name} stays: its statistics are used without calling it"
    if not _is_plain_batch_norm(found):
        return None, f"{norm.name} stays: it computes something else than its base class"
    if not exclusive:
        return None, f"{norm.name} stays: it is not fed by this layer alone"
    if init is None and found.running_mean is None:
        return None, f"{norm.name} stays: it has no running statistics"
    return norm.name, ""


def _is_plain_batch_norm(norm: nn.Module) -> bool:
    """Return whether it is torch's, or timm's, which runs its children after it."""
    base = nn.modules.batchnorm._BatchNorm
    kind = type(norm)
    timms = kind.__module__.startswith("timm.") and kind.__name__.startswith("BatchNormAct")
    same = timms or (kind.forward is base.forward and kind.__call__ is base.__call__)
    return same and "forward" not in norm.__dict__


def absorb_norm(bias: Tensor | None, norm: nn.Module) -> tuple[Tensor, Tensor]:
    """Return gain and bias, in float64, with BN(w^T x + b) = gain * w^T x + bias in evaluation."""
    assert isinstance(norm, BATCH_NORMS) and norm.running_mean is not None
    assert norm.running_var is not None
    gain = (norm.running_var.double() + norm.eps).rsqrt()
    gain = gain if norm.weight is None else gain * norm.weight.detach().double()
    offset = -norm.running_mean.double()
    offset = offset if bias is None else offset + bias.detach().double()
    shift = offset * gain
    return gain, shift if norm.bias is None else shift + norm.bias.detach().double()


def affine_of(module: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Return the weight, one row per unit, and the bias of a layer that can be converted."""
    if isinstance(module, nn.MultiheadAttention):
        return module.in_proj_weight, module.in_proj_bias
    weight: Any = module.weight
    bias: Any = module.bias
    return (weight.t() if kind_of(module) == "transposed" else weight), bias
