"""A snapshot: all that a tracker knows of a model's units at one moment.

It is taken in one run of the probe, if there is one, and one reading of the weights. Two snapshots
are an `Interval`, which is what a quantity is measured on (`quantities.py`). Everything stays on
the model's device, and nothing waits for it.
"""

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from geoparam import sphere
from geoparam.analysis.boundary import Units, combine_terms, place_boundaries, read_units
from geoparam.analysis.layer_units import count_units
from geoparam.analysis.norms import Moments
from geoparam.analysis.patterns import Changes, Pattern, Patterns, count_examples
from geoparam.analysis.readings import Readings
from geoparam.analysis.sites import Inputs, Sites
from geoparam.inspection import full_tensor

BLOCK = 1 << 18  # elements; 2 MiB in float64


class Snapshot(NamedTuple):
    """The followed units of all layers at one moment, one layer after another.

    A direction is kept without the sign of its unit's gain (gamma, or r inside), which would only
    turn it around.
    """

    directions: dict[str, Tensor]  # unit rows (units, n) of each layer
    sign: Tensor  # (total,); NaN for a unit without a boundary
    scale: Tensor  # (total,)
    distances: Tensor  # (2, total), at the first and the last breakpoint
    patterns: Patterns | None = None
    readings: Readings | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return what the next snapshot is compared with."""
        directions = {name: rows.clone() for name, rows in self.directions.items()}
        state: dict[str, Any] = {"directions": directions}
        state |= {"sign": self.sign, "distances": self.distances}
        if self.patterns is not None:
            state["packed"] = {step: part.packed for step, part in self.patterns.parts.items()}
        return state

    def replace_by(self, state: Mapping[str, Any]) -> "Snapshot":
        """Return the snapshot that a state was taken from; this one is of the same units."""
        directions = {}
        for name, now in self.directions.items():
            directions[name] = torch.empty_like(now).copy_(state["directions"][name])
        patterns = self.patterns
        packed = state.get("packed", {})
        if patterns is not None and packed.keys() == patterns.parts.keys():
            parts = {
                step: Pattern(packed[step].to(part.packed.device), part.bits)
                for step, part in patterns.parts.items()
            }
            patterns = Patterns(parts, patterns.layers)
        return Snapshot(
            directions,
            state["sign"].to(self.sign),
            self.scale,
            state["distances"].to(self.distances),
            patterns,
        )


class Layout:
    """Which units of a model are followed, and how vectors over all of them are divided.

    At most `units` of each layer are followed, evenly spaced; all by default.

    Attributes:
        sites: The layers, by name.
        counts: How many units of each layer are followed.
        sizes: How many units each layer has, and all together, (layers + 1,).
        layer_of: The number of each followed unit's layer, (total,).
        like: An empty tensor of the type and on the device of vectors over units.
    """

    def __init__(self, sites: Sites, units: int | None = None) -> None:
        self.sites = sites.layers
        modules = [site.layer for site in sites.layers.values() if site.layer is not None]
        parameters = [next(module.parameters()) for module in modules]
        is_double = any(parameter.dtype == torch.float64 for parameter in parameters)
        dtype = torch.float64 if is_double else torch.float32
        device = parameters[0].device
        self.like = torch.empty(0, dtype=dtype, device=device)

        sizes = [count_units(module) for module in modules]
        self.counts = [min(size, units or size) for size in sizes]
        self.chosen: dict[str, Tensor] = {}  # the followed units of layers that are sampled
        for name, size, count in zip(self.sites, sizes, self.counts, strict=True):
            if count < size:
                spaced = torch.linspace(0, size - 1, count, device=device)
                self.chosen[name] = spaced.round().long()
        self.sizes = torch.tensor([*sizes, sum(sizes)]).to(device, torch.float64)
        layers = torch.arange(len(sizes))
        self.layer_of = layers.repeat_interleave(torch.tensor(self.counts)).to(device)

    def pick(self, name: str, values: Tensor) -> Tensor:
        """Return the elements of the units of a layer that are followed, from those of all."""
        if name not in self.chosen:
            return values
        return full_tensor(values)[self.chosen[name].to(values.device)]


class Camera:
    """Takes snapshots of a model's units.

    With `batch`, norms with running statistics are read by those of the probe, as in training.
    """

    def __init__(
        self, model: nn.Module, sites: Sites, layout: Layout, probe: Inputs | None, batch: bool
    ) -> None:
        self.model, self.sites, self.layout, self.probe = model, sites, layout, probe
        self._examples = None if probe is None else count_examples(probe)
        self._batch = batch
        modules = set(model.modules())
        self._read: dict[str, set[nn.Module]] = {}  # the modules that each layer's units depend on
        for name, site in sites.layers.items():
            parts = (site.layer, site.norm, site.activation)
            named = {part for part in parts if isinstance(part, nn.Module)}
            self._read[name] = named & modules
        self._shapes = self._list_shapes()

    def check_model(self) -> None:
        """Refuse a model whose layers are not those in which the sites were found."""
        modules = set(self.model.modules())
        gone = [name for name, parts in self._read.items() if not parts <= modules]
        if gone:
            raise ValueError(
                "the model has other modules than when the tracker was built, at "
                f"{', '.join(gone)}: convert_, fold_ and the like replace them. Build the tracker "
                "afterwards."
            )
        shapes = self._list_shapes()
        if cut := [name for name, sizes in self._shapes.items() if shapes[name] != sizes]:
            raise ValueError(
                f"{', '.join(cut)} had other sizes when the tracker was built: rows were pruned "
                "or added. Build the tracker anew."
            )

    def _list_shapes(self) -> dict[str, list[torch.Size]]:
        """Return the shapes of each layer's parameters."""
        shapes = {}
        for name, site in self.sites.layers.items():
            parameters = () if site.layer is None else site.layer.parameters()
            shapes[name] = [parameter.shape for parameter in parameters]
        return shapes

    @torch.inference_mode(False)  # tensors that are kept may be used outside of it
    @torch.no_grad()
    def take(self, spare: Snapshot | None = None) -> Snapshot:
        """Run the probe, if there is one, and read all units.

        The directions are written into the memory of `spare`, a snapshot that is no longer used.
        """
        readings = None
        moments: Mapping[str, Moments] = {}
        if self.probe is not None:
            options = (self.sites, self._examples, self._batch)
            readings = Readings(self.model, self.probe, *options)
            moments = readings.moments
        with torch.autocast(self.layout.like.device.type, enabled=False):
            return self._read_units(moments, readings, {} if spare is None else spare.directions)

    def _read_units(
        self,
        moments: Mapping[str, Moments],
        readings: Readings | None,
        spare: Mapping[str, Tensor],
    ) -> Snapshot:
        layers: list[Units] = []
        directions: dict[str, Tensor] = {}
        for name, site in self.layout.sites.items():
            units = self._pick(name, read_units(site, moments.get(name)))
            rows = units.rows.to(torch.promote_types(units.rows.dtype, torch.float32))
            if not units.are_unit_vectors:
                length = map_blocks(sphere.length, rows).to(rows.dtype)
                rows = torch.div(rows, length[:, None], out=spare.get(name))
                units.terms["length"] = length
            directions[name] = rows
            layers.append(units)
        places = place_boundaries(combine_terms(layers, self.layout.like))
        patterns = None if readings is None else readings.patterns
        return Snapshot(directions, *places, patterns, readings)

    def _pick(self, name: str, units: Units) -> Units:
        """Return the followed units of a layer."""
        if name not in self.layout.chosen:
            return units
        terms = dict(units.terms)
        for key, value in terms.items():
            if isinstance(value, Tensor) and value.numel() > 1:  # not one value for all units
                terms[key] = self.layout.pick(name, value)
        return Units(self.layout.pick(name, units.rows), terms, units.are_unit_vectors)


def map_blocks(function: Callable[..., Tensor], *rows: Tensor) -> Tensor:
    """Return a function of rows (units, n), one value for each, computed a block at a time.

    On a CPU what it computes in between then stays in the cache; elsewhere one block is all.
    """
    units, n = rows[0].shape
    is_whole = rows[0].device.type != "cpu" or units * n <= BLOCK
    if is_whole or any(hasattr(part, "full_tensor") for part in rows):
        return function(*rows)
    blocks = zip(*(part.split(max(1, BLOCK // n)) for part in rows), strict=True)
    return torch.cat([function(*block) for block in blocks])


def measure_difference(u: Tensor, v: Tensor) -> Tensor:
    """Return ||u - v|| of each row."""
    return torch.linalg.vector_norm(u - v, dim=1)


class Interval:
    """Two snapshots of the same units, and what several quantities need of both."""

    def __init__(self, layout: Layout, before: Snapshot, now: Snapshot) -> None:
        self.layout, self.before, self.now = layout, before, now
        self.readings: Any = now.readings  # None without a probe

    @cached_property
    def chords(self) -> tuple[Tensor, Tensor]:
        """||u - u'|| and ||u + u'|| of the directions u and u' at both ends, (total,).

        The second is sqrt(4 - ||u - u'||^2), which spares a pass over all weights. It has half
        the digits where a direction is all but turned around.
        """
        apart = []
        for name, u in self.now.directions.items():
            difference = map_blocks(measure_difference, u, self.before.directions[name])
            apart.append(full_tensor(difference).to(self.layout.like))
        near = torch.cat(apart)
        far = (4 - near.square()).clamp(min=0).sqrt()
        # A change of sign turns a direction around: the two lengths change places.
        is_flipped = self.before.sign != self.now.sign
        return torch.where(is_flipped, far, near), torch.where(is_flipped, near, far)

    @cached_property
    def changes(self) -> Changes | None:
        """How activation patterns changed; None where they cannot be compared."""
        now, before = self.now.patterns, self.before.patterns
        if now is None or before is None:
            return None
        try:
            return now.changes(before)
        except ValueError:  # other layers or points than before: a router may skip some
            return None
