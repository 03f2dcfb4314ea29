"""Steps of what a layer stores: constant, Gaussian, or as bad as a step of some length can be.

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

from collections.abc import Iterable
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from geoparam import sphere
from geoparam.analysis.boundary import gather
from geoparam.analysis.perturbation.stored_parameters import Role, coordinates, read_stored
from geoparam.base_layer import GmPLayer

Kind = Literal["constant", "gaussian", "adversarial"]

KINDS: tuple[Kind, ...] = get_args(Kind)
MOVED: tuple[Role, ...] = ("direction", "length", "offset", "gamma", "beta")


@torch.no_grad()
def make_steps(
    layer: nn.Module,
    kind: Kind = "constant",
    delta: float = 1e-3,
    *,
    norm: nn.Module | None = None,
    move: Iterable[Role] = MOVED,
    generator: torch.Generator | None = None,
) -> dict[str, Tensor]:
    """Return a perturbation of one layer and the norm after it: float64 steps by role.

    Example:
        >>> from geoparam import GmPLinear
        >>> {role: step.tolist() for role, step in make_steps(GmPLinear(2, 1), delta=0.5).items()}
        {'direction': [[-0.5]], 'offset': [0.5]}
    """
    move = tuple(move)
    check_steps([kind], [delta], move)
    held = {role: sphere.wide(t) for role, t in read_stored(layer, norm).items() if role in move}
    if kind == "adversarial":
        return {"direction": _reversal(layer, delta)} if "direction" in held else {}
    if kind == "gaussian":
        return {role: delta * _noise(tensor, generator) for role, tensor in held.items()}
    signs = {"direction": -1} if coordinates(layer) == "latitude" else {}
    return {role: torch.full_like(t, signs.get(role, 1) * delta) for role, t in held.items()}


def check_steps(kinds: Iterable[str], deltas: Iterable[float], move: Iterable[str]) -> None:
    """Refuse kinds, sizes and roles that do not exist."""
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown:
        raise ValueError(f"a kind is one of {', '.join(KINDS)}; got {unknown[0]!r}.")
    strange = [role for role in move if role not in get_args(Role)]
    if strange:
        raise ValueError(f"`move` names roles: {', '.join(get_args(Role))}; got {strange[0]!r}.")
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
