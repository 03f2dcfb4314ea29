"""Parameter groups of GeometricOptimizer: each of the user's is divided into units and rest."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from geoparam.arguments import warn_user
from geoparam.storage import list_few

OF_THE_OPTIMIZER = {"coordinates", "match", "scale", "scale_lr"}


def divide_groups(
    model: nn.Module,
    groups: Iterable[Any] | None,
    unit_names: Collection[str],
    unit_options: Mapping[str, Any],
    rest_options: Mapping[str, Any],
) -> list[dict[str, Any]]:
    """Divide each group into units and rest, with their options: the rest's after the units'.

    Where there are units, both groups are there, even if one is empty: the rest's has the options
    of r.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    divided: list[dict[str, Any]] = []
    for given in _list_groups(model, groups):
        params = list_params(given.pop("params"))
        if strangers := [getattr(p, "shape", p) for p in params if id(p) not in names]:
            raise ValueError(f"groups hold parameters that the model does not: {strangers}.")
        named = {names[id(p)]: p for p in params}
        of_units = {name: p for name, p in named.items() if name in unit_names}
        others = {name: p for name, p in named.items() if name not in unit_names}

        rest = _make_group(others, mix_rest_options(rest_options, given, bool(of_units)))
        if of_units:
            units = _make_group(of_units, {**unit_options, **given, "role": "units"})
            units["weight_decay"] = 0.0
            if "turn" in given:  # an angle at the group's own starting rate
                units["start_lr"] = float(units["lr"])
            divided.append(units)
        if of_units or rest["params"]:
            divided.append(rest)
    _tell_of_others(model, divided)
    return divided


def _tell_of_others(model: nn.Module, groups: Iterable[dict[str, Any]]) -> None:
    """Warn of parameters that no group has: they would stay as they are."""
    listed = {name for group in groups for name in group["param_names"]}
    others = [
        name for name, p in model.named_parameters() if p.requires_grad and name not in listed
    ]
    if others:
        warn_user(
            f"groups= leaves out {len(others)} parameters, which will not be trained: "
            f"{list_few(others, most=4)}. Add a group for them, or freeze them with "
            "requires_grad_(False)."
        )


def _list_groups(model: nn.Module, groups: Iterable[Any] | None) -> list[dict[str, Any]]:
    """Return copies of the groups, which may be parameters or dicts."""
    if groups is None:
        groups = model.parameters()
    if isinstance(groups, dict) or not isinstance(groups, Iterable):
        raise ValueError(f"groups are a list of parameters or of dicts; got {type(groups)}.")
    listed = list(groups)
    if not all(isinstance(group, dict) for group in listed):
        listed = [{"params": listed}]
    for group in listed:
        if "params" not in group:
            raise ValueError(f"a group has its parameters under 'params'; got {list(group)}.")
        if wrong := sorted(OF_THE_OPTIMIZER.intersection(group)):
            raise ValueError(
                f"{', '.join(wrong)} belongs to the whole optimizer, not to a group. A group may "
                "have lr, turn, max_turn, weight_decay, scale_decay, and options of base and rest."
            )
    return [dict(group) for group in listed]


def _make_group(named: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    return {**options, "params": list(named.values()), "param_names": list(named)}


def mix_rest_options(
    options: Mapping[str, Any], given: Mapping[str, Any], has_units: bool = False
) -> dict[str, Any]:
    """Return the options of a group of the rest.

    The `lr` that a group names is the one of `GeometricOptimizer` for this group: it scales the
    units' turn and the rest's own rate alike. A group without units has only a rest, so that it
    is the rate of that.
    """
    mixed = {**options, **given, "role": "rest"}
    if "lr" in given and not has_units:
        mixed["lr_ratio"] = mixed["scale_ratio"] = 1.0
    mixed.pop("turn", None)
    mixed.pop("max_turn", None)
    return mixed


def list_params(params: Any) -> list[Any]:
    """Return the parameters of a group, which may be one, several, or have names."""
    listed = [params] if isinstance(params, Tensor) else list(params)
    return [p[-1] if isinstance(p, tuple) else p for p in listed]
