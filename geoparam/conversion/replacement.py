"""Build what stands in a converted model: a layer for a layer, and a place for its BatchNorm."""

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from geoparam.attention import GmPMultiheadAttention
from geoparam.base_layer import GmPLayer
from geoparam.centred_map import shift_bias
from geoparam.conversion.plan import Decision, absorb_norm, affine_of, kind_of
from geoparam.coordinates import Init, Name, draw
from geoparam.input_mean_layers import adopt
from geoparam.layers import GmPConv1d, GmPConv2d, GmPConv3d, GmPLinear, as_linear, build_like

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


@torch.no_grad()
def build_replacement(
    old: Any, decision: Decision, norm: nn.Module | None, options: Options
) -> nn.Module:
    """Return the layer that takes the place of `old`, and of the BatchNorm that it absorbs."""
    weight, bias = affine_of(old)
    mean, batches = options.means.get(decision.name, (None, 0))
    gain = None
    if norm is not None and options.init is None and not weight.is_meta:
        gain, bias = absorb_norm(bias, norm)
        if mean is not None:  # the layer will subtract w^T m, of m in its own type
            bias = bias - gain * shift_bias(None, weight, mean.to(weight.dtype))
    learns = norm is not None and any(p.requires_grad for p in norm.parameters(recurse=False))
    if options.weights == "plain":
        new = tracked = adopt(old, options.momentum, centred=bool(decision.input_norm))
        _set_plain(new, gain, bias, options.init)
    else:
        new = _build_geometric(old, decision, norm is not None, options)
        if options.init is None and not weight.is_meta:
            new._set_affine(weight, bias, gain)
        new.r.requires_grad_(new.r.requires_grad or learns)
        tracked = new.input_norm
    if norm is not None:  # what takes over from a BatchNorm learns if the norm did
        (new.bias if options.weights == "plain" else new.lam).requires_grad_(learns)
    if mean is not None:
        tracked.running_mean.copy_(mean)
        tracked.num_batches_tracked.fill_(batches)
    return GmPMultiheadAttention.around(old, new) if kind_of(old) == "attention" else new


def _build_geometric(old: Any, decision: Decision, absorbs: bool, options: Options) -> Any:
    """Return a layer of the sizes of `old`; one that absorbs a norm has a bias."""
    kind = kind_of(old)
    plain: Any = old if kind in ("linear", "conv") else as_linear(*affine_of(old))
    layer: Any = build_like(
        next(ours for ours in LAYERS if isinstance(plain, ours._plain)),
        plain,
        bias=plain.bias is not None or absorbs,
        input_norm=decision.input_norm,
        coordinates=options.coordinates,
        natural=options.natural,
        init=options.init,
        momentum=options.momentum,
    )
    if kind == "transposed":
        layer.transposed = True
    return layer


def _set_plain(layer: Any, gain: Tensor | None, bias: Tensor | None, init: Init | None) -> None:
    """Write new values into a plain layer's own Parameters."""
    weight = layer.weight
    if init is not None:
        place: dict[str, Any] = {"device": weight.device, "dtype": weight.dtype}
        weight.copy_(draw(len(weight), weight[0].numel(), init, **place).view(weight.shape))
        layer.bias.zero_()
    elif gain is not None and bias is not None:
        weight.copy_(gain.view(-1, *[1] * (weight.ndim - 1)) * weight)
        layer.bias.copy_(bias)
