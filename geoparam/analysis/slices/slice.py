r"""The linear regions of a small network in a plane through input space, exactly.

A piecewise linear network divides the window of a plane into convex polygons, on each of which it
is one affine map. They are found activation by activation, in the order of the run. In a region
all activations so far have a fixed pattern, so each unit's next pre-activation is affine there,
z(a, b) = z_0 + g^T (a, b), known from its value and derivative (by forward mode) at one inner
point. Every breakpoint t gives each unit the line z(a, b) = t. Lines that cross the region cut it,
and their part in it is a piece of that unit's boundary. In the next region it is another line: a
deep unit's boundary bends where it meets an earlier one's. A max pool divides a region likewise:
input k of a window wins in the convex cell where z_k >= z_j for all j of the window. Of inputs
that are equal in all of the region the first one wins.

All arithmetic is in float64, on a copy of the model. The window is scaled to [-1, 1]^2; there, a
line closer than 1e-11 to a corner goes through it, and a unit whose z changes by less than 1e-13
of the largest z of its layer is constant. No region that is wider is lost, and areas always add
up. A boundary that runs along one of an earlier layer is drawn once, as the earlier one's.

The network must be affine between known breakpoints (ReLU, leaky ReLU, PReLU, ReLU6, Hardtanh,
SReLU; norms with running statistics; averages, sums, convolutions, max pools). Smooth activations
and norms of the example itself are refused by name. Other kinks (`abs`, `maximum`) are found at
the end: every pre-activation and the output must be affine over points 1 % inside of the corners
of each region. Kinks nearer to a side are missed.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from geoparam.analysis.boundary import spread
from geoparam.analysis.partition import Collector, Pattern, Patterns
from geoparam.analysis.reading.layer_sites import Site
from geoparam.analysis.reading.probe import MaxPool, observe
from geoparam.analysis.slices import polygons
from geoparam.analysis.slices.piecewise import Network, explain_bend
from geoparam.analysis.slices.plane import Plane, check_plane, scale_window
from geoparam.analysis.slices.polygons import ON_LINE, Polygon
from geoparam.inspection import tensors_in

CONSTANT = 1e-13  # of the largest pre-activation
BENT = 1e-9  # of the largest value of the step
ROUNDING = 1e-13  # of the largest value so far: the error where large values cancel
ELEMENTS = 1 << 21  # in all tensors of one run, to bound its memory

# Regions cut along an activation's boundaries, or where a pool's winners change: the pieces, and
# both ends of the pieces of the boundaries, (2, 2) each.
Cut = tuple[list[Polygon], list[np.ndarray]]


@dataclass(frozen=True)
class Slice:
    """The regions of a network in a window of a plane; `a` and `b` are the plane's coordinates.

    Segments are by layer name. The second call of a layer has the name "layer (2)"; max pools, and
    activations that belong to no layer, have their own.
    """

    plane: Plane
    polygons: list[Polygon]
    areas: np.ndarray
    patterns: Patterns  # of the regions, in the order of `polygons`
    segments: dict[str, np.ndarray]  # both ends of pieces of the units' boundaries, (m, 2, 2)

    @property
    def count(self) -> int:
        """The number of regions."""
        return len(self.polygons)


def slice_regions(model: nn.Module, plane: Plane, *, max_regions: int = 100_000) -> Slice:
    """Return the linear regions of `model` in the window of a plane.

    Args:
        model: A piecewise linear network, seen in evaluation mode; it is left as it is.
        plane: `Plane(origin, axes, extent)`, or one through three inputs, by `plane_through`.
        max_regions: More than these raise ValueError.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1), nn.ReLU())
        >>> for layer, bias in ((model[0], 0.0), (model[2], -1.0)):
        ...     _ = nn.init.eye_(layer.weight), nn.init.constant_(layer.bias, bias)
        >>> found = slice_regions(model, Plane(torch.zeros(2), torch.eye(2), (-2, 2, -2, 2)))
        >>> found.count, found.areas.sum().item(), found.segments["2"].tolist()
        (6, 16.0, [[[1.0, 2.0], [1.0, 0.0]], [[1.0, -2.0], [1.0, 0.0]]])
    """
    plane = check_plane(plane)
    unit_plane, middle, half = scale_window(plane)
    network = Network(model, unit_plane)
    regions: list[Polygon] = [np.array([[-1.0, -1.0], [1.0, -1.0], [1.0, 1.0], [-1.0, 1.0]])]
    segments = {}
    for name, site in network.sites.items():
        regions, ends = _cut_regions(network, site, regions, max_regions)
        segments[name] = middle + half * np.array(ends).reshape(-1, 2, 2)
    patterns = _read_patterns(network, regions)
    areas = np.array([polygons.area(region) for region in regions]) * half.prod()
    corners = [middle + half * region for region in regions]
    return Slice(plane, corners, areas, patterns, segments)


def _cut_regions(network: Network, site: Site, regions: Sequence[Polygon], limit: int) -> Cut:
    """Cut every region; raise ValueError if there are more than `limit` pieces."""
    pool = isinstance(site.activation, MaxPool)
    find, cut = (_inputs, _cut_at_winners) if pool else (_lines, _cut_along_lines)
    found: list[Polygon] = []
    ends: list[np.ndarray] = []
    for group in _groups(network, regions, points=2):
        points = np.stack([region.mean(axis=0) for region in group])
        for region, normal, offset in zip(group, *find(network, site, points), strict=True):
            pieces, own_ends = cut(region, normal, offset)
            found += pieces
            ends += own_ends
            if len(found) > limit:
                raise ValueError(
                    "the window has more regions than `max_regions`. Take a smaller window or "
                    "a smaller network, or allow more."
                )
    return found, ends


def _cut_along_lines(region: Polygon, normal: np.ndarray, offset: np.ndarray) -> Cut:
    """Cut one region along the lines with normals (L, 2) and offsets (L,)."""
    heights = region @ normal.T + offset
    crosses = (heights.min(axis=0) < -ON_LINE) & (heights.max(axis=0) > ON_LINE)
    lines = crosses.nonzero()[0].tolist()
    pieces = [region]
    for line in lines:
        halves = [polygons.split(piece, normal[line], offset[line]) for piece in pieces]
        pieces = [half for both in halves for half in both]
    return pieces, [polygons.chord(region, normal[line], offset[line]) for line in lines]


def _cut_at_winners(region: Polygon, slope: np.ndarray, value: np.ndarray) -> Cut:
    """Cut one region where inputs value + slope^T (a, b), (O, K), win in another order."""
    rounding = CONSTANT * (np.abs(value).max() + np.abs(slope).max())
    heights = slope @ region.mean(axis=0) + value
    first = (heights >= heights.max(axis=1, keepdims=True) - rounding).argmax(axis=1)
    lead = np.take_along_axis(value, first[:, None], 1) - value  # of the winner inside
    rise = np.take_along_axis(slope, first[:, None, None], 1) - slope
    ahead = np.einsum("okd,pd->pok", rise, region) + lead
    near = np.maximum(ON_LINE * np.linalg.norm(rise, axis=2), rounding)
    pieces, places = [region], range(value.shape[1])
    ends: list[np.ndarray] = []
    for output in (ahead.min(axis=0) < -near).any(axis=1).nonzero()[0]:
        duels = [_duels(slope[output], value[output], k, rounding) for k in places]
        cells = {k: polygons.cell_above(region, *duels[k]) for k in places}
        winners = [k for k in places if len(cells[k])]
        parts = [polygons.cell_above(piece, *duels[k]) for piece in pieces for k in winners]
        pieces = [part for part in parts if len(part)]
        for k, j in itertools.combinations(winners, 2):
            normal, offset = duels[k]
            ends += polygons.side_on(cells[k], normal[j], offset[j])
    return pieces, ends


def _duels(
    slope: np.ndarray, value: np.ndarray, k: int, rounding: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return by how much input k of a window exceeds each: normals (K, 2), offsets (K,)."""
    rise, lead = slope[k] - slope, value[k] - value
    length = np.linalg.norm(rise, axis=1)
    constant = length <= rounding
    wins = (lead > rounding) | ((lead >= -rounding) & (k <= np.arange(len(value))))
    length[constant] = 1
    normal = np.where(constant[:, None], 0, rise / length[:, None])
    return normal, np.where(constant, np.where(wins, np.inf, -np.inf), lead / length)


def _inputs(network: Network, site: Site, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the inputs of a max pool's windows by region: slope (P, O, K, 2), value at (0, 0)."""
    assert isinstance(site.activation, MaxPool)
    z, slopes = network.compute_jets(site, points)
    value, *each = (site.activation.windows(t).flatten(1, -2).numpy() for t in (z, *slopes))
    slope = np.stack(each, axis=3)
    return slope, value - np.einsum("pokd,pd->pok", slope, points)


def _lines(network: Network, site: Site, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the lines of an activation's breakpoints, with one inner point for each region.

    Heights above them are normal (P, L, 2)^T (a, b) + offset (P, L), for L = breakpoints x units.
    """
    z, slopes = network.compute_jets(site, points)
    value, gradient = z.flatten(1).numpy(), slopes.flatten(2).movedim(0, 2).numpy()
    length = np.linalg.norm(gradient, axis=2)
    rounding = CONSTANT * (np.abs(value) + length).max(axis=1, keepdims=True)
    constant = length <= rounding
    length[constant] = 1
    normal = gradient / length[:, :, None]
    normal[constant] = 0
    offsets = []
    assert site.breaks is not None  # `find_activations` has checked it
    like = z[0].movedim(site.channel, -1)
    for point in site.breaks.points:
        level = spread(point, like).movedim(-1, site.channel).flatten().numpy()
        offset = (value - level) / length - np.einsum("pud,pd->pu", normal, points)
        side = np.where(value - level > rounding, np.inf, -np.inf)  # a constant meets no line
        offsets.append(np.where(constant, side, offset))
    return np.tile(normal, (1, len(offsets), 1)), np.concatenate(offsets, axis=1)


def _groups(
    network: Network, regions: Sequence[Polygon], points: int
) -> Iterator[Sequence[Polygon]]:
    """Yield regions in groups that fit in memory, with so many points of each."""
    step = max(1, ELEMENTS // (points * max(1, network.size)))
    for start in range(0, len(regions), step):
        yield regions[start : start + step]


def _read_patterns(network: Network, regions: Sequence[Polygon]) -> Patterns:
    """Return the patterns of the regions; refuse a network that is not affine on each of them.

    An affine function's value at a weighted mean of points is that mean of its values. The points
    are just inside each corner, so that a kink separates some of them. The weights are random, so
    that no symmetry hides a product of two coordinates.
    """
    random, found = np.random.default_rng(0), []
    for group in _groups(network, regions, points=8):
        weights = [random.uniform(0.5, 1.5, len(region)) for region in group]
        weights = [each / each.sum() for each in weights]
        points = [0.01 * region.mean(axis=0) + 0.99 * region for region in group]
        means = [each @ corners for each, corners in zip(weights, points, strict=True)]
        owner = np.repeat(np.arange(len(group)), [len(region) for region in group])
        each = np.stack(means), np.concatenate(points), np.concatenate(weights)
        found.append(_read_means(network, *each, owner))
    parts = {
        step: Pattern(torch.cat([each.parts[step].packed for each in found]), part.bits)
        for step, part in found[0].parts.items()
    }
    return Patterns(parts, found[0].layers)


def _read_means(
    network: Network, means: np.ndarray, points: np.ndarray, weights: np.ndarray, owner: np.ndarray
) -> Patterns:
    """Compare pre-activations and output at means (M, 2) with weighted sums over points (N, 2).

    Return the patterns at the means.
    """
    count, total = len(means), len(means) + len(points)
    collector, so_far = Collector(torch.from_numpy(means)), 0.0

    def check(values: Tensor, step: int) -> None:
        nonlocal so_far
        largest = float(values.abs().max())
        so_far = max(so_far, largest)
        values = values.reshape(total, -1)
        mixed = torch.zeros_like(values[:count])
        weighted = torch.from_numpy(weights)[:, None] * values[count:]
        mixed.index_add_(0, torch.from_numpy(owner), weighted)
        error = float((mixed - values[:count]).abs().max())
        if error > max(BENT * largest, ROUNDING * so_far):
            raise ValueError(explain_bend(network.graph, step))

    def check_output(module: nn.Module, args: tuple, result: object) -> None:
        for output in tensors_in(result):
            if output.is_floating_point() and output.shape[:1] == (total,):
                check(output, len(network.graph.nodes) - 1)

    def see(site: Site, z: Tensor, step: int) -> None:
        check(z, step)
        collector(site, z[:count], step)

    with network.model.register_forward_hook(check_output):
        inputs = network.plane.at(np.concatenate([means, points]))
        observe(network.model, inputs, network.sites, see)
    patterns = collector.patterns()
    assert patterns is not None  # each site has breakpoints, or is a max pool
    return patterns
