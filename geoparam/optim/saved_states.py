"""What a saved state of `GeometricOptimizer` must have in common with the optimizer."""

from collections.abc import Mapping, Sequence
from itertools import chain, zip_longest
from typing import Any

from torch import Tensor

from geoparam.model.run import strip_wrappers
from geoparam.optim.units import Unit

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
    groups: Sequence[Group], state_dict: Group, units: Sequence[Unit], held: set[str]
) -> dict[str, dict[str, Any]]:
    """Return the saved states by the names of parameters; raise where they do not fit.

    Args:
        held: weights that are units or not by whether a row is zero, since their r is fixed.
    """
    saved = state_dict["param_groups"]
    pairs: Any = zip_longest(groups, saved, fillvalue={})
    for i, (mine, theirs) in enumerate(pairs):
        _check_names(i, mine, theirs, held)
        _check_settings(i, mine, theirs)

    keys = chain.from_iterable(group["params"] for group in saved)
    names = chain.from_iterable(group["param_names"] for group in groups)
    states = {}
    for name, key in zip(names, keys, strict=True):
        states[name] = state_dict["state"].get(key, {})
    for unit in units:
        if states.get(unit.name):
            check_size(unit, states[unit.name])
    return states


def _check_settings(i: int, mine: Group, theirs: Group) -> None:
    """Raise where a group was made with other settings. Only whether there is a turn counts."""
    for key in (*SETTINGS, "turn"):
        here, there = mine.get(key), theirs.get(key)
        is_same = here == there
        if key == "turn":
            is_same = (here is None) == (there is None)
        if not is_same:
            raise ValueError(
                f"the state's group {i} has {key} {there!r}; this optimizer's has {here!r}."
            )


def _check_names(i: int, mine: Group, theirs: Group, held: set[str]) -> None:
    """Raise where a group has other parameters. Groups without names are known by their order."""
    if theirs and "param_names" not in theirs:
        return
    here, there = _list_names(mine), _list_names(theirs)
    if here != there:
        hint = ""
        if held.intersection(here) ^ held.intersection(there):
            hint = ", and where r is fixed, with the same rows of zeros in the weights"
        raise ValueError(
            f"the state's group {i} differs from the optimizer's in "
            f"{sorted({*here} ^ {*there}) or here}. Build the optimizer with the same options"
            f"{hint}."
        )


def _list_names(group: Group) -> list[str]:
    return [strip_wrappers(name, "module") for name in group.get("param_names", [])]  # DDP's


def check_size(unit: Unit, state: Group) -> None:
    """Raise where a state is damaged, or of units of another size."""
    if any(state.get(key) is None for key in ("r", "length", "fan_in")):
        raise ValueError(f"the state of {unit.name!r} lacks 'r', 'length' or 'fan_in'.")
    rows, parts, fan_in = len(state["r"]), len(state["length"]), state["fan_in"]
    if (rows, parts, fan_in) != (unit.rows, len(unit.parts), unit.fan_in):
        raise ValueError(
            f"the state of {unit.name!r} has {rows} units of fan-in {fan_in} in {parts} layers; "
            f"the model's has {unit.rows} of {unit.fan_in} in {len(unit.parts)}. Delete a "
            "weight's state to let it start anew."
        )


def copy_entry(key: str, entry: Any, p: Tensor) -> Any:
    """Return a copy of an entry of a parameter's state.

    What torch's optimizers keep for each element of a plain parameter gets the parameter's type,
    as in torch. What belongs to units stays in full precision.
    """
    if not isinstance(entry, Tensor):
        return entry
    prefix, _, name = key.rpartition("/")
    is_plain = prefix in ("", "plain") and name not in ("r", "length", "master", "step")
    if is_plain and entry.is_floating_point() and entry.shape == p.shape:
        return entry.to(p.dtype, copy=True)
    return entry.clone()
