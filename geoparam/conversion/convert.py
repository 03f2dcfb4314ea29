"""Put a network under geometric parameterization: one line, the same function.

`convert_` lets `plan` look at the whole model first, and then replaces one layer after the other,
so that no second copy of the model is in memory.

A layer without activation computes r (u^T x + lam) = w^T x + b, whatever follows it; so conversion
is exact for any network. With `norm="imn"` a BatchNorm that follows a layer goes: gamma / sigma
goes into r, and the layer gets input mean normalization instead.
"""

import logging
import warnings
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from geoparam.conversion.plan import Filter, Inputs, Plan, module_name, plan
from geoparam.conversion.replacement import Options, RemovedNorm, build_replacement
from geoparam.conversion.surgery import replace_modules
from geoparam.conversion.verification import check_reads, check_same_outputs, run_and_record
from geoparam.coordinates import Init, Name
from geoparam.norm import MOMENTUM
from geoparam.step_hooks import note_replaced
from geoparam.trace import trace

log = logging.getLogger("geoparam")


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
        filter_fn: `filter_fn(module, name) -> bool` chooses the layers instead, the output
            layer included.
        coordinates: `"angles"` (the default) or `"intrinsic"`.
        natural: Divide the angles' gradient by the metric.
        init: `"sphere"` or `"glorot"` for new parameters instead of the same function.
        norm: `"imn"` removes each BatchNorm that follows a layer and gives that layer input mean
            normalization, z = conv(x, w, b - w_summed E[x]), which folds into a bias; with `init`
            every converted layer but the first has it.
        pretrained: Whether the statistics of BatchNorm are worth keeping. `norm="imn"` without
            `init` warns if they are those of a new model, unless this says True.
        weights: `"geometric"` stores directions, r and lam; `"plain"`, with `norm="imn"`, leaves
            each weight the same Parameter under its old key, and adds a bias and the running mean
            of the layer's input: for `GeometricOptimizer` or any other.
        momentum: Share of a new batch in the running means of `norm="imn"`.
        example_inputs: A small batch, as a tensor, a tuple or list of arguments, or a mapping of
            keyword arguments; needed for `norm`, and finds the output layers exactly. The model
            is run on it before and after, and put back with an error if its outputs differ or it
            still computes with a replaced layer. Without it, layers that the forward reaches
            through global names go on as they were, and are not trained.
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
    _check_weights(weights, norm, coordinates, natural)
    decided = plan(
        model, filter_fn, init=init, norm=norm, weights=weights, example_inputs=example_inputs
    )
    if norm == "imn" and init is None and (advice := _find_misuse(model, decided, pretrained)):
        warnings.warn(advice, stacklevel=2)
    if norm == "imn" and init is not None and (advice := _find_new_keys(model, decided)):
        warnings.warn(advice, stacklevel=2)
    options = Options(coordinates or "angles", natural, init, weights, momentum)
    absorbing = [d.name for d in decided.decisions if d.norm and d.input_norm]
    if absorbing and init is None:
        # A list of example_inputs is one call's arguments; a calibration list is of batches.
        batches = [example_inputs] if calibration is None else calibration
        options.means.update(_measure_input_means(model, absorbing, batches))
    parameters = [weakref.ref(p) for p in model.parameters()]
    if example_inputs is None:
        model = replace_modules(model, _build_pairs(model, decided, options))
    else:
        model = _replace_checked(model, decided, options, example_inputs)
    note_replaced(parameters, model)
    log.info("%s", decided)
    return model


def _check_weights(weights: str, norm: str | None, coordinates: str | None, natural: bool) -> None:
    if weights not in ("geometric", "plain"):
        raise ValueError(f"weights are 'geometric' or 'plain'; got {weights!r}.")
    if weights == "plain" and norm != "imn":
        raise ValueError(
            "weights='plain' leaves weights as they are, and without norm='imn' there is nothing "
            "else to do: for a plain model use GeometricOptimizer alone."
        )
    if weights == "plain" and (coordinates is not None or natural):
        raise ValueError(
            "coordinates and natural say how directions are stored, and with weights='plain' none "
            "are: give coordinates to GeometricOptimizer instead."
        )


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
    if pretrained or any(norm.running_mean.is_meta for norm in norms):
        return None
    if any(norm.running_mean.any() or (norm.running_var != 1).any() for norm in norms):
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
            old = modules.pop(module_name(decision.name))
            norm = modules[decision.norm] if decision.norm else None
            new = build_replacement(old, decision, norm, options)
            if norm is not None:
                yield norm, RemovedNorm(norm, old, new)
            yield old, new


def _replace_checked(
    model: nn.Module, decided: Plan, options: Options, inputs: Inputs
) -> nn.Module:
    """Replace the layers and run the model; if it is not as it was, put them back and raise.

    A run shows what no look at the modules can: a forward that reads a layer's weight or a norm's
    statistics, or that reaches an old layer through an object, a global name or a closure.
    """
    names = [module_name(d.name) for d in decided.decisions if d.converted]
    old, children = _parameters(model, names), [(m, dict(m._modules)) for m in model.modules()]
    before, read_before = run_and_record(model, inputs)
    # Plain weights are written to in place.
    changed = [p for own in old.values() for p in own] if options.weights == "plain" else []
    values = [t.detach().clone() for t in changed]
    try:
        converted = replace_modules(model, _build_pairs(model, decided, options))
        try:
            after, read = run_and_record(converted, inputs)
        except Exception as error:
            raise ValueError(
                f"the converted model does not run on example_inputs ({type(error).__name__}: "
                f"{error}): something reads a layer or norm otherwise than by calling it. Leave "
                "it out with filter_fn."
            ) from error
        check_reads(old, read_before, _parameters(converted, names), read)
        if options.init is None:
            check_same_outputs(before, after)
    except BaseException:
        for module, own in children:
            module._modules.update(own)
        with torch.no_grad():
            for t, value in zip(changed, values, strict=True):
                t.copy_(value)
        raise
    return converted


def _parameters(model: nn.Module, names: list[str]) -> dict[str, list[Tensor]]:
    return {name: list(model.get_submodule(name).parameters()) for name in names}


def _measure_input_means(
    model: nn.Module, names: list[str], batches: Any
) -> dict[str, tuple[Tensor, int]]:
    """Return the mean of each named layer's input per channel, and of how many batches it is."""
    sums: dict[str, Tensor] = {}
    counts: Counter[str] = Counter()

    def add(name: str, layer: nn.Module, args: tuple) -> None:
        channel = -1 - len(getattr(layer, "kernel_size", ()))
        x = args[0].detach().double().movedim(channel, 0).flatten(1)
        sums[name] = sums.get(name, 0) + x.sum(dim=1)
        counts[name] += x.shape[1]

    seen = 0
    with ExitStack() as hooks:
        for name in names:
            hook = model.get_submodule(name).register_forward_pre_hook(partial(add, name))
            hooks.callback(hook.remove)
        single = isinstance(batches, Tensor | tuple | Mapping)
        for batch in [batches] if single else batches:
            trace(model, batch)  # evaluation, no gradients, nothing left behind
            seen += 1
    for name in names:
        if name not in sums or not sums[name].isfinite().all():
            raise ValueError(
                f"calibration gives no finite mean for the input of {name!r}: there are no "
                "batches, they hold NaN, or the layer's weight is used without calling the layer."
            )
    return {name: (sums[name] / counts[name], seen) for name in names}
