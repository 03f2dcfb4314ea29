"""The inner torch optimizers: the base for directions, the rest for r, lam and plain parameters.

They step parameters of their own. Their states are kept in the outer optimizer's, under flat keys
such as `direction/exp_avg` in the weight's entry.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch import optim as torchs
from torch.optim import Optimizer

from geoparam.optim.muon import RowMuon
from geoparam.optim.stage import Member, Part

MakeOptimizer = Callable[..., Any]
Group = dict[str, Any]
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
    """The base and the rest over the parameters of active units and all others.

    Args:
        groups: the outer optimizer's; each step copies their options.
        active: the weights with units and a gradient, by name.
        states: the outer optimizer's states, by parameter.
        undecayed: names of parameters that weight decay spares.
        scale: (r's rate over lr, r's decay).
    """

    def __init__(
        self,
        base: Maker,
        rest: Maker,
        turns: bool,
        groups: Sequence[Group],
        active: dict[str, Member],
        states: MutableMapping[Any, Any],
        undecayed: set[str],
        scale: tuple[float, float],
    ) -> None:
        # By outer group, factor of its rate (None: rate 1) and decay (None: the group's own).
        directions: dict[tuple[int, float | None, float | None], list[Any]] = {}
        others: dict[tuple[int, float | None, float | None], list[Any]] = {}
        by_bias = {id(m.bias): m for m in active.values() if m.bias is not None}
        scales: list[Any] = []
        for at, group in enumerate(groups):
            spared = 0.0 if group.get("weight_decay") else None
            if group["geometry"] != "rest":
                parts = [active[name].parts for name in group["param_names"] if name in active]
                directions[at, None if turns else 1.0, None] = _pick(parts, "direction")
                scales = _pick(parts, "r")
                continue
            others.setdefault((at, scale[0], scale[1] or spared), []).extend(scales)
            scales = []
            for name, p in zip(group["param_names"], group["params"], strict=True):
                m = by_bias.get(id(p))
                decay = spared if m is not None or name in undecayed else None
                others.setdefault((at, 1.0, decay), []).append(p if m is None else m.parts["lam"])
        self.states = states
        self.optimizers: list[Optimizer] = []
        self.copied: list[tuple[Group, Group, list[str], float | None, float | None]] = []
        if base is rest and not turns:
            self._build(base, directions | others, groups)
        else:
            self._build(base, directions, groups)
            self._build(rest, others, groups)

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def copy_options(self) -> None:
        """Copy the options of the outer groups, which schedules and users may have changed."""
        for inner, outer, keys, factor, decay in self.copied:
            for key in keys:
                inner[key] = outer[key]
            if factor != 1.0:
                inner["lr"] = 1.0 if factor is None else outer["lr"] * factor
            if decay is not None:
                inner["weight_decay"] = decay

    def _build(self, maker: Maker, items: dict[Any, list], groups: Sequence[Group]) -> None:
        items = {key: members for key, members in items.items() if members}
        if not items:
            return
        states: dict[Any, dict[str, Any]] = {}
        for members in items.values():
            parts = [part for part in members if isinstance(part, Part)]
            members[:] = [p for p in members if not isinstance(p, Part)]
            for p in members:
                states[p] = _fit(self.states[p], p)
                if "lam" in states[p]:  # a bias whose weight is not stepped now
                    states[p] = PartState([Part("plain", states[p], p, p, p)])
            for run in _runs(parts, maker.is_elementwise):
                members.append(_make_parameter(run))
                states[members[-1]] = PartState(run)
        optimizer = maker.make([{"params": members} for members in items.values()])
        made = dict(optimizer.state)  # what the constructor wrote; it is for empty states only
        optimizer.state.clear()
        for inner, (at, factor, decay) in zip(optimizer.param_groups, items, strict=True):
            keys = [key for key in inner if key != "params" and key in groups[at]]
            self.copied.append((inner, groups[at], keys, factor, decay))
            for p in inner["params"]:
                if not states[p]:
                    for key, value in made.get(p, {}).items():
                        states[p][key] = value
                optimizer.state[p] = states[p]
        self.optimizers.append(optimizer)


def _pick(parts: Iterable[dict[str, Part]], name: str) -> list[Part]:
    return [by_name[name] for by_name in parts if name in by_name]


def _runs(parts: Sequence[Part], is_elementwise: bool) -> list[list[Part]]:
    """Return the parts that are stepped as one: neighbours in a block with equal counters."""
    runs: list[list[Part]] = []
    if is_elementwise:
        order = {id(part.blocks): i for i, part in enumerate(parts)}
        parts = sorted(parts, key=lambda part: (order[id(part.blocks)], part.start))
    for part in parts:
        last = runs[-1][-1] if runs else part
        is_next = last.blocks is part.blocks and last.start + last.value.numel() == part.start
        is_one = is_elementwise and part.blocks is not None and not part.member.is_sharded
        if is_one and is_next and last is not part and _counters(last) == _counters(part):
            runs[-1].append(part)
        else:
            runs.append([part])
    return runs


def _counters(part: Part) -> dict[str, Any]:
    """Return the part's state by key; None for entries with a value for each element."""
    start = f"{part.name}/"
    state = {key: value for key, value in part.state.items() if key.startswith(start)}
    return {
        key: None if _has_elements(value) else float(value) if isinstance(value, Tensor) else value
        for key, value in state.items()
    }


def _has_elements(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0


def _make_parameter(run: Sequence[Part]) -> nn.Parameter:
    """Return one parameter, with its gradient, over these parts."""
    first, last = run[0], run[-1]
    if first is last:
        value, grad = first.member.wrap(first.value), first.member.wrap(first.grad)
    else:
        assert first.blocks is not None
        place = slice(first.start, last.start + last.value.numel())
        value, grad = (block[place] for block in first.blocks)
    p = nn.Parameter(value, requires_grad=False)
    p.grad = grad
    return p


class PartState(dict[str, Any]):
    """The state of a parameter over several parts; every write goes to the parts' states too."""

    def __init__(self, run: Sequence[Part]) -> None:
        self.run, start = run, f"{run[0].name}/"
        for key in [key for key in run[0].state if key.startswith(start)]:
            self[key.removeprefix(start)] = self._join([part.state[key] for part in run])

    def __setitem__(self, key: str, value: Any) -> None:
        if self.get(key, self) is not value:
            super().__setitem__(key, value)
            for part, its in zip(self.run, self._divide(value), strict=True):
                part.state[f"{part.name}/{key}"] = its

    def __delitem__(self, key: str) -> None:
        super().__delitem__(key)
        for part in self.run:
            del part.state[f"{part.name}/{key}"]

    # dict's own would not call the two above
    update, setdefault = MutableMapping.update, MutableMapping.setdefault
    pop, clear = MutableMapping.pop, MutableMapping.clear

    def _join(self, values: Sequence[Any]) -> Any:
        if not _has_elements(values[0]):  # a counter; the base changes it in place
            return values[0].clone() if isinstance(values[0], Tensor) else values[0]
        if len(values) == 1:
            return values[0]
        joined = values[0].new_empty(sum(value.numel() for value in values))
        for view, value in zip(self._views(joined), values, strict=True):
            view.copy_(value.reshape(view.shape))
        return joined

    def _divide(self, value: Any) -> list[Any]:
        is_one = len(self.run) == 1 or not _has_elements(value)
        return [value] * len(self.run) if is_one else self._views(value)

    def _views(self, joined: Tensor) -> list[Tensor]:
        pieces = joined.split([part.value.numel() for part in self.run])
        return [
            piece.as_strided(part.value.shape, part.value.stride(), piece.storage_offset())
            for piece, part in zip(pieces, self.run, strict=True)
        ]


def _fit(state: dict[str, Any], p: Tensor) -> dict[str, Any]:
    """Convert a state to its parameter's type, which may have changed (`model.double()`)."""
    for key, value in state.items():
        if _has_elements(value) and value.is_floating_point():
            if p.dtype in (torch.float32, torch.float64):
                state[key] = value.to(p.device, p.dtype)
    return state
