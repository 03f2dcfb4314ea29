"""Which optimizers can step directions and the rest: a recipe for each, checked by a trial."""

import functools
import inspect
import math
from collections.abc import Callable, Collection, Mapping
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from geoparam.optim.muon import RowMuon
from geoparam.sphere import wide_type

MakeOptimizer = Callable[..., Any]


class Recipe:
    """A class or callable `(params, **options)` that makes a torch optimizer, with its options.

    `RowMuon` replaces torch's Muon.

    Args:
        role: "base" or "rest".
        device: where it is tried out.

    Attributes:
        make: makes the optimizer over parameter groups.
        named: what a partial names.
        defaults: the options of its groups.
    """

    def __init__(
        self,
        role: str,
        make: Any,
        lr: float | Tensor,
        options: Mapping,
        device: torch.device,
    ) -> None:
        if isinstance(make, Optimizer):
            raise ValueError(
                f"{role} is an optimizer's class, as torch.optim.SGD; got one of its instances, "
                f"a {type(make).__name__}: give the class, and the options here."
            )
        if not callable(make):
            raise ValueError(f"{role} is an optimizer's class, as torch.optim.SGD; got {make!r}.")
        call = functools.partial(make)  # of a partial, the same partial
        self.func = call.func
        self.named = call.keywords
        self.name = getattr(call.func, "__name__", type(call.func).__name__)
        self.is_muon = call.func is torch.optim.Muon
        if role == "base" and "lr" in self.named:
            raise ValueError("the base's rate is lr= of GeometricOptimizer: not in a partial.")
        if role == "rest" and self.is_muon:
            raise ValueError("Muon steps matrices, but the rest has vectors: make Muon the base.")

        func: Any = RowMuon if self.is_muon else call.func
        given = {"lr": lr, **self.named, **options}
        self.make: Any = functools.partial(func, *call.args, **given)
        try:
            optimizer = self.make([nn.Parameter(torch.zeros(1, 1))])
        except (TypeError, IndexError, RuntimeError) as error:
            raise ValueError(
                f"{self.name} cannot be made as {role}, with the options {given}: "
                f"{str(error).rstrip('.')}."
            ) from error
        if not isinstance(optimizer, Optimizer):
            raise ValueError(f"{role} must make a torch optimizer; it made {type(optimizer)}.")
        self.defaults = dict(optimizer.param_groups[0])
        del self.defaults["params"]

        fault = _find_fault(optimizer, given["lr"])
        if not fault and not self.is_muon and device.type != "meta":
            fault = self._find_fault_in_steps(role, device)
        if fault:
            raise ValueError(f"{self.name} cannot be the {role}: it {fault}. {_ADVICE}")

    def _find_fault_in_steps(self, role: str, device: torch.device) -> str:
        """Step a small matrix; return what stands in the way, or "".

        The base steps increments that start at 0 in every step, apart from other parameters.
        """
        try:
            move, optimizer = self._try(device, value=None)
        except (RuntimeError, AssertionError) as error:
            return f"cannot step a dense matrix ({error})"
        group = optimizer.param_groups[0]
        names = sorted(group.keys() - {"params", "lr", "weight_decay"})
        changed = [name for name in names if group[name] != self.defaults.get(name)]
        if changed:
            return f"counts in its parameter groups ({', '.join(changed)})"
        if any(not isinstance(key, Tensor) for key in optimizer.state):
            return "keeps a state beside the parameters'"

        if role == "rest":
            return ""
        other_move, _ = self._try(device, value=1.0)
        if not torch.allclose(move, other_move, rtol=1e-6, atol=1e-9):
            return (
                "steps a parameter not by its gradients alone but also by its values or by other "
                "parameters (a decay of its own, as ASGD's lambd, must be 0)"
            )
        return ""

    def _try(self, device: torch.device, value: float | None) -> tuple[Tensor, Optimizer]:
        """Return how far three steps have moved a matrix that starts at 0, and the optimizer.

        With a `value` it is set to that before each step, and its neighbour has a gradient too.
        """
        random = torch.Generator().manual_seed(0)
        p, neighbour = torch.zeros(2, 4, 3, dtype=wide_type(device), device=device)
        optimizer = self.make([p, neighbour])
        group = optimizer.param_groups[0]
        group["lr"] = 0.01 + 0 * group["lr"]  # a tensor if it is one
        if "weight_decay" in group:
            group["weight_decay"] = 0.0

        total = torch.zeros_like(p)
        for _ in range(3):
            p.grad = torch.randn(4, 3, generator=random, dtype=p.dtype).to(device)
            if value is not None:
                p.fill_(value)
                neighbour.grad = torch.full_like(p, 10.0)
            before = p.clone()
            optimizer.step()
            total += p - before
        return total, optimizer


_ADVICE = (
    "Use one of torch's own: SGD, Adam, AdamW, NAdam, RAdam, Adamax, RMSprop, Rprop, Adagrad, "
    "Adadelta, ASGD with lambd=0, Muon."
)


def _find_fault(optimizer: Optimizer, rate: Any) -> str:
    """Return what an optimizer does that cannot be done here, or ""."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        return "calls its closure several times in a step, and here each step has one gradient"
    if any(isinstance(value, Optimizer) for value in vars(optimizer).values()):
        return "wraps another optimizer, whose state would be lost (give the wrapped one)"
    group = optimizer.param_groups[0]
    if group.get("differentiable"):
        return "has differentiable=True, and weights are written in place"
    lr = group.get("lr", rate)
    if not isinstance(rate, Tensor) and not math.isclose(lr, rate, rel_tol=1e-6):
        return f"makes {lr} of lr={rate}"
    return ""


def choose_rest(
    base: Recipe, rest: Any, lr: float | Tensor, options: Mapping, model: nn.Module
) -> Recipe:
    """Return the recipe of the rest: by default the base's own, AdamW beside Muon.

    Where both are of one class, they share the options that the rest does not name.
    """
    if rest is None and base.is_muon:
        rest = torch.optim.AdamW
    elif rest is None:
        rest = functools.partial(base.func, **{**base.named, **options})
    named = getattr(rest, "keywords", {})
    func = getattr(rest, "func", rest)
    shared = {}
    if func is base.func:
        shared = {name: value for name, value in options.items() if name not in named}
    if base.is_muon and func is torch.optim.AdamW:
        if not {"fused", "foreach", "capturable"} & named.keys():
            shared["fused"] = _can_be_fused(model)
    return Recipe("rest", rest, lr, shared, find_device(model))


def find_device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _can_be_fused(model: nn.Module) -> bool:
    """Return whether torch's fused kernels take all parameters: plain tensors on GPUs.

    On CPUs they silently misread gradients whose strides are not the parameter's.
    """
    return all(p.is_cuda and not hasattr(p, "device_mesh") for p in model.parameters())


def check_options(base: Any, options: Collection[str], siblings: Collection[str]) -> None:
    """Raise for an option that the base does not take.

    Args:
        siblings: the options of GeometricOptimizer, one of which may have been meant.
    """
    func = getattr(base, "func", base)
    if not callable(func):
        return
    parameters = inspect.signature(func).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return
    for option in options:
        if option in parameters:
            continue
        if close := get_close_matches(option, [*siblings, *parameters], n=1, cutoff=0.8):
            raise ValueError(f"there is no option {option!r}; did you mean {close[0]!r}?")
        words = f"{getattr(func, '__name__', func)}, the base, has no option {option!r}."
        if option in inspect.signature(torch.optim.AdamW).parameters:
            words += " One of the rest is given with it: "
            words += f"rest=functools.partial(torch.optim.AdamW, {option}=...)."
        raise ValueError(words)
