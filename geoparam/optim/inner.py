"""The torch optimizers inside: the base for directions, the rest for r, lam and all that is plain.

Their parameters stand for the model's, and their states are kept in the outer optimizer's, under
flat keys such as `direction/exp_avg` in the weight's entry.
"""

from collections.abc import Iterator, MutableMapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from geoparam.optim.options import OWN_KEYS, MakeOptimizer
from geoparam.optim.stage import Member

Group = dict[str, Any]


class Inner:
    """The base and the rest over the parameters of active units and all others.

    Args:
        groups: the outer optimizer's; each step copies their options.
        active: the units that take part, by name.
        states: the outer optimizer's states, by parameter.
        undecayed: names of parameters that weight decay spares.
        scale: (r's rate over lr, r's decay).
    """

    def __init__(
        self,
        base: partial[Any],
        rest: partial[Any],
        turns: bool,
        groups: Sequence[Group],
        active: dict[str, Member],
        states: MutableMapping[Any, Any],
        undecayed: set[str],
        scale: tuple[float, float],
    ) -> None:
        self._states: dict[Any, MutableMapping[str, Any]] = {}
        # Parameters by (outer group, factor of its rate, decay; None: the group's own).
        directions: dict[tuple[int, float | None, float | None], list[Any]] = {}
        others: dict[tuple[int, float | None, float | None], list[Any]] = {}
        by_bias = {id(m.bias): m for m in active.values() if m.bias is not None}
        scales: list[Any] = []
        for at, group in enumerate(groups):
            spared = 0.0 if group.get("weight_decay") else None
            if group["geometry"] != "rest":
                members = [active[name] for name in group["param_names"] if name in active]
                directions[at, None if turns else 1.0, None] = self._directions(members)
                scales = [m.r for m in members if not m.is_fixed]
                continue
            others.setdefault((at, scale[0], scale[1] or spared), []).extend(scales)
            scales = []
            for name, p in zip(group["param_names"], group["params"], strict=True):
                m = by_bias.get(id(p))
                decay = spared if m is not None or name in undecayed else None
                others.setdefault((at, 1.0, decay), []).append(p if m is None else m.lam)
                state = _fit(states[p], p) if m is None else Prefixed(m.bias_state, "lam/")
                self._states[p if m is None else m.lam] = state
        self.optimizers: list[Optimizer] = []
        self._groups: list[tuple[Group, Group, float | None, float | None]] = []
        if base.func is rest.func and not turns:
            self._build(base, directions | others, groups)
        else:
            self._build(base, directions, groups)
            self._build(rest, others, groups)

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def copy_options(self) -> None:
        """Take over what schedules and users have set in the outer groups."""
        for inner, outer, factor, decay in self._groups:
            inner.update({key: value for key, value in outer.items() if key not in OWN_KEYS})
            if factor != 1.0:
                inner["lr"] = 1.0 if factor is None else outer["lr"] * factor
            if decay is not None:
                inner["weight_decay"] = decay

    def _directions(self, members: Sequence[Member]) -> list[Any]:
        for m in members:
            self._states[m.stored] = Prefixed(m.state, "direction/")
            self._states[m.r] = Prefixed(m.state, "r/")
        return [m.stored for m in members if m.stored is not None]

    def _build(
        self, make: MakeOptimizer, members: dict[Any, list], groups: Sequence[Group]
    ) -> None:
        members = {key: params for key, params in members.items() if params}
        if not members:
            return
        optimizer = make([{"params": params} for params in members.values()])
        made = dict(optimizer.state)  # what a constructor writes is for states that are empty
        optimizer.state.clear()
        for inner, (at, factor, decay) in zip(optimizer.param_groups, members, strict=True):
            self._groups.append((inner, groups[at], factor, decay))
            for p in inner["params"]:
                if not len(self._states[p]):
                    self._states[p].update(made.get(p, {}))
                optimizer.state[p] = self._states[p]
        self.optimizers.append(optimizer)


class Prefixed(MutableMapping[str, Any]):
    """The entries of a state whose keys begin with a prefix, under the rest of their keys."""

    def __init__(self, state: dict[str, Any], prefix: str) -> None:
        self.state, self.prefix = state, prefix

    def __getitem__(self, key: str) -> Any:
        return self.state[self.prefix + key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.state[self.prefix + key] = value

    def __delitem__(self, key: str) -> None:
        del self.state[self.prefix + key]

    def __iter__(self) -> Iterator[str]:
        size = len(self.prefix)
        return iter([key[size:] for key in self.state if key.startswith(self.prefix)])

    def __len__(self) -> int:
        return sum(key.startswith(self.prefix) for key in self.state)


def _fit(state: dict[str, Any], p: Tensor) -> dict[str, Any]:
    """Bring a state to the type that a parameter has been changed to since (`model.double()`)."""
    for key, value in state.items():
        is_number = isinstance(value, Tensor) and value.ndim > 0 and value.is_floating_point()
        if is_number and p.dtype in (torch.float32, torch.float64):
            state[key] = value.to(p.device, p.dtype)
    return state
