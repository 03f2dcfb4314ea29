r"""The linear regions of a small network in a plane through input space, exactly.

Points of the plane are x(a, b) = origin + a e_1 + b e_2, in a window of a and b. A piecewise
linear network divides the window into convex polygons, on each of which it is one affine map; they
are found activation by activation, in the order of the run:

1. The first region is the window.
2. In a region all activations so far have a fixed pattern, so what the next one gets is affine
   there: z(a, b) = z_0 + g^T (a, b), for every unit. Value and derivative at one inner point are
   all of it, for all regions in one batch; derivatives are those of forward mode, without any step
   size.
3. Every breakpoint t gives each unit the line z(a, b) = t. Lines that cross the region cut it, and
   what lies in the region is a piece of that unit's boundary: straight here, another line in the
   next region. So a deep unit's boundary bends exactly where it meets one of an earlier layer.

Numbers are float64, on a copy of the model. The window is scaled to [-1, 1]^2; there, a line
closer than 1e-11 to a corner goes through it, and a unit whose z changes by less than 1e-13 of the
largest z of its layer is constant. No region that is wider is lost, and areas always add up.

What the network must be: affine between breakpoints that are known (ReLU, leaky ReLU, PReLU,
ReLU6, Hardtanh, SReLU; norms with running statistics; averages, sums, convolutions). Smooth
activations, max pooling and norms of the example itself are refused by name. Kinks that no step
shows (`abs`, `maximum`) are found in the end, where every pre-activation and the output have to be
affine over points 1 % inside of the corners of each region: nearer to a side, kinks are missed.

What is left out: a boundary that runs along one of an earlier layer is drawn once, as the earlier
one's.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from geoparam.analysis.partition import Pattern, Patterns
from geoparam.analysis.reading.activations import Breaks
from geoparam.analysis.reading.layer_sites import Site
from geoparam.analysis.reading.probe import observe
from geoparam.analysis.slices.piecewise import Build, Network, bent
from geoparam.analysis.slices.plane import Extent, Plane, checked_plane, unit_window
from geoparam.analysis.slices.polygons import Polygons, chords, join, rectangle, split
from geoparam.trace import tensors_in

ON_LINE = 1e-11  # of half the window
CONSTANT = 1e-13  # of the largest pre-activation
BENT = 1e-9  # of the largest value of the step
ROUNDING = 1e-13  # of the largest value so far: what is left where large numbers cancel
NUMBERS = 1 << 21  # how many a run may make, which bounds its memory


# --- the result ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Slice:
    """The regions of a network in a window of a plane; `a` and `b` are the plane's coordinates.

    Attributes:
        plane: Where it lies in input space.
        polygons: The corners of each region, (k, 2), counter-clockwise.
        areas: The area of each region, (count,).
        patterns: The activation pattern of each region, in the order of `polygons`.
        segments: Pieces of the boundaries of each layer's units, (m, 2, 2): both ends of each. The
            second call of a layer has the name "layer (2)"; an activation that belongs to no layer
            has its own.
        units: The unit of each segment, (m,): its place in the flattened output of the layer.
    """

    plane: Plane
    polygons: list[np.ndarray]
    areas: np.ndarray
    patterns: Patterns
    segments: dict[str, np.ndarray]
    units: dict[str, np.ndarray]

    @property
    def count(self) -> int:
        """The number of regions."""
        return len(self.polygons)


def slice_regions(
    model: nn.Module,
    origin: Tensor | Plane,
    axes: Sequence[Tensor] | None = None,
    extent: Extent = (-1.0, 1.0, -1.0, 1.0),
    *,
    inputs: Build | None = None,
    max_regions: int = 100_000,
) -> Slice:
    """Return the linear regions of `model` in a window of the plane origin + a e_1 + b e_2.

    Args:
        model: A piecewise linear network, seen in evaluation mode; it is left as it is.
        origin: An input, without the dimension of the batch; or a whole plane with its window, as
            `plane_through` makes it, without `axes` and `extent`.
        axes: e_1 and e_2, two directions of its shape; of a model with two inputs, its own.
        extent: The window, (lowest a, highest a, lowest b, highest b).
        inputs: Makes the model's inputs from a batch (N, *shape), where it takes more than that.
        max_regions: More than these raise ValueError.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1), nn.ReLU())
        >>> for layer, bias in ((model[0], 0.0), (model[2], -1.0)):
        ...     _ = nn.init.eye_(layer.weight), nn.init.constant_(layer.bias, bias)
        >>> found = slice_regions(model, torch.zeros(2), extent=(-2, 2, -2, 2))
        >>> found.count, found.areas.sum().item(), found.segments["2"].tolist()
        (6, 16.0, [[[1.0, 2.0], [1.0, 0.0]], [[1.0, -2.0], [1.0, 0.0]]])
    """
    if isinstance(origin, Plane):
        if axes is not None:
            raise ValueError("a plane has its own axes and extent: give it alone, or its origin.")
        origin, axes, extent = origin
    plane = checked_plane(origin, axes, extent)
    unit_plane, middle, half = unit_window(plane)
    network = Network(model, unit_plane, inputs or (lambda x: x))
    regions = rectangle(*unit_plane.extent)
    packed: dict[str, np.ndarray] = {}
    segments, units = {}, {}
    for name, site in network.sites.items():
        cut = _refine(network, site, regions, max_regions)
        regions = cut.regions
        packed = {earlier: rows[cut.whole] for earlier, rows in packed.items()}
        packed[name] = cut.packed
        segments[name], units[name] = middle + half * cut.ends, cut.unit
    _check_affine(network, regions)
    return Slice(
        plane,
        [middle + half * corners for corners in regions.separate()],
        regions.areas() * half.prod(),
        _patterns(network, packed),
        segments,
        units,
    )


# --- the regions --------------------------------------------------------------------------------


class _Cut(NamedTuple):
    """What the boundaries of one activation make of regions.

    Attributes:
        regions: The pieces.
        whole: The number of the region that each was a part of.
        packed: The activation's bits in each, packed.
        ends, unit: The boundaries themselves, and whose they are.
    """

    regions: Polygons
    whole: np.ndarray
    packed: np.ndarray
    ends: np.ndarray
    unit: np.ndarray


class _Lines(NamedTuple):
    """In each region the lines of all units: height = offset (P, L) + normal (P, L, 2)^T (a, b).

    L counts units, and these for each of the breakpoints, `levels`.
    """

    normal: np.ndarray
    offset: np.ndarray
    levels: int


def _refine(network: Network, site: Site, regions: Polygons, limit: int) -> _Cut:
    """Cut regions along the boundaries of one activation, some of them at a time."""
    cuts: list[_Cut] = []
    for start, group in _groups(network, regions, points=2):
        lines = _lines(network, site, group)
        crosses = _crossing(group, lines)
        region, line = crosses.nonzero()
        heights = _heights(group.pick(region), lines, region, line)
        ends = chords(group.pick(region), heights)
        made = sum(len(cut.whole) for cut in cuts)
        pieces, whole = _cut(group, lines, crosses, limit - made)
        packed = _packed(pieces, whole, lines)
        cuts.append(_Cut(pieces, start + whole, packed, ends, line % network.units(site)))
    first, *others = zip(*cuts, strict=True)
    return _Cut(join(list(first)), *(np.concatenate(each) for each in others))


def _lines(network: Network, site: Site, regions: Polygons) -> _Lines:
    """Return the lines at which the units of an activation have breakpoints, in each region."""
    points = regions.inner()
    z, slopes = network.jets(site, points)
    value, gradient = z.flatten(1).numpy(), slopes.flatten(2).movedim(0, 2).numpy()
    length = np.linalg.norm(gradient, axis=2)
    rounding = CONSTANT * (np.abs(value) + length).max(axis=1, keepdims=True)
    constant = length <= rounding
    length[constant] = 1
    normal = gradient / length[:, :, None]
    normal[constant] = 0
    offsets = []
    for level in _levels(site, z[0]):
        offset = (value - level) / length - np.einsum("pud,pd->pu", normal, points)
        side = np.where(value - level > rounding, np.inf, -np.inf)  # a constant meets no line
        offsets.append(np.where(constant, side, offset))
    levels = len(offsets)
    return _Lines(np.tile(normal, (1, levels, 1)), np.concatenate(offsets, axis=1), levels)


def _levels(site: Site, z: Tensor) -> np.ndarray:
    """Return the breakpoints (K, units) of one example's pre-activations."""
    points = _breaks(site).tensor(z.movedim(site.channel, -1))
    return points.movedim(-1, site.channel).flatten(1).numpy()


def _crossing(regions: Polygons, lines: _Lines) -> np.ndarray:
    """Return which lines have corners of a region on both sides, (P, L)."""
    low = np.full(lines.offset.shape, np.inf)
    high = -low
    for corner in np.moveaxis(regions.corners, 1, 0):
        height = lines.offset + np.einsum("pud,pd->pu", lines.normal, corner)
        np.minimum(low, height, out=low)
        np.maximum(high, height, out=high)
    return (low < -ON_LINE) & (high > ON_LINE)


def _heights(regions: Polygons, lines: _Lines, whole: np.ndarray, line: np.ndarray) -> np.ndarray:
    """Return the heights of corners (M, V) above one line for each region; 0 if they are on it."""
    normal, offset = lines.normal[whole, line], lines.offset[whole, line]
    heights = offset[:, None] + np.einsum("md,mvd->mv", normal, regions.corners)
    return np.where(np.abs(heights) <= ON_LINE, 0, heights)


def _cut(
    regions: Polygons, lines: _Lines, crosses: np.ndarray, limit: int
) -> tuple[Polygons, np.ndarray]:
    """Cut regions along the lines that cross them, in each turn along the next one of each.

    Return the pieces, and the region that each was a part of.
    """
    order = np.argsort(~crosses, axis=1, kind="stable")
    turns = crosses.sum(axis=1)
    pieces, whole = regions, np.arange(len(turns))
    done: list[tuple[Polygons, np.ndarray]] = []
    for turn in range(turns.max(initial=0)):
        waits = turns[whole] > turn
        done.append((pieces.pick(~waits), whole[~waits]))
        pieces, whole = pieces.pick(waits), whole[waits]
        heights = _heights(pieces, lines, whole, order[whole, turn])
        hit = (heights.max(axis=1) > 0) & (heights.min(axis=1) < 0)
        pieces = join([pieces.pick(~hit), *split(pieces.pick(hit), heights[hit])])
        whole = np.concatenate([whole[~hit], whole[hit], whole[hit]])
        _check_room(len(whole) + sum(len(each) for _, each in done), limit)
    parts, wholes = zip(*done, (pieces, whole), strict=True)
    return join(list(parts)), np.concatenate(wholes)


def _packed(pieces: Polygons, whole: np.ndarray, lines: _Lines) -> np.ndarray:
    """Return on which side of all lines pieces are, each breakpoint in whole bytes of its own."""
    points = pieces.inner()
    rows = []
    step = max(1, NUMBERS // lines.offset.shape[1])
    for start in range(0, len(whole), step):
        here, block = points[start : start + step], whole[start : start + step]
        heights = np.einsum("mld,md->ml", lines.normal[block], here) + lines.offset[block]
        sides = heights.reshape(len(block), lines.levels, -1) > 0
        rows.append(np.packbits(sides, axis=2).reshape(len(block), -1))
    return np.concatenate(rows)


def _patterns(network: Network, packed: Mapping[str, np.ndarray]) -> Patterns:
    parts, layers = {}, {}
    for name, site in network.sites.items():
        step, bits = network.step(site), network.units(site) * len(_breaks(site).points)
        parts[step] = Pattern(torch.from_numpy(packed[name]), bits)
        layers[name] = (step,)
    return Patterns(parts, layers)


def _breaks(site: Site) -> Breaks:
    assert site.breaks is not None  # the network has been checked
    return site.breaks


def _groups(network: Network, regions: Polygons, points: int) -> Iterator[tuple[int, Polygons]]:
    """Yield regions, as many as fit in memory with so many points of each, and their start."""
    step = max(1, NUMBERS // (points * max(1, network.size)))
    for start in range(0, len(regions.corners), step):
        yield start, regions.pick(slice(start, start + step))


def _check_room(regions: int, limit: int) -> None:
    if regions > limit:
        raise ValueError(
            "the window has more regions than `max_regions`. Take a smaller window or a smaller "
            "network, or allow more."
        )


# --- the last look ------------------------------------------------------------------------------


def _check_affine(network: Network, regions: Polygons) -> None:
    """Refuse a network that is not affine on each of the regions."""
    random = np.random.default_rng(0)
    for _, group in _groups(network, regions, points=8):
        _check_mixture(network, _mixture(group, random))


class _Mixture(NamedTuple):
    """Points in each region, (N, 2), and the mean of each region's, (M, 2), by weights (N,)."""

    means: np.ndarray
    points: np.ndarray
    region: np.ndarray
    weights: np.ndarray


def _mixture(regions: Polygons, random: np.random.Generator) -> _Mixture:
    """Return points that show a kink: just inside each corner, so that it parts some of them.

    An affine function's value at their mean is the mean of its values. Where it bends once it is
    not; weights are random, so that no symmetry hides a product of two coordinates.
    """
    weights = random.uniform(0.5, 1.5, regions.corners.shape[:2])
    weights *= np.arange(weights.shape[1]) < regions.sizes[:, None]
    weights /= weights.sum(axis=1, keepdims=True)
    inner = regions.inner()[:, None]
    points = inner + 0.99 * (regions.corners - inner)
    region, corner = weights.nonzero()
    means = np.einsum("mv,mvd->md", weights, points)
    return _Mixture(means, points[region, corner], region, weights[region, corner])


def _check_mixture(network: Network, of: _Mixture) -> None:
    """Compare what every activation gets, and the output, at means with the mean over points."""
    points = np.concatenate([of.means, of.points])
    count = len(of.means)
    region, weights = torch.from_numpy(of.region), torch.from_numpy(of.weights)
    so_far = 0.0

    def check(values: Tensor, step: int) -> None:
        nonlocal so_far
        largest = float(values.abs().max())
        so_far = max(so_far, largest)
        values = values.reshape(len(points), -1)
        mixed = torch.zeros_like(values[:count])
        mixed.index_add_(0, region, weights[:, None] * values[count:])
        error = float((mixed - values[:count]).abs().max())
        if error > max(BENT * largest, ROUNDING * so_far):
            raise ValueError(bent(network.graph, step))

    def leave(module: nn.Module, args: tuple, result: object) -> None:
        for output in tensors_in(result):
            if output.is_floating_point() and output.shape[:1] == (len(points),):
                check(output, len(network.graph.nodes) - 1)

    with network.model.register_forward_hook(leave):
        inputs = network.inputs(points)
        observe(network.model, inputs, network.sites, lambda site, z: check(z, network.step(site)))
