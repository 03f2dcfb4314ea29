r"""What a tracker records: each quantity turns two snapshots into numbers.

A `UnitQuantity` has one number for each unit, and the levels at which it is summarised over the
units of a layer. A `LayerQuantity` has one number, or several, for each layer and for the network.
A new metric is one class more; `BoundaryTracker(quantities=[*QUANTITIES, Mine()])` records it.

For the direction u of a unit and its earlier one u', and signed distances lam and lam',

    rotation       2 atan2(||u - u'||, ||u + u'||)
    displacement   ||phi - phi'|| with phi = -lam u:
                   (lam - lam')^2 + lam lam' ||u - u'||^2  where lam lam' >= 0,
                   (lam + lam')^2 - lam lam' ||u + u'||^2  elsewhere.

A quantity that is not known is NaN.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from geoparam.analysis.readings import median
from geoparam.analysis.snapshot import Interval
from geoparam.analysis.unit_layers import has_angles
from geoparam.inspection import full_tensor

LEVELS = {"min": 0.0, "median": 0.5, "p99": 0.99, "max": 1.0}  # quantiles; and "rms"
NEGLIGIBLE = 1e-4  # a metric below this: a step of the angle turns the unit by under 1 % of it
SAMPLED = 64  # units of a layer whose angles are counted: a scan of all took 0.7 ms on an H200


class UnitQuantity(ABC):
    """A quantity of each unit."""

    name: ClassVar[str]
    levels: ClassVar[tuple[str, ...]] = ()  # of the summary: keys of LEVELS, "rms"
    needs_probe: ClassVar[bool] = False

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of its columns in the summary."""
        return tuple(f"{self.name}_{level}" for level in self.levels)

    @abstractmethod
    def measure(self, interval: Interval) -> Tensor:
        """Return a value for each followed unit of all layers, (total,)."""

    def size(self, values: Tensor) -> Tensor:
        """Return what the summary is of."""
        return values


class LayerQuantity(ABC):
    """One or several quantities of each layer, and of all layers together."""

    columns: ClassVar[tuple[str, ...]]
    needs_probe: ClassVar[bool] = False

    @abstractmethod
    def measure(self, interval: Interval) -> Sequence[Tensor]:
        """Return for each column a value for each layer, the network's last, (layers + 1,)."""


Quantity = UnitQuantity | LayerQuantity


class Rotation(UnitQuantity):
    """Degrees by which a direction has turned."""

    name = "rotation"
    levels = ("max", "median", "p99", "rms")

    def measure(self, interval: Interval) -> Tensor:
        near, far = interval.chords
        is_unknown = (interval.before.sign * interval.now.sign).isnan()
        return torch.where(is_unknown, torch.nan, (2 * torch.atan2(near, far)).rad2deg())


class Displacement(UnitQuantity):
    """How far a boundary's location has moved; with two breakpoints, the larger move."""

    name = "displacement"
    levels = ("max", "median", "p99")

    def measure(self, interval: Interval) -> Tensor:
        near, far = interval.chords
        earlier, later = interval.before.distances, interval.now.distances
        product = earlier * later
        same_side = (later - earlier).square() + product * near.square()
        other_side = (later + earlier).square() - product * far.square()
        return torch.where(product < 0, other_side, same_side).sqrt().amax(dim=0)


class Scale(UnitQuantity):
    """How fast the output grows behind the boundary."""

    name = "scale"
    levels = ("min", "median", "max")

    def measure(self, interval: Interval) -> Tensor:
        return interval.now.scale


class Distance(UnitQuantity):
    """Signed distance of the boundary from the origin; the summary is of its size."""

    name = "distance"
    levels = ("median", "p99", "max")

    def measure(self, interval: Interval) -> Tensor:
        return interval.now.distances[0]

    def size(self, values: Tensor) -> Tensor:
        return values.abs()


class Active(UnitQuantity):
    """Share of the probe's points at which a unit is active."""

    name = "active"
    needs_probe = True

    def measure(self, interval: Interval) -> Tensor:
        layout, readings = interval.layout, interval.now.readings
        assert readings is not None
        values = []
        for name, count in zip(layout.sites, layout.counts, strict=True):
            if name in readings.active:
                values.append(layout.pick(name, readings.active[name]).to(layout.like.device))
            else:
                values.append(layout.like.new_full((count,), torch.nan, dtype=torch.float64))
        return torch.cat(values)


class Count(LayerQuantity):
    """Number of units, and of followed ones without a boundary."""

    columns = ("units", "undefined")

    def measure(self, interval: Interval) -> Sequence[Tensor]:
        is_undefined = interval.now.sign.isnan().double()
        return interval.layout.sizes, _sum_by_layer(interval, is_undefined)


class AngleMetric(LayerQuantity):
    """Of GmP's angles: the smallest product of cosines, and the share with negligible metric.

    Angle k has the metric P_k^2 with P_k = prod_{j<k} cos a_j = ||u_{k..n}||; P falls with k.
    """

    columns = ("smallest_product", "negligible_metric")

    def measure(self, interval: Interval) -> Sequence[Tensor]:
        smallest, negligible = {}, {}
        for name, site in interval.layout.sites.items():
            u = interval.now.directions[name]
            if site.layer is None or not has_angles(site.layer) or u.shape[1] < 2:
                continue
            u = full_tensor(u)
            smallest[name] = torch.linalg.vector_norm(u[:, -2:], dim=1).amin()
            some = u[:: -(-len(u) // SAMPLED)]
            is_used_up = some[:, :-2].square().cumsum(1) > 1 - NEGLIGIBLE  # P_1 = 1 is never small
            share = is_used_up.sum() / some[:, 1:].numel()
            negligible[name] = share.to(u.dtype)
        return _column(interval, smallest), _column(interval, negligible)


class InputLength(LayerQuantity):
    """Median length of a layer's inputs, and the median distance of its boundaries over it."""

    columns = ("input_length_median", "relative_distance_median")
    needs_probe = True

    def measure(self, interval: Interval) -> Sequence[Tensor]:
        assert interval.now.readings is not None
        lengths = _column(interval, interval.now.readings.lengths)
        distances = interval.now.distances[:1].abs()
        medians = _compute_levels(interval, distances, [0.5])[0, :, 0]
        return lengths, medians / lengths


class Activity(LayerQuantity):
    """Units that are active nowhere and everywhere; share of points on a boundary's smaller side.

    Layers before one sum have one activation. It counts once in the network.
    """

    columns = ("dead", "always_on", "separated_median")
    needs_probe = True

    def measure(self, interval: Interval) -> Sequence[Tensor]:
        readings = interval.now.readings
        assert readings is not None
        device = interval.layout.like.device
        smaller = {}
        for name, share in readings.above.items():
            smaller[name] = torch.minimum(share, 1 - share).flatten().to(device)
        together = median(torch.cat([*smaller.values()])) if smaller else None
        medians = {name: median(shares) for name, shares in smaller.items()}
        return (
            self._count_units(interval, 0),
            self._count_units(interval, 1),
            _column(interval, medians, together),
        )

    def _count_units(self, interval: Interval, share: float) -> Tensor:
        """Return how many units are active at this share of points."""
        assert interval.now.readings is not None
        counts: dict[str, Tensor] = {}
        once: dict[Any, Tensor] = {}  # by activation
        for name, active in interval.now.readings.active.items():
            site = interval.layout.sites[name]
            counts[name] = (active == share).sum().to(interval.layout.like.device)
            steps = tuple(call.activation for call in site.calls)
            once[steps if any(steps) else name] = counts[name]
        network = torch.stack([*once.values()]).sum() if once else None
        return _column(interval, counts, network)


class Regions(LayerQuantity):
    """Share of activation bits that changed, examples in another region, number of regions."""

    columns = ("pattern_change", "points_changed", "regions")
    needs_probe = True

    def measure(self, interval: Interval) -> Sequence[Tensor]:
        patterns = interval.now.patterns
        unknown = _column(interval, {})
        if patterns is None:
            return unknown, unknown, unknown
        changes = interval.changes
        layers, network = patterns.changes(patterns) if changes is None else changes
        columns = [
            _column(interval, {name: change[k] for name, change in layers.items()}, network[k])
            for k in range(3)
        ]
        return columns if changes is not None else (unknown, unknown, columns[2])


QUANTITIES: tuple[Quantity, ...] = (
    Rotation(),
    Displacement(),
    Scale(),
    Distance(),
    Active(),
    Count(),
    AngleMetric(),
    InputLength(),
    Activity(),
    Regions(),
)


@torch.no_grad()
def measure(quantities: Sequence[Quantity], interval: Interval) -> tuple[Tensor, Tensor]:
    """Return the summary (layers + 1, columns), the network's last, and the units' (Q, total)."""
    by_unit: dict[str, Tensor] = {}
    columns: dict[str, Tensor] = {}
    unknown = interval.now.sign.new_full((), torch.nan, dtype=torch.float64)
    for quantity in quantities:
        is_known = interval.now.readings is not None or not quantity.needs_probe
        if isinstance(quantity, UnitQuantity):
            values = quantity.measure(interval) if is_known else interval.now.sign * torch.nan
            by_unit[quantity.name] = values
        elif is_known:
            columns |= dict(zip(quantity.columns, quantity.measure(interval), strict=True))
    summarised = [q for q in quantities if isinstance(q, UnitQuantity) and q.levels]
    columns |= _summarise(summarised, by_unit, interval)

    names = [column for quantity in quantities for column in quantity.columns]
    rows = unknown.expand(len(interval.layout.counts) + 1)
    summary = torch.stack([columns.get(name, rows) for name in names], dim=1)
    units = torch.stack([values.double() for values in by_unit.values()]) if by_unit else rows
    return summary, units


def _summarise(
    quantities: Sequence[UnitQuantity], by_unit: dict[str, Tensor], interval: Interval
) -> dict[str, Tensor]:
    """Return the columns of quantities of units, (layers + 1,) each."""
    if not quantities:
        return {}
    values = torch.stack([quantity.size(by_unit[quantity.name]) for quantity in quantities])
    levels = _compute_levels(interval, values, [*LEVELS.values()])
    columns = {}
    for quantity, own_values, own_levels in zip(quantities, values, levels, strict=True):
        for level in quantity.levels:
            column = f"{quantity.name}_{level}"
            if level == "rms":
                squares = own_values.double().nan_to_num(nan=0.0).square()
                known = (~own_values.isnan()).double()
                sums = _sum_by_layer(interval, squares)
                columns[column] = (sums / _sum_by_layer(interval, known)).sqrt()
            else:
                columns[column] = own_levels[:, list(LEVELS).index(level)]
    return columns


def _sum_by_layer(interval: Interval, values: Tensor) -> Tensor:
    """Return the sum of values (total,) over each layer's units, and over all layers."""
    layout = interval.layout
    sums = values.new_zeros(len(layout.counts)).index_add(0, layout.layer_of, values)
    return torch.cat([sums, sums.sum(dim=0, keepdim=True)])


def _column(
    interval: Interval, by_layer: Mapping[str, Tensor], network: Tensor | None = None
) -> Tensor:
    """Return one value for each layer, NaN where there is none, and the network's."""
    unknown = interval.layout.like.new_full((), torch.nan, dtype=torch.float64)
    values = [by_layer.get(name, unknown) for name in interval.layout.sites]
    values.append(unknown if network is None else network)
    return torch.stack([value.to(unknown) for value in values])


def _compute_levels(interval: Interval, values: Tensor, levels: Sequence[float]) -> Tensor:
    """Return quantiles (Q, layers + 1, levels) of values (Q, total), the network's last."""
    layer_of = interval.layout.layer_of
    by_layer = compute_quantiles(values, layer_of, len(interval.layout.counts), levels)
    overall = compute_quantiles(values, torch.zeros_like(layer_of), 1, levels)
    return torch.cat([by_layer, overall], dim=1).double()


def compute_quantiles(
    values: Tensor, segment: Tensor, count: int, levels: Sequence[float]
) -> Tensor:
    """Return quantiles (Q, segments, levels) of values (Q, N), whose columns are in segments (N,).

    They interpolate linearly, as numpy's do. NaN counts as missing; all missing give NaN.

    Example:
        >>> values = torch.tensor([[5., 1., 3., torch.nan, 7.]])
        >>> compute_quantiles(values, torch.tensor([0, 0, 0, 1, 1]), 2, (0.5, 1.0))
        tensor([[[3., 5.],
                 [7., 7.]]])
    """
    order = values.argsort(dim=1)  # NaN sorts last
    order = order.gather(1, segment[order].argsort(dim=1, stable=True))
    ordered = values.gather(1, order)
    zeros = torch.zeros(len(values), count, dtype=torch.int64, device=values.device)
    sizes = zeros[0].index_add(0, segment, torch.ones_like(segment))
    known = zeros.index_add(1, segment, (~values.isnan()).long())
    start = (sizes.cumsum(0) - sizes)[:, None]
    level = torch.stack([values.new_full((), each) for each in levels])
    place = level * (known - 1).clamp(min=0)[:, :, None]
    low = ordered.gather(1, (start + place.floor().long()).flatten(1)).view_as(place)
    high = ordered.gather(1, (start + place.ceil().long()).flatten(1)).view_as(place)
    between = torch.lerp(low, high, place - place.floor())
    return torch.where(low == high, low, between)  # infinity less infinity is NaN
