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
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from geoparam.analysis.readings import median
from geoparam.analysis.snapshot import Interval
from geoparam.model.norms import count_groups
from geoparam.model.run import full_tensor
from geoparam.model.unit_layers import count_positions, read_rows

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
        turn = 2 * torch.atan2(near, far)
        return torch.where(is_unknown, torch.nan, turn.rad2deg())


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
        squares = torch.where(product < 0, other_side, same_side)
        return squares.sqrt().amax(dim=0)


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
        layout, active = interval.layout, interval.readings.active
        values = []
        for name, count in zip(layout.sites, layout.counts, strict=True):
            unknown = layout.like.new_full((count,), torch.nan, dtype=torch.float64)
            shares = layout.pick(name, active[name]) if name in active else unknown
            values.append(shares.to(unknown.device))
        return torch.cat(values)


class Count(LayerQuantity):
    """Number of units, and of followed ones without a boundary."""

    columns = ("units", "undefined")

    def measure(self, interval: Interval) -> Sequence[Tensor]:
        is_undefined = interval.now.sign.isnan().double()
        return interval.layout.sizes, sum_by_layer(interval, is_undefined)


class AngleMetric(LayerQuantity):
    """Of GmP's angles: the smallest product of cosines, and the share with negligible metric.

    Angle k has the metric P_k^2 with P_k = prod_{j<k} cos a_j = ||u_{k..n}||; P falls with k.
    """

    columns = ("smallest_product", "negligible_metric")

    def measure(self, interval: Interval) -> Sequence[Tensor]:
        smallest: dict[str, Tensor] = {}
        negligible: dict[str, Tensor] = {}
        for name, site in interval.layout.sites.items():
            if site.layer is None or not getattr(site.layer, "has_angles", False):
                continue
            u = interval.now.directions[name]
            if count_groups(site.norm, count_positions(site.layer)):  # u is centred
                u = interval.layout.pick(name, read_rows(site.layer).rows)
            u = full_tensor(u)
            smallest[name] = torch.linalg.vector_norm(u[:, -2:], dim=1).amin()

            # P_k^2 = 1 - (u_1^2 + ... + u_{k-1}^2); P_1 = 1 is never small.
            every = -(-len(u) // SAMPLED)
            squares = u[::every].square()
            is_small = squares[:, :-2].cumsum(dim=1) > 1 - NEGLIGIBLE
            share = is_small.sum() / squares[:, 1:].numel()
            negligible[name] = share.to(u.dtype)
        return make_column(interval, smallest), make_column(interval, negligible)


class InputLength(LayerQuantity):
    """Median length of a layer's inputs, and the median distance of its boundaries over it."""

    columns = ("input_length_median", "relative_distance_median")
    needs_probe = True

    def measure(self, interval: Interval) -> Sequence[Tensor]:
        lengths = make_column(interval, interval.readings.lengths)
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
        device = interval.layout.like.device
        medians: dict[str, Tensor] = {}
        smaller = []  # shares of all layers
        for name, above in interval.readings.above.items():
            shares = torch.minimum(above, 1 - above).flatten().to(device)
            medians[name] = median(shares)
            smaller.append(shares)
        network = median(torch.cat(smaller)) if smaller else None
        dead = self._count_units(interval, 0)
        always_on = self._count_units(interval, 1)
        return dead, always_on, make_column(interval, medians, network)

    def _count_units(self, interval: Interval, share: float) -> Tensor:
        """Return how many units are active at this share of points."""
        counts: dict[str, Tensor] = {}
        once: dict[Any, Tensor] = {}  # by activation
        for name, active in interval.readings.active.items():
            counts[name] = (active == share).sum().to(interval.layout.like.device)
            steps = tuple(call.activation for call in interval.layout.sites[name].calls)
            once[steps if any(steps) else name] = counts[name]
        network = torch.stack([*once.values()]).sum() if once else None
        return make_column(interval, counts, network)


class Regions(LayerQuantity):
    """Share of activation bits that changed, examples in another region, number of regions."""

    columns = ("pattern_change", "points_changed", "regions")
    needs_probe = True

    def measure(self, interval: Interval) -> Sequence[Tensor]:
        patterns = interval.now.patterns
        unknown = make_column(interval, {})
        if patterns is None:
            return unknown, unknown, unknown
        is_comparable = interval.changes is not None
        layers, network = interval.changes or patterns.changes(patterns)
        columns = []
        for kind in range(len(self.columns)):
            by_layer = {name: change[kind] for name, change in layers.items()}
            columns.append(make_column(interval, by_layer, network[kind]))
        return columns if is_comparable else (unknown, unknown, columns[-1])


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


def choose_quantities(
    chosen: Sequence[str | Quantity] | None,
) -> tuple[tuple[Quantity, ...], list[str]]:
    """Return the quantities to record, and the columns that were asked for.

    A name is that of a column or of a whole quantity; None chooses all.

    Example:
        >>> recorded, columns = choose_quantities(["scale", "dead"])
        >>> [type(quantity).__name__ for quantity in recorded], columns
        (['Scale', 'Activity'], ['scale_min', 'scale_median', 'scale_max', 'dead'])
    """
    if isinstance(chosen, str):
        chosen = [chosen]
    if chosen is not None and not isinstance(chosen, Iterable):
        raise ValueError(f"quantities are a list of names, or None for all; got {chosen!r}.")
    recorded: dict[Quantity, None] = {}  # in order, each once
    columns: dict[str, None] = {}
    for choice in QUANTITIES if chosen is None else chosen:
        if isinstance(choice, str):
            quantity = _find_quantity(choice)
            is_whole = choice == getattr(quantity, "name", None)
            named = quantity.columns if is_whole else (choice,)
        elif isinstance(choice, Quantity):
            quantity, named = choice, choice.columns
        else:
            raise ValueError(f"a quantity is a name, as 'rotation_rms'; got {choice!r}.")
        recorded[quantity] = None
        columns |= dict.fromkeys(named)
    if not recorded:
        raise ValueError("quantities must not be empty; None records all.")
    return tuple(recorded), list(columns)


def _find_quantity(name: str) -> Quantity:
    """Return the quantity that is called `name`, or has a column of that name."""
    for quantity in QUANTITIES:
        if name in (getattr(quantity, "name", None), *quantity.columns):
            return quantity
    columns = [column for quantity in QUANTITIES for column in quantity.columns]
    raise ValueError(f"no quantity {name!r}; there are: {', '.join(columns)}.")


@torch.no_grad()
def measure(quantities: Sequence[Quantity], interval: Interval) -> tuple[Tensor, Tensor]:
    """Return the summary (layers + 1, columns), the network's last, and the units' (Q, total)."""
    unknown = make_column(interval, {})
    columns: dict[str, Tensor] = {}
    summarised: list[UnitQuantity] = []
    by_unit: list[Tensor] = []
    for quantity in quantities:
        is_known = interval.readings is not None or not quantity.needs_probe
        if isinstance(quantity, LayerQuantity):
            if is_known:
                columns |= zip(quantity.columns, quantity.measure(interval), strict=True)
        else:
            values = quantity.measure(interval) if is_known else interval.now.sign * torch.nan
            summarised.append(quantity)
            by_unit.append(values)
    columns |= _summarise(summarised, by_unit, interval)

    names = [column for quantity in quantities for column in quantity.columns]
    summary = torch.stack([columns.get(name, unknown) for name in names], dim=1)
    units = [values.double() for values in by_unit]
    return summary, torch.stack(units) if units else unknown


def _summarise(
    quantities: Sequence[UnitQuantity], by_unit: Sequence[Tensor], interval: Interval
) -> dict[str, Tensor]:
    """Return the columns of quantities of units, (layers + 1,) each."""
    pairs = zip(quantities, by_unit, strict=True)
    sizes = {quantity: quantity.size(values) for quantity, values in pairs if quantity.levels}
    if not sizes:
        return {}
    values = torch.stack([*sizes.values()])
    levels = _compute_levels(interval, values, [*LEVELS.values()])
    columns: dict[str, Tensor] = {}
    for quantity, quantiles in zip(sizes, levels, strict=True):
        columns |= zip([f"{quantity.name}_{level}" for level in LEVELS], quantiles.T, strict=True)
        if "rms" in quantity.levels:
            known = (~sizes[quantity].isnan()).double()
            squares = sizes[quantity].double().nan_to_num(nan=0.0).square()
            mean = sum_by_layer(interval, squares) / sum_by_layer(interval, known)
            columns[f"{quantity.name}_rms"] = mean.sqrt()
    return columns


def sum_by_layer(interval: Interval, values: Tensor) -> Tensor:
    """Return the sum of values (total,) over each layer's units, and over all layers."""
    layout = interval.layout
    sums = values.new_zeros(len(layout.counts)).index_add(0, layout.layer_of, values)
    return torch.cat([sums, sums.sum(dim=0, keepdim=True)])


def make_column(
    interval: Interval, by_layer: Mapping[str, Tensor], network: Tensor | None = None
) -> Tensor:
    """Return one value for each layer, NaN where there is none, and the network's."""
    unknown = interval.layout.like.new_full((), torch.nan, dtype=torch.float64)
    values = [by_layer.get(name, unknown) for name in interval.layout.sites]
    values.append(unknown if network is None else network)
    return torch.stack([value.to(unknown) for value in values])


def _compute_levels(interval: Interval, values: Tensor, levels: Sequence[float]) -> Tensor:
    """Return quantiles (Q, layers + 1, levels) of values (Q, total), the network's last."""
    layout = interval.layout
    return compute_quantiles(values, layout.layer_of, len(layout.counts), levels).double()


def compute_quantiles(
    values: Tensor, segment: Tensor, count: int, levels: Sequence[float]
) -> Tensor:
    """Return quantiles (Q, count + 1, levels) of values (Q, N) in each segment, and of all.

    `segment` (N,) has the number of each column's segment. Quantiles interpolate linearly, as
    numpy's do. NaN counts as missing; all missing give NaN.

    Example:
        >>> values = torch.tensor([[5., 1., 3., torch.nan, 7.]])
        >>> compute_quantiles(values, torch.tensor([0, 0, 0, 1, 1]), 2, (0.5, 1.0))
        tensor([[[3., 5.],
                 [7., 7.],
                 [4., 7.]]])
    """
    overall, order = values.sort(dim=1)  # NaN sorts last
    by_segment = order.gather(1, segment[order].argsort(dim=1, stable=True))
    ordered = torch.cat([values.gather(1, by_segment), overall], dim=1)

    # Where each segment begins in `ordered`, and all values after them; how many are known.
    zeros = torch.zeros(len(values), count, dtype=torch.int64, device=values.device)
    sizes = zeros[0].index_add(0, segment, torch.ones_like(segment))
    start = F.pad(sizes.cumsum(0), (1, 0))[:, None]
    known = zeros.index_add(1, segment, (~values.isnan()).long())
    known = torch.cat([known, known.sum(dim=1, keepdim=True)], dim=1)

    level = torch.stack([values.new_full((), each) for each in levels])
    place = level * (known - 1).clamp(min=0)[:, :, None]
    below = (start + place.floor().long()).flatten(1)
    above = (start + place.ceil().long()).flatten(1)
    low = ordered.gather(1, below).view_as(place)
    high = ordered.gather(1, above).view_as(place)
    between = torch.lerp(low, high, place - place.floor())
    return torch.where(low == high, low, between)  # infinity less infinity is NaN
