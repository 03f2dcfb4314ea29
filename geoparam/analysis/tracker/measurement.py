"""Everything a tracker records of one moment, as one small matrix on the model's device."""

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from geoparam.analysis.boundary import gathered
from geoparam.analysis.partition import Pattern, Patterns
from geoparam.analysis.reading.layer_sites import Site, count_units
from geoparam.analysis.reading.moments import Moments
from geoparam.analysis.tracker.history import column
from geoparam.analysis.tracker.motion import Measured, Motion
from geoparam.analysis.tracker.probe_readings import Readings, median
from geoparam.analysis.tracker.quantiles import Quantiles
from geoparam.analysis.tracker.replay import Replayed
from geoparam.conversion.plan import Inputs

LEVELS = (0.0, 0.5, 0.99, 1.0)
MOTION = {  # of which vector of all units, which level
    "rotation_max": (0, 3),
    "rotation_median": (0, 1),
    "rotation_p99": (0, 2),
    "displacement_max": (1, 3),
    "displacement_median": (1, 1),
    "displacement_p99": (1, 2),
    "scale_min": (2, 0),
    "scale_median": (2, 1),
    "scale_max": (2, 3),
    "distance_median": (3, 1),
    "distance_p99": (3, 2),
    "distance_max": (3, 3),
}
ANGLES = ("rotation_rms", "units", "undefined", "smallest_product", "negligible_metric")
UNITS = (
    "input_length_median",
    "relative_distance_median",
    "dead",
    "always_on",
    "separated_median",
)
REGIONS = ("pattern_change", "points_changed", "regions")
QUANTITIES = (*MOTION, *ANGLES, *UNITS, *REGIONS)
PER_UNIT = ("rotation", "displacement", "scale", "distance")
OTHER_STEPS = (
    "on the probe the model takes other steps than when the tracker was built, so what the probe "
    "tells is NaN in this record: a branch or a router decided otherwise, or example_inputs lead "
    "elsewhere than the probe does."
)
DRAWABLE = 3  # inputs up to which the locations of all units are kept with keep="full"


class Gauge:
    """Measures a model's units, compared with the time before.

    `measure()` returns the summary (layers + 1, quantities), the network's last, and, if `full`,
    the numbers of all units in the order of `unit_types`.
    """

    def __init__(
        self,
        model: nn.Module,
        sites: Mapping[str, Site],
        probe: Inputs | None = None,
        units: int | None = None,
        full: bool = False,
    ) -> None:
        self.model, self.sites, self.probe, self.full = model, sites, probe, full
        self._motion = Motion(sites, units)
        counts, device = self._motion.counts, self._motion.device
        self._by_layer = Quantiles(counts, LEVELS, device)
        self._overall = Quantiles([sum(counts)], LEVELS, device)
        layer_of = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
        self._layer_of = layer_of.to(device)
        sizes = torch.tensor([count_units(site.layer) for site in sites.values()])
        self._sizes = _with(sizes.double(), sizes.double().sum()).to(device)
        self._replayed = Replayed(self._measure_motion, _read_by(sites))
        inside = set(model.modules())
        self._read = {
            name: [part for part in _read_by({name: site}) if part in inside]
            for name, site in sites.items()
        }
        self._patterns: Patterns | None = None
        self.unit_types: np.dtype | None = None

    @torch.inference_mode(False)  # of what is kept, the next call may be outside of it
    @torch.no_grad()
    def measure(self) -> tuple[Tensor, Tensor | None]:
        """Measure now; the next call compares with this one."""
        self._check_model()
        readings = None
        if self.probe is not None:
            readings = Readings(self.model, self.probe, self.sites)
            reshard(self.model)
            if not readings.followed:
                warnings.warn(OTHER_STEPS, stacklevel=4)
        if readings is None or not readings.moments:
            measured, table = self._replayed()
        else:
            measured, table = self._measure_motion(readings.moments)
        if readings is not None:
            table = table | self._unit_columns(readings, table["distance_median"])
            if readings.patterns is not None:
                table |= self._region_columns(readings.patterns)
                self._patterns = readings.patterns
        unknown = torch.full_like(table["rotation_max"], torch.nan)
        values = torch.stack([table.get(name, unknown) for name in QUANTITIES], dim=1)
        return values, self._units(measured, readings) if self.full else None

    def _check_model(self) -> None:
        """Refuse to measure layers that are not in the model any more."""
        inside = set(self.model.modules())
        gone = [name for name, parts in self._read.items() if not inside.issuperset(parts)]
        if gone:
            raise ValueError(
                "the model has other modules than when the tracker was built, at "
                f"{', '.join(gone)}: convert_, fold_ and the like replace them. Build the tracker "
                "afterwards."
            )

    # --- the summary: one number for each layer, and one for the network ----------------------

    def _measure_motion(
        self, moments: Mapping[str, Moments] | None = None
    ) -> tuple[Measured, dict[str, Tensor]]:
        measured = self._motion.measure(moments)
        return measured, self._motion_columns(measured)

    def _motion_columns(self, measured: Measured) -> dict[str, Tensor]:
        distance = measured.distance.abs()
        vectors = torch.stack([measured.rotation, measured.displacement, measured.scale, distance])
        levels = torch.cat([self._by_layer(vectors), self._overall(vectors)], dim=1).double()
        missing = measured.rotation.isnan().double()
        undefined = self._layer_sums(missing)
        squares = self._layer_sums(measured.rotation.double().nan_to_num(nan=0.0).square())
        defined = self._layer_sums(1 - missing)
        totals = _with(squares, squares.sum()) / _with(defined, defined.sum())
        return {
            **{name: levels[which, :, level] for name, (which, level) in MOTION.items()},
            "rotation_rms": totals.sqrt(),
            "units": self._sizes,
            "undefined": _with(undefined, undefined.sum()),
            "smallest_product": _with(measured.smallest_product.double()),
            "negligible_metric": _with(measured.negligible_metric.double()),
        }

    def _layer_sums(self, per_unit: Tensor) -> Tensor:
        return per_unit.new_zeros(len(self.sites)).index_add(0, self._layer_of, per_unit)

    def _unit_columns(self, readings: Readings, distance: Tensor) -> dict[str, Tensor]:
        lengths = self._column(readings.lengths)
        active = readings.active.items()
        smaller = {
            name: median(torch.minimum(share, 1 - share).flatten())
            for name, share in readings.above.items()
        }
        return {
            "input_length_median": lengths,
            "relative_distance_median": distance / lengths,
            "dead": self._column({name: (share == 0).sum() for name, share in active}),
            "always_on": self._column({name: (share == 1).sum() for name, share in active}),
            "separated_median": self._column(smaller),
        }

    def _region_columns(self, patterns: Patterns) -> dict[str, Tensor]:
        earlier = self._patterns
        if earlier is None or not patterns.is_like(earlier):  # a router may leave a layer out
            earlier = None
        layers, network = patterns.changes(earlier or patterns)
        return {
            name: self._column({layer: change[k] for layer, change in layers.items()}, network[k])
            for k, name in enumerate(REGIONS)
            if earlier is not None or name == "regions"
        }

    def _column(self, found: Mapping[str, Tensor], network: Tensor | None = None) -> Tensor:
        """Return one number for each layer, NaN where there is none, and the network's."""
        unknown = torch.full((), torch.nan, dtype=torch.float64, device=self._motion.device)
        numbers = [found.get(name, unknown) for name in self.sites]
        return torch.stack([_number(t, unknown) for t in (*numbers, _or(network, unknown))])

    # --- every unit ---------------------------------------------------------------------------

    def _units(self, measured: Measured, readings: Readings | None) -> Tensor:
        """Return all numbers of all units as one vector, and set `unit_types` to their order."""
        ends = torch.tensor([0, *self._motion.counts]).cumsum(0).tolist()
        types: list[tuple[str, Any]] = [("step", "f8")]
        numbers = [measured.rotation.new_zeros(1, dtype=torch.float64)]
        for index, name in enumerate(self.sites):
            stretch = slice(ends[index], ends[index + 1])
            found = {key: getattr(measured, key)[stretch] for key in PER_UNIT}
            found |= self._drawn(name, found["distance"], stretch)
            if readings is not None and _is_shown(self.sites[name]):
                unknown = torch.full_like(found["scale"], torch.nan)
                active = readings.active.get(name)
                found["active"] = unknown if active is None else self._motion.pick(name, active)
            types.append((column(name), [(key, "f8", tuple(t.shape)) for key, t in found.items()]))
            numbers += [_number(t, numbers[0]).flatten() for t in found.values()]
        if self.unit_types is None:
            self.unit_types = np.dtype(types)
        return torch.cat(numbers)

    def _drawn(self, name: str, distance: Tensor, stretch: slice) -> dict[str, Tensor]:
        """Return the locations of a layer with so few inputs that they can be drawn."""
        u, before = self._motion.reference[name], self._motion.before
        if u.shape[1] > DRAWABLE or before is None:
            return {}
        u = _number(gathered(u), distance)
        return {"location": -(distance * before[0, stretch])[:, None] * u}

    def unit_row(self, step: int, numbers: np.ndarray) -> np.ndarray:
        """Return the numbers of all units as one row of `unit_types`."""
        assert self.unit_types is not None
        row = numbers.view(self.unit_types)
        row["step"] = step
        return row

    # --- between records ----------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what the next measure compares with."""
        state: dict[str, Any] = {
            "reference": dict(self._motion.reference),
            "channels_last": dict(self._motion.channels_last),
            "before": self._motion.before,
        }
        if self._patterns is not None:
            parts = self._patterns.parts
            state["packed"] = {step: part.packed for step, part in parts.items()}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Compare the next measure with an earlier one."""
        self._motion.channels_last = dict(state["channels_last"])
        self._replayed.forget()  # kernels that read the rows in another order
        for name, directions in state["reference"].items():
            self._motion.reference[name].copy_(directions)
        assert self._motion.before is not None
        self._motion.before.copy_(state["before"])
        if self._patterns is not None and "packed" in state:
            earlier = {
                step: Pattern(state["packed"][step].to(part.packed.device), part.bits)
                for step, part in self._patterns.parts.items()
            }
            self._patterns = Patterns(earlier, self._patterns.layers)


def reshard(model: nn.Module) -> None:
    """Let FSDP2 keep parameters in pieces again, which a run leaves whole at the root."""
    for module in model.modules():
        reshard_it = getattr(module, "reshard", None)
        if callable(reshard_it) and hasattr(module, "unshard"):
            reshard_it()


def _read_by(sites: Mapping[str, Site]) -> list[nn.Module]:
    """Return the modules whose tensors say where the boundaries are."""
    held = [part for site in sites.values() for part in (site.layer, site.norm, site.activation)]
    return [part for part in held if isinstance(part, nn.Module)]


def _is_shown(site: Site) -> bool:
    """Return whether a run shows where the units of a layer are active."""
    seen = site.own_activation or any(call.activation is not None for call in site.calls)
    return site.breaks is not None and site.readable and bool(site.calls) and seen


def _with(layers: Tensor, network: Tensor | None = None) -> Tensor:
    last = layers.new_full((), torch.nan) if network is None else network
    return torch.cat([layers, last[None]])


def _or(given: Tensor | None, default: Tensor) -> Tensor:
    return default if given is None else given


def _number(t: Tensor, like: Tensor) -> Tensor:
    return t.to(like.device, torch.float64)
