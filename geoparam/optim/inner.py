"""The two torch optimizers inside: the base steps directions, the rest r, lam and all others.

They step tensors of ours, in groups that follow the outer optimizer's. Their states are kept in
the outer optimizer's under flat keys, as `direction/exp_avg` in the weight's.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from geoparam.optim.bases import Recipe

State = dict[str, Any]
FULL_PRECISION = (torch.float32, torch.float64)


@dataclass
class Variable:
    """A tensor that an inner optimizer steps: the direction, r or lam of a layer, or a parameter.

    Args:
        name: prefix of its entries in the outer state; "" for a parameter of the rest.
        parameter: the tensor, with its gradient.
        outer: the outer optimizer's state of the parameter that it belongs to.
        group: the number of the outer group from which it has its options.
        parts: rows of each layer in it, where it is a matrix.
        decays: whether the group's weight decay acts on it.
    """

    name: str
    parameter: Any
    outer: State
    group: int
    parts: tuple[int, ...] = ()
    decays: bool = False


class InnerOptimizer:
    """A torch optimizer over variables, which share a group if they share rate and decay."""

    def __init__(self, recipe: Recipe, variables: Sequence[Variable]) -> None:
        alike = defaultdict[Any, list[Variable]](list)
        for variable in variables:
            alike[variable.name, variable.group, variable.decays].append(variable)
        groups = []
        for members in alike.values():
            groups.append({"params": [variable.parameter for variable in members]})
        options = {}
        if recipe.is_muon:
            options["parts"] = {variable.parameter: variable.parts for variable in variables}

        self.optimizer = recipe.make(groups, **options)
        self.first_of_groups = [members[0] for members in alike.values()]
        self.options = recipe.defaults.keys() - {"lr", "weight_decay"}
        self.states: list[tuple[str, State, State]] = []  # prefix, inner and outer state
        made = dict(self.optimizer.state)  # Adagrad's, by its constructor
        for variable in variables:
            state = _find_state(variable)
            if not state:
                state.update(made.get(variable.parameter, {}))
            self.optimizer.state[variable.parameter] = state
            if variable.name:
                self.states.append((f"{variable.name}/", state, variable.outer))

    def step(self, outer_groups: Sequence[dict[str, Any]]) -> None:
        """Take a step with the outer groups' present options."""
        for variable, group in zip(self.first_of_groups, self.optimizer.param_groups, strict=True):
            outer = outer_groups[variable.group]
            group.update({key: outer[key] for key in self.options})
            group["lr"], group["weight_decay"] = _find_rate_and_decay(variable, outer)

        self.optimizer.step()
        for prefix, state, outer in self.states:
            for key, entry in state.items():
                outer[prefix + key] = entry

    def is_current(self) -> bool:
        """Return whether the entries in the outer states are still those of the last step."""
        for prefix, state, outer in self.states:
            for key, entry in state.items():
                if outer.get(prefix + key) is not entry:
                    return False
        return True


def _find_state(variable: Variable) -> State:
    """Return the entries of a variable in the outer state, without their prefix."""
    if not variable.name:
        return variable.outer
    state = {}
    prefix = f"{variable.name}/"
    for key, entry in variable.outer.items():
        if key.startswith(prefix):
            state[key.removeprefix(prefix)] = _lay_out(entry, variable.parameter)
    return state


def _lay_out(entry: Any, like: Tensor) -> Any:
    """Return an entry for each element in the type, shape and strides of what is stepped.

    A convolution's is stepped in its own shape or, where rows have to be copied, as a matrix.
    """
    if not isinstance(entry, Tensor) or entry.ndim == 0:
        return entry
    if entry.numel() != like.numel():
        return entry
    dtype = like.dtype if entry.dtype in FULL_PRECISION else entry.dtype
    is_alike = entry.shape == like.shape and entry.stride() == like.stride()
    if is_alike and entry.dtype == dtype:
        return entry
    return torch.empty_like(like, dtype=dtype).copy_(entry.reshape(like.shape))


def _find_rate_and_decay(variable: Variable, outer: dict[str, Any]) -> tuple[Any, float]:
    """Return the rate and decay of a variable; other rates than the base's are ratios of `lr`."""
    rate = outer["lr"]
    if variable.name == "direction":
        # A direction that turns by an angle does so whatever its rate.
        return (rate if outer["turn"] is None else 1.0), 0.0
    if variable.name == "r":
        return rate * outer["scale_ratio"], outer["scale_decay"]
    decay = outer.get("weight_decay", 0.0) if variable.decays else 0.0
    return rate * outer["lr_ratio"], decay


def counts_on_device(group: Mapping[str, Any]) -> bool:
    """Return whether the optimizer of a group keeps its counter of steps on the device."""
    return bool(group.get("capturable") or group.get("fused"))


def fit_state(state: State, p: Any, on_device: bool, r_on_device: bool) -> None:
    """Bring a state to its parameter's present device and type.

    What torch's optimizers keep for each element of a plain parameter has the parameter's type, as
    in torch. What belongs to units stays in full precision. Single numbers stay as they are.

    Args:
        state: of the parameter `p`.
        p: the parameter.
        on_device: whether counters of steps go to the device.
        r_on_device: whether that of r does, which another optimizer steps.
    """
    full = torch.float64 if p.dtype == torch.float64 else torch.float32
    for key, value in state.items():
        if not isinstance(value, Tensor):
            continue
        prefix, _, name = key.rpartition("/")
        if name == "step" or (value.ndim == 0 and p.ndim > 0):
            is_moved = r_on_device if prefix == "r" else on_device
            state[key] = value.to(p.device) if is_moved else value
            continue

        dtype = value.dtype
        is_plain = prefix in ("", "plain") and name != "master" and value.shape == p.shape
        if dtype.is_floating_point:
            dtype = p.dtype if is_plain else full
        state[key] = value.to(p.device, dtype)
