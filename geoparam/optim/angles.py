"""The angle of a step: `turn` degrees while a group's rate is what it was at the start.

Every group's `lr` is a rate, so any schedule, logger or loop can set it. The units of a group turn
by `turn * lr / start_lr` degrees.
"""

import math
import warnings
from typing import Any

from torch import Tensor

Group = dict[str, Any]
LEAST_TURN = 0.1  # degrees: less is likely a rate


def find_angle(group: Group) -> Any:
    """Return the angle of a unit group's next step in degrees; a tensor where its rate is one."""
    return group["turn"] * group["lr"] / group["start_lr"]


def check_turn(name: str, value: Any) -> None:
    """Raise unless it is an angle in degrees; warn if it looks like a rate."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value <= 180:
        raise ValueError(f"{name} is an angle in degrees, above 0 and at most 180; got {value!r}.")
    if name == "turn" and value < LEAST_TURN:
        warnings.warn(
            f"turn={value} is an angle in degrees, and a small one: 2.4 is usual. The rate of "
            "everything else is lr.",
            stacklevel=4,
        )


def check_angles(groups: list[Group]) -> str | None:
    """Raise where the next step turns by more than 90 degrees; return a warning above 4 turns.

    A rate in a tensor is not looked at: that would wait for the GPU.
    """
    message = None
    for group in groups:
        if group.get("turn") is None or isinstance(group["lr"], Tensor):
            continue
        turn, start = group["turn"], group["start_lr"]
        peak = max(group["lr"], _find_peak(group))
        angle = turn * peak / start
        if angle > 90 or (angle > 4 * turn and math.isclose(peak, turn)):
            raise ValueError(
                f"a rate of {peak:g} turns units by {angle:g} degrees: turn={turn:g} is for "
                f"lr={start:g}. Every group's lr is a rate: with OneCycleLR write "
                f"max_lr={start:g} for all groups, not max_lr=[turn, lr]."
            )
        if angle > 4 * turn:
            message = (
                f"a rate of {peak:g} turns units by {angle:g} degrees, more than four times "
                f"turn={turn:g}, which is for lr={start:g}. If {peak:g} is the schedule's peak, "
                f"build the optimizer with lr={peak:g}."
            )
    return message


def _find_peak(group: Group) -> float:
    """Return the peak that OneCycleLR or CyclicLR has noted in the group; 0 without one."""
    peak = group.get("max_lr", 0.0)
    return 0.0 if isinstance(peak, Tensor) else float(peak)
