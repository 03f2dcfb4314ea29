"""What `print(optimizer)` shows: who steps which group, what is a unit, and what stays plain."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from geoparam.optim.units import Unit, looks_packed

Group = Mapping[str, Any]


def list_groups(
    groups: Sequence[Group],
    units: Sequence[Unit],
    trained: Collection[str],
    known: Mapping[str, Collection[str]],
) -> Iterator[str]:
    """Yield a line for each group.

    Args:
        groups: those of the optimizer.
        units: those of the model.
        trained: names of the parameters that are in a group and not frozen.
        known: the options that the optimizers of units and rest have. A schedule of the momentum
            may leave others in a group.
    """
    before: Group = {"param_names": []}
    for i, group in enumerate(groups):
        options = known[group["role"]]
        if group["role"] == "units":
            words = _describe_units(group, options)
        else:
            stepped = _name_stepped(group, before, units, trained)
            words = _describe_rest(group, options, stepped)
        yield f"  group {i}: " + ", ".join(words)
        before = group


def _describe_units(group: Group, known: Collection[str]) -> Iterator[str]:
    """Say who steps the directions of a group, and how far."""
    yield f"directions ({group['coordinates']}) by {group['base']}"
    rate, turn, start_lr = float(group["lr"]), group["turn"], group["start_lr"]
    if turn is None:
        yield f"lr {rate:g}"
    else:
        yield f"turn {turn:g} degrees at lr {start_lr:g}"
        if rate != start_lr:
            yield f"now {turn * rate / start_lr:g} at lr {rate:g}"
    if group["max_turn"] is not None:
        yield f"max_turn {group['max_turn']:g}"
    yield from _describe_momentum(group, known)
    yield "no decay"


def _describe_rest(group: Group, known: Collection[str], stepped: str) -> Iterator[str]:
    """Say who steps a group of the rest, how far, and what decays."""
    yield f"{stepped} by {group['rest']}"
    rate = float(group["lr"])
    yield f"lr {rate * group['lr_ratio']:g}"
    if group["scale_ratio"] != group["lr_ratio"]:
        yield f"lr of r {rate * group['scale_ratio']:g}"
    yield from _describe_momentum(group, known)
    if any(p.ndim > 1 for p in group["params"]):
        yield f"decay {group['weight_decay']:g} on other matrices"
    if group["scale_decay"]:
        yield f"decay {group['scale_decay']:g} on r"


def _describe_momentum(group: Group, known: Collection[str]) -> Iterator[str]:
    for key in ("momentum", "betas"):
        if key in known:
            yield f"{key} {group[key]}"


def _name_stepped(
    group: Group, before: Group, units: Sequence[Unit], trained: Collection[str]
) -> str:
    """Name what a group of the rest steps: r and lam of units, and other parameters.

    The group before it has the units whose r it steps.
    """
    names = {name for name in group["param_names"] if name in trained}
    biases = names & {unit.bias for unit in units}
    stepped = []
    if any(unit.name in before["param_names"] and not unit.is_fixed for unit in units):
        stepped.append("r")
    if biases:
        stepped.append("lam")
    if names - biases or not stepped:
        stepped.append(f"{len(names - biases)} parameters")
    return ", ".join(stepped)


def list_weights(
    units: Sequence[Unit], reasons: Mapping[str, str], trained: Collection[str]
) -> Iterator[str]:
    """Yield a line for each weight: what its units are, or why it stays plain."""
    names = [*reasons, *(unit.name for unit in units)]
    width = min(max(40, *map(len, names)), 100)
    frozen = "frozen, or in no group"

    plain = {}
    for name, reason in reasons.items():
        plain[name] = reason if name in trained else f"{reason}; {frozen}"
    yield f"  {'units of':{width}} {'rows':>6} {'fan-in':>6}  {'bias':5}  scale"
    for unit in units:
        if unit.name not in trained:
            plain[unit.name] = frozen
            continue
        bias = "lam" if unit.bias else "-"
        sizes = f"{unit.rows:6} {unit.fan_in:6}"
        yield f"  {unit.name:{width}} {sizes}  {bias:5}  {_describe_scale(unit)}"

    yield "  plain"
    for name, reason in plain.items():
        yield f"  {name:{width}} {reason}"


def _describe_scale(unit: Unit) -> str:
    words = "free"
    if unit.is_fixed:
        words = f"fixed, {unit.norm} follows" if unit.norm else "fixed"
    if len(unit.parts) > 1:
        return f"{words}; {len(unit.parts)} layers"
    if looks_packed(unit):
        words += "; q, k, v in one? Then give split="
    return words
