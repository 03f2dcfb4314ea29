r"""What a layer and the norm after it store, by role, and steps of it.

| | direction | length | scale | offset | norm after it |
| standard (SP) | w | | | b | gamma, beta |
| weight normalization (WN) | v | l | | b | gamma, beta |
| GmP in angles | theta, as latitude | | r | lam | gamma, beta |
| GmP, intrinsic | d | | r | lam | gamma, beta |

A layer with one input under GmP stores no direction, a layer without bias no offset. Other
parametrizations than weight_norm with a length for each unit are refused. The kinds of step, of
all roles but r, as in the papers' figure 1:

    constant      delta is added to every element. To theta, that is: the stored latitude is
                  pi/2 - theta and loses delta.
    gaussian      N(0, delta^2) is added to every element.
    adversarial   -(1 + delta) w is added to w, or to v, and nothing to the other roles
                  (Propositions 2.3-2.5). All units of a layer flip together, so LayerNorm's too.

GmP stores no w to reverse. Its adversary takes a step of the same length as the one that reverses
the unit under SP, (1 + delta) |r|, in the worst direction. Among angles that is theta_1: its
metric is 1, so the unit turns by the full length, at most by pi. For an intrinsic d it is the
tangent from the origin: the unit turns by arcsin of the length, and is reversed above 1.
"""

from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import _WeightNorm
from torch.nn.utils.parametrize import is_parametrized
from torch.nn.utils.weight_norm import WeightNorm

from geoparam import sphere
from geoparam.base_layer import GmPLayer
from geoparam.inspection import full_tensor, is_conv1d

Kind = Literal["constant", "gaussian", "adversarial"]
Steps = Mapping[str, Tensor]  # what is added, by role

KINDS: tuple[Kind, ...] = get_args(Kind)


@torch.no_grad()
def make_steps(
    layer: nn.Module,
    kind: Kind = "constant",
    delta: float = 1e-3,
    *,
    norm: nn.Module | None = None,
    generator: torch.Generator | None = None,
) -> dict[str, Tensor]:
    """Return a perturbation of one layer and the norm after it: float64 steps by role.

    Example:
        >>> from geoparam import GmPLinear
        >>> {role: step.tolist() for role, step in make_steps(GmPLinear(2, 1), delta=0.5).items()}
        {'direction': [[-0.5]], 'offset': [0.5]}
    """
    if kind not in KINDS:
        raise ValueError(f"a kind is one of {', '.join(KINDS)}; got {kind!r}.")
    if kind == "adversarial" and delta <= 0:
        raise ValueError("the adversarial -(1 + delta) w needs delta > 0; at 0 nothing is left.")
    held = {role: sphere.wide(t) for role, t in read_stored(layer, norm).items()}
    held.pop("scale", None)
    if kind == "adversarial":
        return {"direction": _reversal(layer, delta)} if "direction" in held else {}
    steps = {}
    for role, stored in held.items():
        if kind == "gaussian":
            device = stored.device if generator is None else generator.device
            noise = torch.randn(
                stored.shape, generator=generator, device=device, dtype=stored.dtype
            )
            steps[role] = delta * noise.to(stored.device)
        else:
            sign = -1 if role == "direction" and coordinates(layer) == "latitude" else 1
            steps[role] = torch.full_like(stored, sign * delta)
    return steps


def _reversal(layer: nn.Module, delta: float) -> Tensor:
    """Return -(1 + delta) w for a stored w or v, and for GmP the worst step of that length.

    The worst step of an intrinsic d ends where a line from the origin touches the ball about d of
    the step's length. Once the origin is inside that ball, d can be reversed.
    """
    d = sphere.wide(read_stored(layer)["direction"])
    if not isinstance(layer, GmPLayer):
        return -(1 + delta) * d
    reach = (1 + delta) * sphere.wide(full_tensor(layer.r.detach())).abs()[:, None]
    if coordinates(layer) == "latitude":
        return torch.cat([-reach, torch.zeros_like(d[:, 1:])], dim=1)
    u, share = sphere.normalise(d), reach / sphere.length(d)[:, None]
    axis = nn.functional.one_hot(u.abs().argmin(dim=1), u.shape[1]).to(u.dtype)
    tangent = sphere.normalise(axis - (u * axis).sum(dim=1, keepdim=True) * u)
    touching = (1 - share.square()).clamp(min=0).sqrt() * tangent - share * u
    return reach * torch.where(share < 1, touching, -u)


def read_stored(layer: nn.Module, norm: nn.Module | None = None) -> dict[str, Tensor]:
    """Return the parameters that a layer and the norm after it store, by their roles."""
    places = _find_stored(layer, norm).items()
    return {role: full_tensor(m.get_parameter(name).detach()) for role, (m, name) in places}


def add_steps(
    layer: nn.Module, norm: nn.Module | None, steps: Steps
) -> dict[tuple[nn.Module, str], Tensor]:
    """Return the parameters that have a step, with it added, by module and name.

    Steps are added in float64 and rounded to the storage type.
    """
    places, held = _find_stored(layer, norm), read_stored(layer, norm)
    missing = sorted(set(steps) - set(held))
    if missing:
        raise ValueError(f"this layer has the roles {', '.join(held)}; got steps of {missing}.")
    sums = {role: sphere.wide(held[role]) + step for role, step in steps.items()}
    return {places[role]: value.to(held[role].dtype) for role, value in sums.items()}


def coordinates(layer: nn.Module) -> str:
    """Return how a layer stores directions: "latitude", "unit" or "sign"; "weight" if not GmP."""
    return layer._coordinates.name if isinstance(layer, GmPLayer) else "weight"


def read_direction_rows(layer: nn.Module) -> Tensor:
    """Return the stored direction of each unit as a row: its angles, or a vector along it."""
    held = read_stored(layer)["direction"]
    return held.t() if is_conv1d(layer) else held.flatten(1)


def _find_stored(
    layer: nn.Module, norm: nn.Module | None = None
) -> dict[str, tuple[nn.Module, str]]:
    """Return the module and the name of the parameter that each role has."""
    named = [(layer, role, name) for role, name in _layer_names(layer).items()]
    if norm is not None:
        named += [(norm, "gamma", "weight"), (norm, "beta", "bias")]
    found = {r: (m, name) for m, r, name in named if name in dict(m.named_parameters())}
    if "direction" not in found and coordinates(layer) != "sign":
        raise ValueError(
            f"{type(layer).__name__} does not store its weight in one tensor, or in a length and "
            "a direction of each unit: what a perturbation of it is, is not known. Leave it out "
            "by `layers`."
        )
    return found


def _layer_names(layer: Any) -> dict[str, str]:
    if isinstance(layer, GmPLayer):
        return {"direction": layer._coordinates.name, "scale": "r", "offset": "lam"}
    if isinstance(layer, nn.MultiheadAttention):
        return {"direction": "in_proj_weight", "offset": "in_proj_bias"}
    units_dim = int(is_conv1d(layer))
    hooks = layer._forward_pre_hooks.values()
    if any(isinstance(hook, WeightNorm) and hook.dim == units_dim for hook in hooks):
        return {"direction": "weight_v", "length": "weight_g", "offset": "bias"}
    if not is_parametrized(layer, "weight"):
        return {"direction": "weight", "offset": "bias"}
    chain, original = layer.parametrizations.weight, "parametrizations.weight.original"
    if len(chain) == 1 and isinstance(chain[0], _WeightNorm) and chain[0].dim == units_dim:
        return {"direction": f"{original}1", "length": f"{original}0", "offset": "bias"}
    return {}
