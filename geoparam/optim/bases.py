"""Which optimizers can step directions: a recipe for each, checked by a trial."""

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

    Attributes:
        make: makes the optimizer over parameter groups.
        named: what a partial names.
        defaults: the options of its groups.
    """

    def __init__(self, role: str, make: Any, lr: float | Tensor, options: Mapping) -> None:
        if isinstance(make, Optimizer) or not callable(make):
            raise ValueError(f"{role} is an optimizer's class, as torch.optim.SGD; got {make!r}.")
        call = make if isinstance(make, functools.partial) else functools.partial(make)
        self.role, self.func, self.named = role, call.func, call.keywords
        self.name = getattr(call.func, "__name__", type(call.func).__name__)
        self.is_muon = call.func is torch.optim.Muon
        if role == "base" and "lr" in self.named:
            raise ValueError("the base's rate is lr= of GeometricOptimizer: not in a partial.")
        if role == "rest" and self.is_muon:
            raise ValueError("Muon steps matrices, but the rest has vectors: make Muon the base.")

        func: Any = RowMuon if self.is_muon else call.func
        given = {"lr": lr, **self.named, **options}
        self.make: Any = functools.partial(func, *call.args, **given)
        self.rate = given["lr"]
        try:
            optimizer = self.make([nn.Parameter(torch.zeros(1, 1))])
        except (TypeError, IndexError) as error:
            raise ValueError(
                f"{self.name} cannot be made as {role}, with the options {given}: {error}."
            ) from error
        self._check_form(optimizer)
        self.defaults = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
        self._check_defaults()

    def _check_form(self, optimizer: Any) -> None:
        if not isinstance(optimizer, Optimizer):
            made = type(optimizer)
            raise ValueError(f"{self.role} must make a torch optimizer; it made {made}.")
        closure = inspect.signature(type(optimizer).step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise ValueError(
                f"{self.name} calls its closure several times in a step, so it cannot be the "
                f"{self.role}: here each step has one gradient."
            )
        if any(isinstance(value, Optimizer) for value in vars(optimizer).values()):
            raise ValueError(
                f"{self.name} wraps another optimizer, whose state would be lost: give the "
                f"wrapped one as {self.role}."
            )

    def _check_defaults(self) -> None:
        made = self.defaults.get("lr", self.rate)
        if not isinstance(self.rate, Tensor) and not math.isclose(made, self.rate, rel_tol=1e-6):
            raise ValueError(
                f"{self.name} makes {made} of lr={self.rate}; a {self.role} must keep it."
            )
        if self.defaults.get("differentiable"):
            raise ValueError("differentiable=True is not supported: weights are written in place.")

    def check_steps(self, device: torch.device) -> None:
        """Step a small matrix, and raise if the optimizer keeps more than a state of its own.

        The base steps increments that start at 0 in every step: it must not depend on values.
        """
        if self.is_muon or device.type == "meta":
            return
        try:
            move, optimizer = self._try(device, start=0.0)
        except RuntimeError as error:
            raise ValueError(f"{self.name} cannot step a dense matrix: {error}") from error
        group = optimizer.param_groups[0]
        names = group.keys() - {"params", "lr", "weight_decay"}
        if changed := sorted(k for k in names if group[k] != self.defaults.get(k)):
            raise ValueError(
                f"{self.name} counts in its parameter groups ({', '.join(changed)}), which belong "
                f"to GeometricOptimizer. {_ADVICE}"
            )
        if any(not isinstance(key, Tensor) for key in optimizer.state):
            raise ValueError(f"{self.name} keeps a state beside the parameters'. {_ADVICE}")

        if self.role == "rest":
            return
        others = [self._try(device, start=1.0), self._try(device, start=0.0, resets=True)]
        if not all(_are_close(move, other) for other, _ in others):
            raise ValueError(
                f"the step of {self.name} depends on the values that it steps, and directions are "
                f"stepped from 0 (set a decay of its own, as ASGD's lambd, to 0). {_ADVICE}"
            )
        if not _are_close(move, self._try(device, start=0.0, has_neighbour=True)[0]):
            raise ValueError(
                f"{self.name} steps a parameter by the gradients of others, and directions are "
                f"stepped apart from the rest. {_ADVICE}"
            )

    def _try(
        self,
        device: torch.device,
        start: float,
        resets: bool = False,
        has_neighbour: bool = False,
    ) -> tuple[Tensor, Optimizer]:
        """Return how far three steps have moved a matrix, and the optimizer."""
        random = torch.Generator().manual_seed(0)
        dtype = wide_type(device)
        p = nn.Parameter(torch.full((4, 3), start, dtype=dtype, device=device))
        neighbour = nn.Parameter(torch.zeros_like(p))
        neighbour.grad = torch.full_like(p, 10.0) if has_neighbour else None
        optimizer = self.make([p, neighbour])
        group = optimizer.param_groups[0]
        group["lr"] = torch.full_like(group["lr"], 0.01) if _is_tensor(group["lr"]) else 0.01
        if "weight_decay" in group:
            group["weight_decay"] = 0.0

        total = torch.zeros_like(p)
        for _ in range(3):
            p.grad = torch.randn(4, 3, generator=random, dtype=dtype).to(device)
            before = p.detach().clone()
            optimizer.step()
            total += p.detach() - before
            if resets:
                p.data.fill_(start)
        return total, optimizer


_ADVICE = "Use one of torch's own: SGD, Adam, AdamW, RMSprop, Adagrad, Muon."


def _are_close(move: Tensor, other: Tensor) -> bool:
    return torch.allclose(move, other, rtol=1e-6, atol=1e-9)


def _is_tensor(x: Any) -> bool:
    return isinstance(x, Tensor)


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
    is_adamw = getattr(rest, "func", rest) is torch.optim.AdamW
    if base.is_muon and is_adamw and not {"fused", "foreach", "capturable"} & {*named}:
        rest = functools.partial(rest, fused=_can_be_fused(model))
    is_same = getattr(rest, "func", rest) is base.func
    shared = {k: v for k, v in options.items() if is_same and k not in named}
    return Recipe("rest", rest, lr, shared)


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
    parameters = inspect.signature(func).parameters.values()
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return
    names = [p.name for p in parameters]
    for option in options:
        if option in names:
            continue
        if close := get_close_matches(option, [*siblings, *names], n=1, cutoff=0.8):
            raise ValueError(f"there is no option {option!r}; did you mean {close[0]!r}?")
        words = f"{getattr(func, '__name__', func)}, the base, has no option {option!r}."
        if option in inspect.signature(torch.optim.AdamW).parameters:
            words += " One of the rest is given with it: "
            words += f"rest=functools.partial(torch.optim.AdamW, {option}=...)."
        raise ValueError(words)
