"""Take geometric parameterization off again: plain torch.nn layers with the same function.

The mean of a layer's input goes into its bias; where zeros are padded to the centred input, it
becomes a BatchNorm. An absorbed BatchNorm comes back as one that only adds the bias. r outside an
activation g goes into the weights, since r g(s) = g(r s) where g is ReLU-like and r >= 0; else it
goes into the layers that read the output.
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
from geoparam.conversion.verification import replace_checked
from geoparam.input_mean_layers import InputMeanLayer, release
from geoparam.layers import GmPLinear, is_trained
from geoparam.model.graph import Graph
from geoparam.model.run import computes_as, refuse_non_model
from geoparam.model.trace import record_run
from geoparam.model.unit_layers import is_plain_layer
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
        example_inputs: A small batch; needed where r < 0 stands outside an activation, and for
            `InputMeanNorm` modules. The model is run on it before and after, and put back with an
            error if its outputs differ.
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
    absorbed = _find_removed_norms(ours)
    if restore_norm is None:  # all norms or none: `norm="fold"` may leave some layers plain
        restore_norm = any(isinstance(layer, GmPLayer) for layer in absorbed)
    factors = _find_factors(model, ours, graph)
    for name in factors:
        ours.setdefault(name, model.get_submodule(name))

    folded: dict[nn.Module, nn.Module] = {}
    for name, module in ours.items():
        if isinstance(module, InputMeanNorm):
            folded[module] = _fold_norm(name, module, graph)
        elif not isinstance(module, RemovedNorm | GmPMultiheadAttention):
            removed = absorbed.get(module)
            restored = removed if restore_norm and _can_restore(removed) else None
            folded[module], norm = _fold_layer(name, module, factors.get(name), restored)
            if removed is not None:
                folded[removed] = _drop_norm(removed) if norm is None else norm
    _check_finite(ours, folded)

    pairs = _list_pairs(ours, folded)
    return replace_checked(model, pairs, example_inputs, run, "folded")


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


def _find_removed_norms(ours: dict[str, nn.Module]) -> dict[nn.Module, RemovedNorm]:
    """Return the place of the BatchNorm that each layer has absorbed."""
    absorbed: dict[nn.Module, RemovedNorm] = {}
    for name, module in ours.items():
        if not isinstance(module, RemovedNorm):
            continue
        if module.layer not in ours.values():
            raise ValueError(
                f"{name!r} is the place of a BatchNorm that a layer outside of this model has "
                "absorbed. Fold the whole model, before it is taken apart."
            )
        absorbed[module.layer] = module
    return absorbed


def _can_restore(removed: RemovedNorm | None) -> bool:
    """Return whether a BatchNorm was absorbed that can come back.

    One without running statistics cannot: it uses the batch's even in eval mode.
    """
    return removed is not None and removed.norm.running_mean is not None


def _drop_norm(removed: RemovedNorm) -> nn.Module:
    """Return what stays in the place of a norm: its activation, if it has one."""
    children = list(removed.children())
    return nn.Sequential(*children) if children else nn.Identity()


@torch.no_grad()
def _fold_layer(
    name: str, layer: Any, factor: Tensor | None, removed: RemovedNorm | None
) -> tuple[nn.Module, nn.Module | None]:
    """Return the plain layer, and the norm that comes back in the place of an absorbed one."""
    subtraction = activation = norm = None
    if isinstance(layer, GmPLayer):
        mean = None if layer.input_norm is None else layer.input_norm.running_mean
        if mean is not None and layer._centres_borders:
            subtraction = _build_subtraction(mean, len(layer.weight_shape), factor)
            mean = None
            log.info("%s: its input mean stays as a BatchNorm, %s.0, before the layer", name, name)
        weight, bias = layer._fold(_split_r(name, layer)[0], mean)
        if layer.activation is not None:
            activation = _as_module(name, layer.activation)
    elif isinstance(layer, InputMeanLayer):
        weight, bias = layer.fold()
    else:
        weight, bias = layer.weight, layer.bias

    if factor is not None and subtraction is None:
        weight = weight * _spread_over_inputs(factor, weight)
    if removed is not None and bias is not None:
        norm, bias = _restore_norm(removed, bias)
    plain = _build_plain(layer, weight, bias)
    parts = [part for part in (subtraction, plain, activation) if part is not None]
    return (parts[0] if len(parts) == 1 else nn.Sequential(*parts)), norm


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
        if isinstance(norm, nn.modules.batchnorm._BatchNorm):  # a frozen one counts no batches
            norm.reset_running_stats()
    had_layers_type = norm.running_mean.dtype == removed.layer_type
    norm.to(bias.device, bias.dtype if had_layers_type else None)
    learns = removed.offset_learns()
    if removed.offset_learned not in (None, learns):  # frozen or thawed since
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


def _spread_over_inputs(factor: Tensor, weight: Tensor) -> Tensor:
    """Bring a factor per input channel into the shape of a weight, whose inputs are per group."""
    out, width = weight.shape[:2]
    groups = factor.numel() // width
    rows = factor.view(groups, width).repeat_interleave(out // groups, dim=0)
    return rows.view(out, width, *[1] * (weight.ndim - 2)).to(weight.dtype)


def _find_factors(
    model: nn.Module, ours: dict[str, nn.Module], graph: Graph | None
) -> dict[str, Tensor]:
    """Return for each layer that must take over an r the factor of each of its input channels."""
    factors: dict[str, Tensor] = {}
    for name, layer in ours.items():
        if not isinstance(layer, GmPLayer):
            continue
        _, outside = _split_r(name, layer)
        if outside is None:
            continue
        for receiver, channels in _find_receivers(name, model, graph).items():
            factor = outside[channels.to(outside.device)]
            factors[receiver] = factors.get(receiver, 1) * factor
    return factors


def _split_r(name: str, layer: GmPLayer) -> tuple[Tensor | None, Tensor | None]:
    """Return the scale that goes into the weight, and the factors that the next layers take over.

    The factors are the signs of r, or r where the activation is no ReLU; None where all are 1.
    """
    if layer.activation is None:
        return layer.r, None
    r = layer.r.detach()
    inside, outside = None, r
    activation = _as_module(name, layer.activation)
    if any(isinstance(activation, kind) and computes_as(activation, kind) for kind in HOMOGENEOUS):
        inside, outside = layer.r.abs(), torch.where(r < 0, -1, 1).to(r.dtype)
    return inside, None if (outside == 1).all() else outside


def _find_receivers(name: str, model: nn.Module, graph: Graph | None) -> dict[str, Tensor]:
    """Return the layers that take over an r, and which element each input channel takes."""
    try:
        if graph is None:
            raise ValueError("without example_inputs the next layer is not known: pass them")
        receivers = graph.receivers(name)
        modules = dict(model.named_modules())
        for receiver in receivers:
            module = modules.get(receiver, nn.Identity())
            is_plain = is_plain_layer(module) and "weight" in module._parameters
            if not is_plain and not isinstance(module, GmPLayer | InputMeanLayer):
                raise ValueError(
                    f"{receiver!r} computes something else than nn.Linear or a convolution, or "
                    "its weight is computed (weight_norm, spectral_norm, pruning)"
                )
    except ValueError as error:
        raise ValueError(
            f"{name!r} has an r outside its activation (negative, or the activation is no ReLU) "
            f"that must go into the next layer, but {error}. Otherwise keep r >= 0 in training "
            "(layer.r.clamp_(min=0)), or use the layer without activation= and put that after it."
        ) from error
    return receivers


def _build_subtraction(mean: Tensor, ndim: int, factor: Tensor | None = None) -> nn.Module:
    """Return a BatchNorm that gives x - mean, or factor * x - mean; variance + eps is 1 in it."""
    eps = 2.0**-20  # 1 - eps is a float32 (and eps = 0 is refused by some versions of torch)
    affine = factor is not None
    norm: Any = BATCH_NORMS[ndim - 2](
        mean.numel(), eps=eps, affine=affine, device=mean.device, dtype=mean.dtype
    )
    norm.running_var.fill_(1 - eps)
    if affine:  # a factor of 0 leaves -mean, which no shift of the input would
        norm.weight.copy_(factor)
        norm.bias.copy_(-mean)
    else:
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
