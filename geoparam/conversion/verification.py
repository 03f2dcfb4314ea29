"""Compare two models, and replace modules with a run of the model before and after."""

import math
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import BaseTorchFunctionMode

from geoparam.arguments import warn_user
from geoparam.centred_map import autocast_type
from geoparam.conversion.plan import Inputs
from geoparam.model.run import arguments_of, call, inspection_mode, refuse_non_model, tensors_in
from geoparam.model.trace import Run, record_run
from geoparam.step_hooks import note_replaced

MASKED = 1_000  # times the median: larger elements that are equal in both are masked
NOISE = 1e-6  # of the largest output: smaller tensors may be rounding noise

_ADVICE = {
    "converted": "Leave it out with filter_fn; of a detector, whose boxes are sorted, convert "
    "the backbone by itself.",
    "folded": "Call the layer there, or put a layer's activation= after it as a module.",
}


def verify(a: nn.Module, b: nn.Module, *inputs: Any) -> float:
    """Return the largest difference of two models' outputs, relative to their size.

    Each output tensor is compared by its own scale, its largest |a|. Masked elements do not set
    the scale: those that are equal in both models and more than 1,000 times the tensor's median
    |a|, where a repeated value counts once. A tensor below 1e-6 of the largest output may be
    rounding noise, and is compared by that one's scale; integers and constants are no such
    outputs. Equal infinities do not differ, and a NaN gives NaN.

    Both models run in evaluation mode, without gradients, on copies of the inputs, and are left as
    they were; torch's attention takes its plain path in both. Inputs are positional arguments, one
    tuple or list of them, or one mapping of keyword arguments.

    Example:
        >>> plain = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> import copy
        >>> from geoparam import convert_
        >>> verify(plain, convert_(copy.deepcopy(plain)), torch.randn(3, 4)) < 1e-5
        True
    """
    for model in (a, b):
        refuse_non_model(model, "verify(model_a, model_b, *inputs)")
    call_inputs = inputs[0] if len(inputs) == 1 else inputs
    return _measure_difference(_run(a, call_inputs), _run(b, call_inputs))


def _measure_difference(first: list[Tensor], second: list[Tensor]) -> float:
    """Return the largest difference of paired tensors, each over its own scale."""
    shapes = [[tuple(t.shape) for t in outputs] for outputs in (first, second)]
    if shapes[0] != shapes[1]:
        raise ValueError(f"the models differ in the shapes of their outputs: {shapes}.")
    if not first:
        raise ValueError("the models return no tensors to compare.")

    pairs = [(a, b) for a, b in zip(first, second, strict=True) if a.numel()]
    if not pairs:
        raise ValueError("the models' outputs are empty: there is nothing to compare.")
    scales = [_find_scale(a, b) for a, b in pairs]
    references = [
        scale for scale, (a, b) in zip(scales, pairs, strict=True) if _sets_reference(a, b)
    ]
    reference = max(references, default=0.0)

    ratios = [0.0]
    for (a, b), scale in zip(pairs, scales, strict=True):
        if scale < NOISE * reference:
            scale = reference
        difference = torch.where(a == b, 0, _widen(a) - _widen(b)).abs().max().item()
        if difference:
            ratios.append(difference / scale if scale else difference * math.inf)
    return math.nan if any(map(math.isnan, ratios)) else max(ratios)


def _find_scale(a: Tensor, b: Tensor) -> float:
    """Return the largest |a| without infinities and masked elements; 0 if there is none."""
    sizes = _widen(a).abs()
    is_counted = sizes.isfinite() & (sizes > 0)
    if not is_counted.any():
        return 0.0
    # A mask may fill most of a tensor with one value, so each value counts once.
    typical = sizes[is_counted].unique().median()
    is_masked = (a == b) & (sizes > MASKED * typical)
    return sizes[is_counted & ~is_masked].max().item()


def _sets_reference(a: Tensor, b: Tensor) -> bool:
    """Return whether other outputs may be noise beside this one: no integers, no constants."""
    is_constant = torch.equal(a, b) and bool((a == a.flatten()[0]).all())
    return (a.is_floating_point() or a.is_complex()) and not is_constant


def _widen(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _run(model: nn.Module, inputs: Inputs) -> list[Tensor]:
    """Return the outputs of a model in evaluation."""
    # In a TorchFunctionMode torch's attention takes its plain path.
    with inspection_mode(model), BaseTorchFunctionMode():
        args, kwargs = arguments_of(model, inputs)
        outputs = call(model, args, kwargs)
    return list(tensors_in(outputs))


def replace_checked(
    model: nn.Module,
    pairs: Iterable[tuple[nn.Module, nn.Module]],
    inputs: Inputs | None,
    before: Run | None,
    done: Literal["converted", "folded"],
    *,
    changed: Sequence[Tensor] = (),
    same: bool = True,
) -> nn.Module:
    """Replace the old of each (old, new) and run the model; on any error, undo it and raise.

    A run shows what no look at the modules can: a forward that reads a layer's weight or a norm's
    statistics, or that reaches an old layer through an object, a global name or a closure. Without
    inputs nothing is run.

    Args:
        before: The run of the model on these inputs as it was.
        changed: What is written to in place while `pairs` are built.
        same: Whether the outputs must stay.
    """
    parameters = [weakref.ref(p) for p in model.parameters()]
    modules = dict(model.named_modules())
    with mode_of(model), _undo_on_error(model, changed):
        new = _replace(model, pairs)
        torch.clear_autocast_cache()  # of weights that were written to in place
        if inputs is not None and before is not None:
            try:
                after = record_run(new, inputs)
            except Exception as error:
                text = f"does not run on example_inputs ({type(error).__name__}: {error})"
                raise _refusal(done, text) from error
            _check_reads(modules, new, before.reads, after.reads, done)
            if same:
                _check_same(before.outputs, after.outputs, done)
    note_replaced(parameters, new)
    return new


def mode_of(model: nn.Module) -> torch.inference_mode:
    """Return the mode in which a model's new tensors are made: they must train if the old ones do.

    A caller may be in inference mode, whose tensors autograd refuses.
    """
    return torch.inference_mode(any(p.is_inference() for p in model.parameters()))


@contextmanager
def _undo_on_error(model: nn.Module, changed: Sequence[Tensor]) -> Iterator[None]:
    """Put modules, `requires_grad` and the values of `changed` back if something fails."""
    children = [(module, dict(module._modules)) for module in model.modules()]
    requires_grad = {p: p.requires_grad for p in model.parameters()}
    values = [t.detach().clone() for t in changed]
    try:
        yield
    except BaseException:
        for module, registered in children:
            module._modules.update(registered)
        for p, flag in requires_grad.items():
            p.requires_grad_(flag)
        with torch.no_grad():
            for t, value in zip(changed, values, strict=True):
                t.copy_(value)
        torch.clear_autocast_cache()
        raise


def _replace(model: nn.Module, pairs: Iterable[tuple[nn.Module, nn.Module]]) -> nn.Module:
    """Put new modules into all places of the old ones, with their hooks and mode."""
    places = defaultdict(list)
    for parent in model.modules():
        for name, child in parent._modules.items():
            places[child].append((parent, name))

    for old, new in pairs:
        for key, value in vars(old).items():
            if key.endswith("_hooks") or "_hooks_" in key or key == "_is_full_backward_hook":
                vars(new)[key] = value  # the same dict, so that handles can still remove a hook
        new.train(old.training)
        for parent, name in places[old]:
            parent._modules[name] = new
        if old is model:
            model = new
    return model


def _check_reads(
    old_modules: dict[str, nn.Module],
    model: nn.Module,
    read_before: set[int],
    read_after: set[int],
    done: str,
) -> None:
    """Refuse a model that still computes with a replaced parameter, or skips a new layer."""
    kept = {id(p) for p in model.parameters()}
    for name, new in model.named_modules():
        old = old_modules.get(name, new)
        if old is new:
            continue
        old_ids = {id(p) for p in old.parameters()}
        gone = old_ids - kept
        added = {id(p) for p in new.parameters()} - old_ids
        is_skipped = bool(gone & read_before and added and not added & read_after)
        if gone & read_after or is_skipped:
            raise ValueError(
                f"{name!r} would be {done}, but the model goes on with the old layer: its forward "
                "reaches that otherwise than by its name (a list, a closure, a bound method, an "
                f"object that holds it). Look it up by name there. {_ADVICE[done]}"
            )


def _check_same(before: list[Tensor], after: list[Tensor], done: str) -> None:
    """Refuse outputs that differ by more than rounding, where they can be compared."""
    if len(before) != len(after):
        raise _refusal(done, f"returns {len(after)} tensors instead of {len(before)}")
    if [a.shape for a in before] != [b.shape for b in after]:
        raise _refusal(done, "returns tensors of other shapes")
    pairs = [(a, b) for a, b in zip(before, after, strict=True) if _can_compare(a)]
    tells = any(not _is_constant(a) for a, _ in pairs)
    if not tells and not any(a.is_meta for a in before):
        warn_user(
            "the outputs on example_inputs are empty, integers, NaN or all equal (as of a head "
            f"that starts at zero), so the {done} model is not compared with the original. "
            "Compare features of both, or convert a part that has other outputs."
        )
    if not pairs:
        return
    difference = _measure_difference([a for a, _ in pairs], [b for _, b in pairs])
    eps = max(torch.finfo(autocast_type(a) or a.dtype).eps for a, _ in pairs)
    if not difference <= min(3 * math.sqrt(eps), 0.1):  # 1e-3 in float32
        raise _refusal(done, f"differs by {difference:.1e} on example_inputs")


def _can_compare(output: Tensor) -> bool:
    """Return whether an output has digits to compare: a NaN before tells nothing."""
    has_digits = output.is_floating_point() or output.is_complex()
    has_values = has_digits and output.numel() > 0 and not output.is_meta
    return has_values and not bool(output.isnan().any())


def _is_constant(output: Tensor) -> bool:
    """Return whether all elements are equal; one number alone tells nothing if it is zero."""
    first = output.flatten()[0]
    return bool((output == first).all()) and (output.numel() > 1 or not first)


def _refusal(done: str, text: str) -> ValueError:
    return ValueError(
        f"the {done} model {text}: something reads a layer, a norm or its output otherwise than "
        f"by calling the next module, or sorts values that nearly tie. {_ADVICE[done]}"
    )
