r"""Perturbations of stored parameters: how far boundaries turn and move, and how far they could.

What is perturbed is what an optimizer steps on (`parameter_steps`), and not the weight computed
from it. Turns, moves and bounds are those of the step after rounding to the storage type, in
float64. A bound is the turn that no step of that length exceeds. For a step eps of the stored
direction, finite or not:

    SP, WN, intrinsic     arcsin(||eps|| / ||w||) while ||eps|| < ||w||, else 180 degrees
    angles                ||eps||: the path's length, which is at least the angle (Theorem 3.7)

Both are attained by some step of that length (the second by theta_1 alone), so nothing less can
be promised. Where a sign may flip, of l, of gamma or of an r inside the activation, which takes a
step as large as they are, the bound is 180 degrees under every parameterization, GmP included.
Under LayerNorm a unit's direction is w_i - mean(w): there eps is the step of that difference,
whatever stores w.
"""

import math
from contextlib import ExitStack
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from geoparam import sphere
from geoparam.analysis import boundary, parameter_steps
from geoparam.analysis.boundary import Boundaries, Statistics, Units
from geoparam.analysis.parameter_steps import Kind, Steps
from geoparam.analysis.reading import layer_sites
from geoparam.analysis.reading.activations import Activation, Breaks, breaks
from geoparam.analysis.reading.layer_sites import Layers, Site
from geoparam.analysis.reading.norms import Moments, needs_batch
from geoparam.analysis.reading.probe import read_moments
from geoparam.conversion.plan import Inputs
from geoparam.inspection import unwrap

DELTAS = (1e-4, 1e-3, 1e-2, 1e-1)  # figure 1's


@dataclass(frozen=True)
class Response:
    """How the boundaries of a layer's units answer to a perturbation; NaN where there are none."""

    rotation: Tensor  # (out,), the turn of each boundary in degrees
    displacements: Tensor  # (K, out), the move ||delta phi|| of its location, at K breakpoints
    bound: Tensor  # (out,), the turn in degrees that no step of this length exceeds
    after: Boundaries  # the perturbed boundaries themselves

    @property
    def displacement(self) -> Tensor:
        """(out,), at the first breakpoint; ReLU and its relatives have no other."""
        return self.displacements[0]


def perturb(
    model: nn.Module,
    inputs: Inputs | None = None,
    kind: Kind = "constant",
    delta: float = 1e-3,
    *,
    layers: Layers = None,
    statistics: Statistics = "running",
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
        layers: Names, or a function of module and name; all by default.
        statistics: "running", where BatchNorm's stay as they are, or those of the batch `inputs`,
            which move with the perturbed weight, as in training. Norms without running statistics
            always see the batch anew: one run of the model for each layer and perturbation.
        generator: The source of Gaussian noise.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 1), nn.ReLU())
        >>> _ = nn.init.constant_(model[0].weight, 1e-3), nn.init.zeros_(model[0].bias)
        >>> perturb(model, torch.zeros(1, 2), "adversarial", 0.5)["0"].rotation.tolist()
        [180.0]
    """
    batch = boundary.uses_batch_statistics(statistics, inputs)
    model = unwrap(model)
    found = {}
    for name, site in layer_sites.find_sites(model, inputs, layers).items():
        steps = parameter_steps.make_steps(
            site.layer, kind, delta, norm=site.norm, generator=generator
        )
        before, after = (_perturb_site(model, inputs, site, batch, each) for each in ({}, steps))
        found[name] = _compare(before, after)
    return found


def respond(
    layer: nn.Module,
    steps: Steps,
    norm: nn.Module | None = None,
    activation: Activation | None = None,
) -> Response:
    """Return how the boundaries of one layer's units answer to steps, by role.

    The other arguments are those of `layer_boundaries`.

    Example:
        >>> layer = nn.Linear(2, 1, bias=False)
        >>> _ = nn.init.constant_(layer.weight, 2.0)
        >>> respond(layer, {"direction": torch.tensor([[0.0, -2.0]])}).rotation.tolist()
        [45.0]
    """
    points = breaks(boundary.choose_activation(layer, activation))
    before, after = (_perturb_state(layer, each, norm, points) for each in ({}, steps))
    return _compare(before, after)


class _State(NamedTuple):
    """A layer and its norm with some values, in float64, its units and their boundaries."""

    layer: nn.Module
    norm: nn.Module | None
    units: Units
    boundaries: Boundaries


def _perturb_state(
    layer: nn.Module,
    steps: Steps,
    norm: nn.Module | None,
    points: Breaks | None,
    moments: Moments | None = None,
) -> _State:
    """Return a layer after given steps, with the norm's moments if they are known."""
    copies = {m: layer_sites.copy_in_float64(m) for m in (layer, norm) if m is not None}
    for (module, name), value in parameter_steps.add_steps(layer, norm, steps).items():
        copies[module].get_parameter(name).copy_(value)
    other, other_norm = copies[layer], None if norm is None else copies[norm]
    units = boundary.read_units(other, other_norm, moments)
    return _State(other, other_norm, units, boundary.compute_boundaries(units, points))


@torch.no_grad()
def _perturb_site(
    model: nn.Module, inputs: Inputs | None, site: Site, batch: bool, steps: Steps
) -> _State:
    """Return the layer of a site after given steps, with its norm's moments computed again.

    For that the model runs with the perturbed values in place of its own.
    """
    moments = None
    if inputs is not None and needs_batch(site.norm, model, batch):
        values = parameter_steps.add_steps(site.layer, site.norm, steps)
        with ExitStack() as after:
            for (module, name), value in values.items():
                parameter = module.get_parameter(name)
                after.callback(setattr, parameter, "data", parameter.data)
                parameter.data = value
            moments = read_moments(model, inputs, {site.name: site}, batch).get(site.name)
    return _perturb_state(site.layer, steps, site.norm, site.breaks, moments)


@torch.no_grad()
def _compare(before: _State, after: _State) -> Response:
    old, new = before.boundaries, after.boundaries
    angle = sphere.angle_between(old.direction, new.direction)
    near, far = 2 * (angle / 2).sin(), 2 * (angle / 2).cos()
    bound = _bound_turn(before, after)
    for factor, later in zip(_factors(before), _factors(after), strict=True):
        may_flip = (factor != later) & ((later - factor).abs() >= factor.abs())
        bound = torch.where(may_flip, math.pi, bound)
    return Response(
        rotation=angle.rad2deg(),
        displacements=boundary.displacement(old.distances, new.distances, near, far),
        bound=torch.where(angle.isnan(), torch.nan, bound).rad2deg(),
        after=new,
    )


def _bound_turn(before: _State, after: _State) -> Tensor:
    """Return the bound for a step of the directions, in radians; factors may add to it."""
    layer, norm = before.layer, before.norm
    if norm is not None and boundary.count_groups(norm, layer_sites.has_positions(layer)):
        row, other = before.units.rows, after.units.rows  # those of w_i - mean(w)
    elif parameter_steps.coordinates(layer) == "sign":
        return torch.zeros_like(before.boundaries.scale)
    else:
        row, other = (parameter_steps.read_direction_rows(each.layer) for each in (before, after))
        if parameter_steps.coordinates(layer) == "latitude":
            return sphere.length(other - row).clamp(max=math.pi)
    size, length = sphere.length(other - row), sphere.length(row)
    return torch.where(size < length, (size / length).clamp(max=1).asin(), math.pi)


def _factors(of: _State) -> list[Tensor]:
    """Return r inside, gamma and l, each (out,), whose signs are the unit's too."""
    factors = [of.units.parts.gain, of.units.parts.gamma]
    if "length" in (held := parameter_steps.read_stored(of.layer)):
        factors.append(held["length"].flatten())
    return factors
