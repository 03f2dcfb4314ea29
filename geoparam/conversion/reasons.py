"""Why a layer stays as it is, or a norm: the sentences of a plan."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from geoparam.base_layer import GmPLayer
from geoparam.coordinates import STEEPEST
from geoparam.input_mean_layers import InputMeanLayer
from geoparam.model.graph import Graph
from geoparam.model.norms import CHANNEL_NORMS, is_constant
from geoparam.norm import TrackedMean


def explain_unknown(module: nn.Module) -> str:
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
        if _calls_norm(module):
            return (
                "a norm is called in a layer's forward: use nn.Sequential(layer, norm, activation)"
            )
        return "it computes something else than its base class"

    shapes = [p.shape for p in module.parameters(recurse=False)]
    is_leaf = next(module.children(), None) is None
    has_matrix = is_leaf and any(len(shape) > 1 for shape in shapes)
    is_stacked = any(len(shape) > 2 and min(shape) > 1 for shape in shapes)  # as fused experts are
    return "no GmP form of this type" if has_matrix or is_stacked else ""


def _calls_norm(layer: nn.Module) -> bool:
    """Return whether a norm is among a layer's children, as in detectron2's Conv2d."""
    return any("norm" in type(child).__name__.lower() for child in layer.children())


def explain_limit(dtype: torch.dtype, r: Tensor, bias: Tensor | None) -> str:
    """Return a reason to leave a layer where r or r lam cannot hold it, "" where they can."""
    longest = r.max().item()
    if longest > torch.finfo(dtype).max:
        return f"a row of length {longest:.0f}, beyond the largest {dtype}"
    steep = 0 if bias is None else int((bias.abs() > STEEPEST * r).sum())
    return f"{steep} rows with |bias| > {STEEPEST} |weight|" if steep else ""


def explain_shared(graph: Graph, layer: str) -> str:
    """Return why the norm after a layer is not fed by the layer's bare output alone."""
    call = graph.calls(layer)[0]
    output = graph.nodes[call.layer]
    inputs = () if call.norm is None else graph.nodes[call.norm].inputs
    if len(inputs) == 1 and inputs[0] != call.layer:
        return f"{graph.nodes[inputs[0]].op} comes before it"
    if len(output.shape) + (output.channel or 0) != 1:
        return "its channels are another dimension than the layer's"
    return "it, or what it reads, is used elsewhere too"


def explain_kept_norm(norm: nn.Module, name: str, graph: Graph, left: Mapping[str, str]) -> str:
    """Return why what uses the batch in training stays, from what comes before it in the run.

    `left` are the layers that stay, and why.
    """
    if isinstance(norm, TrackedMean):
        return "it subtracts a mean and divides by nothing"
    node = graph.find(name)
    if node is None:
        parent = name.rpartition(".")[0]
        return left.get(parent, "it does not run on example_inputs")

    before = graph.nodes[node.inputs[0]]
    if before.kind != "layer" or before.name is None:
        return f"{before.op} comes before it, not a layer"
    if before.name in left:
        return f"{before.name} before it is left ({left[before.name]})"
    return f"it is not all that follows {before.name}"


def find_own_batch_norms(model: nn.Module, graph: Graph) -> dict[str, str]:
    """Return why modules that are none of torch's norms may use the batch, by their names."""
    reasons = {}
    for name, module in model.named_modules():
        if isinstance(module, CHANNEL_NORMS) or is_constant(module):
            continue
        if name in graph.batch_norms:
            reasons[name] = "it calls batch_norm itself, and may use the batch"
        elif module._buffers.get("running_var") is not None:
            reasons[name] = "it has a running variance, and may use the batch"
    return reasons
