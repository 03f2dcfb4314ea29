r"""What a layer and the norm after it store, by role, and steps of it.

| | direction | length | scale | offset | norm after it |
| standard (SP) | w | | | b | gamma, beta |
| weight normalization (WN) | v | l | | b | gamma, beta |
| GmP in angles | theta, as latitude | | r | lam | gamma, beta |
| GmP, intrinsic | d | | r | lam | gamma, beta |

These are the tensors that an optimizer steps on. A layer with one input under GmP stores no
direction, a layer without bias no offset. Another parametrization of torch has its one original
tensor as direction. The kinds of step:

    constant      delta is added to every element. To theta, that is: the stored latitude is
                  pi/2 - theta and loses delta.
    gaussian      N(0, delta^2) is added to every element.
    adversarial   -(1 + delta) w is added to w, or to v, and nothing to the other roles
                  (Propositions 2.3-2.5). All units of a layer flip together, so LayerNorm's too.

GmP has no w to be reversed. Its adversary gets a step as long as the one that reverses the same
unit under SP, (1 + delta) |r|, and spends it as badly as can be. Among angles that is theta_1,
the only one whose metric is 1 everywhere: the unit turns by exactly that length, up to pi. An
intrinsic d turns by arcsin of it, and reverses where it is above 1, which is no small step.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import _WeightNorm
from torch.nn.utils.parametrize import is_parametrized

from geoparam import sphere
from geoparam.analysis.boundary import gather
from geoparam.analysis.reading.layer_sites import copy_in_float64, is_transposed
from geoparam.base_layer import GmPLayer

Kind = Literal["constant", "gaussian", "adversarial"]
Steps = Mapping[str, Tensor]  # what is added, by role

KINDS: tuple[Kind, ...] = get_args(Kind)
MOVED = ("direction", "length", "offset", "gamma", "beta")  # all but r, as in figure 1


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
    check_steps([kind], [delta])
    held = {role: sphere.wide(t) for role, t in read_stored(layer, norm).items() if role in MOVED}
    if kind == "adversarial":
        return {"direction": _reversal(layer, delta)} if "direction" in held else {}
    if kind == "gaussian":
        return {role: delta * _noise(tensor, generator) for role, tensor in held.items()}
    signs = {"direction": -1} if coordinates(layer) == "latitude" else {}
    return {role: torch.full_like(t, signs.get(role, 1) * delta) for role, t in held.items()}


def perturb_layer(
    layer: nn.Module, steps: Steps, norm: nn.Module | None = None
) -> tuple[nn.Module, nn.Module | None]:
    """Return copies of a layer and the norm after it with steps added, in float64.

    Read them, with `layer_boundaries` for example; do not train them.

    Example:
        >>> layer = nn.Linear(2, 1)
        >>> _ = nn.init.constant_(layer.bias, 0.5)
        >>> other, _ = perturb_layer(layer, {"offset": torch.ones(1)})
        >>> other.bias.item()
        1.5
    """
    values = add_steps(layer, norm, steps)

    def copy_with_steps(module: nn.Module) -> nn.Module:
        other = copy_in_float64(module)
        for name, value in values[module].items():
            other.get_parameter(name).copy_(value)
        return other

    return copy_with_steps(layer), None if norm is None else copy_with_steps(norm)


def check_steps(kinds: Iterable[str], deltas: Iterable[float]) -> None:
    """Refuse kinds and sizes that do not exist."""
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown:
        raise ValueError(f"a kind is one of {', '.join(KINDS)}; got {unknown[0]!r}.")
    if "adversarial" in kinds and min(deltas, default=1) <= 0:
        raise ValueError("the adversarial -(1 + delta) w needs delta > 0; at 0 nothing is left.")


def _noise(like: Tensor, generator: torch.Generator | None) -> Tensor:
    device = like.device if generator is None else generator.device
    drawn = torch.randn(like.shape, generator=generator, device=device, dtype=like.dtype)
    return drawn.to(like.device)


def _reversal(layer: nn.Module, delta: float) -> Tensor:
    """Return -(1 + delta) w for a stored w or v, and for GmP the worst step of that length."""
    direction = sphere.wide(read_stored(layer)["direction"])
    if not isinstance(layer, GmPLayer):
        return -(1 + delta) * direction
    reach = (1 + delta) * sphere.wide(gather(layer.r.detach())).abs()
    if coordinates(layer) == "unit":
        return _furthest(direction, reach[:, None])
    step = torch.zeros_like(direction)
    step[:, 0] = -reach
    return step


def _furthest(d: Tensor, reach: Tensor) -> Tensor:
    """Return the steps of length `reach` that turn the rows `d` most.

    Such a step ends where a line from the origin touches the ball of radius `reach` about d. Once
    the origin is inside that ball, a row can be reversed.
    """
    u, share = sphere.normalise(d), reach / sphere.length(d)[:, None]
    axis = nn.functional.one_hot(u.abs().argmin(dim=1), u.shape[1]).to(u.dtype)
    tangent = sphere.normalise(axis - (u * axis).sum(dim=1, keepdim=True) * u)
    touching = (1 - share.square()).clamp(min=0).sqrt() * tangent - share * u
    return reach * torch.where(share < 1, touching, -u)


# --- what is stored ---------------------------------------------------------------------------


def read_stored(layer: nn.Module, norm: nn.Module | None = None) -> dict[str, Tensor]:
    """Return the parameters that a layer and the norm after it store, by their roles."""
    found = {}
    for module, names in _names_by_role(layer, norm):
        parameters = dict(module.named_parameters())
        for role, name in names.items():
            if name in parameters:
                found[role] = gather(parameters[name].detach())
    if "direction" not in found and coordinates(layer) != "sign":
        raise ValueError(
            f"{type(layer).__name__} does not store its weight in one tensor, or in a length and "
            "a direction: what a perturbation of it is, is not known. Leave it out by `layers`."
        )
    return found


def add_steps(
    layer: nn.Module, norm: nn.Module | None, steps: Steps
) -> dict[nn.Module, dict[str, Tensor]]:
    """Return the parameters that have a step, with it added, by module and name.

    Steps are added in float64 and rounded to the storage type.
    """
    held = read_stored(layer, norm)
    missing = sorted(set(steps) - set(held))
    if missing:
        raise ValueError(f"this layer has the roles {', '.join(held)}; got steps of {missing}.")
    return {
        module: {
            name: (sphere.wide(held[role]) + steps[role]).to(held[role].dtype)
            for role, name in names.items()
            if role in steps
        }
        for module, names in _names_by_role(layer, norm)
    }


def coordinates(layer: nn.Module) -> str:
    """Return how a layer stores directions: "latitude", "unit" or "sign"; "weight" if not GmP."""
    return layer._coordinates.name if isinstance(layer, GmPLayer) else "weight"


def read_direction_rows(layer: nn.Module) -> Tensor | None:
    """Return the stored vectors (out, n) that units point along; None where there are none.

    Angles are no such vectors, and a parametrization may make a row of the weight from several.
    """
    held = read_stored(layer)
    dim = 1 if is_transposed(layer) else 0
    length = held.get("length")
    if length is None:
        mixed = coordinates(layer) == "weight" and is_parametrized(layer, "weight")
    else:
        mixed = length.numel() != 1 and length.numel() != length.shape[dim]
    if mixed or coordinates(layer) in ("latitude", "sign"):
        return None
    return held["direction"].t() if dim else held["direction"].flatten(1)


def _names_by_role(
    layer: nn.Module, norm: nn.Module | None
) -> list[tuple[nn.Module, dict[str, str]]]:
    """Return layer and norm, each with the names of its parameters by role."""
    found = [(layer, _layer_names(layer))]
    return found if norm is None else [*found, (norm, {"gamma": "weight", "beta": "bias"})]


def _layer_names(layer: Any) -> dict[str, str]:
    if isinstance(layer, GmPLayer):
        return {"direction": layer._coordinates.name, "scale": "r", "offset": "lam"}
    if isinstance(layer, nn.MultiheadAttention):
        return {"direction": "in_proj_weight", "offset": "in_proj_bias"}
    if hasattr(layer, "weight_v"):  # the older torch weight_norm
        return {"direction": "weight_v", "length": "weight_g", "offset": "bias"}
    if not is_parametrized(layer, "weight"):
        return {"direction": "weight", "offset": "bias"}
    chain, original = layer.parametrizations.weight, "parametrizations.weight.original"
    if len(chain) == 1 and isinstance(chain[0], _WeightNorm):
        return {"direction": f"{original}1", "length": f"{original}0", "offset": "bias"}
    return {"direction": original, "offset": "bias"}
