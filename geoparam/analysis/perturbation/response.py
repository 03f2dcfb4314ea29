r"""Perturbations of stored parameters: how far boundaries turn and move, and how far they could.

What is perturbed is what an optimizer steps on, by its role (`analysis.stored_parameters`), and
not the weight that follows from it: by default all but r, as in the papers' figure 1, which moves
(w, b), (v, l, b) and (theta, lam). There are three kinds of step (`steps`): "constant",
"gaussian" and "adversarial", the papers' -(1 + delta) w and what is worst for GmP.

Beside how far each boundary did turn stands how far it could have: the bound on all steps of that
length, which some step attains (`perturbing.bounds`). Under SP, WN and the intrinsic form that is
arcsin(||eps|| / ||w||), or 180 degrees from ||eps|| = ||w|| on; under angles, ||eps||.

**What is exact.** Steps are added in float64 and rounded to the storage type; turns, moves and
bounds are those of the rounded step, in float64. The model is not touched: what is measured is a
twin of the perturbed layer, one layer at a time (`perturbing.seen`).
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, get_args

import torch
from torch import Tensor, nn

from geoparam import sphere
from geoparam.analysis.boundary import Statistics
from geoparam.analysis.perturbation.bounds import may_flip, reach
from geoparam.analysis.perturbation.perturbed_layer import Seen, observer, perturbed, see_layer
from geoparam.analysis.perturbation.steps import KINDS, MOVED, Kind, check, steps
from geoparam.analysis.reading.activations import Activation, breaks
from geoparam.analysis.reading.layer_sites import Follows, Layers, Site, find_sites, unwrap
from geoparam.analysis.reading.moments import Moments
from geoparam.analysis.stored_parameters import Role, Steps
from geoparam.conversion.plan import Inputs

__all__ = [
    "DELTAS",
    "KINDS",
    "MOVED",
    "Kind",
    "Response",
    "Row",
    "perturb",
    "perturbed",
    "respond",
    "steps",
    "sweep",
]

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
    check(kinds, deltas, move)
    if statistics not in get_args(Statistics) or (statistics == "batch" and inputs is None):
        raise ValueError(
            f"statistics is 'running', or 'batch' with `inputs`; got {statistics!r} "
            f"{'without' if inputs is None else 'with'} inputs."
        )
    for name, site in find_sites(model, inputs, layers, follows).items():
        see = observer(unwrap(model), inputs, site, statistics)
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
    before = see_layer(layer, {}, norm, points, moments)
    return _compare(before, see_layer(layer, steps, norm, points, later))


def _compare(before: Seen, after: Seen) -> Response:
    angle = sphere.angle_between(before.found.direction, after.found.direction)
    step, first_order, bound = reach(before, after)
    bound = torch.where(may_flip(before, after), math.pi, bound)
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
