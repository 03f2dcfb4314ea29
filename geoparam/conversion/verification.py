"""Compare two models, and check a conversion by running the model before and after."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from geoparam.conversion.plan import Inputs
from geoparam.trace import arguments_of, inspection_mode, tensors_in

_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3}


@torch.no_grad()
def verify(a: nn.Module, b: nn.Module, *inputs: Any) -> float:
    """Return max|a - b| / max|a| over all outputs of two models; NaN if there is a NaN.

    Both run in evaluation mode, without gradients, and are left as they were. Inputs are
    positional arguments, one tuple or list of them, or one mapping of keyword arguments.

    Example:
        >>> plain = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> import copy
        >>> from geoparam import convert_
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
    a, b = (torch.cat([t.double().flatten() for t in outputs]) for outputs in (first, second))
    if not a.numel():
        return 0.0
    difference, largest = (a - b).abs().max().item(), a.abs().max().item()
    return difference / largest if largest else difference and float("inf")


def run_and_record(model: nn.Module, inputs: Inputs) -> tuple[list[Tensor], set[int]]:
    """Return the outputs that are floating-point numbers, and the ids of all tensors read."""
    with ReadRecorder() as reads:
        outputs = _evaluate(model, inputs)
    return [t for t in tensors_in(outputs) if t.is_floating_point()], reads.ids


def _evaluate(model: nn.Module, inputs: Inputs) -> object:
    args, kwargs = arguments_of(model, inputs)
    with inspection_mode(model):
        return model(*args, **kwargs)


def check_reads(
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


def check_same_outputs(before: list[Tensor], after: list[Tensor]) -> None:
    """Refuse outputs that differ by more than rounding, if they can be compared."""
    if not before or any(t.is_meta or not t.isfinite().all() for t in before):
        return
    difference = _difference(before, after)
    if not difference <= max(_TOLERANCE.get(t.dtype, 0.1) for t in before):
        raise ValueError(
            f"the converted model differs by {difference:.1e} on example_inputs: something "
            "reads a layer or norm otherwise than by calling it. Leave it out with filter_fn."
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
