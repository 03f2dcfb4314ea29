"""Decide about every layer of a model: converted or left, and why.

Nothing is changed here, so an error leaves the model as it was. What follows a layer, and where
the outputs are, comes from a run of the model, or, without example inputs, from the order of the
modules. Which modules are layers, and where their weights are, is in `model.unit_layers`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from geoparam.arguments import check_callable
from geoparam.base_layer import InputNorm
from geoparam.conversion.reasons import (
    explain_kept_norm,
    explain_limit,
    explain_shared,
    explain_unknown,
    find_own_batch_norms,
)
from geoparam.conversion.sharing import ties_and_holders
from geoparam.coordinates import Init
from geoparam.input_mean_layers import InputMeanLayer
from geoparam.model.graph import Graph
from geoparam.model.norms import BatchNorm, is_constant, is_frozen_batch_norm
from geoparam.model.run import overrides, refuse_non_model, refuse_unready
from geoparam.model.trace import Filter, output_layers, record_run
from geoparam.model.unit_layers import Entry, find_affine
from geoparam.removed_norm import find_removed_norms
from geoparam.running_statistics import find_batch_users
from geoparam.storage import list_few

Inputs = Tensor | Sequence[Any] | Mapping[str, Any]
Weights = Literal["geometric", "plain"]
Norm = Literal["imn", "fold"]


@dataclass(frozen=True)
class Decision:
    """What happens to one layer and why."""

    name: str
    kind: str
    converted: bool
    notes: tuple[str, ...] = ()
    norm: str | None = None
    input_norm: InputNorm = False
    weights: Weights = "geometric"
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
    weights: Weights = "geometric"
    norm: Norm | None = None
    kept_norms: tuple[str, ...] = ()  # of `norm`: what else uses the batch in training
    reasons: Mapping[str, str] = field(default_factory=dict)  # why each of them stays

    @property
    def converted(self) -> list[Decision]:
        return [d for d in self.decisions if d.converted]

    def __str__(self) -> str:
        left = [d for d in self.decisions if not d.converted]
        as_asked = [d for d in self.converted if d.weights == self.weights]
        what = "under GmP" if self.weights == "geometric" else "with plain weights"
        count = sum(d.parameters for d in as_asked)
        lines = [
            f"{len(as_asked)} of {len(self.decisions)} layers {what}, "
            f"{count:,} of {self.parameters:,} parameters"
        ]
        if self.norm is not None:
            removed = sum(d.norm is not None for d in self.converted)
            lines.append(f"BatchNorms removed: {removed}")
            lines.append(f"depends on the batch in training: {self._describe_batch_use()}")
        for title, decisions in (("converted:", self.converted), ("left:", left)):
            if decisions:
                lines.append(title)
                lines += [f"  {d}" for d in decisions]
        if self.kept_norms:
            lines.append("norms left:")
            lines += self._group_kept_norms()
        return "\n".join(lines)

    def _group_kept_norms(self) -> list[str]:
        """Return a line for each reason for which norms stay."""
        by_reason: dict[str, list[str]] = {}
        for name in self.kept_norms:
            by_reason.setdefault(self.reasons[name], []).append(name)
        return [f"  {list_few(names, most=3)}: {why}" for why, names in by_reason.items()]

    def _describe_batch_use(self) -> str:
        """Name what will use a batch's statistics."""
        users = []
        means = sum(bool(d.input_norm) for d in self.converted)
        if means:
            users.append(f"input means of {means} {_plural('layer', means)}")
        if self.kept_norms:
            listed = ", ".join(self.kept_norms[:3])
            more = ", ..." if len(self.kept_norms) > 3 else ""
            count = len(self.kept_norms)
            users.append(f"{count} {_plural('norm', count)} left ({listed}{more})")
        return " and ".join(users) or "nothing"


def _plural(noun: str, count: int) -> str:
    return noun if count == 1 else f"{noun}s"


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
        entry = find_affine(module)
        if entry is not None and not isinstance(module, InputMeanLayer):
            candidates[name] = Candidate(entry.name(name), module, entry)
    return candidates


@dataclass(frozen=True)
class Request:
    """What a caller of `plan` or `convert_` asks for."""

    filter_fn: Filter | None = None
    init: Init | None = None
    norm: Norm | None = None
    weights: Weights = "geometric"

    def check(self, model: nn.Module, example_inputs: Inputs | None) -> None:
        """Refuse options that do not go together, and models that cannot be converted."""
        check_callable("filter_fn", self.filter_fn, "filter_fn(module, name)")
        if self.norm not in (None, *get_args(Norm)):
            raise ValueError(f"norm is None, 'imn' or 'fold'; got {self.norm!r}.")
        if self.weights not in get_args(Weights):
            raise ValueError(f"weights are 'geometric' or 'plain'; got {self.weights!r}.")
        if self.init not in (None, *get_args(Init)):
            raise ValueError(f"init is None or one of {get_args(Init)}; got {self.init!r}.")
        if self.norm == "fold" and self.init is not None:
            raise ValueError(
                "norm='fold' keeps the function of BatchNorm, which new parameters would not: "
                "leave out init, or pass norm='imn' to train from scratch."
            )
        if self.weights == "plain" and self.norm is None:
            raise ValueError(
                "weights='plain' leaves weights as they are, and without norm='imn' or 'fold' "
                "there is nothing else to do: for a plain model use GeometricOptimizer alone."
            )
        if self.norm is not None and example_inputs is None:
            raise ValueError(
                f"norm={self.norm!r} needs example_inputs, to see which BatchNorm follows a layer."
            )
        refuse_non_model(model, "convert_(model, ...)")
        refuse_unready(model)
        refuse_wrapped(model, "convert")


def plan(
    model: nn.Module,
    filter_fn: Filter | None = None,
    *,
    init: Init | None = None,
    norm: Norm | None = None,
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
        elif reason := explain_unknown(module):
            decisions.append(Decision(name, type(module).__name__, False, (reason,)))

    kept_norms: list[str] = []
    if request.norm is not None and graph is not None:
        removed = {d.norm for d in decisions}
        kept_norms += [name for name in find_batch_users(model) if name not in removed]
        left = {d.name: d.notes[0] for d in decisions if not d.converted}
        own = find_own_batch_norms(model, graph)
        kept_norms += own
        planner.reasons.update(own)
        for name in kept_norms:
            reason = explain_kept_norm(model.get_submodule(name), name, graph, left)
            planner.reasons.setdefault(name, reason)
    if not any(d.converted for d in decisions):
        raise ValueError(_explain_nothing(decisions, planner.reasons))
    return Plan(
        tuple(decisions),
        sum(p.numel() for p in model.parameters()),
        request.weights,
        request.norm,
        tuple(kept_norms),
        planner.reasons,
    )


def _explain_nothing(decisions: Sequence[Decision], reasons: Mapping[str, str]) -> str:
    """Say why no layer is converted, in lines that stay few for a large model."""
    lines = ["nothing to convert in this model:"]
    lines += [f"  {name} stays: {reason}" for name, reason in reasons.items()][:3]
    lines += [f"  {d}" for d in decisions[:12]] or ["  it has no layers"]
    if len(decisions) > 12:
        lines.append(f"  and {len(decisions) - 12} more layers")
    return "\n".join(lines)


class _Planner:
    """Decides about one candidate after the other."""

    def __init__(self, model: nn.Module, request: Request, graph: Graph | None) -> None:
        self.model = model
        self.request = request
        self.graph = graph
        self.outputs = set(output_layers(model) if graph is None else graph.outputs)
        self.ties, self.holders = ties_and_holders(model)
        self.removed = find_removed_norms(model)
        self.reasons: dict[str, str] = {}  # why norms that follow a layer stay

    def decide(self, candidate: Candidate) -> Decision:
        """Return what happens to a layer; raise where it can be neither converted nor left."""
        kind = type(candidate.module).__name__
        left = Decision(candidate.name, kind, False)
        absorbed, note = self._find_norm(candidate)
        if reason := self._explain_left(candidate, absorbed):
            return replace(left, notes=(reason,))

        self._refuse_computed_weight(candidate)
        self._refuse_held(candidate)
        decision = replace(left, converted=True, norm=absorbed, weights=self.request.weights)
        decision = self._choose_input_mean(candidate, decision, note)
        weight, bias = candidate.read()
        limit, zeros = "", 0
        if self.request.init is None and not weight.is_meta:
            r, offset = self._measure(weight, bias, decision)
            limit = explain_limit(weight.dtype, r, offset)
            zeros = int((r == 0).sum())
        if limit and decision.weights == "geometric":
            if decision.norm is None:
                return replace(left, notes=(limit,))
            # The norm goes into a plain weight where r cannot hold the result.
            notes = (*decision.notes, f"plain weight: {limit}")
            decision = replace(decision, notes=notes, weights="plain")

        if decision.weights == "plain":
            if reason := self._explain_left_plain(candidate, decision):
                return replace(left, notes=(reason,))

        notes = (*decision.notes, *self._find_facts(weight, bias, decision, zeros))
        parameters = weight.numel() + (0 if bias is None else bias.numel())
        return replace(decision, notes=notes, parameters=parameters)

    def _find_facts(
        self, weight: Tensor, bias: Tensor | None, decision: Decision, zeros: int
    ) -> list[str]:
        """Return what is worth knowing about a layer's parameters."""
        facts = []
        norm: Any = self.model.get_submodule(decision.norm) if decision.norm else None
        if decision.weights == "geometric":
            has_bias = bias is not None or norm is not None
            if zeros:
                facts.append(f"{zeros} zero rows have r = 0")
            if has_bias and weight.requires_grad and not learns_offset(bias, norm):
                facts.append(
                    "its frozen bias moves with r: bias = r * lam, and only lam stays frozen"
                )
        elif norm is not None and norm.weight is not None:
            if norm.weight.requires_grad and not weight.requires_grad:
                facts.append(
                    f"the scale of {decision.norm} goes into the frozen weight and stops "
                    "learning; with weights='geometric' r learns it"
                )
        return facts

    def _explain_left(self, candidate: Candidate, absorbed: str | None) -> str:
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
        if filter_fn is None and name in self.outputs and absorbed is None:
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

    def _choose_input_mean(self, candidate: Candidate, decision: Decision, note: str) -> Decision:
        """Return the decision with the mean of the layer's input, and what is to be noted."""
        graph, name = self.graph, candidate.name
        if graph is not None and name not in graph.layers:
            return replace(decision, notes=("does not run on example_inputs",))
        if self.request.norm is None or graph is None or not candidate.is_plain:
            return decision

        is_first = name in graph.first
        form: InputNorm = False
        if self.request.init is None:
            absorbed = decision.norm
            used_batch = absorbed and not is_constant(self.model.get_submodule(absorbed))
            if self.request.norm == "imn" and used_batch and not is_first:
                form = "bias"
        elif any(node.is_call for node in graph.nodes if node.name == name):
            form = not is_first
        else:
            note = note or "no input mean: its weight is used without a call"
        return replace(decision, notes=(note,) if note else (), input_norm=form)

    def _find_norm(self, candidate: Candidate) -> tuple[str | None, str]:
        """Return the BatchNorm that a layer absorbs, or why the one that follows it stays."""
        graph, name = self.graph, candidate.name
        if self.request.norm is None or graph is None or name not in graph.layers:
            return None, ""
        if not candidate.is_plain:
            return None, ""
        node, is_exclusive = graph.norm_after(name)
        if node is None or node.name is None:
            return None, ""
        norm = self.model.get_submodule(node.name)
        if not isinstance(norm, BatchNorm) and not is_constant(norm):
            return None, ""

        has_children = next(norm.children(), None) is not None
        reason = ""
        if is_constant(norm) and not is_frozen_batch_norm(norm):
            reason = "it holds constants alone, which training does not change"
        elif isinstance(norm, nn.SyncBatchNorm) and self.request.norm == "imn":
            reason = "convert before convert_sync_batchnorm, and call synchronise_means_ after"
        elif not _is_plain_batch_norm(norm):
            reason = "it computes something else than its base class"
        elif node.op == "batch_norm" and not has_children:
            reason = "its statistics are used without calling it"
        elif norm in self.ties:
            reason = f"it shares memory with {', '.join(self.ties[norm])}"
        elif not is_exclusive:
            reason = explain_shared(graph, name)
        elif any(call.layer in graph.dropped for call in graph.calls(name)):
            reason = "dropout, or what else acts in training alone, comes before it"
        elif candidate.module in self.removed:
            reason = "the layer before it has absorbed another norm"
        elif self.request.init is None and norm.running_mean is None:
            reason = "it has no running statistics"
        if reason:
            self.reasons[node.name] = reason
            return None, f"{node.name} stays: {reason}"
        return node.name, ""

    def _measure(
        self, weight: Tensor, bias: Tensor | None, decision: Decision
    ) -> tuple[Tensor, Tensor | None]:
        """Return the length of each row, and the bias, with the norm that the layer absorbs."""
        for key, tensor in (("weight", weight), ("bias", bias)):
            if tensor is not None and not tensor.isfinite().all():
                raise ValueError(
                    f"the {key} of {decision.name!r} holds NaN or infinite values, which have no "
                    "direction. Repair or reinitialise that layer, or leave it out with filter_fn."
                )

        r = torch.linalg.vector_norm(weight.flatten(1), dim=1, dtype=torch.float64)
        if not decision.norm:
            return r, bias
        gain, bias = absorb_norm(bias, self.model.get_submodule(decision.norm))
        if not (gain.isfinite().all() and bias.isfinite().all()):
            raise ValueError(
                f"{decision.norm!r} has statistics or parameters that are NaN, infinite or of "
                f"negative variance, so {decision.name!r} cannot absorb it. Repair them first."
            )
        return r * gain.abs(), bias

    def _explain_left_plain(self, candidate: Candidate, decision: Decision) -> str:
        """Return why weights="plain" leaves a layer."""
        if not candidate.is_plain:
            return "input means are for nn.Linear and nn.Conv1d/2d/3d"
        if parametrize.is_parametrized(candidate.module):
            return "its weight is not a Parameter but computed (weight_norm)"
        if decision.norm or decision.input_norm or self.request.init is not None:
            return ""
        if decision.notes:
            return decision.notes[0]
        if candidate.module in self.removed:
            return "already converted"
        return "no BatchNorm follows it directly"


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
    if kind is nn.SyncBatchNorm or is_frozen_batch_norm(norm):
        return True
    if kind.__module__.startswith("timm.") and "BatchNormAct" in kind.__name__:
        return True
    return not overrides(norm, BatchNorm)


def learns_offset(bias: Tensor | None, norm: nn.Module | None) -> bool:
    """Return whether what a layer adds learns: its bias does, or the norm that it absorbs."""
    parameters = [] if norm is None else list(norm.parameters(recurse=False))
    return any(p.requires_grad for p in (bias, *parameters) if p is not None)


def absorb_norm(bias: Tensor | None, norm: Any) -> tuple[Tensor, Tensor]:
    """Return gain and bias, in float64, with BN(w^T x + b) = gain * w^T x + bias in evaluation."""
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
