r"""Perturbations of stored parameters: how far boundaries turn and move, and how far they could.

What is perturbed is what an optimizer steps on, by its role (`geoparam.analysis.roles`), and not
the weight that follows from it: by default all but r, as in the papers' figure 1, which moves
(w, b), (v, l, b) and (theta, lam). There are three kinds of step:

    constant      delta is added to every number. To theta, that is: the stored latitude is
                  pi/2 - theta and loses delta.
    gaussian      N(0, delta^2) is added to every number.
    adversarial   -(1 + delta) w is added to w, or to v, and nothing to the other roles
                  (Propositions 2.3-2.5). All units of a layer flip together, so LayerNorm's too.

GmP has no w to be reversed. Its adversary gets a step as long as the one that reverses the same
unit under SP, (1 + delta) |r|, and spends it as badly as can be. Among angles that is theta_1,
the only one whose metric is 1 everywhere: the unit turns by exactly that length, up to pi. An
intrinsic d turns by arcsin of it, and reverses where it is above 1, which is no small step.

**Bounds**, for a step eps of the stored direction, finite or not:

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

**What is exact.** Steps are added in float64 and rounded to the storage type; turns, moves and
bounds are those of the rounded step, in float64. The model is not touched: what is measured is a
twin of the perturbed layer, one layer at a time.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from geoparam import sphere
from geoparam.analysis.boundary import (
    Boundaries,
    Parts,
    Statistics,
    gathered,
    groups_of_units,
    made_boundaries,
    parts,
)
from geoparam.analysis.reading.activations import Activation, Breaks, breaks
from geoparam.analysis.reading.moments import Moments, batch_moments, has_running
from geoparam.analysis.reading.sites import (
    Follows,
    Layers,
    Site,
    find_sites,
    has_positions,
    unwrap,
)
from geoparam.analysis.roles import Role, Steps, coordinates, moved, rows, stored, twin
from geoparam.plan import Inputs
from geoparam.unit import GmPLayer

Kind = Literal["constant", "gaussian", "adversarial"]

KINDS: tuple[Kind, ...] = get_args(Kind)
MOVED: tuple[Role, ...] = ("direction", "length", "offset", "gamma", "beta")
DELTAS = (1e-4, 1e-3, 1e-2, 1e-1)  # figure 1's


@dataclass(frozen=True)
class Response:
    """How the boundaries of a layer's units answer to a perturbation; NaN where there are none.

    Attributes:
        rotation: (out,), the turn of each boundary in degrees.
        displacements: (K, out), the move ||delta phi|| of its location, at the K breakpoints.
        step: (out,), ||eps||, the length of the step of the stored direction.
        first_order: (out,), the turn in degrees to first order in eps; for angles, the metric's.
        bound: (out,), the turn in degrees that no step of this length exceeds.
    """

    rotation: Tensor
    displacements: Tensor
    step: Tensor
    first_order: Tensor
    bound: Tensor

    @property
    def displacement(self) -> Tensor:
        """(out,), at the first breakpoint; ReLU and its relatives have no other."""
        return self.displacements[0]


class Row(NamedTuple):
    """One line of a sweep: turns in degrees, displacements in the units of the layer's input."""

    layer: str
    kind: str
    delta: float
    rotation_max: float
    rotation_median: float
    displacement_max: float
    displacement_median: float
    first_order_max: float
    bound_max: float


# --- whole models -------------------------------------------------------------------------------


def perturb(
    model: nn.Module,
    inputs: Inputs | None = None,
    kind: Kind = "constant",
    delta: float = 1e-3,
    *,
    move: Iterable[Role] = MOVED,
    layers: Layers = None,
    statistics: Statistics = "running",
    follows: Follows | None = None,
    generator: torch.Generator | None = None,
) -> dict[str, Response]:
    """Perturb each layer of a model by itself and return how its boundaries answer, by name.

    The model is afterwards what it was, bit for bit. Distances are known where `boundaries` knows
    them: without `inputs` there are turns alone.

    Args:
        model: Any model: SP, torch's weight_norm, BatchNorm, LayerNorm, GmP.
        inputs: A batch as the model takes it.
        kind: "constant", "gaussian" or "adversarial".
        delta: The size of the perturbation; what it means depends on `kind`.
        move: The roles that are perturbed: "direction", "length", "scale", "offset", "gamma" and
            "beta", where a layer and the norm after it have them.
        layers: Names, or a function of module and name; all by default.
        statistics: "running", where BatchNorm's stay as they are, or those of the batch `inputs`,
            which move with the perturbed weight, as in training. Norms without running statistics
            always see the batch anew: one run of the model for each layer and perturbation.
        follows: Norm and activation by layer name, where they are known better than found.
        generator: Where Gaussian noise comes from.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 1), nn.ReLU())
        >>> _ = nn.init.constant_(model[0].weight, 1e-3), nn.init.zeros_(model[0].bias)
        >>> perturb(model, torch.zeros(1, 2), "adversarial", 0.5)["0"].rotation.tolist()
        [180.0]
    """
    each = _responses(model, inputs, [kind], [delta], move, layers, statistics, follows, generator)
    return {name: response for name, _, _, response in each}


def sweep(
    model: nn.Module,
    inputs: Inputs | None = None,
    kinds: Iterable[Kind] = KINDS,
    deltas: Iterable[float] = DELTAS,
    *,
    move: Iterable[Role] = MOVED,
    layers: Layers = None,
    statistics: Statistics = "running",
    follows: Follows | None = None,
    generator: torch.Generator | None = None,
) -> list[Row]:
    """Perturb as `perturb` does, by every kind and size, and return one row for each.

    All sizes scale the same Gaussian noise, so that rows differ by delta alone.

    Example:
        >>> from geoparam import GmPLinear
        >>> rows = sweep(GmPLinear(2, 5), kinds=["constant"], deltas=[0.01, 0.1])
        >>> [f"{row.delta:g} rad: {row.rotation_max:.3f} degrees" for row in rows]
        ['0.01 rad: 0.573 degrees', '0.1 rad: 5.730 degrees']
    """
    each = _responses(model, inputs, kinds, deltas, move, layers, statistics, follows, generator)
    return [_row(*one) for one in each]


def _responses(
    model: nn.Module,
    inputs: Inputs | None,
    kinds: Iterable[Kind],
    deltas: Iterable[float],
    move: Iterable[Role],
    layers: Layers,
    statistics: Statistics,
    follows: Follows | None,
    generator: torch.Generator | None,
) -> Iterator[tuple[str, Kind, float, Response]]:
    """Yield layer by layer, so that no more than one is held in perturbed form."""
    kinds, deltas, move = list(kinds), list(deltas), tuple(move)
    _check(kinds, deltas, move)
    if statistics not in get_args(Statistics) or (statistics == "batch" and inputs is None):
        raise ValueError(
            f"statistics is 'running', or 'batch' with `inputs`; got {statistics!r} "
            f"{'without' if inputs is None else 'with'} inputs."
        )
    for name, site in find_sites(model, inputs, layers, follows).items():
        see = _observer(unwrap(model), inputs, site, statistics)
        before = see({})
        for kind in kinds:
            for delta, each in _scaled(site, kind, deltas, move, generator):
                yield name, kind, delta, _compare(before, see(each))


def _scaled(
    site: Site,
    kind: Kind,
    deltas: list[float],
    move: tuple[Role, ...],
    generator: torch.Generator | None,
) -> Iterator[tuple[float, Steps]]:
    if kind == "adversarial":
        for delta in deltas:
            yield delta, steps(site.layer, kind, delta, norm=site.norm, move=move)
        return
    unit = steps(site.layer, kind, 1.0, norm=site.norm, move=move, generator=generator)
    for delta in deltas:
        yield delta, {role: delta * step for role, step in unit.items()}


def _row(layer: str, kind: str, delta: float, response: Response) -> Row:
    turn, move = response.rotation, response.displacements
    return Row(
        layer,
        kind,
        delta,
        rotation_max=_known(turn, Tensor.max),
        rotation_median=_known(turn, Tensor.median),
        displacement_max=_known(move, Tensor.max),
        displacement_median=_known(move, Tensor.median),
        first_order_max=_known(response.first_order, Tensor.max),
        bound_max=_known(response.bound, Tensor.max),
    )


def _known(values: Tensor, summary: Callable[[Tensor], Tensor]) -> float:
    """Return a summary over the units that have a boundary both before and after."""
    values = values[~values.isnan()]
    return summary(values).item() if len(values) else math.nan


# --- one layer ----------------------------------------------------------------------------------


@torch.no_grad()
def respond(
    layer: nn.Module,
    steps: Steps,
    norm: nn.Module | None = None,
    activation: Activation | None = None,
    moments: Moments | None = None,
    moments_after: Moments | None = None,
) -> Response:
    """Return how the boundaries of one layer's units answer to any steps.

    Args:
        layer: Linear, Conv1d-3d, with or without torch's weight_norm, or a GmP layer.
        steps: What to add, by role, in the shape of what is `stored`.
        norm: The norm after it.
        activation: The activation after that, ReLU by default.
        moments: The norm's mean and deviation, where it has no running ones.
        moments_after: The same after the perturbation, where they moved.

    Example:
        >>> layer = nn.Linear(2, 1, bias=False)
        >>> _ = nn.init.constant_(layer.weight, 2.0)
        >>> respond(layer, {"direction": torch.tensor([[0.0, -2.0]])}).rotation.tolist()
        [45.0]
    """
    given = activation if activation is not None else getattr(layer, "activation", None)
    points = breaks(nn.ReLU() if given is None else given)
    later = moments if moments_after is None else moments_after
    before = _see(layer, {}, norm, points, moments)
    return _compare(before, _see(layer, steps, norm, points, later))


@torch.no_grad()
def steps(
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
        >>> {role: step.tolist() for role, step in steps(GmPLinear(2, 1), delta=0.5).items()}
        {'direction': [[-0.5]], 'offset': [0.5]}
    """
    move = tuple(move)
    _check([kind], [delta], move)
    held = {role: sphere.wide(t) for role, t in stored(layer, norm).items() if role in move}
    if kind == "adversarial":
        return {"direction": _reversal(layer, delta)} if "direction" in held else {}
    if kind == "gaussian":
        return {role: delta * _noise(tensor, generator) for role, tensor in held.items()}
    found: dict[str, Tensor] = {
        role: torch.full_like(tensor, delta) for role, tensor in held.items()
    }
    if coordinates(layer) == "latitude" and "direction" in found:
        found["direction"].neg_()
    return found


def perturbed(
    layer: nn.Module, steps: Steps, norm: nn.Module | None = None
) -> tuple[nn.Module, nn.Module | None]:
    """Return twins of a layer and the norm after it with steps added, in float64.

    They are to be looked at, by `layer_boundaries` for example, and not to be run or trained.

    Example:
        >>> layer = nn.Linear(2, 1)
        >>> other, _ = perturbed(layer, {"offset": 1 - layer.bias.detach()})
        >>> other.bias
        tensor([1.], dtype=torch.float64)
    """
    values = moved(layer, norm, steps)
    return twin(layer, values[layer]), None if norm is None else twin(norm, values[norm])


def _noise(like: Tensor, generator: torch.Generator | None) -> Tensor:
    device = like.device if generator is None else generator.device
    drawn = torch.randn(like.shape, generator=generator, device=device, dtype=like.dtype)
    return drawn.to(like.device)


def _reversal(layer: nn.Module, delta: float) -> Tensor:
    """Return -(1 + delta) w for a stored w or v, and for GmP the worst step of that length."""
    direction = sphere.wide(stored(layer)["direction"])
    if not isinstance(layer, GmPLayer):
        return -(1 + delta) * direction
    reach = (1 + delta) * sphere.wide(gathered(layer.r.detach())).abs()
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


def _check(kinds: Iterable[str], deltas: Iterable[float], move: Iterable[str]) -> None:
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown:
        raise ValueError(f"a kind is one of {', '.join(KINDS)}; got {unknown[0]!r}.")
    strange = [role for role in move if role not in get_args(Role)]
    if strange:
        raise ValueError(f"`move` names roles: {', '.join(get_args(Role))}; got {strange[0]!r}.")
    if "adversarial" in kinds and min(deltas, default=1) <= 0:
        raise ValueError("the adversarial -(1 + delta) w needs delta > 0; at 0 nothing is left.")


# --- before and after ---------------------------------------------------------------------------


class _Seen(NamedTuple):
    """A layer and its norm with given values, in float64, what they are made of, and do."""

    layer: nn.Module
    norm: nn.Module | None
    parts: Parts
    found: Boundaries


def _see(
    layer: nn.Module,
    steps: Steps,
    norm: nn.Module | None,
    points: Breaks | None,
    moments: Moments | None,
) -> _Seen:
    other, other_norm = perturbed(layer, steps, norm)
    made_of = parts(other, other_norm, moments)
    return _Seen(other, other_norm, made_of, made_boundaries(made_of, points))


def _observer(
    model: nn.Module, inputs: Inputs | None, site: Site, statistics: Statistics
) -> Callable[[Steps], _Seen]:
    """Return a function that shows a site after given steps, its norm's moments made anew."""
    kept = statistics == "running" and has_running(site.norm)
    runs = inputs is not None and any(call.norm is not None for call in site.calls)

    @torch.no_grad()
    def see(steps: Steps) -> _Seen:
        moments = None
        if inputs is not None and runs and not kept:
            moments = _moments(model, inputs, site, steps, statistics == "batch")
        return _see(site.layer, steps, site.norm, site.breaks, moments)

    return see


def _moments(
    model: nn.Module, inputs: Inputs, site: Site, steps: Steps, training: bool
) -> Moments | None:
    """Run the model with the perturbed layer and return what the norm after it sees.

    Running statistics are lent too: torch's BatchNorm writes them without a trace.
    """
    watched = _Watched(model)
    values = moved(site.layer, site.norm, steps)
    lent = {
        f"{path}.{name}": tensor
        for path, module in watched.named_modules()
        for name, tensor in (*values.get(module, {}).items(), *_running(module))
    }
    before = dict(vars(site.layer))
    try:
        return torch.func.functional_call(watched, lent, (inputs, site, training))
    finally:
        vars(site.layer).update(before)  # the older weight_norm leaves the weight it made


def _running(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return copies of a norm's running statistics, with their names."""
    if not has_running(module):
        return []
    return [(name, t.clone()) for name, t in module._buffers.items() if t is not None]


class _Watched(nn.Module):
    """Puts `batch_moments` where `functional_call` can lend a model other parameters."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Inputs, site: Site, training: bool) -> Moments | None:
        return batch_moments(self.model, inputs, {site.name: site}, training).get(site.name)


def _compare(before: _Seen, after: _Seen) -> Response:
    angle = sphere.angle_between(before.found.direction, after.found.direction)
    step, first_order, bound = _reach(before, after)
    bound = torch.where(_may_flip(before, after), math.pi, bound)
    return Response(
        rotation=angle.rad2deg(),
        displacements=_distance(before.found.distances, after.found.distances, angle),
        step=step,
        first_order=torch.where(angle.isnan(), torch.nan, first_order).rad2deg(),
        bound=torch.where(angle.isnan(), torch.nan, bound).rad2deg(),
    )


def _distance(lam: Tensor, moved: Tensor, angle: Tensor) -> Tensor:
    """Return ||lam u - lam' u'|| by the law of cosines, without cancellation at 0 and 180 degrees.

    Example:
        >>> _distance(torch.tensor(3.0), torch.tensor(4.0), torch.tensor(math.pi / 2))
        tensor(5.)
    """
    aligned = (moved - lam).square() + 4 * lam * moved * (angle / 2).sin().square()
    opposed = (moved + lam).square() - 4 * lam * moved * (angle / 2).cos().square()
    return torch.where(lam * moved < 0, opposed, aligned).sqrt()


# --- bounds -------------------------------------------------------------------------------------


def _reach(before: _Seen, after: _Seen) -> tuple[Tensor, Tensor, Tensor]:
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


def _may_flip(before: _Seen, after: _Seen) -> Tensor:
    """Return which units a step of this size could reverse by the sign of l, r or gamma."""
    flips = torch.zeros_like(before.found.scale, dtype=torch.bool)
    for old, new in zip(_factors(before), _factors(after), strict=True):
        flips |= (old != new) & ((new - old).abs() >= old.abs())
    return flips


def _factors(of: _Seen) -> list[Tensor]:
    """Return r inside, gamma and l, (out,) or one number, whose signs are the unit's too."""
    length = None if rows(of.layer) is None else stored(of.layer).get("length")
    factors = (of.parts.gain, of.parts.gamma, length)
    return [each.flatten() for each in factors if each is not None]
