"""What a saved state of `GeometricOptimizer` must have in common with the optimizer."""

from collections.abc import Mapping, Sequence
from itertools import chain, zip_longest
from typing import Any

from geoparam.inspection import strip_wrappers
from geoparam.optim.units import Unit

Group = Mapping[str, Any]
SETTINGS = ("role", "base", "rest", "coordinates", "match")


def check_form(state_dict: Any) -> None:
    """Raise where it is no state of a GeometricOptimizer."""
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= set(state_dict):
        raise ValueError("an optimizer's state dict has entries 'state' and 'param_groups'.")
    groups = state_dict["param_groups"]
    if not isinstance(state_dict["state"], Mapping) or not isinstance(groups, Sequence):
        raise ValueError("an optimizer's 'state' is a mapping and its 'param_groups' a list.")
    if any("geometry" in group for group in groups):
        raise ValueError(
            "this state was saved by geoparam 0.1, whose groups had angles for rates: let the "
            "optimizer start anew from the weights."
        )
    if any("role" not in group for group in groups):
        raise ValueError(
            "this is the state of another optimizer. Its moments belong to plain weights, not to "
            "directions: load the model's weights and let GeometricOptimizer start anew."
        )


def find_states(
    groups: Sequence[Group], state_dict: Group, units: Sequence[Unit]
) -> dict[str, dict[str, Any]]:
    """Return the saved states by the names of parameters; raise where they do not fit."""
    saved = state_dict["param_groups"]
    pairs: Any = zip_longest(groups, saved, fillvalue={})
    for i, (mine, theirs) in enumerate(pairs):
        _check_group(i, mine, theirs)

    keys = chain.from_iterable(group["params"] for group in saved)
    names = chain.from_iterable(group["param_names"] for group in groups)
    states = {}
    for name, key in zip(names, keys, strict=True):
        states[name] = state_dict["state"].get(key, {})
    for unit in units:
        if states.get(unit.name):
            check_size(unit, states[unit.name])
    return states


def _check_group(i: int, mine: Group, theirs: Group) -> None:
    """Raise where a group has other parameters, or was made with other settings."""
    for key in SETTINGS:
        if mine and theirs and mine.get(key) != theirs.get(key):
            raise ValueError(
                f"the state's group {i} has {key} {theirs.get(key)!r}; this optimizer's has "
                f"{mine.get(key)!r}."
            )
    if mine and theirs and (mine.get("turn") is None) != (theirs.get("turn") is None):
        raise ValueError(
            f"the state's group {i} has turn {theirs.get('turn')}; this optimizer's has "
            f"{mine.get('turn')}."
        )

    here = list(map(_unwrap, mine.get("param_names", [])))
    there = list(map(_unwrap, theirs.get("param_names", mine.get("param_names", []))))
    if here != there:
        raise ValueError(
            f"the state's group {i} differs from the optimizer's in "
            f"{sorted({*here} ^ {*there}) or here}. Build the optimizer with the same options; "
            "where r is fixed, before weights with rows of zeros are loaded."
        )


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


def _unwrap(name: str) -> str:
    return strip_wrappers(name, "module")  # DDP's
