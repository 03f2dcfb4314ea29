"""Build what stands in a converted model: a layer for a layer, and a place for its BatchNorm."""

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from geoparam.attention import GmPMultiheadAttention
from geoparam.base_layer import GmPLayer
from geoparam.conversion.plan import Decision, absorb_norm, affine_of, kind_of
from geoparam.coordinates import Name
from geoparam.input_mean_layers import adopt
from geoparam.layers import (
    GmPConv1d,
    GmPConv2d,
    GmPConv3d,
    GmPLinear,
    as_linear,
    build_like,
    freeze_like,
)
from geoparam.norm import TrackedMean, shift_bias
from geoparam.parameter_values import Init, draw

LAYERS: tuple[type[GmPLayer], ...] = (GmPLinear, GmPConv1d, GmPConv2d, GmPConv3d)


@dataclass(frozen=True)
class Options:
    """How layers are built; `means` has each layer's input mean and its number of batches."""

    coordinates: Name
    natural: bool
    init: Init | None
    weights: Literal["geometric", "plain"]
    momentum: float | None
    means: dict[str, tuple[Tensor, int]] = field(default_factory=dict)


class RemovedNorm(nn.Module):
    """The place of a BatchNorm that a layer has absorbed: it passes its input on.

    It keeps the norm and the layer outside of the model's state, so that folding can put a norm
    back. What the norm held besides (timm's hold their activation) still runs.
    """

    norm: nn.Module
    layer: nn.Module
    layer_had_bias: bool

    def __init__(self, norm: nn.Module, old: nn.Module, new: nn.Module) -> None:
        super().__init__()
        for name, child in norm.named_children():
            self.add_module(name, child)
        self.__dict__.update(norm=norm, layer=new, layer_had_bias=old.bias is not None)

    def forward(self, x: Tensor) -> Tensor:
        for child in self._modules.values():  # children() takes longer than most calls of this
            assert child is not None
            x = child(x)
        return x


def build_replacement(
    old: Any, decision: Decision, norm: nn.Module | None, options: Options
) -> nn.Module:
    """Return the layer that takes the place of `old`, and of the BatchNorm that it absorbs."""
    if options.weights == "plain":
        return _adopt_weight(old, decision, norm, options)
    weight, bias = affine_of(old)
    kind = kind_of(old)
    plain: Any = old if kind in ("linear", "conv") else as_linear(weight, bias)
    layer: Any = _build_empty(plain, decision, norm, options)
    freeze_like(layer, plain)
    if norm is not None:  # what takes over from a BatchNorm learns if the norm did
        layer.r.requires_grad_(layer.r.requires_grad or _learns(norm))
        layer.lam.requires_grad_(_learns(norm))
    if options.init is None and not weight.is_meta:
        gain = None
        if norm is not None:
            gain, bias = absorb_norm(bias, norm)
        layer._set_affine(weight, bias, gain)
        _start_from_mean(layer, options.means.get(decision.name))
    if kind == "attention":
        return GmPMultiheadAttention.around(old, layer)
    if kind == "transposed":
        layer.transposed = True
    return layer


def _build_empty(
    plain: Any, decision: Decision, norm: nn.Module | None, options: Options
) -> GmPLayer:
    """Return a layer of the sizes of `plain`; one that absorbs a norm has a bias."""
    kind = next(ours for ours in LAYERS if isinstance(plain, ours._plain))
    return build_like(
        kind,
        plain,
        bias=plain.bias is not None or norm is not None,
        input_norm=decision.input_norm,
        coordinates=options.coordinates,
        natural=options.natural,
        init=options.init,
        momentum=options.momentum,
    )


@torch.no_grad()
def _start_from_mean(layer: GmPLayer, calibrated: tuple[Tensor, int] | None) -> None:
    """Give a layer its running mean, and change lam so that its function stays."""
    norm = layer.input_norm
    if norm is None or calibrated is None or layer.lam is None:
        return
    shift = _calibrate(norm, layer._weight(None), calibrated)
    r = layer.r.double()
    layer.lam.copy_(torch.where(r == 0, 0, layer.lam - shift / torch.where(r == 0, 1, r)))


def _calibrate(norm: TrackedMean, weight: Tensor, calibrated: tuple[Tensor, int]) -> Tensor:
    """Set the running mean m, and return -w^T m for each unit."""
    assert norm.running_mean is not None and norm.num_batches_tracked is not None
    norm.running_mean.copy_(calibrated[0])
    norm.num_batches_tracked.fill_(calibrated[1])
    return shift_bias(None, weight.detach(), norm.running_mean).double()


@torch.no_grad()
def _adopt_weight(
    old: Any, decision: Decision, norm: nn.Module | None, options: Options
) -> nn.Module:
    """Return a layer with the Parameters of `old` that has absorbed its norm."""
    new = adopt(old, options.momentum, centred=bool(decision.input_norm))
    weight, bias = affine_of(old)
    if options.init is not None:
        place: dict[str, Any] = {"device": weight.device, "dtype": weight.dtype}
        rows = draw(len(weight), weight[0].numel(), options.init, **place)
        weight.copy_(rows.view(weight.shape))
        new.bias.zero_()
    elif norm is not None and not weight.is_meta:
        gain, bias = absorb_norm(bias, norm)
        weight.copy_(gain.view(-1, *[1] * (weight.ndim - 1)) * weight)
        if decision.name in options.means:
            bias = bias - _calibrate(new, weight, options.means[decision.name])
        new.bias.copy_(bias)
    if norm is not None:
        new.bias.requires_grad_(_learns(norm))
    return new


def _learns(norm: nn.Module) -> bool:
    return any(p.requires_grad for p in norm.parameters(recurse=False))
