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
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from geoparam.analysis.history import NETWORK
from geoparam.analysis.snapshot import Interval

LEVELS = {"min": 0.0, "median": 0.5, "p99": 0.99, "max": 1.0}  # quantiles; and "rms"


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
    def measure(self, interval: Interval) -> Sequence[Mapping[str, Tensor]]:
        """Return for each column its values by layer; NETWORK's is that of all layers.

        A value that is left out is NaN.
        """


Quantity = UnitQuantity | LayerQuantity


class Rotation(UnitQuantity):
    """Degrees by which a direction has turned."""

    name = "rotation"
    levels = ("max", "median", "p99", "rms")

    def measure(self, interval: Interval) -> Tensor:
        near, far = interval.chords
        return (2 * torch.atan2(near, far)).rad2deg()


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
            known = layout.pick(name, active[name]) if name in active else unknown
            values.append(known.to(unknown))
        return torch.cat(values)


class Count(LayerQuantity):
    """Number of units, and of followed ones without a boundary."""

    columns = ("units", "undefined")

    def measure(self, interval: Interval) -> Sequence[Mapping[str, Tensor]]:
        layout = interval.layout
        is_undefined = interval.now.sign.isnan().double()
        undefined = layout.sizes.new_zeros(len(layout.counts))
        undefined.index_add_(0, layout.layer_of, is_undefined)

        names = (*layout.sites, NETWORK)
        sizes = dict(zip(names, layout.sizes, strict=True))
        return sizes, dict(zip(names, (*undefined, undefined.sum()), strict=True))


class Activity(LayerQuantity):
    """Units that are active nowhere and everywhere; share of points on a boundary's smaller side.

    Layers before one sum have one activation. It counts once in the network.
    """

    columns = ("dead", "always_on", "separated_median")
    needs_probe = True

    def measure(self, interval: Interval) -> Sequence[Mapping[str, Tensor]]:
        device = interval.layout.like.device
        medians: dict[str, Tensor] = {}
        smaller = []  # shares of all layers
        for name, above in interval.readings.above.items():
            shares = torch.minimum(above, 1 - above).flatten().to(device)
            medians[name] = _median(shares)
            smaller.append(shares)
        if smaller:
            medians[NETWORK] = _median(torch.cat(smaller))
        return self._count_units(interval, 0), self._count_units(interval, 1), medians

    def _count_units(self, interval: Interval, share: float) -> dict[str, Tensor]:
        """Return how many units are active at this share of points."""
        layout = interval.layout
        counts: dict[str, Tensor] = {}
        by_activation: dict[Any, Tensor] = {}
        for name, active in interval.readings.active.items():
            counts[name] = (active == share).sum().to(layout.like.device)
            steps = tuple(call.activation for call in layout.sites[name].calls)
            has_steps = any(steps)  # else the layer applies its activation itself
            by_activation[steps if has_steps else name] = counts[name]
        if counts:
            counts[NETWORK] = torch.stack([*by_activation.values()]).sum()
        return counts


def _median(values: Tensor) -> Tensor:
    """Return the middle value, of an even number the mean of two; NaN counts as missing."""
    ordered = values.sort().values  # NaN comes last
    known = (~values.isnan()).sum()
    middle = torch.stack([(known - 1).clamp(min=0) // 2, known // 2])
    return ordered[middle].mean()


class Regions(LayerQuantity):
    """Share of activation bits that changed, examples in another region, number of regions."""

    columns = ("pattern_change", "points_changed", "regions")
    needs_probe = True

    def measure(self, interval: Interval) -> Sequence[Mapping[str, Tensor]]:
        patterns = interval.now.patterns
        if patterns is None:
            return {}, {}, {}
        changes = interval.changes or patterns.changes(patterns)
        by_name = {**changes.layers, NETWORK: changes.network}
        columns = zip(*by_name.values(), strict=True)
        shares, points, regions = (dict(zip(by_name, c, strict=True)) for c in columns)
        return (shares, points, regions) if interval.changes else ({}, {}, regions)


QUANTITIES: tuple[Quantity, ...] = (
    Rotation(),
    Displacement(),
    Scale(),
    Distance(),
    Active(),
    Count(),
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
            quantity = find_quantity(choice)
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


def find_quantity(name: str) -> Quantity:
    """Return the quantity that is called `name`, or has a column of that name."""
    for quantity in QUANTITIES:
        if name in (getattr(quantity, "name", None), *quantity.columns):
            return quantity
    columns = [column for quantity in QUANTITIES for column in quantity.columns]
    raise ValueError(f"no quantity {name!r}; there are: {', '.join(columns)}.")


@torch.no_grad()
def measure(quantities: Sequence[Quantity], interval: Interval) -> Tensor:
    """Return all numbers of a record in one vector on the model's device.

    In the order of the quantities: one for each followed unit, or, for each column of a
    `LayerQuantity`, one for each layer and the network's.
    """
    unknown = interval.now.sign * torch.nan
    vectors: list[Tensor] = []
    for quantity in quantities:
        is_known = interval.readings is not None or not quantity.needs_probe
        if isinstance(quantity, UnitQuantity):
            values = quantity.measure(interval) if is_known else unknown
            if values.shape != unknown.shape:
                raise ValueError(
                    f"{quantity.name}: measure() returns one value for each followed unit, "
                    f"{len(unknown)} of them; got a tensor of shape {tuple(values.shape)}."
                )
            vectors.append(values)
        else:
            nothing: list[Mapping[str, Tensor]] = [{} for _ in quantity.columns]
            columns = quantity.measure(interval) if is_known else nothing
            for _, by_layer in zip(quantity.columns, columns, strict=True):
                vectors.append(_make_column(interval, by_layer))
    return torch.cat([vector.double() for vector in vectors])


def _make_column(interval: Interval, by_layer: Mapping[str, Tensor]) -> Tensor:
    """Return a value for each layer, and the network's last; NaN where there is none."""
    unknown = interval.layout.like.new_full((), torch.nan, dtype=torch.float64)
    values = [by_layer.get(name, unknown) for name in (*interval.layout.sites, NETWORK)]
    return torch.stack([value.to(unknown) for value in values])


def summarise(
    quantities: Sequence[Quantity], measured: np.ndarray, counts: Sequence[int]
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return the summary (layers + 1, columns), the network's last, and quantities of units.

    Args:
        measured: What `measure` has returned.
        counts: The number of followed units in each layer.
    """
    columns: dict[str, np.ndarray] = {}
    by_unit: dict[UnitQuantity, np.ndarray] = {}
    for quantity in quantities:
        if isinstance(quantity, UnitQuantity):
            by_unit[quantity], measured = np.split(measured, [sum(counts)])
        else:
            for column in quantity.columns:
                columns[column], measured = np.split(measured, [len(counts) + 1])

    sizes = {}
    for quantity, values in by_unit.items():
        if quantity.levels:
            sizes[quantity] = quantity.size(torch.from_numpy(values)).numpy()
    if sizes:
        columns |= _summarise_units(sizes, counts)

    names = [column for quantity in quantities for column in quantity.columns]
    summary = np.empty((len(counts) + 1, len(names)))
    for index, name in enumerate(names):
        summary[:, index] = columns[name]
    return summary, [*by_unit.values()]


def _summarise_units(
    sizes: Mapping[UnitQuantity, np.ndarray], counts: Sequence[int]
) -> dict[str, np.ndarray]:
    """Return the columns of quantities of units, (layers + 1,) each."""
    quantiles = compute_quantiles(np.stack([*sizes.values()]), counts, [*LEVELS.values()])
    columns: dict[str, np.ndarray] = {}
    for (quantity, size), by_level in zip(sizes.items(), quantiles, strict=True):
        for level, column in zip(LEVELS, by_level.T, strict=True):
            columns[f"{quantity.name}_{level}"] = column
        if "rms" in quantity.levels:
            known = sum_by_layer(~np.isnan(size), counts)
            squares = sum_by_layer(np.nan_to_num(size) ** 2, counts)
            with np.errstate(invalid="ignore"):  # 0 / 0: none is known
                columns[f"{quantity.name}_rms"] = np.sqrt(squares / known)
    return columns


def sum_by_layer(values: np.ndarray, counts: Sequence[int]) -> np.ndarray:
    """Return the sums (..., layers + 1) of values (..., N) in each layer, and of all."""
    starts = np.cumsum([0, *counts[:-1]])
    sums = np.add.reduceat(values, starts, axis=-1, dtype=float)
    return np.concatenate([sums, sums.sum(axis=-1, keepdims=True)], axis=-1)


def compute_quantiles(
    values: np.ndarray, counts: Sequence[int], levels: Sequence[float]
) -> np.ndarray:
    """Return quantiles (Q, layers + 1, levels) of values (Q, N) in each layer, and of all.

    Quantiles interpolate linearly, as numpy's do. NaN counts as missing; all missing give NaN.

    Example:
        >>> values = np.array([[5., 1., 3., np.nan, 7.]])
        >>> compute_quantiles(values, [3, 2], (0.5, 1.0)).tolist()
        [[[3.0, 5.0], [7.0, 7.0], [4.0, 7.0]]]
    """
    # Layer after layer, each in rising order, and then the network; NaN comes last in each.
    first = np.cumsum([0, *counts])
    ordered = np.concatenate([values, values], axis=1)
    for start, end in pairwise([*first, ordered.shape[1]]):
        ordered[:, start:end].sort(axis=1)
    known = sum_by_layer(~np.isnan(values), counts)

    # A quantile is between two ranks: level 0 is that of the first value, 1 of the last known.
    rank = np.maximum(known - 1, 0)[:, :, None] * np.array(levels)
    low = _take(ordered, first[:, None] + np.floor(rank).astype(int))
    high = _take(ordered, first[:, None] + np.ceil(rank).astype(int))
    with np.errstate(invalid="ignore"):  # infinity less infinity
        between = low + (high - low) * (rank % 1)
    return np.where(low == high, low, between)


def _take(rows: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Return the elements of rows (Q, N) at places (Q, ...)."""
    return np.take_along_axis(rows, places.reshape(len(rows), -1), axis=1).reshape(places.shape)
