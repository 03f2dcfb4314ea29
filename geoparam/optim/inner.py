"""The inner torch optimizers, for directions, r, lam and the rest: how they are made and fed.

They step parameters of their own. Their states are kept in the outer optimizer's, under flat keys
such as `direction/exp_avg` in the weight's entry.
"""

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from geoparam.optim.muon import RowMuon

MakeOptimizer = Callable[..., Any]
State = dict[str, Any]
Pair = tuple[Tensor, State]  # a parameter and its state
FULL_PRECISION = (torch.float32, torch.float64)
OUTER_KEYS = ("params", "lr", "weight_decay")  # of a group: only the outer optimizer sets them


class Maker:
    """A class or callable that makes optimizers, with its options and their defaults.

    `RowMuon` replaces torch's Muon. What a partial names is kept, as `named`.
    """

    def __init__(self, role: str, make: Any, lr: Any, options: Mapping[str, Any]) -> None:
        if isinstance(make, Optimizer) or not callable(make):
            raise ValueError(f"{role} is an optimizer's class, as torch.optim.SGD; got {make!r}.")
        self.given = make, lr, options
        call = make if isinstance(make, functools.partial) else functools.partial(make)
        self.name = getattr(call.func, "__name__", type(call.func).__name__)
        self.is_muon, self.named = call.func is torch.optim.Muon, call.keywords
        if role == "base" and "lr" in self.named:
            raise ValueError("the base's rate is lr= of GeometricOptimizer: not in a partial.")
        if role == "rest" and self.is_muon:
            raise ValueError("Muon steps matrices, but the rest has vectors: make Muon the base.")
        func: MakeOptimizer = RowMuon if self.is_muon else call.func
        self.make = functools.partial(func, *call.args, **{"lr": lr, **self.named, **options})
        probe = self.make([nn.Parameter(torch.zeros(1, 1))])
        if not isinstance(probe, Optimizer):
            raise ValueError(f"{role} must make a torch optimizer; it made {type(probe)}.")
        closure = inspect.signature(type(probe).step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise ValueError(
                f"{self.name} calls its closure several times in a step, so it cannot be "
                f"the {role}: here each step has one gradient."
            )
        self.defaults = {k: v for k, v in probe.param_groups[0].items() if k != "params"}
        rate = self.named.get("lr", lr)
        made = self.defaults.get("lr", rate)
        if not isinstance(rate, Tensor) and not math.isclose(made, rate, rel_tol=1e-6):
            raise ValueError(f"{self.name} makes {made} of lr={rate}; a {role} must keep it.")
        if any(x.state is not probe.state and probe.state for x in find_wrapped(probe)):
            raise ValueError(
                f"{self.name} has a state beside that of the optimizer it wraps, and they would "
                f"mix: give the wrapped one as {role}."
            )
        if self.defaults.get("differentiable"):
            raise ValueError("differentiable=True is not supported: weights are written in place.")

    def options(self, decay: float) -> dict[str, Any]:
        """Return the default options with this weight decay."""
        if decay and "weight_decay" not in self.defaults:
            raise ValueError(f"weight_decay was given, but {self.name} has no such option.")
        known = {"weight_decay": decay} if "weight_decay" in self.defaults else {}
        return {**self.defaults, **known}

    def make_rest(self, rest: Any) -> "Maker":
        """Return what makes the rest's optimizer: by default the same; AdamW beside Muon."""
        base, lr, options = self.given
        rest = torch.optim.AdamW if rest is None and self.is_muon else rest
        if rest is None or (rest is base and not self.is_muon):
            return self
        is_same = getattr(rest, "func", rest) is getattr(base, "func", base)
        named = getattr(rest, "keywords", {})
        own = {key: value for key, value in options.items() if is_same and key not in named}
        return Maker("rest", rest, lr, own)


def find_wrapped(optimizer: Optimizer) -> list[Optimizer]:
    return [x for x in vars(optimizer).values() if isinstance(x, Optimizer)]


class Inner:
    """An optimizer the groups of which follow those of the outer one.

    What it writes into its groups itself, such as a number of steps, is kept in the outer ones.

    Args:
        pairs: parameters with their states, by outer group, factor of its rate (None: the rate is
            1) and decay (None: the group's own).
        outer: the outer optimizer's state, which under `name` has what belongs to no parameter.
    """

    def __init__(
        self, maker: Maker, pairs: Mapping[Any, Sequence[Pair]], outer: dict[Any, Any], name: str
    ) -> None:
        pairs = {key: members for key, members in pairs.items() if members}
        self.keys, self.outer, self.name = list(pairs), outer, name
        self.count = sum(map(len, pairs.values()))
        self.optimizer = maker.make([{"params": [p for p, _ in each]} for each in pairs.values()])
        # timm's Lookahead leaves states to the optimizer it wraps.
        for holder in (self.optimizer, *find_wrapped(self.optimizer)):
            made = dict(holder.state)  # what the constructor made is used where our state is empty
            holder.state.clear()
            for p, state in chain.from_iterable(pairs.values()):
                if not state:
                    state.update(made.pop(p, {}))
                holder.state[p] = state
            loose = {key: value for key, value in made.items() if not isinstance(key, Tensor)}
            holder.state.update({**loose, **outer.get(name, {})})

    def step(self, outer_groups: Sequence[dict[str, Any]]) -> None:
        """Take a step with the outer groups' options; keep what it writes beside parameters."""
        self._copy_options(outer_groups)
        self.optimizer.step()
        if len(self.optimizer.state) > self.count:
            state = self.optimizer.state.items()
            self.outer[self.name] = {k: v for k, v in state if not isinstance(k, Tensor)}
        self._keep_written(outer_groups)

    def _copy_options(self, outer_groups: Sequence[dict[str, Any]]) -> None:
        """Copy options into the inner groups: schedules and users may have changed them."""
        groups = self.optimizer.param_groups
        for (at, factor, decay), group in zip(self.keys, groups, strict=True):
            outer = outer_groups[at]
            for key, value in outer.items():
                if key != "params" and "/" not in key:
                    # A base may update a counter in place, and never a rate.
                    is_count = isinstance(value, Tensor) and "lr" not in key
                    group[key] = value.clone() if is_count else value
            own = f"/{factor}/{decay}"  # marks numbers in which inner groups differ
            group.update({k.removesuffix(own): v for k, v in outer.items() if k.endswith(own)})
            if factor != 1.0:
                group["lr"] = 1.0 if factor is None else outer["lr"] * factor
            if decay is not None and "weight_decay" in group:
                group["weight_decay"] = decay

    def _keep_written(self, outer_groups: Sequence[dict[str, Any]]) -> None:
        """Copy what the step has written into its groups, such as a counter, to the outer ones."""
        before = [dict(outer) for outer in outer_groups]
        groups = self.optimizer.param_groups
        for (at, factor, decay), group in zip(self.keys, groups, strict=True):
            outer = outer_groups[at]
            for key, value in group.items():
                label = f"{key}/{factor}/{decay}"
                if key in OUTER_KEYS or before[at].get(label, before[at].get(key, self)) is value:
                    continue
                if isinstance(value, Tensor) and isinstance(outer.get(key), Tensor):
                    outer[key].copy_(value)  # in place, as a CUDA graph needs it
                    continue
                outer[key] = value
                if label in before[at] or self._differs(at, key, value):
                    outer[label] = value

    def _differs(self, at: int, key: str, value: Any) -> bool:
        """Return whether another inner group of the same outer one has found another number."""
        pairs = zip(self.keys, self.optimizer.param_groups, strict=True)
        others = [group.get(key) for (own, _, _), group in pairs if own == at]
        return isinstance(value, int | float) and any(other != value for other in others)


class Slot:
    """A parameter of an inner optimizer: the direction, r or lam of one layer.

    Its state is a dict of its own. `publish` writes the entries into the outer optimizer's state
    of the weight, under flat keys.

    Args:
        grad: its gradient; without one, the value is a parameter itself.
        layout: the weight, where the memory that is stepped has its elements in another order:
            entries are published with the weight's shape and strides.
    """

    def __init__(
        self,
        name: str,
        outer: State,
        value: Tensor,
        grad: Tensor | None = None,
        layout: Tensor | None = None,
    ) -> None:
        self.prefix, self.outer, self.layout, self.parameter = f"{name}/", outer, layout, value
        if grad is not None:
            self.parameter = nn.Parameter(value, requires_grad=False)
            self.parameter.grad = grad
        own = {key: value for key, value in outer.items() if key.startswith(self.prefix)}
        self.state = {key.removeprefix(self.prefix): self._fit(x) for key, x in own.items()}
        self.pair: Pair = self.parameter, self.state

    def publish(self) -> None:
        """Copy the state into the outer one; values stay alive, so that no id is used again."""
        self.published = [*self.state.values()]
        for key, value in self.state.items():
            self.outer[self.prefix + key] = self._lay_out(value)

    def _fit(self, value: Any) -> Any:
        """Return an entry in the parameter's shape and type; half precision stays as it is."""
        shape = (self.parameter if self.layout is None else self.layout).shape
        is_each = isinstance(value, Tensor) and value.numel() == self.parameter.numel()
        if not is_each or value.ndim == 0 or value.ndim == 1 < len(shape):
            return value
        if {value.dtype, self.parameter.dtype} <= {*FULL_PRECISION}:
            value = value.to(self.parameter.dtype)
        if self.layout is None:
            return value.reshape(self.parameter.shape)
        fitted = torch.empty_like(self.parameter, dtype=value.dtype)
        self._lay_out(fitted).copy_(value.reshape(self.layout.shape))
        return fitted

    def _lay_out(self, value: Any) -> Any:
        """Return an entry as others see it."""
        has_shape = isinstance(value, Tensor) and value.shape == self.parameter.shape
        if self.layout is None or not has_shape:
            return value
        return value.as_strided(self.layout.shape, self.layout.stride())


def fit_state(state: State, p: Any, step_on_device: bool) -> None:
    """Bring a state to its parameter's present device and type; counters keep their own type.

    If all tensors are in half precision, the parameter was, too, when they were saved: they are
    widened. If only some are, the optimizer chose it: they stay. Masters are not rounded.
    """
    full = torch.float64 if p.dtype == torch.float64 else torch.float32
    arrays = [x for x in state.values() if isinstance(x, Tensor) and x.ndim]
    is_widened = p.dtype in FULL_PRECISION and not any(x.dtype in FULL_PRECISION for x in arrays)
    for key, value in state.items():
        is_step = key.rpartition("/")[2] == "step"
        if not isinstance(value, Tensor) or (is_step and not step_on_device):
            continue
        is_wide = is_widened or value.dtype in FULL_PRECISION
        has_type = value.is_floating_point() and (value.ndim or key in ("length", "metric"))
        state[key] = value.to(p.device, full if has_type and is_wide else value.dtype)


def find_master(p: Any, state: State) -> Tensor:
    """Return this process's rows of a parameter; of one in half precision, its float32 copy."""
    own = local(p)
    if own.dtype in FULL_PRECISION:
        state.pop("master", None)
        return own
    if "master" not in state:
        state["master"] = shard_like(p, own.float(), len(p))
    return local(state["master"])


def local(x: Any) -> Tensor:
    """Return a tensor without its history; of a DTensor, this process's rows."""
    return x._local_tensor.detach() if hasattr(x, "_local_tensor") else x.detach()


def shard_like(p: Any, part: Tensor, rows: int) -> Tensor:
    """Return this process's part of so many rows, as a DTensor where the parameter is one."""
    if not hasattr(p, "placements"):
        return part
    from torch.distributed.tensor import DTensor

    size = torch.Size((rows, *part.shape[1:]))
    return DTensor.from_local(
        part, p.device_mesh, p.placements, run_check=False, shape=size, stride=part.stride()
    )
