"""Take geometric parameterization off again: plain torch.nn layers with the same function.

The mean of a layer's input goes into its bias; where zeros are padded to the centred input, it
becomes a BatchNorm. An absorbed BatchNorm comes back as one that only adds the bias. r outside an
activation g goes into the weights where g is ReLU-like and r >= 0, since r g(s) = g(r s) then;
else it becomes a layer that multiplies each channel by its r.
"""

import copy
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from geoparam.arguments import check_flag
from geoparam.attention import GmPMultiheadAttention
from geoparam.base_layer import GmPLayer
from geoparam.conversion.plan import Inputs, refuse_wrapped
from geoparam.conversion.verification import mode_of, replace_checked
from geoparam.input_mean_layers import InputMeanLayer, release
from geoparam.layers import GmPLinear, is_trained
from geoparam.model.graph import Graph
from geoparam.model.norms import BatchNorm
from geoparam.model.run import computes_as, refuse_non_model
from geoparam.model.trace import record_run
from geoparam.norm import InputMeanNorm, MeanOnlyBatchNorm, TrackedMean
from geoparam.removed_norm import RemovedNorm

log = logging.getLogger("geoparam")

HOMOGENEOUS = (nn.ReLU, nn.LeakyReLU, nn.PReLU, nn.Identity)
MODULES = {name.lower(): name for name in nn.modules.activation.__all__}  # by function
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)  # by ndim - 2


def fold_(
    model: nn.Module, example_inputs: Inputs | None = None, *, restore_norm: bool | None = None
) -> nn.Module:
    """Turn all layers of geoparam in `model` into plain torch.nn layers in place, and return it.

    Nothing of geoparam is left in it, and it computes what it did in evaluation. After `convert_`
    its `state_dict` has the keys of the original where norms are restored. The model has new
    parameters: build a new optimizer to train on.

    Args:
        model: Any model. A bare layer is folded too; use what is returned.
        example_inputs: A small batch; needed for `InputMeanNorm` modules. The model is run on it
            before and after, and put back with an error if its outputs differ.
        restore_norm: Whether a BatchNorm comes back where `convert_(norm=...)` took one out. It
            adds the layer's bias and does nothing else (gamma = 1, mu = 0, sigma^2 = 1 - eps), so
            that the original's files load. By default it does where weights are geometric, and
            does not with `weights="plain"`.

    Example:
        >>> import geoparam as gp
        >>> model = nn.Sequential(gp.GmPLinear(4, 8, activation=torch.relu), nn.Linear(8, 2))
        >>> x = torch.randn(3, 4)
        >>> before = model(x)
        >>> fold_(model)[0]
        Sequential(
          (0): Linear(in_features=4, out_features=8, bias=True)
          (1): ReLU()
        )
        >>> torch.allclose(model(x), before, atol=1e-6)
        True
    """
    refuse_non_model(model, "fold_(model, ...)")
    if restore_norm is not None:
        check_flag("restore_norm", restore_norm)
    ours = _find_ours(model)
    if not ours:
        raise ValueError("nothing to fold: the model has no layers of geoparam.")
    refuse_wrapped(model, "fold")
    run = None if example_inputs is None else record_run(model, example_inputs)
    graph = None if run is None else run.graph
    removed = _find_removed(ours)
    if restore_norm is None:  # all norms or none: `norm="fold"` may leave some layers plain
        restore_norm = any(isinstance(layer, GmPLayer) for layer in removed)

    with mode_of(model):
        folded = _fold_modules(ours, removed, graph, restore_norm)
    _check_finite(ours, folded)
    pairs = _list_pairs(ours, folded)
    return replace_checked(model, pairs, example_inputs, run, "folded")


@torch.no_grad()
def _fold_modules(
    ours: dict[str, nn.Module],
    removed: dict[nn.Module, RemovedNorm],
    graph: Graph | None,
    restore_norm: bool,
) -> dict[nn.Module, nn.Module]:
    """Return the plain module for each of ours; attention follows when its parts are plain."""
    folded: dict[nn.Module, nn.Module] = {}
    for name, module in ours.items():
        if isinstance(module, RemovedNorm | GmPMultiheadAttention):
            continue
        if isinstance(module, InputMeanNorm):
            folded[module] = _fold_norm(name, module, graph)
            continue

        weight, bias = _read_plain(name, module)
        place = removed.get(module)
        if place is not None:
            folded[place] = _drop_norm(place)
            # One without running statistics uses the batch's even in eval mode.
            if restore_norm and bias is not None and place.norm.running_mean is not None:
                folded[place], bias = _restore_norm(place, bias)
        folded[module] = _fold_layer(name, module, weight, bias)
    return folded


def _list_pairs(
    ours: dict[str, nn.Module], folded: dict[nn.Module, nn.Module]
) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Yield each module that goes, and the plain one that takes its place."""
    for module in reversed(ours.values()):  # children before the attention that holds them
        if isinstance(module, GmPMultiheadAttention):
            yield module, module.to_attention()
        else:
            yield module, folded[module]


def _find_ours(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of geoparam that are to be replaced, by name."""
    kinds = (GmPLayer, GmPMultiheadAttention, TrackedMean, RemovedNorm)
    inside = {m.input_norm for m in model.modules() if isinstance(m, GmPLayer)}
    absorbing = {m.layer for m in model.modules() if isinstance(m, RemovedNorm)}
    return {
        name: module
        for name, module in model.named_modules()
        if (isinstance(module, kinds) or module in absorbing) and module not in inside
    }


def _find_removed(ours: dict[str, nn.Module]) -> dict[nn.Module, RemovedNorm]:
    """Return the place of the BatchNorm that each layer has absorbed."""
    removed: dict[nn.Module, RemovedNorm] = {}
    for name, module in ours.items():
        if not isinstance(module, RemovedNorm):
            continue
        if module.layer not in ours.values():
            raise ValueError(
                f"{name!r} is the place of a BatchNorm that a layer outside of this model has "
                "absorbed. Fold the whole model, before it is taken apart."
            )
        removed[module.layer] = module
    return removed


def _drop_norm(removed: RemovedNorm) -> nn.Module:
    """Return what stays in the place of a norm: its activation, if it has one."""
    children = list(removed.children())
    return nn.Sequential(*children) if children else nn.Identity()


def _read_plain(name: str, layer: Any) -> tuple[Tensor, Tensor | None]:
    """Return the plain layer's weight and bias."""
    if isinstance(layer, InputMeanLayer):
        return layer.fold()
    if isinstance(layer, GmPLayer):
        return layer._fold(layer.r if _has_r_inside(name, layer) else None)
    return layer.weight, layer.bias


def _has_r_inside(name: str, layer: GmPLayer) -> bool:
    """Return whether r can be in the weight: r g(s) = g(r s) for r >= 0 and g like ReLU."""
    if layer.activation is None:
        return True
    activation = _as_module(name, layer.activation)
    kinds = [kind for kind in HOMOGENEOUS if isinstance(activation, kind)]
    is_homogeneous = any(computes_as(activation, kind) for kind in kinds)
    return is_homogeneous and not bool((layer.r < 0).any())


def _fold_layer(name: str, layer: Any, weight: Tensor, bias: Tensor | None) -> nn.Module:
    """Return the plain layer, with what has to run before and after it."""
    plain = _build_plain(layer, weight, bias)
    if not isinstance(layer, GmPLayer):
        return plain

    parts = [plain]
    if layer.input_norm is not None and layer._centres_borders:
        parts.insert(0, _build_subtraction(layer.input_norm.running_mean, weight.ndim))
        log.info("%s: its input mean stays as a BatchNorm, %s.0, before the layer", name, name)
    if layer.activation is not None:
        parts.append(_as_module(name, layer.activation))
        if not _has_r_inside(name, layer):
            parts.append(_build_scale(layer))
            log.info("%s: r stays as a layer, %s.%d, after it", name, name, len(parts) - 1)
    return parts[0] if len(parts) == 1 else nn.Sequential(*parts)


def _build_scale(layer: GmPLayer) -> nn.Module:
    """Return a layer that multiplies each channel by its r: depthwise, or diagonal."""
    out, r = layer.weight_shape[0], layer.r.detach()
    scale: Any
    if len(layer.weight_shape) > 2:
        scale = layer._plain(out, out, 1, groups=out, bias=False, device="meta")
        values = r.view(scale.weight.shape)
    else:
        scale = nn.Linear(out, out, bias=False, device="meta")
        values = torch.diag(r)
    scale.weight = nn.Parameter(values.clone(), requires_grad=layer.r.requires_grad)
    return scale


def _build_plain(layer: Any, weight: Tensor, bias: Tensor | None) -> nn.Module:
    """Return the layer that `layer` was made from, with another weight and bias."""
    if isinstance(layer, GmPLayer):
        plain = layer.build_plain(weight, bias)
        return _as_conv1d(plain) if isinstance(layer, GmPLinear) and layer.transposed else plain
    plain = release(layer)
    if weight is not layer.weight:
        plain.weight = nn.Parameter(weight, is_trained(layer, "weight"))
    plain.bias = None if bias is None else nn.Parameter(bias, is_trained(layer, "bias"))
    return plain


def _as_module(name: str, activation: Callable) -> nn.Module:
    if isinstance(activation, nn.Module):
        return activation
    function = getattr(activation, "__name__", "")
    kind = MODULES.get(function.replace("_", ""))
    is_torchs = any(getattr(place, function, None) is activation for place in (F, torch, Tensor))
    if kind is None or not is_torchs:
        raise ValueError(
            f"{name!r} has an activation that is no function of torch with a module in torch.nn: "
            f"{activation}. Give the layer an nn.Module as its activation."
        )
    return getattr(nn, kind)()


def _as_conv1d(linear: nn.Linear) -> nn.Module:
    """Return transformers' Conv1D, which stores its weight as (in, out)."""
    from transformers.pytorch_utils import Conv1D

    plain = Conv1D(linear.out_features, linear.in_features).train(linear.training)
    plain.weight = nn.Parameter(linear.weight.t().contiguous(), linear.weight.requires_grad)
    plain.bias = linear.bias
    return plain


def _restore_norm(removed: RemovedNorm, bias: Tensor) -> tuple[nn.Module, Tensor | None]:
    """Return a BatchNorm that adds `bias` and does nothing else, and the layer's own bias."""
    norm: Any = copy.deepcopy(removed.norm)
    if norm.running_mean.is_meta and not bias.is_meta:  # converted before it had values
        norm.to_empty(device=bias.device)
        if isinstance(norm, BatchNorm):  # a frozen one counts no batches
            norm.reset_running_stats()
    had_layers_type = norm.running_mean.dtype == removed.layer_type
    norm.to(bias.device, bias.dtype if had_layers_type else None)
    learns = removed.offset_learns()
    if removed.offset_learned != learns:  # frozen or thawed since
        norm.requires_grad_(learns)
    for name, child in removed.named_children():
        norm.add_module(name, child)

    # gamma (x - mu) / sqrt(sigma^2 + eps) + beta = x + bias
    norm.running_mean.zero_()
    norm.running_var.fill_(1 - norm.eps)
    if norm.weight is not None:
        norm.weight.fill_(1)
    if norm.bias is None:
        norm.running_mean.copy_(-bias)
    else:
        norm.bias.copy_(bias)
    return norm, torch.zeros_like(bias) if removed.layer_had_bias else None


def _build_subtraction(mean: Tensor, ndim: int) -> nn.Module:
    """Return a BatchNorm that gives x - mean; its variance + eps is 1."""
    eps = 2.0**-20  # 1 - eps is a float32 (and eps = 0 is refused by some versions of torch)
    norm: Any = BATCH_NORMS[ndim - 2](
        mean.numel(), eps=eps, affine=False, device=mean.device, dtype=mean.dtype
    )
    norm.running_var.fill_(1 - eps)
    norm.running_mean.copy_(mean)
    return norm


def _fold_norm(name: str, norm: InputMeanNorm, graph: Graph | None) -> nn.Module:
    if graph is None:
        raise ValueError(f"{name!r} becomes a BatchNorm: pass example_inputs, to see its rank.")
    ranks = {len(node.shape) for node in graph.nodes if node.name == name}
    if len(ranks) != 1 or norm.dim not in (1, 1 - min(ranks)):
        raise ValueError(
            f"{name!r} does not have its channels in dimension 1 of inputs of one rank, as a "
            "BatchNorm must."
        )
    plain: Any = _build_subtraction(norm.running_mean, ranks.pop())
    if isinstance(norm, MeanOnlyBatchNorm) and norm.bias is not None:
        plain.running_mean.sub_(norm.bias.detach())
    return plain


def _check_finite(ours: dict[str, nn.Module], folded: dict[nn.Module, nn.Module]) -> None:
    for name, module in ours.items():
        if module not in folded:
            continue
        for tensor in folded[module].state_dict().values():
            has_values = isinstance(tensor, Tensor) and not tensor.is_meta
            if has_values and not tensor.isfinite().all():
                raise ValueError(
                    f"{name!r} folds to NaN or infinite values: its parameters are broken."
                )
