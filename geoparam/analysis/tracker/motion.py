r"""How far boundaries have moved since the last measurement, for all layers of a model at once.

For the direction u of a unit and its earlier one u', and signed distances lam and lam',

    rotation       2 atan2(||u - u'||, ||u + u'||)
    displacement   ||phi - phi'|| with phi = -lam u:
                   (lam - lam')^2 + lam lam' ||u - u'||^2  where lam lam' >= 0,
                   (lam + lam')^2 - lam lam' ||u + u'||^2  elsewhere.

So each layer needs three lengths of rows, and one copy of its directions from one time to the
next; the rest is arithmetic with one element for each unit, for all layers together. A sign (of
gamma, or of r inside) reverses a direction: it only exchanges the two lengths, so the copy is kept
without signs. Nothing here synchronises with the device, and all state is updated in place, so
that the kernels can be replayed.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from geoparam.analysis.boundary import (
    Parts,
    combine,
    displacement,
    gather,
    offset_at,
    read_parts,
    sign_and_slope,
)
from geoparam.analysis.reading.layer_sites import Site, count_units
from geoparam.analysis.reading.norms import Moments
from geoparam.base_layer import GmPLayer

SAMPLED = 64  # units of a layer whose angles are counted: a scan of all took 0.7 ms on an H200
NEGLIGIBLE = 1e-4  # a metric below this: a step of the angle turns the unit by under 1 % of it


class Measured(NamedTuple):
    """One element for each unit of all layers, (total,); the last two for each layer."""

    rotation: Tensor  # degrees
    displacement: Tensor
    scale: Tensor
    distance: Tensor
    smallest_product: Tensor
    negligible_metric: Tensor


class Motion:
    """Measures the boundaries of all sites, and how far they are from where they were.

    At most `units` of each layer are followed, evenly spaced; all by default.
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
            name: None if count == size else _space_evenly(size, count, self.device)
            for name, size, count in zip(self.sites, sizes, self.counts, strict=True)
        }
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
                found = read_parts(site.layer, site.norm, (moments or {}).get(name))
                u, lengths = self._compare_directions(name, found)
                vectors = self._vectors(site, found, count)
                vectors |= {key: self._cast(gather(length)) for key, length in lengths.items()}
                for key, vector in vectors.items():
                    columns.setdefault(key, []).append(vector)
                angular.append(self._cast(_angle_metric(site, u, self._constant(torch.nan, 2))))
        return self._compare(
            {key: torch.cat(column) for key, column in columns.items()}, torch.stack(angular)
        )

    def pick(self, name: str, value: Tensor) -> Tensor:
        """Return the elements of the units of a layer that are followed, from those of all."""
        chosen = self.chosen[name]
        return value if chosen is None else value[chosen.to(value.device)]

    def _vectors(self, site: Site, found: Parts, count: int) -> dict[str, Tensor]:
        """Return the parts of a layer and its breakpoints with one element for each unit."""
        breaks = site.breaks
        ends = (torch.nan,) if breaks is None else breaks.points
        given = {**found.per_unit(), "low": ends[0], "high": ends[-1]}
        return {
            name: self.pick(site.name, self._cast(value.detach()).expand(len(found.rows)))
            if isinstance(value, Tensor)
            else self._constant(value, count)
            for name, value in given.items()
        }

    def _constant(self, value: float, count: int) -> Tensor:
        if value not in self._constants:
            size = (max(2, *self.counts),)
            full = torch.full(size, value, dtype=self.dtype, device=self.device)
            self._constants[value] = full
        return self._constants[value][:count]

    def _cast(self, value: Tensor) -> Tensor:
        return value.to(self.device, self.dtype)

    def _compare_directions(self, name: str, found: Parts) -> tuple[Tensor, dict[str, Tensor]]:
        """Return a layer's directions, and the lengths from which their turns follow."""
        rows = found.rows.detach()
        rows = rows if self.chosen[name] is None else self.pick(name, gather(rows))
        u = rows.to(torch.promote_types(rows.dtype, torch.float32))
        length = self._constant(1.0, len(u))
        if not found.unit:
            length = torch.linalg.vector_norm(u, dim=1)
            u = u / length[:, None]
        if name not in self.reference:
            self.reference[name] = u.clone()
        before = self.reference[name]
        apart, together = (torch.linalg.vector_norm(t, dim=1) for t in (u - before, u + before))
        before.copy_(u)
        return u, {"length": length, "apart": apart, "together": together}

    def _compare(self, v: Mapping[str, Tensor], angular: Tensor) -> Measured:
        pre = combine(v)
        sign, slope = sign_and_slope(pre, v["length"])
        low, high = (offset_at(pre, v[end]) / slope for end in ("low", "high"))
        now = torch.stack([sign, low, high])
        before = now if self.before is None else self.before.clone()
        self.before = now if self.before is None else self.before.copy_(now)
        flipped = before[0] != sign
        near = torch.where(flipped, v["together"], v["apart"])
        far = torch.where(flipped, v["apart"], v["together"])
        turn = 2 * torch.atan2(near, far)
        return Measured(
            rotation=torch.where((before[0] * sign).isnan(), torch.nan, turn.rad2deg()),
            displacement=displacement(before[1:], now[1:], near, far).amax(dim=0),
            scale=pre.outer * slope / pre.deviation,
            distance=low,
            smallest_product=angular[:, 0],
            negligible_metric=angular[:, 1],
        )


def _space_evenly(size: int, count: int, device: torch.device) -> Tensor:
    return torch.linspace(0, size - 1, count, device=device).round().long()


def _angle_metric(site: Site, u: Tensor, unknown: Tensor) -> Tensor:
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
    return gather(torch.stack([smallest, share.to(smallest.dtype)]))
