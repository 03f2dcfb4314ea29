"""Decide about every layer of a model: converted or left, and why.

Nothing is changed here, so an error leaves the model as it was. What follows a layer, and where
the outputs are, comes from a run of the model, or, without example inputs, from the order of the
modules. Which modules are layers, and where their weights are, is in `model.unit_layers`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from geoparam.arguments import check_callable
from geoparam.attention import GmPMultiheadAttention
from geoparam.base_layer import GmPLayer, InputNorm
from geoparam.conversion.sharing import ties_and_holders
from geoparam.coordinates import STEEPEST, Init
from geoparam.graph import Graph
from geoparam.input_mean_layers import InputMeanLayer
from geoparam.inspection import is_conv1d, refuse_non_model, refuse_unready
from geoparam.model.unit_layers import Entry, describe, is_plain_layer
from geoparam.trace import Filter, output_layers, record_run

Inputs = Tensor | Sequence[Any] | Mapping[str, Any]
Weights = Literal["geometric", "plain"]

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
        details = []
        if self.norm:
            details.append(f"absorbs {self.norm}")
        if self.input_norm:
            details.append(f"input_norm={self.input_norm!r}")
        details += self.notes

        text = f"{self.name or '(the model)'}: {self.kind}"
        return f"{text} ({'; '.join(details)})" if details else text


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

    @property
    def converted(self) -> list[Decision]:
        return [d for d in self.decisions if d.converted]

    def __str__(self) -> str:
        left = [d for d in self.decisions if not d.converted]
        what = "under GmP" if self.weights == "geometric" else "with plain weights and IMN"
        count = sum(d.parameters for d in self.converted)
        lines = [
            f"{len(self.converted)} of {len(self.decisions)} layers {what}, "
            f"{count:,} of {self.parameters:,} parameters"
        ]
        for title, decisions in (("converted:", self.converted), ("left:", left)):
            if decisions:
                lines.append(title)
                lines += [f"  {d}" for d in decisions]
        return "\n".join(lines)


class Candidate(NamedTuple):
    """A layer that has a GmP form, and where its weight is."""

    name: str  # attention's is that of its input projection
    module: nn.Module
    entry: Entry

    def read(self) -> tuple[Tensor, Tensor | None]:
        """Return the weight (out, in, ...), also where it is stored transposed, and the bias."""
        weight = self.entry.layout.to_units_first(getattr(self.module, self.entry.key))
        return weight, getattr(self.module, self.entry.bias_key)

    @property
    def is_attention(self) -> bool:
        return isinstance(self.module, nn.MultiheadAttention)

    @property
    def is_transposed(self) -> bool:
        return self.entry.layout.axes == "io"

    @property
    def is_plain(self) -> bool:
        """Whether it is nn.Linear or a convolution, which may have its input's mean."""
        return not self.is_attention and not self.is_transposed


def find_candidates(model: nn.Module) -> dict[str, Candidate]:
    """Return the layers that have a GmP form, by the name of their module."""
    candidates = {}
    for name, module in model.named_modules():
        is_attention = isinstance(module, nn.MultiheadAttention)
        is_ours = isinstance(module, GmPMultiheadAttention)  # its projection is a layer
        if is_plain_layer(module) or is_conv1d(module) or (is_attention and not is_ours):
            entry = next(describe(module))
            candidates[name] = Candidate(entry.name(name), module, entry)
    return candidates


@dataclass(frozen=True)
class Request:
    """What a caller of `plan` or `convert_` asks for."""

    filter_fn: Filter | None = None
    init: Init | None = None
    norm: Literal["imn"] | None = None
    weights: Weights = "geometric"

    def check(self, model: nn.Module, example_inputs: Inputs | None) -> None:
        """Refuse options that do not go together, and models that cannot be converted."""
        check_callable("filter_fn", self.filter_fn, "filter_fn(module, name)")
        if self.norm not in (None, "imn"):
            raise ValueError(f"norm is None or 'imn'; got {self.norm!r}.")
        if self.weights not in get_args(Weights):
            raise ValueError(f"weights are 'geometric' or 'plain'; got {self.weights!r}.")
        if self.init not in (None, *get_args(Init)):
            raise ValueError(f"init is None or one of {get_args(Init)}; got {self.init!r}.")
        if self.weights == "plain" and self.norm != "imn":
            raise ValueError(
                "weights='plain' leaves weights as they are, and without norm='imn' there is "
                "nothing else to do: for a plain model use GeometricOptimizer alone."
            )
        if self.norm == "imn" and example_inputs is None:
            raise ValueError(
                "norm='imn' needs example_inputs, to see which BatchNorm follows a layer."
            )
        refuse_non_model(model, "convert_(model, ...)")
        refuse_unready(model)
        refuse_wrapped(model, "convert")


def plan(
    model: nn.Module,
    filter_fn: Filter | None = None,
    *,
    init: Init | None = None,
    norm: Literal["imn"] | None = None,
    weights: Weights = "geometric",
    example_inputs: Inputs | None = None,
) -> Plan:
    """Return what `convert_` would do with these arguments, or raise what it would raise."""
    request = Request(filter_fn, init, norm, weights)
    request.check(model, example_inputs)
    graph = None if example_inputs is None else record_run(model, example_inputs).graph
    return decide(model, find_candidates(model), request, graph)


def decide(
    model: nn.Module,
    candidates: Mapping[str, Candidate],
    request: Request,
    graph: Graph | None,
) -> Plan:
    """Return the plan for a model whose request has been checked and whose run is `graph`."""
    planner = _Planner(model, request, graph)
    decisions = []
    for name, module in model.named_modules():
        candidate = candidates.get(name)
        if candidate is not None:
            decisions.append(planner.decide(candidate))
        elif reason := _explain_unknown(module):
            decisions.append(Decision(name, type(module).__name__, False, (reason,)))

    if not any(d.converted for d in decisions):
        listed = "\n".join(f"  {d}" for d in decisions) or "  it has no layers"
        raise ValueError(f"nothing to convert in this model:\n{listed}")
    parameters = sum(p.numel() for p in model.parameters())
    return Plan(tuple(decisions), parameters, request.weights)


class _Planner:
    """Decides about one candidate after the other."""

    def __init__(self, model: nn.Module, request: Request, graph: Graph | None) -> None:
        self.model = model
        self.request = request
        self.graph = graph
        self.outputs = set(output_layers(model) if graph is None else graph.outputs)
        self.ties, self.holders = ties_and_holders(model)

    def decide(self, candidate: Candidate) -> Decision:
        """Return what happens to a layer; raise where it can be neither converted nor left."""
        name, kind = candidate.name, type(candidate.module).__name__
        reason = self._explain_left(candidate)
        if reason:
            return Decision(name, kind, False, (reason,))

        self._refuse_computed_weight(candidate)
        self._refuse_held(candidate)
        weight, bias = candidate.read()
        decision = self._choose_norm(candidate, Decision(name, kind, True))
        if self.request.init is None:
            reason = self._check_values(weight, bias, decision)
        if self.request.weights == "plain":  # r and its limits do not apply
            reason = self._explain_left_plain(candidate, decision)
        if reason:
            return Decision(name, kind, False, (reason,))
        return self._add_facts(weight, bias, decision)

    def _explain_left(self, candidate: Candidate) -> str:
        """Return why a layer that has a GmP form stays as it is, "" if it does not."""
        name, module, entry = candidate
        stored = module._parameters.get(entry.key)
        if candidate.is_attention and stored is None:
            return "separate projections of query, key and value share one bias"
        if not candidate.is_attention and stored is not None:
            if not stored.is_floating_point():
                return f"its weight is {stored.dtype}"
            if stored.numel() == 0:
                return f"its weight is empty, {tuple(stored.shape)}"

        filter_fn = self.request.filter_fn
        if filter_fn is not None and not filter_fn(module, name):
            return "filter_fn"
        if filter_fn is None and name in self.outputs:
            return "the output layer"

        others = ", ".join(self.ties.get(module, ()))
        if not others:
            return ""
        if name in self.outputs:
            return f"the output layer, tied to {others}"
        raise ValueError(
            f"{name!r} shares memory with {others}: converting it would cut the tie. Untie them "
            "first, or leave it out with filter_fn."
        )

    def _refuse_computed_weight(self, candidate: Candidate) -> None:
        """Refuse weights that something else computes; torch's weight_norm is absorbed."""
        name, module, entry = candidate
        if parametrize.is_parametrized(module):
            steps_by_key: Any = module.parametrizations
            kinds = {type(step).__name__ for steps in steps_by_key.values() for step in steps}
            if kinds == {"_WeightNorm"} and list(steps_by_key) == ["weight"]:
                return
            raise ValueError(
                f"{name!r} has parametrizations ({', '.join(sorted(kinds))}), which "
                "conversion would lose. Call torch.nn.utils.parametrize.remove_parametrizations "
                "on it first, or leave it out with filter_fn."
            )
        if entry.key not in module._parameters:
            raise ValueError(
                f"{name!r} has a {entry.key} that is not a parameter (old weight_norm, "
                "spectral_norm or pruning). Remove that first (torch.nn.utils.remove_weight_norm, "
                "prune.remove), or leave it out with filter_fn."
            )

    def _refuse_held(self, candidate: Candidate) -> None:
        holder = self.holders.get(candidate.module)
        if holder is not None:
            raise ValueError(
                f"{candidate.name!r} is also held by {holder}, outside of the registered modules: "
                "that would go on with the old layer. Use nn.ModuleList or nn.ModuleDict there, "
                "or leave it out with filter_fn."
            )

    def _choose_norm(self, candidate: Candidate, decision: Decision) -> Decision:
        """Add the BatchNorm that a layer absorbs, and how its input is normalized instead."""
        graph, name = self.graph, candidate.name
        if graph is not None and name not in graph.layers:
            return replace(decision, notes=("does not run on example_inputs",))
        if self.request.norm is None or graph is None or not candidate.is_plain:
            return decision

        absorbed, note = self._find_norm(name, graph)
        is_first = name in graph.first
        form: InputNorm = False
        if self.request.init is None:
            if absorbed and not is_first:
                form = "bias"
        elif any(node.is_call for node in graph.nodes if node.name == name):
            form = not is_first
        else:
            note = note or "no input mean: its weight is used without a call"
        notes = (note,) if note else ()
        return replace(decision, notes=notes, norm=absorbed, input_norm=form)

    def _find_norm(self, layer: str, graph: Graph) -> tuple[str | None, str]:
        """Return the BatchNorm that a layer absorbs, or why the one that follows it stays."""
        node, is_exclusive = graph.norm_after(layer)
        if node is None or node.name is None:
            return None, ""
        norm = self.model.get_submodule(node.name)
        if isinstance(norm, nn.SyncBatchNorm):  # would hide means of the joint batch
            return None, f"{node.name} stays: convert before convert_sync_batchnorm"
        if not isinstance(norm, BATCH_NORMS):
            return None, ""

        has_children = next(norm.children(), None) is not None
        reason = ""
        if node.op == "batch_norm" and not has_children:
            reason = "its statistics are used without calling it"
        elif not _is_plain_batch_norm(norm):
            reason = "it computes something else than its base class"
        elif not is_exclusive:
            reason = "it is not fed by this layer alone"
        elif self.request.init is None and norm.running_mean is None:
            reason = "it has no running statistics"
        if reason:
            return None, f"{node.name} stays: {reason}"
        return node.name, ""

    def _check_values(self, weight: Tensor, bias: Tensor | None, decision: Decision) -> str:
        """Raise for NaN; return a reason to leave the layer where r or r lam cannot hold it."""
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
            gain, bias = absorb_norm(bias, self.model.get_submodule(decision.norm))
            if not (gain.isfinite().all() and bias.isfinite().all()):
                raise ValueError(
                    f"{decision.norm!r} has statistics or parameters that are NaN, infinite or of "
                    f"negative variance, so {decision.name!r} cannot absorb it. Repair them first."
                )
            r = r * gain.abs()

        longest = r.max().item()
        if longest > torch.finfo(weight.dtype).max:
            return f"a row of length {longest:.0f}, beyond the largest {weight.dtype}"
        steep = 0 if bias is None else int((bias.abs() > STEEPEST * r).sum())
        return f"{steep} rows with |bias| > {STEEPEST} |weight|" if steep else ""

    def _explain_left_plain(self, candidate: Candidate, decision: Decision) -> str:
        """Return why weights="plain" leaves a layer."""
        if not candidate.is_plain:
            return "input means are for nn.Linear and nn.Conv1d/2d/3d"
        if parametrize.is_parametrized(candidate.module):
            return "its weight is not a Parameter but computed (weight_norm)"
        has_mean = bool(decision.norm or decision.input_norm)
        if not has_mean and self.request.init is None:
            return decision.notes[0] if decision.notes else "no BatchNorm follows it"
        return ""

    def _add_facts(self, weight: Tensor, bias: Tensor | None, decision: Decision) -> Decision:
        """Add a layer's number of parameters, and what is worth knowing about them."""
        notes = list(decision.notes)
        if not weight.is_meta:
            is_zero = ~weight.flatten(1).any(dim=1)
            if decision.norm and self.request.init is None:
                gain, _ = absorb_norm(bias, self.model.get_submodule(decision.norm))
                is_zero |= gain == 0
            if zeros := int(is_zero.sum()):
                notes.append(f"{zeros} zero rows have r = 0")

        if bias is not None and weight.requires_grad and not bias.requires_grad:
            notes.append("its frozen bias moves with r: bias = r * lam, and only lam stays frozen")
        parameters = weight.numel() + (0 if bias is None else bias.numel())
        return replace(decision, notes=tuple(notes), parameters=parameters)


def _explain_unknown(module: nn.Module) -> str:
    """Return why a module with matrices of its own is left, "" where it is not worth a line.

    Norms and embeddings are not listed.
    """
    if isinstance(module, GmPLayer):
        return "already converted"
    is_norm = "norm" in type(module).__name__.lower()
    if is_norm or isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return ""
    if isinstance(module, nn.modules.conv._ConvTransposeNd):
        return "there is no such GmP layer; GeometricOptimizer turns its units"
    if isinstance(module, InputMeanLayer):
        return "it has its input's mean already"
    if isinstance(module, nn.Linear | nn.modules.conv._ConvNd):
        return "it computes something else than its base class"

    shapes = [p.shape for p in module.parameters(recurse=False)]
    is_leaf = next(module.children(), None) is None
    has_matrix = is_leaf and any(len(shape) > 1 for shape in shapes)
    is_stacked = any(len(shape) > 2 and min(shape) > 1 for shape in shapes)  # as fused experts are
    return "no GmP form of this type" if has_matrix or is_stacked else ""


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
        wrappers = kinds & {"DistributedDataParallel", "FullyShardedDataParallel"}
        if wrappers:
            raise ValueError(
                f"the model is wrapped in {wrappers.pop()}, which would not see its new "
                f"parameters: processes would drift apart. First {verb} the model, then wrap it."
            )


def _is_plain_batch_norm(norm: nn.Module) -> bool:
    """Return whether it is torch's, or timm's, which runs its children after it."""
    if "forward" in vars(norm):
        return False
    kind = type(norm)
    if kind.__module__.startswith("timm.") and kind.__name__.startswith("BatchNormAct"):
        return True
    base = nn.modules.batchnorm._BatchNorm
    return kind.forward is base.forward and kind.__call__ is base.__call__


def absorb_norm(bias: Tensor | None, norm: nn.Module) -> tuple[Tensor, Tensor]:
    """Return gain and bias, in float64, with BN(w^T x + b) = gain * w^T x + bias in evaluation."""
    assert isinstance(norm, BATCH_NORMS)
    assert norm.running_mean is not None and norm.running_var is not None
    gain = (norm.running_var.double() + norm.eps).rsqrt()
    if norm.weight is not None:
        gain = gain * norm.weight.detach().double()

    # BN(z) = gain (z - mean) + beta at z = w^T x + b
    shift = -norm.running_mean.double()
    if bias is not None:
        shift = shift + bias.detach().double()
    shift = shift * gain
    if norm.bias is not None:
        shift = shift + norm.bias.detach().double()
    return gain, shift
