"""Put a network under geometric parameterization: one line, the same function.

`convert_` has the whole model looked at first (`plan`), and then replaces one layer after the
other, so that no second copy of the model is in memory.

A layer without activation computes r (u^T x + lam) = w^T x + b, whatever follows it; so conversion
is exact for any network. With `norm="imn"` a BatchNorm that follows a layer goes: gamma / sigma
goes into r, and the layer gets input mean normalization instead.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from geoparam.attention import GmPMultiheadAttention
from geoparam.base_layer import GmPLayer
from geoparam.conversion.plan import (
    Decision,
    Filter,
    Inputs,
    Plan,
    absorbed,
    affine_of,
    kind_of,
    module_name,
    plan,
)
from geoparam.conversion.surgery import places, put
from geoparam.input_mean_layers import adopt
from geoparam.layers import GmPConv1d, GmPConv2d, GmPConv3d, GmPLinear
from geoparam.norm import MOMENTUM, TrackedMean, shifted_bias
from geoparam.parameter_values import draw
from geoparam.trace import arguments_of, inspection_mode, tensors_in, trace

log = logging.getLogger("geoparam")

Means = dict[str, tuple[Tensor, int]]  # by layer: the mean of its input, and of how many batches

_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3}
_CONVOLUTIONS = {nn.Conv1d: GmPConv1d, nn.Conv2d: GmPConv2d, nn.Conv3d: GmPConv3d}


def convert_(
    model: nn.Module,
    filter_fn: Filter | None = None,
    *,
    coordinates: str | None = None,
    natural: bool = False,
    init: str | None = None,
    norm: str | None = None,
    weights: str = "geometric",
    momentum: float | None = MOMENTUM,
    example_inputs: Inputs | None = None,
    calibration: Inputs | Iterable[Inputs] | None = None,
    verbose: bool = False,
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
        weights: `"geometric"` stores directions, r and lam; `"plain"`, with `norm="imn"`, leaves
            each weight the same Parameter under its old key, and adds a bias and the running mean
            of the layer's input: for `GeometricOptimizer` or any other.
        momentum: Share of a new batch in the running means of `norm="imn"`.
        example_inputs: A small batch, as a tensor, a tuple or list of arguments, or a mapping of
            keyword arguments; needed for `norm`, and finds the output layers exactly. The model
            is run on it before and after, and put back with an error if its outputs differ or it
            still computes with a replaced layer. Without it, layers that the forward reaches
            through global names, iterators or caches go on as they were, and are not trained.
        calibration: A batch, or a list or other iterable of batches, whose means the layers start
            from where BatchNorm is replaced; by default `example_inputs`.
        verbose: Print the summary; it is always logged, as "geoparam", level INFO.

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
    means: Means = {}
    absorbing = [d.name for d in decided.decisions if d.norm and d.input_norm]
    if absorbing and init is None:
        # A list of example_inputs is one call's arguments; a calibration list is of batches.
        batches = [example_inputs] if calibration is None else calibration
        means = _input_means(model, absorbing, batches)
    make = {
        "coordinates": coordinates or "angles",
        "natural": natural,
        "init": init,
        "weights": weights,
        "momentum": momentum,
    }
    if example_inputs is None:
        model = _replace_all(model, decided, means, make)
    else:
        model = _replace_checked(model, decided, means, make, example_inputs)
    log.info("%s", decided)
    if verbose:
        print(decided)
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


def _replace_all(model: nn.Module, decided: Plan, means: Means, make: dict[str, Any]) -> nn.Module:
    where, modules = places(model), dict(model.named_modules())
    for decision in reversed(decided.decisions):  # children before the attention that holds them
        if decision.converted:
            old = modules.pop(module_name(decision))
            norm = modules[decision.norm] if decision.norm else None
            new = _converted(old, decision, norm, means, make)
            if norm is not None:
                put(RemovedNorm(norm, old, new), norm, where)
            put(new, old, where)
            model = new if old is model else model
            where.pop(old, None)  # with its last name, the old layer's memory goes
    return model


def _replace_checked(
    model: nn.Module,
    decided: Plan,
    means: Means,
    make: dict[str, Any],
    inputs: Inputs,
) -> nn.Module:
    """Replace the layers and run the model; if it is not as it was, put them back and raise.

    A run shows what no look at the modules can: a forward that reads a layer's weight or a norm's
    statistics, or that reaches an old layer through an object, a global name or a closure.
    """
    names = [module_name(d) for d in decided.decisions if d.converted]
    old, children = _parameters(model, names), [(m, dict(m._modules)) for m in model.modules()]
    before, read_before = _run(model, inputs)
    changed = _changed(model, decided, make)
    values = [t.detach().clone() for t in changed]
    try:
        converted = _replace_all(model, decided, means, make)
        try:
            after, read = _run(converted, inputs)
        except Exception as error:
            raise ValueError(
                f"the converted model does not run on example_inputs ({type(error).__name__}: "
                f"{error}): something reads a layer or norm otherwise than by calling it. Leave "
                "it out with filter_fn."
            ) from error
        _check_reads(old, read_before, _parameters(converted, names), read)
        if make["init"] is None:
            _check_same(before, after)
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


def _check_reads(
    old: dict[str, list[Tensor]],
    read_before: set[int],
    new: dict[str, list[Tensor]],
    read: set[int],
) -> None:
    """Refuse a model that still computes with a replaced parameter, or skips a converted layer."""
    kept = {id(p) for own in new.values() for p in own}
    known = {id(p) for own in old.values() for p in own}
    for name, own in old.items():
        gone = {id(p) for p in own} - kept
        added = {id(p) for p in new[name]} - known
        if gone & read or (gone & read_before and not added & read):
            raise ValueError(
                f"{name!r} would be converted, but the model goes on with the old layer: its "
                "forward reaches that otherwise than by its name (a list, a closure, a bound "
                "method, an object that holds it). Look it up by name there, or leave it out "
                "with filter_fn."
            )


def _check_same(before: list[Tensor], after: list[Tensor]) -> None:
    if not before or any(t.is_meta or not t.isfinite().all() for t in before):
        return
    difference = _difference(before, after)
    if not difference <= max(_TOLERANCE.get(t.dtype, 0.1) for t in before):
        raise ValueError(
            f"the converted model differs by {difference:.1e} on example_inputs: something "
            "reads a layer or norm otherwise than by calling it. Leave it out with filter_fn."
        )


class _Reads(TorchFunctionMode):
    """Notes the tensors that a run computes with; a look at their shape or dtype is not noted."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: set[int] = set()

    def __torch_function__(
        self, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") != "__get__" or isinstance(result, Tensor):
            self.ids.update(id(tensor) for tensor in tensors_in((args, kwargs)))
        return result


class RemovedNorm(nn.Module):
    """The place of a BatchNorm that a layer has absorbed: it passes its input on.

    It remembers the norm and the layer, outside of the model's state, so that folding can put a
    norm back. What the norm held besides (timm's carry their activation) still runs.
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


def _input_means(model: nn.Module, names: list[str], batches: Any) -> Means:
    """Return the mean of each named layer's input per channel, and of how many batches it is."""
    sums: dict[str, Tensor] = {}
    counts: dict[str, int] = {}

    def hook(name: str) -> Callable:
        def add(module: nn.Module, args: tuple) -> None:
            channel = -1 - len(getattr(module, "kernel_size", ()))
            x = args[0].detach().double().movedim(channel, 0).flatten(1)
            sums[name] = sums.get(name, 0) + x.sum(dim=1)
            counts[name] = counts.get(name, 0) + x.shape[1]

        return add

    handles = [model.get_submodule(n).register_forward_pre_hook(hook(n)) for n in names]
    try:
        single, seen = isinstance(batches, Tensor | tuple | Mapping), 0
        for batch in [batches] if single else batches:
            trace(model, batch)  # evaluation, no gradients, nothing left behind
            seen += 1
    finally:
        for handle in handles:
            handle.remove()
    for name in names:
        if name not in sums or not sums[name].isfinite().all():
            raise ValueError(
                f"calibration gives no finite mean for the input of {name!r}: there are no "
                "batches, they hold NaN, or the layer's weight is used without calling the layer."
            )
    return {name: (sums[name] / counts[name], seen) for name in names}


def _converted(
    old: nn.Module,
    decision: Decision,
    norm: nn.Module | None,
    means: Means,
    make: dict[str, Any],
) -> nn.Module:
    if make["weights"] == "plain":
        return _with_plain_weight(old, decision, norm, means, make)
    stored = {key: make[key] for key in ("coordinates", "natural", "init")}
    if isinstance(old, nn.MultiheadAttention):
        return GmPMultiheadAttention.from_attention(old, **stored)
    weight, bias = affine_of(old)
    if kind_of(old) == "transposed":
        layer: Any = GmPLinear.from_affine(weight, bias, **stored)
        layer.transposed = True
        return layer
    layer = _empty_like(old, decision, norm is not None, make)
    if make["init"] is None and not weight.is_meta:
        gain = None
        if norm is not None:
            gain, bias = absorbed(weight, bias, norm)
        layer._assign_affine(weight, bias, gain)
        _start_from(layer, means.get(decision.name))
    _freeze_like(layer, old, norm)
    return layer


def _empty_like(old: Any, decision: Decision, absorbs: bool, make: dict[str, Any]) -> GmPLayer:
    options = {
        **{key: make[key] for key in ("coordinates", "natural", "init", "momentum")},
        "bias": old.bias is not None or absorbs,
        "input_norm": decision.input_norm,
        "device": old.weight.device,
        "dtype": old.weight.dtype,
    }
    if isinstance(old, nn.Linear):
        return GmPLinear(old.in_features, old.out_features, **options)
    cls: Any = next(ours for plain, ours in _CONVOLUTIONS.items() if isinstance(old, plain))
    return cls.like(old, **options)


@torch.no_grad()
def _start_from(layer: GmPLayer, calibrated: tuple[Tensor, int] | None) -> None:
    """Let a layer with mean normalization start from a mean, with the function it has without."""
    norm = layer.input_norm
    if norm is None or calibrated is None or layer.lam is None:
        return
    shift = _calibrate(norm, layer._weight(None), calibrated)
    r = layer.r.double()
    layer.lam.copy_(torch.where(r == 0, 0, layer.lam - shift / torch.where(r == 0, 1, r)))


def _calibrate(norm: TrackedMean, weight: Tensor, calibrated: tuple[Tensor, int]) -> Tensor:
    """Set the running mean, and return what it subtracts from each unit's bias, as -w^T m."""
    assert norm.running_mean is not None and norm.num_batches_tracked is not None
    norm.running_mean.copy_(calibrated[0])
    norm.num_batches_tracked.fill_(calibrated[1])
    return shifted_bias(None, weight.detach(), norm.running_mean).double()


# --- plain weights ------------------------------------------------------------------------------


@torch.no_grad()
def _with_plain_weight(
    old: nn.Module,
    decision: Decision,
    norm: nn.Module | None,
    means: Means,
    make: dict[str, Any],
) -> nn.Module:
    """Return a layer with the Parameters of `old` that has absorbed its norm."""
    new = adopt(old, make["momentum"], centred=bool(decision.input_norm))
    weight, bias = affine_of(old)
    if make["init"] is not None:
        place: dict[str, Any] = {"device": weight.device, "dtype": weight.dtype}
        rows = draw(len(weight), weight[0].numel(), make["init"], **place)
        weight.copy_(rows.view(weight.shape))
        new.bias.zero_()
    elif norm is not None and not weight.is_meta:
        gain, bias = absorbed(weight, bias, norm)
        weight.copy_(gain.view(-1, *[1] * (weight.ndim - 1)) * weight)
        if decision.name in means:
            bias = bias - _calibrate(new, weight, means[decision.name])
        new.bias.copy_(bias)
    if norm is not None:
        new.bias.requires_grad_(_learns(norm))
    return new


def _changed(model: nn.Module, decided: Plan, make: dict[str, Any]) -> list[Tensor]:
    """Return the parameters that are written to in place: those of plain weights."""
    if make["weights"] == "geometric":
        return []
    modules = dict(model.named_modules())
    names = [module_name(d) for d in decided.decisions if d.converted]
    return [p for name in names for p in modules[name].parameters(recurse=False)]


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


@torch.no_grad()
def verify(a: nn.Module, b: nn.Module, *inputs: Any) -> float:
    """Return max|a - b| / max|a| over all outputs of two models; NaN if there is a NaN.

    Both run in evaluation mode, without gradients, and are left as they were. Inputs are
    positional arguments, one tuple or list of them, or one mapping of keyword arguments.

    Example:
        >>> plain = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> import copy
        >>> verify(plain, convert_(copy.deepcopy(plain)), torch.randn(3, 4)) < 1e-5
        True
    """
    given = inputs[0] if len(inputs) == 1 else inputs
    first, second = (list(tensors_in(_evaluate(model, given))) for model in (a, b))
    return _difference(first, second)


def _difference(first: list[Tensor], second: list[Tensor]) -> float:
    shapes = [[tuple(t.shape) for t in outputs] for outputs in (first, second)]
    if shapes[0] != shapes[1]:
        raise ValueError(f"the models differ in the shapes of their outputs: {shapes}.")
    if not first:
        raise ValueError("the models return no tensors to compare.")
    pairs = [(x.double(), y.double()) for x, y in zip(first, second, strict=True) if x.numel()]
    if not pairs:
        return 0.0
    difference = torch.stack([(x - y).abs().max() for x, y in pairs]).max().item()
    largest = torch.stack([x.abs().max() for x, _ in pairs]).max().item()
    return difference / largest if largest else difference and float("inf")


def _run(model: nn.Module, inputs: Inputs) -> tuple[list[Tensor], set[int]]:
    """Return the outputs that are floating-point numbers, and the ids of all tensors read."""
    with _Reads() as reads:
        outputs = _evaluate(model, inputs)
    return [t for t in tensors_in(outputs) if t.is_floating_point()], reads.ids


def _evaluate(model: nn.Module, inputs: Inputs) -> object:
    args, kwargs = arguments_of(inputs)
    with inspection_mode(model):
        return model(*args, **kwargs)
