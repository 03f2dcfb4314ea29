r"""How far boundaries have moved since they were last measured, for all layers of a model at once.

For the direction u of a unit and its earlier one u', and signed distances lam and lam',

    rotation       2 atan2(||u - u'||, ||u + u'||)
    displacement   ||phi - phi'|| with phi = -lam u:
                   (lam - lam')^2 + lam lam' ||u - u'||^2  where lam lam' >= 0,
                   (lam + lam')^2 - lam lam' ||u + u'||^2  elsewhere: sums without cancellation.

So each layer needs three lengths of rows, and one copy of its directions from one time to the
next; everything after that is arithmetic with one number for each unit, done for all layers
together. A sign (of gamma, or of r inside) turns a direction around: it only exchanges the two
lengths, and the copy needs to know nothing of it. Nothing here waits for the device, and what is
kept stays where it is, so that the kernels can be replayed.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from geoparam.analysis.boundary import LEFT_OUT, Parts, PreActivation, combine, gathered, parts
from geoparam.analysis.reading.layer_sites import Site, count_units
from geoparam.analysis.reading.moments import Moments
from geoparam.base_layer import GmPLayer

SAMPLED = 64  # units of a layer whose angles are counted: a scan of all took 0.7 ms on an H200
NEGLIGIBLE = 1e-4  # a metric below this: a step of the angle turns the unit by under 1 % of it


class Measured(NamedTuple):
    """One number for each unit of all layers (total,); of each angular layer, (layers,)."""

    rotation: Tensor  # degrees
    displacement: Tensor
    scale: Tensor
    distance: Tensor
    smallest_product: Tensor
    negligible_metric: Tensor


class Motion:
    """Measures the boundaries of all sites, and how far they are from where they were.

    Args:
        sites: The layers.
        units: At most so many units of each layer, evenly spaced; all by default.

    Example:
        >>> from torch import nn
        >>> from geoparam.analysis.reading.layer_sites import find_sites
        >>> model = nn.Sequential(nn.Linear(2, 1), nn.ReLU())
        >>> motion = Motion(find_sites(model, torch.zeros(1, 2)))
        >>> _ = motion.measure()
        >>> _ = nn.init.zeros_(model[0].bias), model[0].weight.data.neg_()
        >>> motion.measure().rotation
        tensor([180.])
    """

    def __init__(self, sites: Mapping[str, Site], units: int | None = None) -> None:
        self.sites = dict(sites)
        sizes = [count_units(site.layer) for site in self.sites.values()]
        self.counts = [min(size, units or size) for size in sizes]
        some = [next(site.layer.parameters()) for site in self.sites.values()]
        self.device = some[0].device
        double = any(parameter.dtype == torch.float64 for parameter in some)
        self.dtype = torch.float64 if double else torch.float32
        self.chosen = {
            name: None if count == size else _evenly_spaced(size, count, self.device)
            for name, size, count in zip(self.sites, sizes, self.counts, strict=True)
        }
        # Decided once: a weight that changes its layout must not change the order of its rows.
        self.channels_last = {name: _channels_last(site) for name, site in self.sites.items()}
        self.reference: dict[str, Tensor] = {}  # the directions, without signs
        self.before: Tensor | None = None  # signs and distances at both ends, (3, total)
        self._constants: dict[float, Tensor] = {}

    @torch.no_grad()
    def measure(self, moments: Mapping[str, Moments] | None = None) -> Measured:
        """Measure now; the next call compares with this one."""
        columns: dict[str, list[Tensor]] = {}
        angular: list[Tensor] = []
        with torch.autocast(self.device.type, enabled=False):
            for (name, site), count in zip(self.sites.items(), self.counts, strict=True):
                seen = (moments or {}).get(name)
                found = parts(site.layer, site.norm, seen, self.channels_last[name])
                for key, column in self._vectors(site, found, count).items():
                    columns.setdefault(key, []).append(column)
                u, lengths = self._turned(name, found.rows, found.unit)
                for key, column in lengths.items():
                    columns.setdefault(key, []).append(self._to_numbers(gathered(column)))
                angular.append(self._to_numbers(_smallness(site, u, self._constant(torch.nan, 2))))
        return self._compare(
            {key: torch.cat(column) for key, column in columns.items()}, torch.stack(angular)
        )

    # --- one layer ----------------------------------------------------------------------------

    def _vectors(self, site: Site, found: Parts, count: int) -> dict[str, Tensor]:
        """Return the parts of a layer with one number for each unit, and its breakpoints."""
        breaks = site.breaks
        ends = (torch.nan,) if breaks is None else breaks.points
        given = {
            **{name: _or(getattr(found, name), value) for name, value in LEFT_OUT.items()},
            "eps": found.eps,
            "low": ends[0],
            "high": ends[-1],
        }
        return {
            name: self.pick(site.name, self._to_numbers(value.detach()).expand(len(found.rows)))
            if isinstance(value, Tensor)
            else self._constant(value, count)
            for name, value in given.items()
        }

    def pick(self, name: str, value: Tensor) -> Tensor:
        """Return one number for each unit of a layer that is followed, from those of all."""
        chosen = self.chosen[name]
        return value if chosen is None else value[chosen.to(value.device)]

    def _constant(self, value: float, count: int) -> Tensor:
        if value not in self._constants:
            size = (max(2, *self.counts),)
            numbers = torch.full(size, value, dtype=self.dtype, device=self.device)
            self._constants[value] = numbers
        return self._constants[value][:count]

    def _to_numbers(self, value: Tensor) -> Tensor:
        return value.to(self.device, self.dtype)

    def _turned(self, name: str, rows: Tensor, unit: bool) -> tuple[Tensor, dict[str, Tensor]]:
        """Return a layer's directions and the lengths that tell how they have turned."""
        rows = rows.detach()
        rows = rows if self.chosen[name] is None else self.pick(name, gathered(rows))
        u = rows.to(torch.promote_types(rows.dtype, torch.float32))
        length = self._constant(1.0, len(u))
        if not unit:
            length = torch.linalg.vector_norm(u, dim=1)
            u = u / length[:, None]
        if name not in self.reference:
            self.reference[name] = u.clone()
        before = self.reference[name]
        apart, together = (torch.linalg.vector_norm(t, dim=1) for t in (u - before, u + before))
        before.copy_(u)
        return u, {"length": length, "apart": apart, "together": together}

    # --- all layers ---------------------------------------------------------------------------

    def _compare(self, v: Mapping[str, Tensor], angular: Tensor) -> Measured:
        pre = combine(v, v["eps"])
        slope = pre.gain.abs() * v["length"]
        slope = torch.where(slope == 0, torch.nan, slope)
        sign = torch.where(slope.isnan(), torch.nan, pre.gain.sign())
        low, high = (_offset(pre, v[end]) / slope for end in ("low", "high"))
        now = torch.stack([sign, low, high])
        before = now if self.before is None else self.before.clone()
        self.before = now if self.before is None else self.before.copy_(now)
        flipped = before[0] != sign
        near = torch.where(flipped, v["together"], v["apart"])
        far = torch.where(flipped, v["apart"], v["together"])
        turn = 2 * torch.atan2(near, far)
        moved = _displacement(now[1:], before[1:], near, far).amax(dim=0)
        return Measured(
            rotation=torch.where((before[0] * sign).isnan(), torch.nan, turn.rad2deg()),
            displacement=moved,
            scale=pre.outer * slope / pre.deviation,
            distance=low,
            smallest_product=angular[:, 0],
            negligible_metric=angular[:, 1],
        )


def _or(given: Tensor | None, default: float) -> Tensor | float:
    return default if given is None else given


def _offset(pre: PreActivation, point: Tensor) -> Tensor:
    height = pre.beta - point
    return pre.shift + torch.where(height == 0, 0, height * pre.deviation)


def _displacement(lam: Tensor, before: Tensor, near: Tensor, far: Tensor) -> Tensor:
    product = lam * before
    same_side = (lam - before).square() + product * near.square()
    other_side = (lam + before).square() - product * far.square()
    return torch.where(product >= 0, same_side, other_side).sqrt()


def _channels_last(site: Site) -> bool:
    """Return whether a convolution's weight, an ordinary parameter, is so in memory."""
    weight = site.layer._parameters.get("weight")
    return weight is not None and weight.ndim > 2 and weight.stride(1) == 1


def _evenly_spaced(size: int, count: int, device: torch.device) -> Tensor:
    return torch.linspace(0, size - 1, count, device=device).round().long()


def _smallness(site: Site, u: Tensor, unknown: Tensor) -> Tensor:
    """Return the smallest product of cosines and the share of angles with negligible metric.

    Angle k has the metric P_k^2 with P_k = prod_{j<k} cos a_j = ||u_{k..n}||; P falls with k.
    """
    layer = site.layer
    angles = isinstance(layer, GmPLayer) and layer.coordinates == "angles" and layer.fan_in > 1
    if not angles:
        return unknown
    smallest = torch.linalg.vector_norm(u[:, -2:], dim=1).amin()
    some = u[:: -(-len(u) // SAMPLED)]
    used_up = some[:, :-2].square().cumsum(1) > 1 - NEGLIGIBLE  # P_1 = 1 is never small
    share = used_up.sum() / some[:, 1:].numel()
    return gathered(torch.stack([smallest, share.to(smallest.dtype)]))
