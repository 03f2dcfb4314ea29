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
that the kernels can be replayed: a record of a ResNet-50 needs some 700 small ones. Launching them
from Python took 15 ms on the host of an H200, and their work 2 ms of the device.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from geoparam import sphere
from geoparam.analysis import boundary
from geoparam.analysis.boundary import Terms, Units
from geoparam.analysis.reading.layer_sites import Site, count_units
from geoparam.analysis.reading.norms import Moments
from geoparam.base_layer import GmPLayer
from geoparam.inspection import full_tensor

Result = TypeVar("Result")

SAMPLED = 64  # units of a layer whose angles are counted: a scan of all took 0.7 ms on an H200
NEGLIGIBLE = 1e-4  # a metric below this: a step of the angle turns the unit by under 1 % of it


class Measured(NamedTuple):
    """One element for each unit of all layers, (total,); the last two for each layer."""

    rotation: Tensor  # degrees
    displacement: Tensor
    scale: Tensor
    distance: Tensor
    is_undefined: Tensor
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
        self.chosen: dict[str, Tensor | None] = {}
        for name, size, count in zip(self.sites, sizes, self.counts, strict=True):
            spaced = torch.linspace(0, size - 1, count, device=self.device).round().long()
            self.chosen[name] = None if count == size else spaced
        self.reference: dict[str, Tensor] = {}  # the directions, without signs
        self.before: Tensor | None = None  # signs and distances at both ends, (3, total)

    @torch.no_grad()
    def measure(self, moments: Mapping[str, Moments] | None = None) -> Measured:
        """Measure now; the next call compares with this one."""
        columns: list[list[Tensor]] = []  # of each layer: turns, breakpoints, parts
        angular: list[Tensor] = []
        with torch.autocast(self.device.type, enabled=False):
            for name, site in self.sites.items():
                known = None if moments is None else moments.get(name)
                units = boundary.read_units(site.layer, site.norm, known, self.dtype)
                u, turns = self._compare_directions(name, units)
                ends = (torch.nan,) if site.breaks is None else site.breaks.points
                levels = [boundary.spread(end, units.parts.gain) for end in (ends[0], ends[-1])]
                rest = [self.pick(name, vector) for vector in (*levels, *units.parts)]
                columns.append([self._cast(vector) for vector in (*turns, *rest)])
                angular.append(self._cast(_angle_metric(site, u)))
        length, apart, together, low, high, *parts = map(torch.cat, zip(*columns, strict=True))
        located = boundary.place_boundaries(Terms(*parts), length, torch.stack([low, high]))
        return self._compare(apart, together, located, torch.stack(angular))

    def pick(self, name: str, value: Tensor) -> Tensor:
        """Return the elements of the units of a layer that are followed, from those of all."""
        chosen = self.chosen[name]
        return value if chosen is None else value[chosen.to(value.device)]

    def _cast(self, value: Tensor) -> Tensor:
        return value.to(self.device, self.dtype)

    def _compare_directions(self, name: str, units: Units) -> tuple[Tensor, list[Tensor]]:
        """Return a layer's directions u, and the lengths of its rows, of u - u' and of u + u'."""
        rows = units.rows.detach()
        rows = rows if self.chosen[name] is None else self.pick(name, full_tensor(rows))
        u = rows.to(torch.promote_types(rows.dtype, torch.float32))
        length = boundary.spread(1.0, units.parts.gain[: len(u)])
        if not units.normalised:
            length = sphere.length(u).to(u.dtype)
            u = u / length[:, None]
        if name not in self.reference:
            self.reference[name] = u.clone()
        before = self.reference[name]
        apart, together = (torch.linalg.vector_norm(t, dim=1) for t in (u - before, u + before))
        before.copy_(u)
        return u, [full_tensor(each) for each in (length, apart, together)]

    def _compare(
        self, apart: Tensor, together: Tensor, located: tuple[Tensor, ...], angular: Tensor
    ) -> Measured:
        sign, scale, distances = located
        now = torch.cat([sign[None], distances])
        before = now if self.before is None else self.before.clone()
        self.before = now if self.before is None else self.before.copy_(now)
        flipped = before[0] != sign
        near = torch.where(flipped, together, apart)
        far = torch.where(flipped, apart, together)
        turn = 2 * torch.atan2(near, far)
        return Measured(
            rotation=torch.where((before[0] * sign).isnan(), torch.nan, turn.rad2deg()),
            displacement=boundary.displacement(before[1:], distances, near, far).amax(dim=0),
            scale=scale,
            distance=distances[0],
            is_undefined=sign.isnan(),
            smallest_product=angular[:, 0],
            negligible_metric=angular[:, 1],
        )


def _angle_metric(site: Site, u: Tensor) -> Tensor:
    """Return the smallest product of cosines and the share of angles with negligible metric.

    Angle k has the metric P_k^2 with P_k = prod_{j<k} cos a_j = ||u_{k..n}||; P falls with k.
    """
    layer = site.layer
    angles = isinstance(layer, GmPLayer) and layer.coordinates == "angles" and layer.fan_in > 1
    if not angles:
        return boundary.spread(torch.nan, torch.empty(2, device=u.device))
    smallest = torch.linalg.vector_norm(u[:, -2:], dim=1).amin()
    some = u[:: -(-len(u) // SAMPLED)]
    used_up = some[:, :-2].square().cumsum(1) > 1 - NEGLIGIBLE  # P_1 = 1 is never small
    share = used_up.sum() / some[:, 1:].numel()
    return full_tensor(torch.stack([smallest, share.to(smallest.dtype)]))


class GraphReplay(Generic[Result]):
    """Calls a function of tensors that stay in place by replaying its kernels.

    The function takes no arguments and must do the same every time: read the tensors of `modules`,
    change its own state in place, and return tensors, which the next call overwrites. The first
    call runs it, the second captures it. If a tensor has moved or was replaced, capture starts
    again. On a CPU, and for sharded parameters, it is just called.
    """

    def __init__(self, function: Callable[[], Result], modules: Iterable[nn.Module]) -> None:
        self._function = function
        inner = dict.fromkeys(part for module in modules for part in module.modules())
        self._holders: list[Mapping[str, Tensor | None]] = [
            held for module in inner for held in (module._parameters, module._buffers)
        ]
        tensors = self._tensors()
        whole = not any(hasattr(t, "full_tensor") for t in tensors)
        self._can_replay = whole and bool(tensors) and all(t.is_cuda for t in tensors)
        self._places: list[int] | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: Result | None = None

    def _tensors(self) -> list[Tensor]:
        return [t for held in self._holders for t in held.values() if t is not None]

    def __call__(self) -> Result:
        if not self._can_replay:
            return self._function()
        places = [t.data_ptr() for t in self._tensors()]
        if places != self._places:
            self._places, self._graph = places, None
            return self._function()
        if self._graph is None:
            self._graph, self._result = torch.cuda.CUDAGraph(), None
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                self._result = self._function()
        self._graph.replay()
        assert self._result is not None
        return self._result
