"""Which modules have units, and where their weights are: the one place that knows layer types.

A unit is a row of a layer's weight (a column, in transformers' Conv1D). Its pre-activation is

    gain (rows^T x + offset),

where `rows` and `gain` are w and 1 in a plain layer, u and r in a GmP layer. A GmP layer that is
given its activation has r outside of it: the factor `outer`, which scales the output.
"""

from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from geoparam.attention import GmPMultiheadAttention
from geoparam.base_layer import GmPLayer
from geoparam.input_mean_layers import InputMeanLayer
from geoparam.inspection import computes_as, is_conv1d

PLAIN = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
PROJECTION = "in_proj_weight"  # nn.MultiheadAttention stands for its input projection


class UnitRows(NamedTuple):
    """The units of a layer; None where a layer has no such factor."""

    rows: Tensor  # (out, n)
    gain: Tensor | None  # r, inside of the activation
    outer: Tensor | None  # r, outside of it
    offset: Tensor | None  # the bias, or lam
    are_unit_vectors: bool


def find_unit_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that have units, by the layer's name, in order of registration."""
    layers = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            name = f"{name}.{PROJECTION}".lstrip(".")
        if has_units(module):
            layers[name] = module
    return layers


def has_units(module: nn.Module) -> bool:
    """Return whether a module is a layer whose weight has one row, or column, for each unit.

    A subclass of torch's layers has units only if it computes what they do.
    """
    if isinstance(module, GmPMultiheadAttention):
        return False  # its projection is a layer of its own
    if isinstance(module, nn.MultiheadAttention):
        return module.in_proj_weight is not None
    is_ours = isinstance(module, GmPLayer | InputMeanLayer)
    is_plain = any(isinstance(module, base) and computes_as(module, base) for base in PLAIN)
    return (is_ours or is_plain or is_conv1d(module)) and count_units(module) > 0


def count_units(layer: Any) -> int:
    """Return how many units a layer has."""
    if isinstance(layer, nn.MultiheadAttention):
        return 3 * layer.embed_dim
    if isinstance(layer, GmPLayer):
        return layer.weight_shape[0]
    if isinstance(layer, nn.Linear):
        return layer.out_features
    if isinstance(layer, nn.modules.conv._ConvNd):
        return layer.out_channels
    return layer.nf  # transformers' Conv1D


def has_angles(layer: nn.Module) -> bool:
    """Return whether a layer stores its units' directions as angles; with one input, a sign."""
    return isinstance(layer, GmPLayer) and layer.coordinates == "angles" and layer.fan_in > 1


def count_positions(layer: nn.Module) -> int:
    """Return in how many dimensions a unit has outputs at several places: 2 for Conv2d."""
    return len(getattr(layer, "kernel_size", ()))


def read_rows(layer: Any) -> UnitRows:
    """Return the units of a layer, as its next call computes with them."""
    if isinstance(layer, GmPLayer):
        wide = torch.promote_types(layer.r.dtype, torch.float32)
        rows = layer._rows(None, wide)
        if layer.activation is None:
            return UnitRows(rows, layer.r, None, layer.lam, has_angles(layer))
        return UnitRows(rows, None, layer.r, layer.lam, has_angles(layer))
    if isinstance(layer, nn.MultiheadAttention):
        return UnitRows(layer.in_proj_weight, None, None, layer.in_proj_bias, False)
    weight, bias = _read_weight(layer)
    if isinstance(layer, PLAIN):
        rows = weight.flatten(1)
    else:  # transformers' Conv1D
        rows = weight.t()
    return UnitRows(rows, None, None, bias, False)


def _read_weight(layer: Any) -> tuple[Tensor, Tensor | None]:
    """Return weight and bias of a layer that is not ours.

    torch's older hooks (weight_norm, pruning) write `layer.weight` in a call only, so it is
    computed here. Parametrizations are read in evaluation mode: in training, reading
    spectral_norm's weight takes a step of its power iteration.
    """
    with ExitStack() as after:
        if is_parametrized(layer):
            for step in layer.parametrizations.modules():
                after.callback(setattr, step, "training", step.training)
                step.training = False
        values = {"weight": layer.weight, "bias": layer.bias}
    for hook in layer._forward_pre_hooks.values():
        if isinstance(hook, WeightNorm):
            values[hook.name] = hook.compute_weight(layer)
        elif isinstance(hook, SpectralNorm):
            values[hook.name] = hook.compute_weight(layer, do_power_iteration=False)
        elif isinstance(hook, BasePruningMethod):
            values[hook._tensor_name] = hook.apply_mask(layer)
    return values["weight"], values["bias"]
