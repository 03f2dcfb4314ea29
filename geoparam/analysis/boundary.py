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

import functools
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from geoparam import sphere
from geoparam.analysis.reading import layer_sites
from geoparam.analysis.reading.activations import Breaks, breaks
from geoparam.analysis.reading.norms import Moments, has_running
from geoparam.analysis.reading.probe import read_moments
from geoparam.base_layer import GmPLayer
from geoparam.conversion.plan import Inputs
from geoparam.inspection import full_tensor, is_conv1d, unwrap

Statistics = Literal["running", "batch"]


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


class Terms(NamedTuple):
    """The coefficients of pre-activations, one element for each unit, (out,)."""

    gain: Tensor  # r inside
    offset: Tensor  # b, or lam
    outer: Tensor  # r outside
    gamma: Tensor
    beta: Tensor
    mean: Tensor
    variance: Tensor  # the deviation is sqrt(variance + eps)
    eps: Tensor


Found = dict[str, Tensor | float | None]  # coefficients by name; None: as if it were not there
DEFAULTS = dict.fromkeys(("gain", "outer", "gamma", "variance"), 1.0)
DEFAULTS |= dict.fromkeys(("offset", "beta", "mean", "eps"), 0.0)


class Units(NamedTuple):
    """The units of a layer: the weight as rows (out, n), and what is added to it."""

    rows: Tensor
    parts: Terms
    normalised: bool  # all rows are unit vectors


def boundaries(
    model: nn.Module,
    inputs: Inputs | None = None,
    layers: layer_sites.Layers = None,
    statistics: Statistics = "running",
) -> dict[str, Boundaries]:
    """Return the boundaries of every layer's units, in float64, by layer name.

    A layer has distances only if its norm and activation are understood. They are NaN for smooth
    activations, output layers, foreign norms, norms over other features than the units, norms with
    a view (transpose, reshape) before the activation, averages and arithmetic with constants
    there, a norm after a sum, results that are used twice, and calls with different norms; then
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
        >>> found = boundaries(model, torch.zeros(1, 2))["0"]
        >>> found.distance.item(), found.location.round(decimals=6).tolist()
        (-1.414213562373095, [[1.0, 1.0]])
    """
    batch = uses_batch_statistics(statistics, inputs)
    sites = layer_sites.find_sites(model, inputs, layers)
    moments = {} if inputs is None else read_moments(unwrap(model), inputs, sites, batch)
    return {
        name: compute_boundaries(read_units(site.layer, site.norm, moments.get(name)), site.breaks)
        for name, site in sites.items()
    }


def uses_batch_statistics(statistics: str, inputs: Inputs | None) -> bool:
    """Return whether norms are read by the statistics of the batch `inputs`."""
    if statistics not in ("running", "batch"):
        raise ValueError(f"statistics is 'running' or 'batch'; got {statistics!r}.")
    if inputs is None and statistics == "batch":
        raise ValueError("statistics='batch' needs the batch: `inputs`, or a tracker's probe.")
    return statistics == "batch"


def layer_boundaries(
    layer: nn.Module, norm: nn.Module | None = None, activation: nn.Module | None = None
) -> Boundaries:
    """Return the boundaries of one layer's units, given the norm and activation after it.

    The activation is ReLU by default.

    Example:
        >>> layer_boundaries(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.ReLU6()).distances.shape
        torch.Size([2, 5])
    """
    if not layer_sites.has_units(layer, "in_proj_weight"):
        raise ValueError(
            f"{type(layer).__name__} has no units that are rows of its weight: Linear, Conv1d-3d "
            "and their GmP forms do, and subclasses that compute the same."
        )
    units = read_units(layer, layer_sites.check_norm(norm, layer))
    return compute_boundaries(units, breaks(choose_activation(layer, activation)))


def choose_activation(layer: nn.Module, activation: Any = None) -> Any:
    """Return the activation that is given, or the layer's own, or ReLU."""
    own = getattr(layer, "activation", None) if activation is None else activation
    return nn.ReLU() if own is None else own


@torch.no_grad()
def compute_boundaries(units: Units, breaks: Breaks | None) -> Boundaries:
    """Return the boundaries of these units, in float64."""
    rows = sphere.wide(full_tensor(units.rows))
    length = sphere.length(rows)
    points = (torch.nan,) if breaks is None else breaks.points
    levels = torch.stack([spread(point, length) for point in points])
    sign, scale, distances = place_boundaries(units.parts, length, levels)
    return Boundaries(sign[:, None] * sphere.normalise(rows), scale, distances)


def place_boundaries(of: Terms, length: Tensor, points: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sign of the gain, the scale and, at breakpoints (K, out), the signed distances.

    This is the formula of this file, for rows of this length. All are NaN for a constant unit. A
    deviation that is not known does not matter where beta is the breakpoint.
    """
    gain = of.gamma * of.gain
    slope = gain.abs() * length
    slope = torch.where(slope == 0, torch.nan, slope)
    sign = torch.where(slope.isnan(), torch.nan, gain.sign())
    deviation = (of.variance + of.eps).sqrt()
    height = of.beta - points
    offset = of.gamma * (of.gain * of.offset - of.mean)
    offset = offset + torch.where(height == 0, 0, height * deviation)
    return sign, of.outer.abs() * slope / deviation, offset / slope


def displacement(lam: Tensor, later: Tensor, near: Tensor, far: Tensor) -> Tensor:
    """Return ||lam u - lam' u'|| without cancellation, from ||u - u'|| and ||u + u'||."""
    product = lam * later
    same_side = (later - lam).square() + product * near.square()
    other_side = (later + lam).square() - product * far.square()
    return torch.where(product < 0, other_side, same_side).sqrt()


@torch.no_grad()
def read_units(
    layer: nn.Module,
    norm: nn.Module | None = None,
    moments: Moments | None = None,
    dtype: torch.dtype = torch.float64,
) -> Units:
    """Return the units of a layer and the norm after it, the rows in a type of their own."""
    given: Found
    if isinstance(layer, GmPLayer):
        r = full_tensor(layer.r)
        rows = layer._rows(None, torch.promote_types(r.dtype, torch.float32))
        given = {"gain" if layer.activation is None else "outer": r, "offset": layer.lam}
    else:
        rows, bias = _weight_and_bias(layer)
        given = {"offset": bias}
    normalised = isinstance(layer, GmPLayer) and layer.coordinates == "angles"
    if norm is not None:
        groups = count_groups(norm, layer_sites.has_positions(layer))
        if groups:
            rows, given = _centre(rows, given, groups)
        given |= _read_norm(norm, bool(groups), moments)
        normalised = normalised and not groups
    like = torch.empty(len(rows), dtype=dtype, device=rows.device)
    known = {name: value for name, value in given.items() if value is not None}
    parts = {name: spread(value, like) for name, value in (DEFAULTS | known).items()}
    return Units(rows, Terms(**parts), normalised)


def spread(value: Tensor | float, like: Tensor) -> Tensor:
    """Return a number, or a tensor, in the shape and type of `like`."""
    if not isinstance(value, Tensor):
        value = _constant(value, like.dtype, like.device)
    return full_tensor(value.detach()).to(like).expand_as(like)


@functools.cache
def _constant(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Keep a number on its device, so that a record does not fill a tensor for each layer."""
    return torch.full((), value, dtype=dtype, device=device)


def _weight_and_bias(layer: Any) -> tuple[Tensor, Tensor | None]:
    """Return the weight as rows (out, n) and the bias of a layer that is not ours.

    They are those of its next call. torch's older hooks (weight_norm, pruning) write
    `layer.weight` in a call only, so it is computed here. Parametrizations are read in evaluation
    mode: in training, reading spectral_norm's weight takes a step of its power iteration.
    """
    if isinstance(layer, nn.MultiheadAttention):
        return layer.in_proj_weight, layer.in_proj_bias
    with ExitStack() as after:
        for step in layer.parametrizations.modules() if is_parametrized(layer) else ():
            after.callback(setattr, step, "training", step.training)
            step.training = False
        own = {name: getattr(layer, name, None) for name in ("weight", "bias")}
    for hook in layer._forward_pre_hooks.values():
        if isinstance(hook, WeightNorm):
            own[hook.name] = hook.compute_weight(layer)
        elif isinstance(hook, SpectralNorm):
            own[hook.name] = hook.compute_weight(layer, do_power_iteration=False)
        elif isinstance(hook, BasePruningMethod):
            own[hook._tensor_name] = hook.apply_mask(layer)
    weight: Any = own["weight"]
    return (weight.t() if is_conv1d(layer) else weight.flatten(1)), own["bias"]


def _read_norm(norm: Any, centred: bool, moments: Moments | None) -> Found:
    """Return the parts that a norm adds; unknown statistics make distances NaN."""
    gamma, beta = (getattr(norm, name, None) for name in ("weight", "bias"))
    found: Found = {"gamma": gamma, "beta": beta}
    if moments is not None:
        mean = 0.0 if centred else moments.mean
        return {**found, "mean": mean, "variance": moments.deviation.square()}
    if has_running(norm):
        variance = getattr(norm, "running_var", None)
        eps = 0.0 if variance is None else norm.eps
        return {**found, "mean": norm.running_mean, "variance": variance, "eps": eps}
    return {**found, "mean": 0.0 if centred else torch.nan, "variance": torch.nan}


def count_groups(norm: nn.Module, positions: bool) -> int:
    """Return how many groups of units a norm centres at each point; 0 if it does not do that."""
    if isinstance(norm, nn.LayerNorm):
        return 1
    return norm.num_groups if isinstance(norm, nn.GroupNorm) and not positions else 0


def _centre(rows: Tensor, given: Found, groups: int) -> tuple[Tensor, Found]:
    """Subtract the mean over the units of each group, which is an affine map too."""

    def subtract_mean(t: Tensor) -> Tensor:
        t = t.to(torch.promote_types(t.dtype, torch.float32))
        if isinstance(gain := given.get("gain"), Tensor):
            t = gain.view(-1, *[1] * (t.ndim - 1)) * t
        t = t.unflatten(0, (groups, -1))
        return (t - t.mean(dim=1, keepdim=True)).flatten(0, 1)

    offset = given["offset"]
    offset = subtract_mean(full_tensor(offset)) if isinstance(offset, Tensor) else offset
    return subtract_mean(full_tensor(rows)), {**given, "gain": 1.0, "offset": offset}
