"""Put a network under geometric parameterization: one line, the same function.

`convert_` lets `plan` look at the whole model first, and then replaces one layer after the other.
The old layers are kept until the end: after an error they are put back.

A layer without activation computes r (u^T x + lam) = w^T x + b, so that conversion is exact,
whatever follows it.
"""

import logging
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from geoparam.attention import GmPMultiheadAttention
from geoparam.base_layer import GmPLayer
from geoparam.centred_map import shift_bias
from geoparam.conversion.plan import (
    Decision,
    Inputs,
    Plan,
    absorb_norm,
    affine_of,
    kind_of,
    module_name,
    plan,
)
from geoparam.conversion.verification import replace_checked
from geoparam.coordinates import Init, Name, draw
from geoparam.input_mean_layers import adopt
from geoparam.layers import GmPConv1d, GmPConv2d, GmPConv3d, GmPLinear, as_linear, build_like
from geoparam.norm import MOMENTUM
from geoparam.trace import Filter, trace

log = logging.getLogger("geoparam")

LAYERS: tuple[type[GmPLayer], ...] = (GmPLinear, GmPConv1d, GmPConv2d, GmPConv3d)


@dataclass(frozen=True)
class Options:
    """How layers are built; `means` has each layer's input mean and its number of batches."""

    coordinates: Name
    natural: bool
    init: Init | None
    weights: Literal["geometric", "plain"]
    momentum: float | None
    means: Mapping[str, tuple[Tensor, int]]


class RemovedNorm(nn.Module):
    """The place of a BatchNorm that a layer has absorbed: it passes its input on.

    It keeps the norm and the layer outside of the model's state, so that folding can put a norm
    back. The norm's child modules still run: timm's norms hold their activation.
    """

    norm: nn.Module
    layer: nn.Module
    offset_learned: bool | None = None  # at the conversion

    def __init__(self, norm: nn.Module, old: nn.Module, new: nn.Module) -> None:
        super().__init__()
        for name, child in norm.named_children():
            self.add_module(name, child)
        self.__dict__.update(norm=norm, layer=new, layer_had_bias=old.bias is not None)
        self.layer_type = old.weight.dtype
        self.offset_learned = self.offset_learns()

    def offset_learns(self) -> bool:
        """Return whether the layer trains the offset that it took over from the norm."""
        offset: Any = self.layer.lam if isinstance(self.layer, GmPLayer) else self.layer.bias
        return offset.requires_grad

    def forward(self, input: Tensor) -> Tensor:  # torch's name for it
        for child in self._modules.values():  # children() takes longer than most calls of this
            assert child is not None
            input = child(input)
        return input


def convert_(
    model: nn.Module,
    filter_fn: Filter | None = None,
    *,
    coordinates: Name | None = None,
    natural: bool = False,
    init: Init | None = None,
    norm: Literal["imn"] | None = None,
    pretrained: bool = False,
    weights: Literal["geometric", "plain"] = "geometric",
    momentum: float | None = MOMENTUM,
    example_inputs: Inputs | None = None,
    calibration: Inputs | Iterable[Inputs] | None = None,
) -> nn.Module:
    """Put `model` under geometric parameterization in place, and return it.

    Every nn.Linear, nn.Conv1d/2d/3d, the input projection of nn.MultiheadAttention and
    transformers' Conv1D become GmP layers with the same function; the output layer, embeddings and
    norms stay. The model has new parameters afterwards: build the optimizer after this call.

    Args:
        model: Any model. A bare layer is converted too; use what is returned.
        filter_fn: `filter_fn(module, name) -> bool` chooses the layers, output layers too.
        coordinates: `"angles"` (the default) or `"intrinsic"`.
        natural: Divide the angles' gradient by the metric.
        init: `"sphere"` or `"glorot"` for new parameters instead of the same function.
        norm: `"imn"` lets a layer absorb the BatchNorm that follows it, and gives it input mean
            normalization instead; with `init` every converted layer but the first has it.
        pretrained: Whether the statistics of BatchNorm are worth keeping. `norm="imn"` without
            `init` warns if they are those of a new model, unless this says True.
        weights: `"geometric"` stores directions, r and lam; `"plain"`, with `norm="imn"`, keeps
            each weight's Parameter and key, and adds a bias and the running mean of the input.
        momentum: Share of a new batch in the running means of `norm="imn"`.
        example_inputs: A small batch, as a tensor, a tuple or list of arguments, or a mapping of
            keyword arguments; needed for `norm`, and finds the output layers exactly. The model
            is run on it before and after, and put back with an error if its outputs differ or it
            still computes with a replaced layer.
        calibration: A batch, or a list or other iterable of batches, whose means the layers start
            from where BatchNorm is replaced; by default `example_inputs`.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))
        >>> x = torch.randn(2, 3, 8, 8)
        >>> before = model(x)
        >>> torch.allclose(convert_(model)(x), before, atol=1e-5)
        True
        >>> type(model[0]).__name__, type(model[3]).__name__
        ('GmPConv2d', 'Linear')
    """
    decided = plan(
        model, filter_fn, init=init, norm=norm, weights=weights, example_inputs=example_inputs
    )
    if weights == "plain" and (coordinates is not None or natural):
        raise ValueError(
            "coordinates and natural say how directions are stored, and with weights='plain' none "
            "are: give coordinates to GeometricOptimizer instead."
        )
    if norm == "imn" and init is None and (advice := _find_misuse(model, decided, pretrained)):
        warnings.warn(advice, stacklevel=2)
    if norm == "imn" and init is not None and (advice := _find_new_keys(model, decided)):
        warnings.warn(advice, stacklevel=2)
    # A list of example_inputs is one call's arguments; a calibration list is of batches.
    batches = [example_inputs] if calibration is None else calibration
    means = _measure_input_means(model, decided, batches) if init is None else {}
    options = Options(coordinates or "angles", natural, init, weights, momentum, means)
    # Plain weights are written to in place.
    names = [d.name for d in decided.decisions if d.converted and weights == "plain"]
    model = replace_checked(
        model,
        _build_pairs(model, decided, options),
        example_inputs,
        "converted",
        changed=[p for name in names for p in model.get_submodule(name).parameters()],
        same=init is None,
    )
    log.info("%s", decided)
    return model


def _find_misuse(model: nn.Module, decided: Plan, pretrained: bool) -> str | None:
    """Return what to say where norm="imn" without `init` has no BatchNorm to learn from."""
    names = [d.norm for d in decided.decisions if d.norm]
    if not names:
        return (
            "norm='imn' found no BatchNorm that follows a layer, so no layer has its input's mean "
            "subtracted. To train from scratch with input means in every layer, pass "
            "init='glorot'; else leave out norm."
        )
    norms: list[Any] = [model.get_submodule(name) for name in names]
    states = [t for norm in norms for t in (norm.running_mean, norm.running_var - 1)]
    if pretrained or any(t.is_meta or t.any() for t in states):
        return None
    return (
        "norm='imn' keeps the function that this model has in evaluation, and its BatchNorms have "
        "never seen a batch: without their deviations it would start badly scaled. To train from "
        "scratch pass init='glorot'; if the function is worth keeping, pretrained=True."
    )


def _find_new_keys(model: nn.Module, decided: Plan) -> str | None:
    """Say which layers will not fold to the keys they have, nor will a norm after them."""
    found = []
    for d in decided.decisions:
        if d.norm:
            has_keys = model.get_submodule(d.norm).running_mean is not None
        else:
            gets_bias = d.converted and (d.input_norm or decided.weights == "plain")
            has_keys = not gets_bias or model.get_submodule(d.name).bias is not None
        found += [] if has_keys else [d.name]
    if not found:
        return None
    return (
        f"{len(found)} layers, {found[0]!r} first, will not fold to the keys they have, so that "
        "the original will not load the folded model: the mean of a layer's input folds into its "
        "own bias, or into a BatchNorm after it that has running statistics. Give these layers a "
        "bias, or leave them out with filter_fn."
    )


def _build_pairs(
    model: nn.Module, decided: Plan, options: Options
) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Yield each module that goes, and the one that takes its place."""
    modules = dict(model.named_modules())
    for decision in reversed(decided.decisions):  # children before the attention that holds them
        if decision.converted:
            old = modules.pop(module_name(decision.name, modules))
            norm = modules[decision.norm] if decision.norm else None
            new = _build_replacement(old, decision, norm, options)
            if norm is not None:
                yield norm, RemovedNorm(norm, old, new)
            yield old, new


def _measure_input_means(
    model: nn.Module, decided: Plan, batches: Any
) -> dict[str, tuple[Tensor, int]]:
    """Return the input mean of each layer that absorbs a norm, and of how many batches it is."""
    names = [d.name for d in decided.decisions if d.norm and d.input_norm]
    if not names:
        return {}
    sums: dict[str, Tensor] = {}
    counts: Counter[str] = Counter()

    def add(name: str, layer: nn.Module, args: tuple, kwargs: dict[str, Tensor]) -> None:
        channel = -1 - len(getattr(layer, "kernel_size", ()))
        x = [*args, *kwargs.values()][0].detach().double().movedim(channel, 0).flatten(1)
        sums[name] = sums.get(name, 0) + x.sum(dim=1)
        counts[name] += x.shape[1]

    seen = 0
    with ExitStack() as hooks:
        for name in names:
            layer = model.get_submodule(name)
            hook = layer.register_forward_pre_hook(partial(add, name), with_kwargs=True)
            hooks.callback(hook.remove)
        single = isinstance(batches, Tensor | tuple | Mapping)
        for batch in [batches] if single else batches:
            trace(model, batch)  # evaluation, no gradients, nothing left behind
            seen += 1
    means = {name: sums[name] / counts[name] for name in sums}
    for name in names:
        if name not in means or not (means[name].is_meta or means[name].isfinite().all()):
            raise ValueError(
                f"calibration gives no finite mean for the input of {name!r}: there are no "
                "batches, they are empty or hold NaN, or the layer's weight is used without "
                "calling the layer."
            )
    return {name: (mean, seen) for name, mean in means.items()}


@torch.no_grad()
def _build_replacement(
    old: Any, decision: Decision, norm: nn.Module | None, options: Options
) -> nn.Module:
    """Return the layer that takes the place of `old`, and of the BatchNorm that it absorbs."""
    weight, bias = affine_of(old)
    bias_learns = bias is not None and bias.requires_grad
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
    if norm is not None:  # what takes over from a BatchNorm learns if the norm or the bias did
        (new.bias if options.weights == "plain" else new.lam).requires_grad_(learns or bias_learns)
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
