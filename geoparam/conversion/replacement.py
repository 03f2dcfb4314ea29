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
from geoparam.layers import GmPConv1d, GmPConv2d, GmPConv3d, GmPLinear
from geoparam.norm import TrackedMean, shift_bias
from geoparam.parameter_values import Init, draw

_CONVOLUTIONS = {nn.Conv1d: GmPConv1d, nn.Conv2d: GmPConv2d, nn.Conv3d: GmPConv3d}


@dataclass(frozen=True)
class Options:
    """How layers are built; `means` has each layer's input mean and its number of batches."""

    coordinates: Name
    natural: bool
    init: Init | None
    weights: Literal["geometric", "plain"]
    momentum: float | None
    means: dict[str, tuple[Tensor, int]] = field(default_factory=dict)

    @property
    def storage(self) -> dict[str, Any]:
        return {"coordinates": self.coordinates, "natural": self.natural, "init": self.init}


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
    if isinstance(old, nn.MultiheadAttention):
        return GmPMultiheadAttention.from_attention(old, **options.storage)
    weight, bias = affine_of(old)
    if kind_of(old) == "transposed":
        layer: Any = GmPLinear.from_affine(weight, bias, **options.storage)
        layer.transposed = True
        return layer
    layer = _build_empty(old, decision, norm is not None, options)
    if options.init is None and not weight.is_meta:
        gain = None
        if norm is not None:
            gain, bias = absorb_norm(bias, norm)
        layer._set_affine(weight, bias, gain)
        _start_from_mean(layer, options.means.get(decision.name))
    _freeze_like(layer, old, norm)
    return layer


def _build_empty(old: Any, decision: Decision, absorbs: bool, options: Options) -> GmPLayer:
    arguments = {
        **options.storage,
        "momentum": options.momentum,
        "bias": old.bias is not None or absorbs,
        "input_norm": decision.input_norm,
        "device": old.weight.device,
        "dtype": old.weight.dtype,
    }
    if isinstance(old, nn.Linear):
        return GmPLinear(old.in_features, old.out_features, **arguments)
    cls: Any = next(ours for plain, ours in _CONVOLUTIONS.items() if isinstance(old, plain))
    return cls.like(old, **arguments)


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


def _freeze_like(layer: GmPLayer, old: Any, norm: nn.Module | None) -> None:
    """Parameters stay frozen; what takes over from a BatchNorm learns if the norm did."""
    learns = old.weight.requires_grad
    norm_learns = norm is not None and _learns(norm)
    if isinstance(layer._stored, nn.Parameter):
        layer._stored.requires_grad_(learns)
    layer.r.requires_grad_(learns or norm_learns)
    if layer.lam is not None:
        own = learns if old.bias is None else old.bias.requires_grad
        layer.lam.requires_grad_(own if norm is None else norm_learns)


def _learns(norm: nn.Module) -> bool:
    return any(p.requires_grad for p in norm.parameters(recurse=False))
