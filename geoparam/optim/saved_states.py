"""What a saved state of `GeometricOptimizer` must have in common with the optimizer."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from operator import itemgetter
from typing import Any

from torch import Tensor

from geoparam.arguments import warn_user
from geoparam.model.run import strip_wrappers
from geoparam.optim.units import Unit
from geoparam.storage import list_few

Group = Mapping[str, Any]
SETTINGS = ("role", "base", "rest", "coordinates", "match")


def check_form(state_dict: Any) -> None:
    """Raise where it is no state of a GeometricOptimizer."""
    has_form = (
        isinstance(state_dict, Mapping)
        and isinstance(state_dict.get("state"), Mapping)
        and isinstance(state_dict.get("param_groups"), Sequence)
    )
    if not has_form:
        raise ValueError(
            "an optimizer's state dict has entries 'state' and 'param_groups', a mapping and a "
            "list."
        )
    for group in state_dict["param_groups"]:
        if "role" not in group or "geometry" in group:
            raise ValueError(
                "this state was saved by another optimizer or by geoparam 0.1, whose moments do "
                "not belong to directions: load the model's weights and let GeometricOptimizer "
                "start anew."
            )


def find_states(
    groups: Sequence[Group], state_dict: Group, units: Sequence[Unit]
) -> dict[str, dict[str, Any]]:
    """Return the saved states by the names of parameters; raise where they do not fit."""
    saved = state_dict["param_groups"]
    pairs: Any = zip_longest(groups, saved, fillvalue={})
    for i, (mine, theirs) in enumerate(pairs):
        _check_names(i, mine, theirs)
        _check_settings(i, mine, theirs)

    states = {}
    unit_names = {unit.name for unit in units}
    for mine, theirs in zip(groups, saved, strict=True):
        params = dict(zip(mine["param_names"], mine["params"], strict=True))
        for name, key in _pair_names(mine, theirs):
            states[name] = state_dict["state"].get(key, {})
            if name not in unit_names:
                _check_shapes(name, params[name], states[name])
    for unit in units:
        if states.get(unit.name):
            check_size(unit, states[unit.name])
    return states


def _check_settings(i: int, mine: Group, theirs: Group) -> None:
    """Raise where a group was made with other settings. Only whether units turn counts."""
    for key in (*SETTINGS, "turn"):
        here, there = mine.get(key), theirs.get(key)
        is_same = here == there
        if key == "turn":
            is_same = mine.get("role") == "rest" or (here is None) == (there is None)
        if not is_same:
            raise ValueError(
                f"the state's group {i} has {key} {there!r}; this optimizer's has {here!r}."
            )


def _check_names(i: int, mine: Group, theirs: Group) -> None:
    """Raise where a group has other parameters. Groups without names are known by their order."""
    if theirs and "param_names" not in theirs:
        return
    here, there = {*_list_names(mine)}, {*_list_names(theirs)}
    if here != there:
        lacks = list_few(sorted(here - there)) or "none"
        has = list_few(sorted(there - here)) or "none"
        raise ValueError(
            f"the state's group {i} has other parameters than the optimizer's: it lacks {lacks}; "
            f"the optimizer's lacks {has}. Is the state another model's? Otherwise build the "
            "optimizer with the same options, and where r is fixed, with the same rows of zeros "
            "in the weights."
        )


def _list_names(group: Group) -> list[str]:
    return [strip_wrappers(name, "module") for name in group.get("param_names", [])]  # DDP's


def _pair_names(mine: Group, theirs: Group) -> Iterator[tuple[str, Any]]:
    """Pair a group's names with the saved keys: by saved names where there are any.

    A model of the same parameters may have registered them in another order.
    """
    names, keys = mine["param_names"], theirs["params"]
    if "param_names" in theirs:
        names, keys = _sort_by_name(mine, names), _sort_by_name(theirs, keys)
    return zip(names, keys, strict=True)


def _sort_by_name(group: Group, values: Sequence[Any]) -> list[Any]:
    pairs = zip(_list_names(group), values, strict=True)
    return [value for _, value in sorted(pairs, key=itemgetter(0))]


def check_size(unit: Unit, state: Group) -> None:
    """Raise where a state is damaged, or of units of another size."""
    if any(state.get(key) is None for key in ("r", "length", "fan_in")):
        raise ValueError(f"the state of {unit.name!r} lacks 'r', 'length' or 'fan_in'.")
    rows, parts, fan_in = len(state["r"]), len(state["length"]), state["fan_in"]
    is_same_size = (rows, fan_in) == (unit.rows, unit.fan_in)
    if is_same_size and "parts" in state and state["parts"].tolist() != list(unit.parts):
        raise ValueError(
            f"the state of {unit.name!r} is divided into {state['parts'].tolist()} rows; this "
            f"optimizer divides it into {list(unit.parts)}. Give the same split=."
        )
    if not is_same_size or parts != len(unit.parts):
        raise ValueError(
            f"the state of {unit.name!r} has {rows} units of fan-in {fan_in} in {parts} layers; "
            f"the model's has {unit.rows} of {unit.fan_in} in {len(unit.parts)}. Is the state "
            "another model's? Otherwise delete this weight's state to let it start anew."
        )


def _check_shapes(name: str, p: Any, state: Group) -> None:
    """Raise where what is kept for each element of a parameter has another shape."""
    for key, entry in state.items():
        is_per_element = isinstance(entry, Tensor) and entry.ndim and "/" not in key
        if is_per_element and entry.shape != p.shape:
            raise ValueError(
                f"the state of {name!r} has {key} of shape {tuple(entry.shape)}; the parameter's "
                f"is {tuple(p.shape)}. Is the state another model's?"
            )


def check_scales(units: Sequence[Unit], states: Mapping[str, Group]) -> None:
    """Raise where r was fixed and is to be free, or the reverse."""
    words = {True: "fixed", False: "free"}
    for unit in units:
        was_fixed = states.get(unit.name, {}).get("is_fixed")
        if was_fixed is not None and bool(was_fixed) != unit.is_fixed:
            raise ValueError(
                f"in the state r of {unit.name!r} is {words[bool(was_fixed)]}; this optimizer's "
                f"is {words[unit.is_fixed]}. Build it with the same scale=, or with 'auto'."
            )


def tell_of_other_angle(mine: Group, theirs: Group) -> None:
    """Warn where the saved angle, which counts, is not the one the optimizer was built with."""
    here = mine.get("turn"), mine.get("start_lr")
    there = theirs.get("turn"), theirs.get("start_lr")
    if None not in (*here, *there) and here != there:
        warn_user(
            f"the state's angle counts, turn={there[0]:g} at lr={there[1]:g}, not this "
            f"optimizer's, turn={here[0]:g} at lr={here[1]:g}. For the latter, set 'turn' and "
            "'start_lr' of the groups that have them after loading."
        )
