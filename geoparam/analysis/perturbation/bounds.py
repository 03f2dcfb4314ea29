"""How far a step of some length could turn a unit, beside how far it does to first order.

For a step eps of the stored direction, finite or not:

    SP, WN, intrinsic     arcsin(||eps|| / ||w||) while ||eps|| < ||w||, else 180 degrees
    angles                ||eps||: the path's length, which is at least the angle (Theorem 3.7)

Both are attained by some step of that length (the second by theta_1 alone), so nothing less can
be promised. Where a sign may flip, of l, of gamma or of an r inside the activation, which takes a
step as large as they are, the bound is 180 degrees under every parameterization, GmP included.
Under LayerNorm a unit's direction is w_i - mean(w): there eps is the step of that difference,
whatever stores w. The same holds for parametrizations that are not known here.

Beside the bound stands the turn *to first order*, ||eps across w|| / ||w||, and for angles the
metric's sqrt(sum_i m_i eps_i^2), m_i = sin^2 theta_1 ... sin^2 theta_{i-1}. It is no bound: a long
step may turn a unit more than the metric where it starts says, but never more than ||eps||.
"""

import math

import torch
from torch import Tensor

from geoparam import sphere
from geoparam.analysis.boundary import groups_of_units
from geoparam.analysis.perturbation.perturbed_layer import Seen
from geoparam.analysis.reading.layer_sites import has_positions
from geoparam.analysis.stored_parameters import coordinates, rows, stored


def reach(before: Seen, after: Seen) -> tuple[Tensor, Tensor, Tensor]:
    """Return length, first-order turn and bound of the step that directions took, in radians."""
    layer, norm, made_of, _ = before
    held, row, other = coordinates(layer), rows(layer), rows(after.layer)
    if norm is not None and groups_of_units(norm, has_positions(layer), len(made_of.rows)):
        return _straight(made_of.rows, after.parts.rows)
    if held == "sign":
        zero = torch.zeros_like(before.found.scale)
        return zero, zero, zero
    if held == "latitude":
        return _along_sphere(stored(layer)["direction"], stored(after.layer)["direction"])
    if row is None or other is None:
        return _straight(made_of.rows, after.parts.rows)
    return _straight(row, other)


def _straight(row: Tensor, moved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the three for vectors of any length, of which the direction counts."""
    step, length, u = moved - row, sphere.length(row), sphere.normalise(row)
    across = step - (step * u).sum(dim=-1, keepdim=True) * u
    size = sphere.length(step)
    turn = (size / length).clamp(max=1).asin()
    return size, sphere.length(across) / length, torch.where(size < length, turn, math.pi)


def _along_sphere(latitude: Tensor, moved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the three for angles."""
    step = moved - latitude
    size = sphere.length(step)
    turn = sphere.length(sphere.metric(latitude).sqrt() * step)
    return size, turn, size.clamp(max=math.pi)


def may_flip(before: Seen, after: Seen) -> Tensor:
    """Return which units a step of this size could reverse by the sign of l, r or gamma."""
    flips = torch.zeros_like(before.found.scale, dtype=torch.bool)
    for old, new in zip(_factors(before), _factors(after), strict=True):
        flips |= (old != new) & ((new - old).abs() >= old.abs())
    return flips


def _factors(of: Seen) -> list[Tensor]:
    """Return r inside, gamma and l, (out,) or one number, whose signs are the unit's too."""
    length = None if rows(of.layer) is None else stored(of.layer).get("length")
    factors = (of.parts.gain, of.parts.gamma, length)
    return [each.flatten() for each in factors if each is not None]
