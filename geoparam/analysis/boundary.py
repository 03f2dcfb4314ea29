r"""Characteristic activation boundaries: where the units of a layer switch, under any parameters.

A unit's pre-activation is affine in the layer's input x (a patch, for a convolution), for every
parameterization and norm alike:

    s(x) = (gain rows^T x + shift) / deviation + beta

| | rows | gain | shift | deviation, beta |
| standard (SP) | w | 1 | b | 1, 0 |
| weight normalization (WN) | l v / ||v|| | 1 | b | 1, 0 |
| GmP, r inside | u | r | r lam | 1, 0 |
| GmP, r outside | u | 1 | lam | 1, 0 |
| + BatchNorm | as the layer | gamma gain | gamma (shift - mu) | sigma, beta |
| + LayerNorm | less their mean over units | gamma gain | gamma (shift - its mean) | sigma, beta |

An activation with breakpoints t has the boundaries {x : s(x) = t}, described by

    direction   u = sign(gain) rows / ||rows||, the normal that points to where s grows
    distance    lam = (shift + (beta - t) deviation) / (|gain| ||rows||), signed
    location    phi = -lam u, the boundary's nearest point to the origin
    scale       how fast the pre-activation grows beyond it: |gain| ||rows|| / deviation, times
                |r| where r is outside, so that it is the output's slope under ReLU

A unit with zero rows, gamma = 0 or an inside r = 0 is constant and has no boundary: all NaN. Where
a layer normalises the mean of its own input (IMN), x is the centred input.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from geoparam import sphere
from geoparam.analysis.readings import Readings
from geoparam.analysis.sites import Inputs, Layers, Site, find_sites
from geoparam.model.activations import breaks
from geoparam.model.norms import (
    Moments,
    count_groups,
    find_feature_dim,
    needs_batch,
    read_norm,
)
from geoparam.model.run import full_tensor, unwrap
from geoparam.model.unit_layers import (
    UnitRows,
    count_positions,
    count_units,
    read_rows,
)

Statistics = Literal["running", "batch"]

# What a term is where a unit has none. The terms: the length of its row, r inside, bias or lam, r
# outside, the norm's parameters and statistics (its deviation is sqrt(variance + eps)), the first
# and the last breakpoint.
DEFAULTS = {
    "length": 1.0,
    "gain": 1.0,
    "offset": 0.0,
    "outer": 1.0,
    "gamma": 1.0,
    "beta": 0.0,
    "mean": 0.0,
    "variance": 1.0,
    "eps": 0.0,
    "low": torch.nan,
    "high": torch.nan,
}


@dataclass(frozen=True)
class Boundaries:
    """The boundaries of a layer's units; (out, n) vectors are flattened as the weight is."""

    direction: Tensor  # unit vectors (out, n) towards the side where the pre-activation grows
    scale: Tensor  # (out,), how fast the pre-activation grows there; the output, under ReLU
    distances: Tensor  # (K, out), signed distances lam of the boundaries at the K breakpoints

    @property
    def distance(self) -> Tensor:
        """(out,), at the first breakpoint; ReLU and its relatives have no other."""
        return self.distances[0]

    @property
    def location(self) -> Tensor:
        """phi (out, n), the nearest point to the origin of the first breakpoint's boundary."""
        return self.locations[0]

    @property
    def locations(self) -> Tensor:
        """phi (K, out, n) at all breakpoints."""
        return -self.distances[..., None] * self.direction


class Places(NamedTuple):
    """Where boundaries are, one element for each unit; NaN for a constant one."""

    sign: Tensor  # of the gain
    scale: Tensor
    distances: Tensor  # (2, units), at the first and the last breakpoint


def boundaries(
    model: nn.Module,
    inputs: Inputs | None = None,
    layers: Layers = None,
    statistics: Statistics = "running",
) -> dict[str, Boundaries]:
    """Return the boundaries of every layer's units, in float64, by layer name.

    A layer has distances only if its norm and activation are understood. They are NaN for smooth
    activations, output layers, foreign norms, norms over other features than the units, norms with
    a view (transpose, reshape) before the activation, averages and arithmetic with constants
    there, a norm after a sum, results that are used twice, and a layer whose calls have different
    norms or activation modules; then
    the directions are those of the weight's rows. `layer_boundaries` takes what follows a layer
    from you instead. Subclasses of torch's layers that compute something else are left out. Before
    a residual sum, the boundary is that of the layer and its norm alone.

    Exact are layers without a norm, BatchNorm and MBN. LayerNorm on the units and GroupNorm
    without positions have exact directions; their deviation differs from point to point, so
    distances are those at its average over `inputs`, and exact only at beta = 0 and breakpoint 0.
    GroupNorm and InstanceNorm over positions also subtract a mean that differs from image to
    image: mean and deviation are both averages.

    Args:
        model: Any model: SP, torch's weight_norm, BatchNorm, LayerNorm, GmP.
        inputs: A batch as the model takes it.
        layers: Names, or a function of module and name; all by default.
        statistics: "running" reads BatchNorm and MBN as they evaluate, "batch" as they train, by
            the statistics of `inputs`.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 1), nn.ReLU())
        >>> _ = nn.init.constant_(model[0].weight, 3.0), nn.init.constant_(model[0].bias, -6.0)
        >>> first = boundaries(model, torch.zeros(1, 2))["0"]
        >>> first.distance.item(), first.location.round(decimals=6).tolist()
        (-1.414213562373095, [[1.0, 1.0]])
    """
    batch = uses_batch_statistics(statistics, inputs)
    model = unwrap(model)
    sites = find_sites(model, inputs, layers)
    norms = [site.norm for site in sites.layers.values() if site.norm is not None]
    moments: Mapping[str, Moments] = {}
    if inputs is not None and any(needs_batch(norm, model, batch) for norm in norms):
        moments = Readings(model, inputs, sites, batch).moments
    computed = {}
    for name, site in sites.layers.items():
        computed[name] = _compute_boundaries(site, moments.get(name))
    return computed


def uses_batch_statistics(statistics: str, inputs: Inputs | None) -> bool:
    """Return whether norms are read by the statistics of the batch `inputs`."""
    if statistics not in ("running", "batch"):
        raise ValueError(f"statistics is 'running' or 'batch'; got {statistics!r}.")
    if inputs is None and statistics == "batch":
        raise ValueError("statistics='batch' needs the batch: `inputs`, or a tracker's probe.")
    return statistics == "batch"


def layer_boundaries(
    layer: nn.Module, norm: nn.Module | None = None, activation: Any = None
) -> Boundaries:
    """Return the boundaries of one layer's units, given the norm and activation after it.

    The activation is the layer's own, or else ReLU, by default.

    Example:
        >>> layer_boundaries(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.ReLU6()).distances.shape
        torch.Size([2, 5])
    """
    units, positions = count_units(layer), count_positions(layer)
    if not units:
        raise ValueError(
            f"{type(layer).__name__} has no units that are rows of its weight: Linear, Conv1d-3d "
            "and their GmP forms do, and subclasses that compute the same."
        )
    if norm is not None:
        dims = [find_feature_dim(norm, units, rank, positions) for rank in range(2, 6)]
        if all(dim is None for dim in dims):
            raise ValueError(
                f"{type(norm).__name__} is not known as a norm of this layer's {units} units."
            )
    if activation is None:
        activation = getattr(layer, "activation", None)
    if activation is None:
        activation = nn.ReLU()
    return _compute_boundaries(Site("", layer, units, norm=norm, activation=activation))


@torch.no_grad()
def _compute_boundaries(site: Site, moments: Moments | None = None) -> Boundaries:
    """Return the boundaries of a layer's units, in float64."""
    units = read_units(site, moments)
    rows = sphere.wide(full_tensor(units.rows))
    units.terms["length"] = sphere.length(rows)
    places = place_boundaries(combine_terms([units], rows))
    direction = places.sign[:, None] * sphere.normalise(rows)

    breakpoints = breaks(site.activation)
    count = 1 if breakpoints is None else len(breakpoints.points)
    return Boundaries(direction, places.scale, places.distances[:count])


def read_units(site: Site, moments: Moments | None = None) -> UnitRows:
    """Return the units of a layer, with the terms of its norm and the activation's breakpoints."""
    assert site.layer is not None
    units = read_rows(site.layer)
    if site.norm is not None:
        groups = count_groups(site.norm, count_positions(site.layer))
        if groups:
            units = _centre(units, groups)
        units.terms.update(read_norm(site.norm, bool(groups), moments))

    breakpoints = None if site.activation is None else breaks(site.activation)
    if breakpoints is not None:
        units.terms.update(low=breakpoints.points[0], high=breakpoints.points[-1])
    return units


def _centre(units: UnitRows, groups: int) -> UnitRows:
    """Return rows and offset times the gain, less their mean over the units of each group."""
    gain = full_tensor(units.terms.get("gain", 1.0))

    def subtract_mean(t: Any) -> Tensor:
        t = full_tensor(t)
        t = t.to(torch.promote_types(t.dtype, torch.float32))
        if isinstance(gain, Tensor):
            t = gain.view(-1, *[1] * (t.ndim - 1)) * t
        t = t.unflatten(0, (groups, -1))
        return (t - t.mean(dim=1, keepdim=True)).flatten(0, 1)

    terms = {name: term for name, term in units.terms.items() if name != "gain"}
    if "offset" in terms:
        terms["offset"] = subtract_mean(terms["offset"])
    return UnitRows(subtract_mean(units.rows), terms)


def combine_terms(units: Sequence[UnitRows], like: Tensor) -> dict[str, Tensor]:
    """Return each term of all layers' units in one vector, of the type and device of `like`."""
    filled = cache(lambda value, count: like.new_full((count,), value))  # each is made once
    vectors = {}
    for name, default in DEFAULTS.items():
        parts = []
        for layer in units:
            value, count = layer.terms.get(name, default), len(layer.rows)
            if isinstance(value, Tensor):
                parts.append(full_tensor(value).to(like).expand(count))
            else:
                parts.append(filled(value, count))
        vectors[name] = torch.cat(parts)
    return vectors


def place_boundaries(terms: dict[str, Tensor]) -> Places:
    """Return where boundaries are: the formula of this file.

    A deviation that is not known does not matter where beta is the breakpoint.
    """
    gain = terms["gamma"] * terms["gain"]
    slope = gain.abs() * terms["length"]
    slope = torch.where(slope == 0, torch.nan, slope)  # a constant unit
    sign = torch.where(slope.isnan(), torch.nan, gain.sign())

    deviation = (terms["variance"] + terms["eps"]).sqrt()
    shift = terms["gamma"] * (terms["gain"] * terms["offset"] - terms["mean"])
    height = terms["beta"] - torch.stack([terms["low"], terms["high"]])
    distances = (shift + torch.where(height == 0, 0, height * deviation)) / slope
    return Places(sign, terms["outer"].abs() * slope / deviation, distances)
