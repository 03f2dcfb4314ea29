"""Compare two models, and replace modules with a run of the model before and after."""

import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from geoparam.conversion.plan import Inputs
from geoparam.inspection import arguments_of, inspection_mode, tensors_in
from geoparam.step_hooks import note_replaced

_ADVICE = {
    "converted": "Leave it out with filter_fn; of a detector, whose boxes are sorted, convert "
    "the backbone by itself.",
    "folded": "Call the layer there, or put a layer's activation= after it as a module.",
}


def verify(a: nn.Module, b: nn.Module, *inputs: Any) -> float:
    """Return max|a - b| / max|a| over all outputs of two models; NaN if there is a NaN.

    Both run in evaluation mode, without gradients, on copies of the inputs, and are left as they
    were; torch's attention takes its plain path in both. Inputs are positional arguments, one
    tuple or list of them, or one mapping of keyword arguments. Equal infinities do not differ.

    Example:
        >>> plain = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> import copy
        >>> from geoparam import convert_
        >>> verify(plain, convert_(copy.deepcopy(plain)), torch.randn(3, 4)) < 1e-5
        True
    """
    given = inputs[0] if len(inputs) == 1 else inputs
    return _difference(_run(a, given)[0], _run(b, given)[0])


def _difference(first: list[Tensor], second: list[Tensor]) -> float:
    shapes = [[tuple(t.shape) for t in outputs] for outputs in (first, second)]
    if shapes[0] != shapes[1]:
        raise ValueError(f"the models differ in the shapes of their outputs: {shapes}.")
    if not first:
        raise ValueError("the models return no tensors to compare.")
    wide = torch.complex128 if any(t.is_complex() for t in first + second) else torch.float64
    a, b = (torch.cat([t.flatten().to(wide) for t in outputs]) for outputs in (first, second))
    if not a.numel():
        return 0.0
    difference = torch.where(a == b, 0, a - b).abs().max().item()
    largest = a.abs().masked_fill(~a.isfinite(), 0).max().item()
    return difference / largest if largest else difference and difference * float("inf")


def _run(model: nn.Module, inputs: Inputs) -> tuple[list[Tensor], set[int]]:
    """Return the outputs, and the ids of all tensors that were read."""
    with inspection_mode(model), ReadRecorder() as recorder:
        args, kwargs = arguments_of(model, inputs)
        outputs = model(*args, **kwargs)
    return list(tensors_in(outputs)), recorder.ids


def replace_checked(
    model: nn.Module,
    pairs: Iterable[tuple[nn.Module, nn.Module]],
    inputs: Inputs | None,
    done: Literal["converted", "folded"],
    *,
    changed: Sequence[Tensor] = (),
    same: bool = True,
) -> nn.Module:
    """Replace the old of each (old, new) and run the model; if it differs, undo it and raise.

    A run shows what no look at the modules can: a forward that reads a layer's weight or a norm's
    statistics, or that reaches an old layer through an object, a global name or a closure. Without
    inputs nothing is run. `changed` is what is written to in place while `pairs` are built; `same`
    says whether the outputs must stay.
    """
    parameters = [weakref.ref(p) for p in model.parameters()]
    if inputs is None:
        new = _replace(model, pairs)
    else:
        modules = dict(model.named_modules())
        children = [(module, dict(module._modules)) for module in model.modules()]
        values = [t.detach().clone() for t in changed]
        flags = {p: p.requires_grad for p in model.parameters()}
        before, read_before = _run(model, inputs)
        try:
            new = _replace(model, pairs)
            try:
                after, read = _run(new, inputs)
            except Exception as error:
                text = f"does not run on example_inputs ({type(error).__name__}: {error})"
                raise _refusal(done, text) from error
            _check_reads(modules, new, read_before, read, done)
            if same:
                _check_same(before, after, done)
        except BaseException:
            for module, own in children:
                module._modules.update(own)
            for p, flag in flags.items():
                p.requires_grad_(flag)
            with torch.no_grad():
                for t, value in zip(changed, values, strict=True):
                    t.copy_(value)
            raise
    note_replaced(parameters, new)
    return new


def _replace(model: nn.Module, pairs: Iterable[tuple[nn.Module, nn.Module]]) -> nn.Module:
    """Put new modules into all places of the old ones, with their hooks and mode."""
    places = defaultdict(list)
    for parent in model.modules():
        for name, child in parent._modules.items():
            places[child].append((parent, name))
    for old, new in pairs:  # a generator may build each after the last is placed
        for key, value in old.__dict__.items():
            if key.endswith("_hooks") or "_hooks_" in key or key == "_is_full_backward_hook":
                new.__dict__[key] = value  # the same dict, so that handles can still remove a hook
        new.train(old.training)
        for parent, name in places.pop(old, ()):  # the last one frees the old layer
            parent._modules[name] = new
        model = new if old is model else model
    return model


def _check_reads(
    old: dict[str, nn.Module], model: nn.Module, read_before: set[int], read: set[int], done: str
) -> None:
    """Refuse a model that still computes with a replaced parameter, or skips a new layer."""
    kept = {id(p) for p in model.parameters()}
    for name, module in model.named_modules():
        if old.get(name, module) is module:
            continue
        known = {id(p) for p in old[name].parameters()}
        gone, added = known - kept, {id(p) for p in module.parameters()} - known
        if gone & read or (gone & read_before and added and not added & read):
            raise ValueError(
                f"{name!r} would be {done}, but the model goes on with the old layer: its forward "
                "reaches that otherwise than by its name (a list, a closure, a bound method, an "
                f"object that holds it). Look it up by name there. {_ADVICE[done]}"
            )


def _check_same(before: list[Tensor], after: list[Tensor], done: str) -> None:
    """Refuse outputs that differ by more than rounding, if they can be compared."""
    before, after = (
        [t for t in outputs if t.is_floating_point() or t.is_complex()]
        for outputs in (before, after)
    )
    if not before or any(t.is_meta or t.isnan().any() for t in before):
        return
    difference, eps = _difference(before, after), max(torch.finfo(t.dtype).eps for t in before)
    if not difference <= min(3 * math.sqrt(eps), 0.1):  # 1e-3 in float32
        raise _refusal(done, f"differs by {difference:.1e} on example_inputs")


def _refusal(done: str, text: str) -> ValueError:
    return ValueError(
        f"the {done} model {text}: something reads a layer, a norm or its output otherwise than "
        f"by calling the next module, or sorts values that nearly tie. {_ADVICE[done]}"
    )


class ReadRecorder(TorchFunctionMode):
    """Records the tensors that a run computes with; reading a shape or dtype is not recorded."""

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
