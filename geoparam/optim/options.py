"""What a user asks of the optimizer: checked once, in words."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from geoparam.optim.muon import RowMuon

MakeOptimizer = Callable[..., Any]
OWN_KEYS = frozenset({"params", "param_names", "geometry", "initial_lr"})  # not the inner groups'


def check_options(
    coordinates: str, turn: Any, max_turn: Any, scale: str, **rates: float | None
) -> None:
    """Raise where an option makes no sense; rates and decays are 0 or more."""
    if coordinates not in ("intrinsic", "angles"):
        raise ValueError(f"coordinates are 'intrinsic' or 'angles'; got {coordinates!r}.")
    if scale not in ("auto", "free", "fixed"):
        raise ValueError(f"scale is 'auto', 'free' or 'fixed'; got {scale!r}.")
    for name, value in (("turn", turn), ("max_turn", max_turn)):
        if value is not None and not 0 < value <= 180:
            raise ValueError(
                f"{name} is an angle in degrees, above 0 and at most 180; got {value}."
            )
    if turn is not None and coordinates == "angles":
        raise ValueError(
            "turn needs coordinates='intrinsic': a step along latitudes is no arc of a circle. "
            "max_turn bounds the turn of angles."
        )
    for name, value in rates.items():
        if value is not None and value < 0:
            raise ValueError(f"{name} is 0 or more; got {value}.")


def check_maker(name: str, make: Any) -> None:
    """Raise where `base` or `rest` is not what makes an optimizer."""
    if isinstance(make, Optimizer) or not callable(make):
        raise ValueError(f"{name} is an optimizer's class, as torch.optim.SGD; got {make!r}.")


def replace_muon(base: Any) -> tuple[MakeOptimizer, bool]:
    """Return the optimizer's class, in place of torch's Muon ours, and whether it was Muon."""
    muon = getattr(torch.optim, "Muon", None)
    if isinstance(base, functools.partial) and base.func is muon and muon is not None:
        return functools.partial(RowMuon, *base.args, **base.keywords), True
    return (RowMuon, True) if base is muon and muon is not None else (base, False)


def name_of(make: Any) -> str:
    make = make.func if isinstance(make, functools.partial) else make
    return getattr(make, "__name__", type(make).__name__)


def read_defaults(make: MakeOptimizer, name: str) -> dict[str, Any]:
    """Return the default options of an optimizer, read from one built over a dummy parameter."""
    probe = make([nn.Parameter(torch.zeros(1, 1))])
    if not isinstance(probe, Optimizer):
        raise ValueError(f"{name} must make a torch optimizer; it made {type(probe).__name__}.")
    closure = inspect.signature(type(probe).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"{type(probe).__name__} calls its closure several times in a step, so it cannot be "
            f"the {name}: here each step has one gradient."
        )
    options = {k: v for k, v in probe.param_groups[0].items() if k not in OWN_KEYS}
    if options.get("differentiable"):
        raise ValueError("differentiable=True is not supported: weights are written in place.")
    return options


def set_decay(options: dict[str, Any], decay: float, needed: bool = False) -> None:
    if "weight_decay" in options:
        options["weight_decay"] = decay
    elif needed:
        raise ValueError("weight_decay was given, but the rest's optimizer has no such option.")
