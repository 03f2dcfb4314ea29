"""How far a step of some length could turn a unit, beside how far it does to first order.

For a step eps of the stored direction, finite or not:

    SP, WN, intrinsic     arcsin(||eps|| / ||w||) while ||eps|| < ||w||, else 180 degrees
    angles                ||eps||: the path's length, which is at least the angle (Theorem 3.7)

Both are attained by some step of that length (the second by theta_1 alone), so nothing less can
be promised. Where a sign may flip, of l, of gamma or of an r inside the activation, which takes a
step as large as they are, the bound is 180 degrees under every parameterization, GmP included.
Under LayerNorm a unit's direction is w_i - mean(w): there eps is the step of that difference,
whatever stores w. The same holds for parametrizations that are not known here.

The turn *to first order* is ||eps across w|| / ||w||, and for angles the metric's
sqrt(sum_i m_i eps_i^2), m_i = sin^2 theta_1 ... sin^2 theta_{i-1}. It is no bound: a long step may
turn a unit more than the metric where it starts says, but never more than ||eps||.
"""

import math

import torch
from torch import Tensor

from geoparam import sphere
from geoparam.analysis.boundary import groups_of_units
from geoparam.analysis.perturbation.perturbed_layer import LayerState
from geoparam.analysis.perturbation.stored_parameters import (
    coordinates,
    direction_rows,
    read_stored,
)
from geoparam.analysis.reading.layer_sites import has_positions


def bound_turn(before: LayerState, after: LayerState) -> tuple[Tensor, Tensor, Tensor]:
    """Return length, first-order turn and bound of a step of the directions, in radians."""
    layer, norm, parts, _ = before
    held, row, other = coordinates(layer), direction_rows(layer), direction_rows(after.layer)
    mixed = norm is not None and groups_of_units(norm, has_positions(layer), len(parts.rows))
    if held == "sign" and not mixed:
        zero = torch.zeros_like(before.boundaries.scale)
        return zero, zero, zero
    if held == "latitude" and not mixed:
        latitude = read_stored(layer)["direction"]
        step = read_stored(after.layer)["direction"] - latitude
        size = sphere.length(step)
        turn = sphere.length(sphere.metric(latitude).sqrt() * step)
        return size, turn, size.clamp(max=math.pi)
    if row is None or other is None or mixed:
        row, other = parts.rows, after.parts.rows
    step, length, u = other - row, sphere.length(row), sphere.normalise(row)
    across = step - (step * u).sum(dim=-1, keepdim=True) * u
    size = sphere.length(step)
    turn = (size / length).clamp(max=1).asin()
    return size, sphere.length(across) / length, torch.where(size < length, turn, math.pi)


def may_flip(before: LayerState, after: LayerState) -> Tensor:
    """Return which units a step of this size could reverse by the sign of l, r or gamma."""
    flips = torch.zeros_like(before.boundaries.scale, dtype=torch.bool)
    for old, new in zip(_factors(before), _factors(after), strict=True):
        flips |= (old != new) & ((new - old).abs() >= old.abs())
    return flips


def _factors(of: LayerState) -> list[Tensor]:
    """Return r inside, gamma and l, (out,) or one number, whose signs are the unit's too."""
    length = None if direction_rows(of.layer) is None else read_stored(of.layer).get("length")
    factors = (of.parts.gain, of.parts.gamma, length)
    return [each.flatten() for each in factors if isinstance(each, Tensor)]
