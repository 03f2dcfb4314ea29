"""A snapshot: all that a tracker knows of a model's units at one moment.

It is taken in one run of the probe, if there is one, and one pass over the weights. Two snapshots
are an `Interval`, which is what a quantity is measured on (`quantities.py`). Everything stays on
the model's device, and nothing waits for it.
"""

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from geoparam import sphere
from geoparam.analysis.boundary import combine_terms, place_boundaries, read_units
from geoparam.analysis.patterns import Changes, Pattern, Patterns
from geoparam.analysis.readings import Readings
from geoparam.analysis.sites import Inputs, Site, Sites
from geoparam.model.norms import Moments
from geoparam.model.run import full_tensor
from geoparam.model.unit_layers import UnitRows

SAFE_LENGTHS = {torch.float32: (1e-15, 1e15), torch.float64: (1e-150, 1e150)}


class Snapshot(NamedTuple):
    """The followed units of all layers at one moment, one layer after another.

    A direction is kept without the sign of its unit's gain (gamma, or r inside), which would only
    turn it around. Only the latest snapshot has directions: the next one turns them in place.
    """

    directions: dict[str, Tensor]  # unit rows (units, n) of each layer
    moves: Tensor  # (total,), ||u - u'|| of each direction and the one before
    sign: Tensor  # (total,); NaN for a unit without a boundary
    scale: Tensor  # (total,)
    distances: Tensor  # (2, total), at the first and the last breakpoint
    patterns: Patterns | None = None
    readings: Readings | None = None

    def lost(self) -> "Snapshot":
        """Return a snapshot from which turns and displacements are unknown."""
        nowhere = self.distances * torch.nan
        return self._replace(sign=self.sign * torch.nan, distances=nowhere)


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
        self.like = _find_type(self.sites.values())
        device = self.like.device

        sizes = [site.size for site in self.sites.values()]
        self.sizes = torch.tensor([*sizes, sum(sizes)]).to(device, torch.float64)
        self.counts = [min(size, units or size) for size in sizes]
        layers = torch.arange(len(sizes))
        self.layer_of = layers.repeat_interleave(torch.tensor(self.counts)).to(device)

        self.sample: dict[str, Tensor] = {}  # the followed units of layers that are sampled
        for name, size, count in zip(self.sites, sizes, self.counts, strict=True):
            if count < size:
                spaced = torch.linspace(0, size - 1, count, device=device)
                self.sample[name] = spaced.round().long()

    def pick(self, name: str, values: Tensor) -> Tensor:
        """Return the elements of the units of a layer that are followed, from those of all."""
        if name not in self.sample:
            return values
        return full_tensor(values)[self.sample[name].to(values.device)]


def _find_type(sites: Iterable[Site]) -> Tensor:
    """Return an empty tensor on the layers' device; float64 if one of them is."""
    parameters = [next(site.layer.parameters()) for site in sites if site.layer is not None]
    is_double = any(parameter.dtype == torch.float64 for parameter in parameters)
    dtype = torch.float64 if is_double else torch.float32
    return torch.empty(0, dtype=dtype, device=parameters[0].device)


class Camera:
    """Takes snapshots of a model's units, each compared with the one before.

    With `batch`, norms with running statistics are read by those of the probe, as in training.
    `last` is what the next one is compared with; from `compare` to `keep` it is lost, so that
    nothing is compared with a snapshot that was broken off.
    """

    def __init__(
        self, model: nn.Module, sites: Sites, units: int | None, probe: Inputs | None, batch: bool
    ) -> None:
        self.model, self.sites, self.probe = model, sites, probe
        self.layout = Layout(sites, units)
        self.directions: dict[str, Tensor] = {}  # of the latest snapshot
        self._batch = batch
        self._shapes: dict[str, torch.Size] = {}  # of each layer's rows
        modules = set(model.modules())
        self._read: dict[str, set[nn.Module]] = {}  # the modules that each layer's units depend on
        for name, site in sites.layers.items():
            parts = (site.layer, site.norm, site.activation)
            named = {part for part in parts if isinstance(part, nn.Module)}
            self._read[name] = named & modules
        self.last = _strip(self._take())

    @property
    def units(self) -> dict[str, list[int]]:
        """The number of followed units of each layer, and of their inputs."""
        return {name: list(u.shape) for name, u in self.directions.items()}

    def _check_model(self) -> None:
        """Refuse a model whose modules are not those in which the sites were found."""
        modules = set(self.model.modules())
        gone = [name for name, parts in self._read.items() if not parts <= modules]
        if gone:
            raise ValueError(
                "the model has other modules than when the tracker was built, at "
                f"{', '.join(gone)}: convert_, fold_ and the like replace them. Build the tracker "
                "afterwards."
            )

    def compare(self) -> "Interval":
        """Take a snapshot, and return it with the one before; it is to be kept."""
        self._check_model()
        before, self.last = self.last, self.last.lost()
        return Interval(self.layout, before, self._take())

    def keep(self, now: Snapshot) -> None:
        """Let the next snapshot be compared with this one, or with the last known patterns."""
        self.last = _strip(now)._replace(patterns=now.patterns or self.last.patterns)

    @torch.inference_mode(False)  # tensors that are kept may be used outside of it
    @torch.no_grad()
    def _take(self) -> Snapshot:
        """Run the probe, if there is one, read all units and turn the directions to theirs."""
        readings = None
        moments: Mapping[str, Moments] = {}
        if self.probe is not None:
            readings = Readings(self.model, self.probe, self.sites, self._batch)
            moments = readings.moments

        like = self.layout.like
        layers: list[UnitRows] = []
        moves: list[Tensor] = []
        with torch.autocast(like.device.type, enabled=False):
            for name, site in self.layout.sites.items():
                units = self._pick(name, read_units(site, moments.get(name)))
                moves.append(self._turn(name, units))
                layers.append(units)
            places = place_boundaries(combine_terms(layers, like))
        all_moves = torch.cat([full_tensor(move).to(like) for move in moves])
        patterns = None if readings is None else readings.patterns
        return Snapshot(self.directions, all_moves, *places, patterns, readings)

    def state_dict(self) -> dict[str, Any]:
        """Return what the next snapshot is compared with."""
        state: dict[str, Any] = {"sign": self.last.sign, "distances": self.last.distances}
        state["directions"] = {name: u.clone() for name, u in self.directions.items()}
        if self.last.patterns is not None:
            parts = self.last.patterns.parts
            state["packed"] = {step: part.packed for step, part in parts.items()}
        return state

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Compare the next snapshot with that of a state, or with the model as it is."""
        self.last = self.last.lost()
        last = _strip(self._take())
        if state is not None:
            last = self._restore(state, last)
        self.last = last

    def _restore(self, state: Mapping[str, Any], now: Snapshot) -> Snapshot:
        """Go back to the directions of a state, and return its snapshot of the same units."""
        for name, u in self.directions.items():
            u.copy_(state["directions"][name])
        sign, distances = state["sign"].to(now.sign), state["distances"].to(now.distances)
        earlier = now._replace(sign=sign, distances=distances)

        packed = state.get("packed", {})
        if now.patterns is None or packed.keys() != now.patterns.parts.keys():
            return earlier
        parts = {}
        for step, part in now.patterns.parts.items():
            parts[step] = Pattern(packed[step].to(part.packed.device), part.bits)
        return earlier._replace(patterns=Patterns(parts, now.patterns.layers))

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Refuse a state that lacks a tensor, or has one of another shape."""
        directions = state.get("directions")
        if not isinstance(directions, Mapping):
            directions = {}
        expected = [("sign", state.get("sign"), self.last.sign)]
        expected.append(("distances", state.get("distances"), self.last.distances))
        for name, u in self.directions.items():
            expected.append((name, directions.get(name), u))

        for name, value, tensor in expected:
            if not isinstance(value, Tensor) or value.shape != tensor.shape:
                raise ValueError(
                    f"the tracker's state is damaged: {name!r} of its snapshot should be a tensor "
                    f"of shape {tuple(tensor.shape)}. Load another checkpoint, or go on without."
                )

    def _pick(self, name: str, units: UnitRows) -> UnitRows:
        """Return the followed units of a layer; refuse one that has other rows than before."""
        if self._shapes.setdefault(name, units.rows.shape) != units.rows.shape:
            raise ValueError(
                f"{name} had other sizes when the tracker was built: rows were pruned or added. "
                "Build the tracker anew."
            )
        if name not in self.layout.sample:
            return units
        terms = dict(units.terms)
        for key, value in terms.items():
            if isinstance(value, Tensor) and value.numel() > 1:  # not one value for all units
                terms[key] = self.layout.pick(name, value)
        return UnitRows(self.layout.pick(name, units.rows), terms, units.are_unit_vectors)

    def _turn(self, name: str, units: UnitRows) -> Tensor:
        """Turn a layer's directions to those of its rows; return ||u - u'|| of each unit.

        The lengths of the rows become one of the units' terms.
        """
        rows = units.rows.to(torch.promote_types(units.rows.dtype, torch.float32))
        if name not in self.directions:
            self.directions[name] = torch.zeros_like(rows)
        u = self.directions[name]
        if units.are_unit_vectors:
            self.directions[name] = rows
            return torch.linalg.vector_norm(rows - u, dim=1)

        units.terms["length"], moves = turn_rows(u, rows)
        return moves


def _strip(snapshot: Snapshot) -> Snapshot:
    """Return a snapshot without what the next one is not compared with."""
    return snapshot._replace(directions={}, readings=None)


def turn_rows(u: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Turn directions u (units, n) to those of rows; return the rows' lengths and ||u - u'||.

    All is computed in u: on a CPU, new memory of that size takes as long as the arithmetic.
    """
    length = measure_lengths(rows)
    u.addcdiv_(rows, length[:, None], value=-1)  # u - rows / length
    moves = torch.linalg.vector_norm(u, dim=1)
    torch.div(rows, length[:, None], out=u)
    return length, moves


def measure_lengths(rows: Tensor) -> Tensor:
    """Return the lengths of rows (units, n), in their type.

    On a CPU, torch adds up a contiguous row in many partial sums: in float32 that is right to
    5e-7, in a fifth of the time of float64. Elsewhere, and where squares may leave the range of
    the type, lengths are computed in float64.
    """
    if is_on_cpu(rows) and rows.is_contiguous():
        length = torch.linalg.vector_norm(rows, dim=1)
        if torch.equal(length, length.clamp(*SAFE_LENGTHS[rows.dtype])):
            return length
    return sphere.length(rows).to(rows.dtype)


def is_on_cpu(rows: Tensor) -> bool:
    """Return whether rows are in this process's memory, and not in shards."""
    return rows.device.type == "cpu" and not hasattr(rows, "full_tensor")


class Interval:
    """Two snapshots of the same units, and what several quantities need of both."""

    def __init__(self, layout: Layout, before: Snapshot, now: Snapshot) -> None:
        self.layout, self.before, self.now = layout, before, now
        self.readings: Any = now.readings  # None without a probe

    @cached_property
    def chords(self) -> tuple[Tensor, Tensor]:
        """||u - u'|| and ||u + u'|| of the directions u and u' at both ends, (total,).

        NaN where a unit has no boundary at one of them, or the earlier snapshot is lost. The
        second is sqrt(4 - ||u - u'||^2), which spares a pass over all weights. It has half the
        digits where a direction is all but turned around.
        """
        near = torch.where((self.before.sign * self.now.sign).isnan(), torch.nan, self.now.moves)
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
