"""The inner torch optimizers, for directions, r, lam and the rest: how they are made and fed.

They step parameters of their own. Their states are kept in the outer optimizer's, under flat keys
such as `direction/exp_avg` in the weight's entry.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch import optim as torchs
from torch.optim import Optimizer

from geoparam.optim.muon import RowMuon

MakeOptimizer = Callable[..., Any]
Pair = tuple[Tensor, dict[str, Any]]  # a parameter and its state
FULL_PRECISION = (torch.float32, torch.float64)
# Optimizers that step each element by itself, so that many parameters may be one.
ELEMENTWISE = {
    torchs.SGD, torchs.Adam, torchs.AdamW, torchs.NAdam, torchs.RAdam, torchs.RMSprop,
    torchs.Adagrad, torchs.Adadelta, torchs.Adamax, torchs.ASGD, torchs.Rprop,
}  # fmt: skip


class Maker:
    """A class or callable that makes optimizers, with its options and their defaults.

    `RowMuon` replaces torch's Muon.
    """

    def __init__(self, role: str, make: Any, options: dict[str, Any]) -> None:
        if isinstance(make, Optimizer) or not callable(make):
            raise ValueError(f"{role} is an optimizer's class, as torch.optim.SGD; got {make!r}.")
        given = make if isinstance(make, functools.partial) else functools.partial(make)
        self.name = getattr(given.func, "__name__", type(given.func).__name__)
        self.is_muon = given.func is torchs.Muon
        func: MakeOptimizer = RowMuon if self.is_muon else given.func
        self.make = functools.partial(func, *given.args, **{**given.keywords, **options})
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
        if self.defaults.get("differentiable"):
            raise ValueError("differentiable=True is not supported: weights are written in place.")
        self.is_elementwise = type(probe) in ELEMENTWISE

    def options(self, decay: float) -> dict[str, Any]:
        """Return the default options with this weight decay."""
        if decay and "weight_decay" not in self.defaults:
            raise ValueError(f"weight_decay was given, but {self.name} has no such option.")
        known = {"weight_decay": decay} if "weight_decay" in self.defaults else {}
        return {**self.defaults, **known}


class Inner:
    """An optimizer the groups of which follow those of the outer one.

    Args:
        pairs: parameters with their states, by outer group, factor of its rate (None: the rate is
            1) and decay (None: the group's own).
    """

    def __init__(self, maker: Maker, pairs: Mapping[Any, Sequence[Pair]]) -> None:
        pairs = {key: own for key, own in pairs.items() if own}
        self.keys = list(pairs)
        self.optimizer = maker.make([{"params": [p for p, _ in own]} for own in pairs.values()])
        made = dict(self.optimizer.state)  # by the constructor; it is for empty states only
        self.optimizer.state.clear()
        for p, state in chain.from_iterable(pairs.values()):
            if not state:
                state.update(made.get(p, {}))
            self.optimizer.state[p] = state

    def step(self, outer_groups: Sequence[dict[str, Any]]) -> None:
        """Copy options, which schedules and users may have changed, and take a step."""
        for (at, factor, decay), own in zip(self.keys, self.optimizer.param_groups, strict=True):
            outer = outer_groups[at]
            own.update({key: outer[key] for key in own if key in outer and key != "params"})
            if factor != 1.0:
                own["lr"] = 1.0 if factor is None else outer["lr"] * factor
            if decay is not None and "weight_decay" in own:
                own["weight_decay"] = decay
        self.optimizer.step()


class Slot:
    """A parameter of an inner optimizer, which stands for tensors of one or more weights.

    Its state is a dict of its own. `publish` writes the entries into the outer optimizer's states
    under flat keys: each weight's are parts of the slot's tensors, with the shape and the strides
    of its layout. Without a gradient, the value is a parameter itself.
    """

    def __init__(
        self,
        name: str,
        states: Sequence[dict[str, Any]],
        layouts: Sequence[Tensor],
        value: Tensor,
        grad: Tensor | None = None,
    ) -> None:
        self.prefix, self.states, self.layouts, self.parameter = f"{name}/", states, layouts, value
        if grad is not None:
            self.parameter = nn.Parameter(value, requires_grad=False)
            self.parameter.grad = grad
        self.state = {
            key.removeprefix(self.prefix): self._join([state[key] for state in states])
            for key in states[0]
            if key.startswith(self.prefix)
        }
        self.pair: Pair = self.parameter, self.state
        self.published: dict[str, Any] = {}
        self.publish()

    def publish(self) -> None:
        """Write entries that are new or have been replaced."""
        for key, value in self.state.items():
            if self.published.get(key, self) is not value:
                self.published[key] = value
                for state, own in zip(self.states, self._divide(value), strict=True):
                    state[self.prefix + key] = own

    @property
    def _is_itself(self) -> bool:
        """Whether the parameter is one weight's, in the order in which others see it."""
        return len(self.layouts) == 1 and self.layouts[0].is_contiguous()

    def _join(self, values: Sequence[Any]) -> Any:
        first = values[0]
        if not _has_elements_of(first, self.layouts[0]):  # the optimizer changes it in place
            return first.clone() if isinstance(first, Tensor) else first
        if self._is_itself:
            return self._fit(_own_memory(first)).reshape(self.parameter.shape)
        joined = self._fit(first.new_empty(self.parameter.shape))
        for view, value in zip(self._divide(joined), values, strict=True):
            view.copy_(value.reshape(view.shape))
        return joined

    def _fit(self, value: Tensor) -> Tensor:
        """Return an entry in the parameter's type; half precision stays as it is."""
        types = {value.dtype, self.parameter.dtype}
        return value.to(self.parameter.dtype) if types <= {*FULL_PRECISION} else value

    def _divide(self, value: Any) -> list[Any]:
        if self._is_itself or not _has_elements_of(value, self.parameter):
            return [value] * len(self.layouts)
        pieces = value.flatten().split([x.numel() for x in self.layouts])
        return [
            piece.as_strided(x.shape, x.stride(), piece.storage_offset())
            for piece, x in zip(pieces, self.layouts, strict=True)
        ]


def _has_elements_of(value: Any, like: Tensor) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0 and value.numel() == like.numel()


def _own_memory(value: Tensor) -> Tensor:
    """Return a tensor that keeps no larger one alive, of which it was a part."""
    is_part = not hasattr(value, "placements") and value.untyped_storage().nbytes() > value.nbytes
    return value.clone() if is_part else value


def read_counters(state: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Return what inner optimizers keep of a weight: those with the same may be stepped as one."""

    def read(value: Any) -> Any:
        is_counter = isinstance(value, Tensor) and not value.ndim
        return value.item() if is_counter else None

    return tuple(sorted((key, read(value)) for key, value in state.items() if "/" in key))


def fit_state(state: dict[str, Any], p: Any, step_on_device: bool) -> None:
    """Bring a state to its parameter's present device and type; counters keep their own type.

    Half precision is not widened where the parameter has it too, nor are masters rounded.
    """
    full = torch.float64 if p.dtype == torch.float64 else torch.float32
    for key, value in state.items():
        is_step = key.rpartition("/")[2] == "step"
        if not isinstance(value, Tensor) or (is_step and not step_on_device):
            continue
        is_wide = p.dtype in FULL_PRECISION or value.dtype in FULL_PRECISION
        has_type = value.is_floating_point() and (value.ndim or key in ("length", "metric"))
        state[key] = value.to(p.device, full if has_type and is_wide else value.dtype)


def find_master(p: Any, state: dict[str, Any]) -> Tensor:
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
