"""The two torch optimizers inside: the base steps directions, the rest r, lam and all others.

They step tensors of ours, in groups that follow the outer optimizer's. Their states are kept in
the outer optimizer's under flat keys, as `direction/exp_avg` in the weight's.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from geoparam.optim.bases import Recipe

State = dict[str, Any]
FULL_PRECISION = (torch.float32, torch.float64)


class Slot:
    """A tensor that an inner optimizer steps: the direction, r or lam of a layer, or a parameter.

    Args:
        name: prefix of its entries in the outer state; "" for a parameter of the rest.
        outer: the outer optimizer's state of the parameter that it belongs to.
        group: the number of the outer group from which it has its options.
        parts: rows of each layer in it, where it is a matrix.
        decays: whether the group's weight decay acts on it.

    Attributes:
        pace: a factor of its rate.
    """

    def __init__(
        self,
        name: str,
        outer: State,
        group: int,
        value: Tensor,
        grad: Tensor | None = None,
        parts: tuple[int, ...] = (),
        decays: bool = False,
    ) -> None:
        self.name, self.outer, self.group = name, outer, group
        self.parts, self.decays = parts, decays
        self.pace = 1.0
        self.parameter = value
        self.prefix = f"{name}/" if name else ""
        if grad is not None:
            self.parameter = nn.Parameter(value, requires_grad=False)
            self.parameter.grad = grad

        self.state = outer
        if name:
            entries = [key for key in outer if key.startswith(self.prefix)]
            self.state = {key.removeprefix(self.prefix): outer[key] for key in entries}
            for key, entry in self.state.items():
                self.state[key] = _fit_entry(entry, self.parameter)


def _fit_entry(entry: Any, parameter: Tensor) -> Any:
    """Return an entry for each element in the type and with the strides of the parameter."""
    if not isinstance(entry, Tensor) or entry.shape != parameter.shape or not entry.ndim:
        return entry
    dtype = parameter.dtype if entry.dtype in FULL_PRECISION else entry.dtype
    if entry.dtype == dtype and entry.stride() == parameter.stride():
        return entry
    return torch.empty_like(parameter, dtype=dtype).copy_(entry)


class Inner:
    """A torch optimizer over slots, which share a group of it if they share rate and decay."""

    def __init__(self, recipe: Recipe, slots: Sequence[Slot]) -> None:
        self.slots = slots
        self.options = [key for key in recipe.defaults if key not in ("lr", "weight_decay")]
        members: dict[Any, list[Slot]] = {}
        for slot in slots:
            key = slot.name, slot.group, slot.decays, slot.pace
            members.setdefault(key, []).append(slot)

        self.first = [alike[0] for alike in members.values()]
        groups = [{"params": [slot.parameter for slot in alike]} for alike in members.values()]
        more = {"parts": {slot.parameter: slot.parts for slot in slots}} if recipe.is_muon else {}
        self.optimizer = recipe.make(groups, **more)

        states = dict(self.optimizer.state)
        for slot in slots:
            if not slot.state:  # Adagrad's are made by its constructor
                slot.state.update(states.get(slot.parameter, {}))
            self.optimizer.state[slot.parameter] = slot.state

    def step(self, outer_groups: Sequence[dict[str, Any]]) -> None:
        """Take a step with the outer groups' present options."""
        for slot, group in zip(self.first, self.optimizer.param_groups, strict=True):
            outer = outer_groups[slot.group]
            group.update({key: outer[key] for key in self.options})
            group["lr"], group["weight_decay"] = _find_rate_and_decay(slot, outer)

        self.optimizer.step()
        for slot in self.slots:
            if slot.name:
                slot.outer.update({slot.prefix + key: slot.state[key] for key in slot.state})

    def is_current(self) -> bool:
        """Return whether the entries in the outer states are still those of the last step."""
        for slot in self.slots:
            for key, value in slot.state.items():
                if slot.outer.get(slot.prefix + key) is not value:
                    return False
        return True


def _find_rate_and_decay(slot: Slot, outer: dict[str, Any]) -> tuple[Any, float]:
    """Return the rate and decay of a slot; other rates than the base's are ratios of `lr`."""
    if slot.name == "direction":  # which turns by an angle whatever the rate, or at the rate
        return (outer["lr"] if outer["turn"] is None else 1.0), 0.0
    if slot.name == "r":
        return outer["lr"] * outer["scale_ratio"] * slot.pace, outer["scale_decay"]
    decay = outer.get("weight_decay", 0.0) if slot.decays else 0.0
    return outer["lr"] * outer["lr_ratio"], decay


def fit_state(state: State, p: Any, step_on_device: bool) -> None:
    """Bring a state to its parameter's present device and type.

    Tensors in full precision follow the parameter, but never to half precision. Single numbers, as
    counters of steps, stay as they are unless the optimizer wants them on the device.
    """
    full = torch.float64 if p.dtype == torch.float64 else torch.float32
    for key, value in state.items():
        if not isinstance(value, Tensor):
            continue
        is_number = value.ndim == 0 and p.ndim > 0
        if is_number or key.rpartition("/")[2] == "step":
            state[key] = value.to(p.device) if step_on_device else value
        elif value.dtype in FULL_PRECISION:
            state[key] = value.to(p.device, full)
        else:
            state[key] = value.to(p.device)
