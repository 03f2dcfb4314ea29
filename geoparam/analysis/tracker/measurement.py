"""All that a tracker records of one moment, as one small matrix on the model's device."""

import itertools
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from geoparam.analysis.partition import Collector, Pattern, Patterns
from geoparam.analysis.reading.layer_sites import Site, count_units
from geoparam.analysis.reading.norms import Moments
from geoparam.analysis.reading.probe import (
    MomentReader,
    compute_input_lengths,
    find_other_activations,
    observe,
)
from geoparam.analysis.tracker.history import PER_UNIT
from geoparam.analysis.tracker.motion import GraphReplay, Measured, Motion
from geoparam.conversion.plan import Inputs

LEVELS = {"min": 0.0, "median": 0.5, "p99": 0.99, "max": 1.0}
REGIONS = ("pattern_change", "points_changed", "regions")
QUANTITIES = """rotation_max rotation_median rotation_p99 displacement_max displacement_median
    displacement_p99 scale_min scale_median scale_max distance_median distance_p99 distance_max
    rotation_rms units undefined smallest_product negligible_metric input_length_median
    relative_distance_median dead always_on separated_median""".split()
QUANTITIES += REGIONS
OTHER_STEPS = (
    "on the probe the model takes other steps than when the tracker was built, so the probe's "
    "quantities are NaN in this record: a branch or a router decided otherwise, or example_inputs "
    "lead elsewhere than the probe does."
)


class ProbeReadings:
    """The readings of one run on a probe batch, by layer name.

    With `batch`, norms with running statistics use those of the probe instead, as in training. If
    a branch or a router took other steps than those in which the sites were found, it is not known
    which layer showed what: `same_steps` is False, and there are no readings.

    Attributes:
        active: The share of points at which each unit is active, (units,). A point is an example,
            or a position in one.
        above: The share of points above each breakpoint, (K, units).
        lengths: The median length of a layer's inputs, one element.
        moments: Mean and deviation of norms that are not read by running statistics.
        patterns: The activation patterns; None where all activations are smooth.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Inputs,
        sites: Mapping[str, Site],
        others: Mapping[str, Site],
        batch: bool = False,
    ) -> None:
        self._collector = Collector(inputs)
        self._active, self._above, self._lengths = (defaultdict[str, list](list) for _ in range(3))
        self._moments = MomentReader(model, sites, batch)
        see = self._see_pre_activation, self._see_input, self._moments
        self.same_steps = observe(model, inputs, {**sites, **others}, *see, training=batch)
        self.active, self.above, self.lengths = (
            {name: torch.stack(each).mean(dim=0) for name, each in seen.items() if self.same_steps}
            for seen in (self._active, self._above, self._lengths)
        )
        self.moments = self._moments.average(is_known=self.same_steps)
        self.patterns: Patterns | None = self._collector.patterns() if self.same_steps else None

    def _see_pre_activation(self, site: Site, z: Tensor, step: int) -> None:
        breaks = site.breaks
        self._collector(site, z, step)
        if breaks is None or not z.numel() or isinstance(site.layer, nn.Identity):
            return
        sides = torch.cat([breaks.active(z, site.channel)[None], breaks.above(z, site.channel)])
        shares = torch.stack([_share(side, site.channel) for side in sides])
        shares[:, _share(z.isnan(), site.channel) > 0] = torch.nan  # a unit that has diverged
        self._active[site.name].append(shares[0])
        self._above[site.name].append(shares[1:])

    def _see_input(self, site: Site, x: Tensor, _: int) -> None:
        if x.is_floating_point() and x.numel():
            lengths = compute_input_lengths(site.layer, x).double()
            self._lengths[site.name].append(median(lengths.flatten()))


class Measurement:
    """Measures a model's units, compared with the time before.

    `measure()` returns the summary (layers + 1, quantities), the network's last, and, if `full`,
    the values of PER_UNIT of all units, layer after layer. With `batch`, norms with running
    statistics are read by those of the probe.
    """

    def __init__(
        self,
        model: nn.Module,
        sites: Mapping[str, Site],
        probe: Inputs | None = None,
        units: int | None = None,
        full: bool = False,
        batch: bool = False,
    ) -> None:
        self.model, self.sites, self.probe, self.full = model, sites, probe, full
        self._batch = batch
        self._motion = Motion(sites, units)
        self.device, self.counts = self._motion.device, self._motion.counts
        counts = torch.tensor(self.counts)
        self._layer_of = torch.arange(len(counts)).repeat_interleave(counts).to(self.device)
        sizes = torch.tensor([count_units(site.layer) for site in sites.values()]).double()
        self._sizes = _with_network(sizes, sizes.sum()).to(self.device)
        parts = {name: (s.layer, s.norm, s.activation) for name, s in sites.items()}
        read = {n: [m for m in own if isinstance(m, nn.Module)] for n, own in parts.items()}
        self._replay = GraphReplay(self._measure_motion, itertools.chain(*read.values()))
        self._read = {name: set(own).intersection(model.modules()) for name, own in read.items()}
        self._others = {} if probe is None else find_other_activations(model, probe, sites)
        self._patterns: Patterns | None = None

    @torch.inference_mode(False)  # tensors that are kept may be used outside of it
    @torch.no_grad()
    def measure(self) -> tuple[Tensor, Tensor | None]:
        """Measure now; the next call compares with this one."""
        self._check_model()
        readings = None
        if self.probe is not None:
            options = self.sites, self._others, self._batch
            readings = ProbeReadings(self.model, self.probe, *options)
            if not readings.same_steps:
                warnings.warn(OTHER_STEPS, stacklevel=4)
        if readings is None or not readings.moments:
            measured, table = self._replay()
        else:
            measured, table = self._measure_motion(readings.moments)
        if readings is not None:
            table = table | self._unit_columns(readings, table["distance_median"])
            if readings.patterns is not None:
                table |= self._region_columns(readings.patterns)
                self._patterns = readings.patterns
        unknown = torch.full_like(table["rotation_max"], torch.nan)
        values = torch.stack([table.get(name, unknown) for name in QUANTITIES], dim=1)
        return values, self._all_units(measured, readings) if self.full else None

    def _check_model(self) -> None:
        """Refuse to measure layers that are not in the model any more."""
        inside = set(self.model.modules())
        gone = [name for name, modules in self._read.items() if not inside.issuperset(modules)]
        if gone:
            raise ValueError(
                "the model has other modules than when the tracker was built, at "
                f"{', '.join(gone)}: convert_, fold_ and the like replace them. Build the tracker "
                "afterwards."
            )

    def _measure_motion(
        self, moments: Mapping[str, Moments] | None = None
    ) -> tuple[Measured, dict[str, Tensor]]:
        measured = self._motion.measure(moments)
        distance = measured.distance.abs()
        vectors = torch.stack([measured.rotation, measured.displacement, measured.scale, distance])
        one_segment = torch.zeros_like(self._layer_of)
        by_layer = compute_quantiles(vectors, self._layer_of, len(self.sites), [*LEVELS.values()])
        overall = compute_quantiles(vectors, one_segment, 1, [*LEVELS.values()])
        levels = torch.cat([by_layer, overall], dim=1).double()  # vector, layer, level
        missing = measured.rotation.isnan().double()
        squares = self._layer_sums(measured.rotation.double().nan_to_num(nan=0.0).square())
        return measured, {
            **{
                f"{name}_{level}": levels[row, :, k]
                for row, name in enumerate(PER_UNIT[:-1])
                for k, level in enumerate(LEVELS)
            },
            "rotation_rms": (squares / self._layer_sums(1 - missing)).sqrt(),
            "units": self._sizes,
            "undefined": self._layer_sums(measured.is_undefined.double()),
            "smallest_product": _with_network(measured.smallest_product.double()),
            "negligible_metric": _with_network(measured.negligible_metric.double()),
        }

    def _layer_sums(self, per_unit: Tensor) -> Tensor:
        """Return the sum over each layer's units, and over all layers."""
        sums = per_unit.new_zeros(len(self.sites)).index_add(0, self._layer_of, per_unit)
        return _with_network(sums, sums.sum())

    def _unit_columns(self, readings: ProbeReadings, distance: Tensor) -> dict[str, Tensor]:
        lengths = self._column(readings.lengths)
        smaller = {
            name: torch.minimum(share, 1 - share).flatten().to(self.device)
            for name, share in readings.above.items()
        }
        together = median(torch.cat([*smaller.values()])) if smaller else None
        return {
            "input_length_median": lengths,
            "relative_distance_median": distance / lengths,
            "dead": self._count_active(readings, 0),
            "always_on": self._count_active(readings, 1),
            "separated_median": self._column({n: median(s) for n, s in smaller.items()}, together),
        }

    def _count_active(self, readings: ProbeReadings, share: float) -> Tensor:
        """Return how many units are active at this share of points; after a sum, once in all."""
        active = readings.active.items()
        counts = {name: (own == share).sum().to(self.device) for name, own in active}
        once: dict[Any, Tensor] = {}
        for name, count in counts.items():
            site = self.sites[name]
            steps = tuple(call.activation for call in site.calls)
            once[name if site.own_activation or not any(steps) else steps] = count
        return self._column(counts, torch.stack([*once.values()]).sum() if counts else None)

    def _region_columns(self, patterns: Patterns) -> dict[str, Tensor]:
        earlier = self._patterns
        try:
            layers, network = patterns.changes(earlier or patterns)
        except ValueError:  # other layers or points than before: a router may skip some
            earlier = None
            layers, network = patterns.changes(patterns)
        return {
            name: self._column({layer: change[k] for layer, change in layers.items()}, network[k])
            for k, name in enumerate(REGIONS)
            if earlier is not None or name == "regions"
        }

    def _column(self, found: Mapping[str, Tensor], network: Tensor | None = None) -> Tensor:
        """Return one value for each layer, NaN where there is none, and the network's."""
        unknown = torch.full((), torch.nan, dtype=torch.float64, device=self.device)
        values = [found.get(name, unknown) for name in self.sites]
        values.append(unknown if network is None else network)
        return torch.stack([value.to(unknown) for value in values])

    def _all_units(self, measured: Measured, readings: ProbeReadings | None) -> Tensor:
        """Return the values of PER_UNIT of all units, (5, total); NaN where one is not known."""
        shares = {} if readings is None else readings.active
        active = []
        for name, count in zip(self.sites, self.counts, strict=True):
            unknown = self._sizes.new_full((count,), torch.nan)
            active.append(self._motion.pick(name, shares[name]) if name in shares else unknown)
        return torch.stack([*(each.double() for each in measured[:4]), torch.cat(active)])

    def state_dict(self) -> dict[str, Any]:
        """Return what the next measurement compares with."""
        motion = self._motion
        state: dict[str, Any] = {"reference": dict(motion.reference), "before": motion.before}
        if self._patterns is not None:
            state["packed"] = {step: part.packed for step, part in self._patterns.parts.items()}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Compare the next measurement with an earlier one."""
        reference, theirs = self._motion.reference, state["reference"]
        shapes = [{n: rows.shape for n, rows in each.items()} for each in (reference, theirs)]
        if shapes[0] != shapes[1]:
            raise ValueError(
                "the tracker's state is of another model or other options: its units are others. "
                "Load the state that was saved with this model."
            )
        for name, directions in theirs.items():
            reference[name].copy_(directions)
        assert self._motion.before is not None
        self._motion.before.copy_(state["before"])
        packed = state.get("packed", {})
        if self._patterns is not None and packed.keys() == self._patterns.parts.keys():
            earlier = {
                step: Pattern(packed[step].to(part.packed.device), part.bits)
                for step, part in self._patterns.parts.items()
            }
            self._patterns = Patterns(earlier, self._patterns.layers)


def _share(sides: Tensor, channel: int) -> Tensor:
    """Return the share of points that are True; from counts, so that all of them are exactly 1."""
    others = [d for d in range(sides.ndim) if d != channel % sides.ndim]
    count = sides.sum(dim=others) if others else sides.long()
    return count.double() / max(1, sides.numel() // max(1, len(count)))


def median(values: Tensor) -> Tensor:
    """Return the middle value, of an even number the mean of two; any size, unlike quantile."""
    count = values.numel()
    ordered = values.sort().values
    return (ordered[(count - 1) // 2] + ordered[count // 2]) / 2


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
    low, high = (
        ordered.gather(1, (start + at.long()).flatten(1)).view_as(place)
        for at in (place.floor(), place.ceil())
    )
    between = torch.lerp(low, high, place - place.floor())
    return torch.where(low == high, low, between)  # infinity less infinity is NaN


def _with_network(layers: Tensor, network: Tensor | None = None) -> Tensor:
    last = layers.new_full((), torch.nan) if network is None else network
    return torch.cat([layers, last[None]])
