"""The inner torch optimizers: the base for directions, the rest for r, lam and plain parameters.

They step parameters of their own. Their states are kept in the outer optimizer's, under flat keys
such as `direction/exp_avg` in the weight's entry.
"""

import functools
import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch import optim as torchs
from torch.optim import Optimizer

from geoparam.optim.muon import RowMuon
from geoparam.optim.stage import Block, Stage

MakeOptimizer = Callable[..., Any]
Group = dict[str, Any]
Pair = tuple[nn.Parameter, dict[str, Any]]  # a parameter and its state
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
    """The base and the rest over the parameters of stages and all others.

    Args:
        groups: the outer optimizer's; each step copies their options.
        stages: the weights with units and a gradient.
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
        stages: Sequence[Stage],
        states: MutableMapping[Any, Any],
        undecayed: set[str],
        scale: tuple[float, float],
    ) -> None:
        self.optimizers: list[Optimizer] = []
        self.slots: list[Slot] = []
        self.copied: list[tuple[Group, Group, list[str], float | None, float | None]] = []
        distances: dict[int, Block | None] = {id(m.bias): None for s in stages for m in s.members}
        distances |= {id(stage.first.bias): stage.blocks.get("lam") for stage in stages}
        directions, others = defaultdict[Any, list[Pair]](list), defaultdict[Any, list[Pair]](list)
        scales: list[Pair] = []
        for at, group in enumerate(groups):
            spared = 0.0 if group.get("weight_decay") else None
            if group["geometry"] != "rest":
                for blocks in [stage.blocks for stage in stages if stage.group is group]:
                    key = at, None if turns else 1.0, None
                    directions[key] += self._make_pairs(blocks.get("direction"), base)
                    scales += self._make_pairs(blocks.get("r"), rest)
                continue
            others[at, scale[0], scale[1] or spared] += scales
            scales = []
            for name, p in zip(group["param_names"], group["params"], strict=True):
                if id(p) in distances:  # all of a stage are stepped where its first one is
                    others[at, 1.0, spared] += self._make_pairs(distances[id(p)], rest)
                else:
                    decay = spared if name in undecayed else None
                    others[at, 1.0, decay].append((p, self._find_state(p, states[p])))
        if base is rest and not turns:  # as one, for those that look at all parameters (a norm)
            self._build(base, directions | others, groups)
        else:
            self._build(base, directions, groups)
            self._build(rest, others, groups)

    def step(self) -> None:
        self._copy_options()
        for optimizer in self.optimizers:
            optimizer.step()
        for slot in self.slots:
            slot.publish()

    def _copy_options(self) -> None:
        """Copy the options of the outer groups, which schedules and users may have changed."""
        for inner, outer, keys, factor, decay in self.copied:
            for key in keys:
                inner[key] = outer[key]
            if factor != 1.0:
                inner["lr"] = 1.0 if factor is None else outer["lr"] * factor
            if decay is not None:
                inner["weight_decay"] = decay

    def _make_pairs(self, block: Block | None, maker: Maker) -> list[Pair]:
        """Return parameters with their states: one for all tensors of a block, or one for each."""
        if block is None:
            return []
        name, states, values, grads, whole = block
        if whole is not None and maker.is_elementwise and len(states) > 1:
            slots = [Slot(name, states, values, _make_parameter(*whole))]
        else:
            parts = zip(states, values, grads, strict=True)
            slots = [Slot(name, [state], [x], _make_parameter(x, g)) for state, x, g in parts]
        self.slots += slots
        return [(slot.parameter, slot.state) for slot in slots]

    def _find_state(self, p: nn.Parameter, state: dict[str, Any]) -> dict[str, Any]:
        """Return a plain parameter's state, in its present type (`model.double()`)."""
        for key, value in state.items():
            is_wide = p.dtype in (torch.float32, torch.float64)
            if is_wide and _has_elements(value) and value.is_floating_point():
                state[key] = value.to(p.device, p.dtype)
        if "lam" in state:  # a bias whose weight is not stepped now
            self.slots.append(Slot("plain", [state], [p], p))
            return self.slots[-1].state
        return state

    def _build(
        self, maker: Maker, items: Mapping[Any, list[Pair]], groups: Sequence[Group]
    ) -> None:
        """Make an optimizer; items are by outer group, factor of its rate and decay.

        A factor of None means the rate 1, and a decay of None the group's own.
        """
        items = {key: pairs for key, pairs in items.items() if pairs}
        if not items:
            return
        optimizer = maker.make([{"params": [p for p, _ in pairs]} for pairs in items.values()])
        made = dict(optimizer.state)  # what the constructor wrote; it is for empty states only
        optimizer.state.clear()
        inner_groups = zip(optimizer.param_groups, items.items(), strict=True)
        for inner, ((at, factor, decay), pairs) in inner_groups:
            keys = [key for key in inner if key != "params" and key in groups[at]]
            self.copied.append((inner, groups[at], keys, factor, decay))
            for p, state in pairs:
                if not state:
                    state.update(made.get(p, {}))
                optimizer.state[p] = state
        self.optimizers.append(optimizer)


class Slot:
    """A parameter of an inner optimizer, which stands for tensors of one or more weights.

    Its state is a dict of its own. `publish` writes the entries into the outer optimizer's states
    under flat keys, such as `direction/exp_avg`: each weight's are parts of the slot's tensors.
    """

    def __init__(
        self,
        name: str,
        states: Sequence[dict[str, Any]],
        parts: Sequence[Tensor],
        parameter: nn.Parameter,
    ) -> None:
        self.prefix, self.states, self.parts, self.parameter = f"{name}/", states, parts, parameter
        self.state = {
            key.removeprefix(self.prefix): self._join([state[key] for state in states])
            for key in states[0]
            if key.startswith(self.prefix)
        }
        self.published: dict[str, Any] = {}
        self.publish()

    def publish(self) -> None:
        """Write entries that are new or have been replaced."""
        for key, value in self.state.items():
            if self.published.get(key, self) is not value:
                self.published[key] = value
                for state, own in zip(self.states, self._divide(value), strict=True):
                    state[self.prefix + key] = own

    def _join(self, values: Sequence[Any]) -> Any:
        if not _has_elements(values[0]):  # a counter; the base changes it in place
            return values[0].clone() if isinstance(values[0], Tensor) else values[0]
        if len(values) == 1:
            return values[0]
        joined = values[0].new_empty(sum(value.numel() for value in values))
        for view, value in zip(self._divide(joined), values, strict=True):
            view.copy_(value.reshape(view.shape))
        return joined

    def _divide(self, value: Any) -> list[Any]:
        if len(self.parts) == 1 or not _has_elements(value):
            return [value] * len(self.parts)
        pieces = value.split([part.numel() for part in self.parts])
        return [
            piece.as_strided(part.shape, part.stride(), piece.storage_offset())
            for piece, part in zip(pieces, self.parts, strict=True)
        ]


def _make_parameter(value: Tensor, grad: Tensor) -> nn.Parameter:
    p = nn.Parameter(value, requires_grad=False)
    p.grad = grad
    return p


def _has_elements(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0
