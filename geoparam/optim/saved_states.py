"""What a saved state of `GeometricOptimizer` must have in common with the optimizer."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, zip_longest
from typing import Any

from geoparam.inspection import strip_wrappers
from geoparam.optim.units import Unit

Group = Mapping[str, Any]


def check_form(state_dict: Any) -> None:
    """Raise where it is no state of a GeometricOptimizer."""
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= set(state_dict):
        raise ValueError("an optimizer's state dict has entries 'state' and 'param_groups'.")
    if any("geometry" not in group for group in state_dict["param_groups"]):
        raise ValueError(
            "this is the state of another optimizer. Its moments belong to plain weights, not to "
            "directions: load the model's weights and let GeometricOptimizer start anew."
        )


def find_saved_names(
    own: Sequence[Group], saved: Sequence[Group], by_values: Iterable[str]
) -> list[list[str]] | None:
    """Return the saved names by group if only weights differ that are plain for their values.

    They have a row of zeros, as LoRA's B at its start or after pruning, or, without `match`, a
    large bias. None if groups are equal, or differ in other weights.
    """
    names = {_unwrap(name): name for group in own for name in group["param_names"]}
    merged = [{**mine, **theirs} for mine, theirs in zip(own, saved, strict=False)]
    wanted = [[names.get(n, n) for n in map(_unwrap, group["param_names"])] for group in merged]
    pairs = zip(own, wanted, strict=False)
    moved = {name for group, then in pairs for name in {*group["param_names"]} ^ {*then}}
    texts = [group.get("zero_rows", "") for group in (*own, *saved)]
    more = [name for text in texts for name in (*text.split("\n"), *text.split())]
    may_move = {*by_values, *(names.get(_unwrap(name)) for name in more)}
    is_all = sorted(chain.from_iterable(wanted)) == sorted(names.values())
    return wanted if moved and moved <= may_move and is_all else None


def check_fit(own: Sequence[Group], state_dict: Group, units: Iterable[Unit]) -> dict[str, Any]:
    """Return the saved states by the names of parameters; raise where they do not fit."""
    saved = state_dict["param_groups"]
    _check_groups(own, saved)
    ids = chain.from_iterable(group["params"] for group in saved)
    names = chain.from_iterable(group["param_names"] for group in own)
    states = {n: state_dict["state"].get(key, {}) for n, key in zip(names, ids, strict=True)}
    for unit in units:
        if states.get(unit.name):
            check_size(unit, states[unit.name])
    return states


def _check_groups(own: Sequence[Group], saved: Sequence[Group]) -> None:
    """Raise where groups have other parameters, or were made with other settings."""
    pairs: Iterator[Any] = zip_longest(own, saved, fillvalue={"param_names": []})
    for i, (mine, theirs) in enumerate(pairs):
        here, there = ([*map(_unwrap, g["param_names"])] for g in (mine, {**mine, **theirs}))
        if here != there:
            raise ValueError(
                f"the state's group {i} differs from the optimizer's in "
                f"{sorted({*here} ^ {*there}) or here}."
            )
    forms, found = ([group["geometry"] for group in groups] for groups in (own, saved))
    if forms != found:
        raise ValueError(f"the state is for groups {found}; this optimizer has {forms}.")


def check_size(unit: Unit, state: Group) -> None:
    """Raise where a state is damaged, or of units of another size."""
    if any(state.get(key) is None for key in ("r", "length", "fan_in")):
        raise ValueError(f"the state of {unit.name!r} lacks 'r', 'length' or 'fan_in'.")
    rows, fan_in = len(state["r"]), state["fan_in"]
    if (rows, fan_in) != (unit.out, unit.fan_in):
        raise ValueError(
            f"the state of {unit.name!r} has {rows} units of fan-in {fan_in}; the model's has "
            f"{unit.out} of {unit.fan_in}. Delete a weight's state to let it start anew."
        )


def _unwrap(name: str) -> str:
    return strip_wrappers(name, "module")  # DDP's
