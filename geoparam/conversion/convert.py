"""Put a network under geometric parameterization: one line, the same function.

`convert_` lets `plan` look at the whole model first, and then replaces one layer after the other.
The old layers are kept until the end: after an error they are put back.

A layer without activation computes r (u^T x + lam) = w^T x + b, so that conversion is exact,
whatever follows it.
"""

import logging
import math
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from geoparam.arguments import check_flag
from geoparam.attention import GmPMultiheadAttention
from geoparam.base_layer import GmPLayer
from geoparam.centred_map import shift_bias
from geoparam.conversion.plan import (
    Candidate,
    Decision,
    Inputs,
    Norm,
    Plan,
    Request,
    Weights,
    absorb_norm,
    decide,
    find_candidates,
    learns_offset,
)
from geoparam.conversion.verification import replace_checked
from geoparam.coordinates import Init, Name, draw
from geoparam.input_mean_layers import adopt
from geoparam.layers import GmPConv1d, GmPConv2d, GmPConv3d, GmPLinear, as_linear, build_like
from geoparam.model.norms import has_running
from geoparam.model.run import drop_labels
from geoparam.model.trace import Filter, record_run
from geoparam.model.unit_layers import find_channel
from geoparam.norm import MOMENTUM
from geoparam.removed_norm import RemovedNorm, find_removed_norms

log = logging.getLogger("geoparam")

LAYERS: tuple[type[GmPLayer], ...] = (GmPLinear, GmPConv1d, GmPConv2d, GmPConv3d)


def convert_(
    model: nn.Module,
    filter_fn: Filter | None = None,
    *,
    coordinates: Name | None = None,
    natural: bool = False,
    init: Init | None = None,
    norm: Norm | None = None,
    pretrained: bool = False,
    weights: Weights = "geometric",
    momentum: float | None = MOMENTUM,
    example_inputs: Inputs | None = None,
    calibration: Inputs | Iterable[Inputs] | None = None,
) -> nn.Module:
    """Put `model` under geometric parameterization in place, and return it.

    Every nn.Linear, nn.Conv1d/2d/3d, the input projection of nn.MultiheadAttention and
    transformers' Conv1D become GmP layers with the same function; the output layer, embeddings and
    norms stay. The model has new parameters afterwards: build the optimizer after this call.

    `norm` takes out BatchNorm where it follows a layer and nothing else, also that of a backbone's
    last layer. The printed `plan` says how many go and what then depends on the batch.

    Args:
        model: Any model. A bare layer is converted too; use what is returned.
        filter_fn: `filter_fn(module, name) -> bool` chooses the layers, output layers too.
        coordinates: `"angles"` (the default) or `"intrinsic"`.
        natural: Divide the angles' gradient by the metric.
        init: `"sphere"` or `"glorot"` for new parameters instead of the same function.
        norm: `"fold"` lets a layer absorb the BatchNorm that follows it, so that nothing depends
            on the batch. `"imn"` does so and gives the layer input mean normalization instead;
            with `init` every converted layer but the first has it.
        pretrained: Whether the statistics of BatchNorm are worth keeping. `norm` without `init`
            warns if they are those of a new model, unless this says True.
        weights: `"geometric"` stores directions, r and lam; `"plain"`, with `norm`, keeps each
            weight's Parameter and key, and adds a bias and, for `"imn"`, the input's running mean.
        momentum: Share of a new batch in the running means of `norm="imn"`; from the first on,
            where they were calibrated.
        example_inputs: A small batch, as a tensor, a tuple or list of arguments, or a mapping of
            keyword arguments; needed for `norm`, and finds the output layers exactly. The model
            is run on it before and after, and put back with an error if its outputs differ or it
            still computes with a replaced layer.
        calibration: A batch, or a list or other iterable of batches, whose means the layers start
            from where `norm="imn"` replaces BatchNorm; by default `example_inputs`. A batch is
            what `recalibrate_` takes, so a DataLoader that adds labels will do.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))
        >>> x = torch.randn(2, 3, 8, 8)
        >>> before = model(x)
        >>> torch.allclose(convert_(model)(x), before, atol=1e-5)
        True
        >>> type(model[0]).__name__, type(model[3]).__name__
        ('GmPConv2d', 'Linear')
    """
    request = Request(filter_fn, init, norm, weights)
    request.check(model, example_inputs)
    check_flag("natural", natural)
    check_flag("pretrained", pretrained)
    if weights == "plain" and (coordinates is not None or natural):
        raise ValueError(
            "coordinates and natural say how directions are stored, and with weights='plain' none "
            "are: give coordinates to GeometricOptimizer instead."
        )

    candidates = find_candidates(model)
    means = _InputMeans()
    run = None
    if example_inputs is not None:
        layers = [c for c in candidates.values() if norm == "imn" and init is None and c.is_plain]
        with means.gather(layers):
            run = record_run(model, example_inputs)

    decided = decide(model, candidates, request, None if run is None else run.graph)
    advice = _find_advice(model, decided, request, pretrained)
    if advice is not None:
        warnings.warn(advice, stacklevel=2)
    if init is None:
        centred = {d.name for d in decided.converted if d.input_norm}
        layers = [c for c in candidates.values() if c.name in centred]
        if layers and calibration is not None:
            means = _measure_input_means(model, layers, calibration)
        means.check(layers)

    coordinates = "angles" if coordinates is None else coordinates
    builder = _Builder(coordinates, natural, init, momentum, means)
    pairs = _build_pairs(model, candidates, decided, builder)
    changed: list[Tensor] = []
    for decision in decided.converted:
        if decision.weights == "plain":  # its Parameters are written to in place
            changed += model.get_submodule(decision.name).parameters()
    model = replace_checked(
        model, pairs, example_inputs, run, "converted", changed=changed, same=init is None
    )
    log.info("%s", decided)
    return model


def _find_advice(
    model: nn.Module, decided: Plan, request: Request, pretrained: bool
) -> str | None:
    """Return what a caller of `norm` should know before training."""
    if request.norm is None:
        return None
    if request.init is not None:
        return _find_new_keys(model, decided)

    removed = [model.get_submodule(d.norm) for d in decided.decisions if d.norm]
    if not removed:
        return None if find_removed_norms(model) else _explain_nothing_removed(decided)
    if not pretrained and not any(map(_has_statistics, removed)):
        return (
            f"norm={decided.norm!r} keeps the function that this model has in evaluation, and its "
            "BatchNorms have never seen a batch: without their deviations it would start badly "
            "scaled. To train from scratch pass norm='imn' and init='glorot'; if the function is "
            "worth keeping, pretrained=True."
        )
    if decided.norm == "fold" and decided.kept_norms and request.filter_fn is None:
        return _explain_kept(model, decided)
    return None


def _explain_nothing_removed(decided: Plan) -> str:
    """Say why no BatchNorm goes."""
    start = f"norm={decided.norm!r} removes nothing"
    if decided.reasons:
        name, reason = next(iter(decided.reasons.items()))
        return f"{start}. {name} stays: {reason}. gp.plan(...) has all layers."
    return (
        f"{start}: it found no BatchNorm that follows a layer. To train from scratch with input "
        "means in every layer, pass norm='imn' and init='glorot'; else leave out norm."
    )


def _explain_kept(model: nn.Module, decided: Plan) -> str:
    """Say which norms go on using the batch's statistics, and what holds them still."""
    names = decided.kept_norms
    count = "1 norm stays and uses" if len(names) == 1 else f"{len(names)} norms stay and use"
    text = (
        f"{count} the batch's statistics in training, {names[0]!r} first: "
        f"{decided.reasons[names[0]]}."
    )
    if any(has_running(model.get_submodule(name)) for name in names):
        text += " To hold them still, call eval() on those that have running statistics."
    return f"{text} gp.plan(...).kept_norms has their names."


def _has_statistics(norm: Any) -> bool:
    """Return whether a BatchNorm's mean and variance are others than a new one's, 0 and 1."""
    if norm.running_mean.is_meta:
        return True
    return bool(norm.running_mean.any()) or bool((norm.running_var - 1).any())


def _find_new_keys(model: nn.Module, decided: Plan) -> str | None:
    """Say which layers will not fold to the keys they have, nor will a norm after them."""
    without_keys = []
    for d in decided.decisions:
        if d.norm:
            has_keys = model.get_submodule(d.norm).running_mean is not None
        else:
            gets_bias = d.converted and (d.input_norm or decided.weights == "plain")
            has_keys = not gets_bias or model.get_submodule(d.name).bias is not None
        if not has_keys:
            without_keys.append(d.name)
    if not without_keys:
        return None
    return (
        f"{len(without_keys)} layers, {without_keys[0]!r} first, will not fold to the keys they "
        "have, so that the original will not load the folded model: the mean of a layer's input "
        "folds into its own bias, or into a BatchNorm after it that has running statistics. Give "
        "these layers a bias, or leave them out with filter_fn."
    )


class _InputMeans:
    """The mean of each layer's input, summed up while the model runs."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.counts: Counter[str] = Counter()
        self.batches = 0

    @contextmanager
    def gather(self, layers: Iterable[Candidate]) -> Iterator[None]:
        """Add the inputs of these layers in one run."""
        with ExitStack() as hooks:
            for layer in layers:
                hook = partial(self._add, layer.name)
                handle = layer.module.register_forward_pre_hook(hook, with_kwargs=True)
                hooks.callback(handle.remove)
            yield
        self.batches += 1

    def _add(self, name: str, layer: nn.Module, args: tuple, kwargs: dict[str, Tensor]) -> None:
        x = args[0] if args else next(iter(kwargs.values()))
        with torch._C.DisableTorchFunction():  # what is computed here is no step of the model
            columns = x.detach().double().movedim(find_channel(layer), 0).flatten(1)
            self.sums[name] = self.sums.get(name, 0) + columns.sum(dim=1)
            self.counts[name] += columns.shape[1]

    def get(self, name: str) -> Tensor | None:
        """Return the mean of a layer's input; None where nothing was gathered."""
        return self.sums[name] / self.counts[name] if self.counts[name] else None

    def check(self, layers: Iterable[Candidate]) -> None:
        """Raise where a layer has no finite mean."""
        for layer in layers:
            mean = self.get(layer.name)
            if mean is None or not (mean.is_meta or mean.isfinite().all()):
                raise ValueError(
                    f"calibration gives no finite mean for the input of {layer.name!r}: there are "
                    "no batches, they are empty or hold NaN, or the layer's weight is used "
                    "without calling the layer."
                )


def _measure_input_means(
    model: nn.Module, layers: Iterable[Candidate], calibration: Any
) -> _InputMeans:
    """Run the model on one batch, or on each of a list or other iterable of batches."""
    means = _InputMeans()
    is_one = isinstance(calibration, Tensor | tuple | Mapping)
    if not is_one and not isinstance(calibration, Iterable):
        raise ValueError(
            "calibration is a batch, or a list or other iterable of batches; got a "
            f"{type(calibration).__name__}."
        )
    for batch in [calibration] if is_one else calibration:
        with means.gather(layers):
            record_run(model, drop_labels(batch))  # evaluation, no gradients, nothing left behind
    return means


def _build_pairs(
    model: nn.Module,
    candidates: Mapping[str, Candidate],
    decided: Plan,
    builder: "_Builder",
) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Yield each module that goes, and the one that takes its place."""
    by_layer = {candidate.name: candidate for candidate in candidates.values()}
    removed_before = find_removed_norms(model)
    for decision in reversed(decided.converted):  # children before the attention that holds them
        candidate = by_layer[decision.name]
        norm = model.get_submodule(decision.norm) if decision.norm else None
        new = builder.build(candidate, decision, norm)
        if norm is not None:
            yield norm, RemovedNorm(norm, candidate.module, new)
        removed = removed_before.get(candidate.module)
        if removed is not None:
            yield removed, removed.follow(new)
        yield candidate.module, new


@dataclass(frozen=True)
class _Builder:
    """Builds the layers of a converted model."""

    coordinates: Name
    natural: bool
    init: Init | None
    momentum: float | None
    means: _InputMeans

    @torch.no_grad()
    def build(self, candidate: Candidate, decision: Decision, norm: nn.Module | None) -> nn.Module:
        """Return the layer that takes the place of an old one, and of the norm it absorbs."""
        weight, bias = candidate.read()
        mean = None
        if self.init is None and decision.input_norm:
            mean = self.means.get(decision.name)

        if decision.weights == "plain":
            new = adopt(candidate.module, self.momentum, centred=bool(decision.input_norm))
            offset, tracked = new.bias, new
        else:
            new = self._build_geometric(candidate, decision)
            offset, tracked = new.lam, new.input_norm
        if self.init is None and not weight.is_meta:
            _set_function(new, weight, bias, norm, mean)
        elif decision.weights == "plain" and self.init is not None:
            _draw_plain(new, self.init)

        if norm is not None:
            offset.requires_grad_(learns_offset(bias, norm))
            if decision.weights == "geometric" and learns_offset(None, norm):
                new.r.requires_grad_()
        if mean is not None:
            tracked.running_mean.copy_(mean)
            tracked.num_batches_tracked.fill_(self._count_calibrated())
        if candidate.is_attention:
            attention: Any = candidate.module
            return GmPMultiheadAttention.around(attention, new)
        return new

    def _count_calibrated(self) -> int:
        """Return how many batches a calibrated mean stands for: the next has momentum's share."""
        batches = self.means.batches
        return batches if self.momentum is None else max(batches, math.ceil(1 / self.momentum))

    def _build_geometric(self, candidate: Candidate, decision: Decision) -> Any:
        """Return a layer of the same sizes; one that absorbs a norm has a bias."""
        plain: Any = candidate.module
        is_transposed = candidate.is_transposed
        if not candidate.is_plain:
            plain = as_linear(*candidate.read())
        kind = next(kind for kind in LAYERS if isinstance(plain, kind._plain))
        layer: Any = build_like(
            kind,
            plain,
            bias=plain.bias is not None or decision.norm is not None,
            input_norm=decision.input_norm,
            coordinates=self.coordinates,
            natural=self.natural,
            init=self.init,
            momentum=self.momentum,
        )
        if is_transposed:
            layer.transposed = True
        return layer


def _set_function(
    new: Any, weight: Tensor, bias: Tensor | None, norm: nn.Module | None, mean: Tensor | None
) -> None:
    """Let a new layer compute what the old one did, and the norm after it."""
    gain = None
    if norm is not None:
        gain, bias = absorb_norm(bias, norm)
        if mean is not None:  # the layer will subtract w^T m, of m in its own type
            bias = bias - gain * shift_bias(None, weight, mean.to(weight.dtype))

    if isinstance(new, GmPLayer):
        new._set_affine(weight, bias, gain)
    elif gain is not None:
        new.weight.copy_(gain.view(-1, *[1] * (weight.ndim - 1)) * weight)
        new.bias.copy_(bias)


def _draw_plain(new: Any, init: Init) -> None:
    """Draw new values into a plain layer's own Parameters."""
    weight = new.weight
    place: dict[str, Any] = {"device": weight.device, "dtype": weight.dtype}
    rows = draw(len(weight), weight[0].numel(), init, **place)
    weight.copy_(rows.view(weight.shape))
    new.bias.zero_()
