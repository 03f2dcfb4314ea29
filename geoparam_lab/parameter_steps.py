"""Steps of a layer's stored parameters: how far boundaries turn and move.

What is perturbed is what an optimizer steps on, and not the weight computed from it:

| | direction | length | scale | offset |
| standard (SP) | w | | | b |
| weight normalization (WN) | v | l | | b |
| GmP in angles | theta, as latitude | | r | lam |
| GmP, intrinsic | d | | r | lam |

Norms need no table of their own: BN is WN in the norm of the data's covariance, with gamma for l
and beta for b, and LN is SP on the difference w_i - mean(w).

Two kinds of step are the papers'. In figure 1 every element but r's is moved by the same delta. In
propositions 2.3 to 2.5 -(1 + delta) w is added to w, or to v, and nothing to the other roles: that
reverses the unit. GmP stores no w. Its step has the length of the one that reverses the unit under
SP, (1 + delta) |r|, and the worst direction. Among angles that is theta_1: its metric is 1, so the
unit turns by the full length, at most by pi. For an intrinsic d it is the tangent from the origin:
the unit turns by arcsin of the length, and is reversed above 1.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import geoparam as gp
from geoparam import sphere
from geoparam.analysis import Boundaries, layer_boundaries

Steps = Mapping[str, Tensor]  # what is added, by role

DELTAS = (1e-4, 1e-3, 1e-2, 1e-1)  # figure 1's


@dataclass(frozen=True)
class Response:
    """How the boundaries of a layer's units answer to a step; NaN where there are none."""

    rotation: Tensor  # (out,), the turn of each boundary in degrees
    displacement: Tensor  # (out,), the move ||delta phi|| of its location
    after: Boundaries  # the boundaries after the step


def read_stored(layer: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that a layer stores, by their roles."""
    stored = dict(layer.named_parameters())
    original = "parametrizations.weight.original"
    names = {"direction": "weight", "offset": "bias"}
    if isinstance(layer, gp.GmPLayer):
        names = {"direction": "unit", "scale": "r", "offset": "lam"}
        if "latitude" in stored:
            names["direction"] = "latitude"
    elif f"{original}1" in stored:
        names = {"direction": f"{original}1", "length": f"{original}0", "offset": "bias"}

    roles = {role: stored[name] for role, name in names.items() if name in stored}
    is_sign = isinstance(layer, gp.GmPLayer) and layer.fan_in == 1
    has_other_length = "length" in roles and roles["length"].numel() != len(roles["length"])
    if has_other_length or ("direction" not in roles and not is_sign):
        raise ValueError(
            f"{type(layer).__name__} does not store its weight in one tensor, or in a length and "
            "a direction of each unit: what a step of it is, is not known."
        )
    return roles


def _has_angles(layer: nn.Module) -> bool:
    return "latitude" in dict(layer.named_parameters())


@torch.no_grad()
def make_constant_steps(layer: nn.Module, delta: float) -> Steps:
    """Return a step that moves every stored element but r's by delta; theta gains delta.

    Example:
        >>> steps = make_constant_steps(gp.GmPLinear(2, 1), 0.5)
        >>> {role: step.tolist() for role, step in steps.items()}
        {'direction': [[-0.5]], 'offset': [0.5]}
    """
    stored = read_stored(layer)
    stored.pop("scale", None)
    steps = {role: torch.full_like(value.double(), delta) for role, value in stored.items()}
    if _has_angles(layer):
        steps["direction"] *= -1  # the latitude is pi/2 - theta
    return steps


@torch.no_grad()
def make_reversing_steps(layer: nn.Module, delta: float) -> Steps:
    """Return -(1 + delta) w for a stored w or v, and for GmP the worst step of that length."""
    if delta <= 0:
        raise ValueError(f"a step of -(1 + delta) w needs delta > 0; got {delta:g}.")
    stored = read_stored(layer)
    if "direction" not in stored:  # one input: a sign
        return {}
    d = stored["direction"].double()
    if isinstance(layer, gp.GmPLayer):
        return {"direction": _find_worst_step(layer, d, delta)}
    return {"direction": -(1 + delta) * d}


def _find_worst_step(layer: gp.GmPLayer, d: Tensor, delta: float) -> Tensor:
    reach = (1 + delta) * layer.r.double().abs()[:, None]
    if _has_angles(layer):
        return torch.cat([-reach, torch.zeros_like(d[:, 1:])], dim=1)

    # The worst step of d ends where a line from the origin touches the ball about d of the step's
    # length. Once the origin is inside that ball, d can be reversed.
    u = sphere.normalise(d)
    share = reach / sphere.length(d)[:, None]
    axis = nn.functional.one_hot(u.abs().argmin(dim=1), u.shape[1]).to(u.dtype)
    tangent = sphere.normalise(axis - (u * axis).sum(dim=1, keepdim=True) * u)
    touching = (1 - share.square()).clamp(min=0).sqrt() * tangent - share * u
    return reach * torch.where(share < 1, touching, -u)


@torch.no_grad()
def respond(layer: nn.Module, steps: Steps) -> Response:
    """Return how the boundaries of one layer's units answer to steps, by role.

    Steps are rounded to what the parameters can hold; turns and moves are those of the rounded
    step, in float64.

    Example:
        >>> layer = nn.Linear(2, 1, bias=False)
        >>> _ = nn.init.constant_(layer.weight, 2.0)
        >>> respond(layer, {"direction": torch.tensor([[0.0, -2.0]])}).rotation.tolist()
        [45.0]
    """
    stored = read_stored(layer)
    missing = sorted(set(steps) - set(stored))
    if missing:
        raise ValueError(f"this layer has the roles {', '.join(stored)}; got steps of {missing}.")
    before, after = copy.deepcopy(layer), copy.deepcopy(layer)
    for role, step in steps.items():
        value = stored[role]
        read_stored(after)[role].copy_((value.double() + step).to(value.dtype))
    before.double()
    after.double()

    old, new = layer_boundaries(before), layer_boundaries(after)
    angle = sphere.angle_between(old.direction, new.direction)
    return Response(
        rotation=angle.rad2deg(),
        displacement=(old.location - new.location).norm(dim=-1),
        after=new,
    )
