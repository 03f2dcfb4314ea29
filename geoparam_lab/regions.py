r"""The linear regions of a small network in a plane through input space, exactly.

A piecewise linear network divides a window of the plane into convex polygons, on each of which it
is one affine map. They are found activation by activation. In a region all activations so far have
a fixed pattern, so each unit's next pre-activation is affine there,

    z(a, b) = z_0 + g^T (a, b),

known from its value and derivative (by forward mode) at one inner point. Each breakpoint t gives
the unit a line z(a, b) = t. Lines that cross the region cut it, and their part in it is a piece of
that unit's boundary. In the next region it is another line: a deep unit's boundary bends where it
meets an earlier one.

All arithmetic is in float64, on a copy of the model. The window is scaled to [-1, 1]^2. There, a
line closer than 1e-11 to a corner goes through it, and a unit whose z changes by less than 1e-13
of the largest z of its layer is constant.
"""

import copy
import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import geoparam as gp
from geoparam.analysis import SReLU, breaks

ON_LINE = 1e-11  # of half the window
CONSTANT = 1e-13  # of the largest pre-activation
BENT = 1e-9  # of the largest value of a step
AT_A_TIME = 4096  # regions in one run of the model

Polygon = np.ndarray  # corners (k, 2), counter-clockwise
Steps = list[tuple[str, nn.Module]]


class Plane(NamedTuple):
    """A window in a plane through input space: origin + a axes[0] + b axes[1]."""

    origin: Tensor  # an input, without the dimension of the batch
    axes: Sequence[Tensor]  # two directions of its shape; torch.eye(2) for two inputs
    extent: tuple[float, float, float, float]  # lowest a, highest a, lowest b, highest b

    def at(self, points: Tensor | np.ndarray) -> Tensor:
        """Return the inputs at points (N, 2) of the plane, in float64."""
        coefficients = torch.as_tensor(points, dtype=torch.float64)
        axes = torch.stack([_float64(axis) for axis in self.axes])
        return _float64(self.origin) + torch.tensordot(coefficients, axes, dims=1)

    def coordinates(self, inputs: Tensor) -> np.ndarray:
        """Return the coordinates (N, 2) of inputs, or of their nearest points in the plane."""
        axes = torch.stack([_float64(axis).flatten() for axis in self.axes])
        offsets = (_float64(inputs) - _float64(self.origin)).flatten(1)
        return (offsets @ torch.linalg.pinv(axes)).numpy()


def plane_through(p: Tensor, q: Tensor, r: Tensor, margin: float = 0.25) -> Plane:
    """Return the plane through three inputs, with orthonormal axes, and a window around them.

    The first axis points from p to q. The window is wider than what the three points span, by
    `margin` of it on each side.

    Example:
        >>> a, b, c = torch.tensor([0., 0., 1.]), torch.tensor([4., 0., 1.]), torch.ones(3)
        >>> plane = plane_through(a, b, c, margin=0)
        >>> [axis.tolist() for axis in plane.axes], plane.extent
        ([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]], (0.0, 4.0, 0.0, 1.0))
    """
    p, q, r = _float64(p), _float64(q), _float64(r)
    first = q - p
    second = (r - p) - first * ((r - p) * first).sum() / (first * first).sum()
    if not float(second.norm()) > 1e-6 * float((r - p).norm()):  # float32 rounds that much
        raise ValueError("three points that lie on one line make no plane. Take others.")

    axes = (first / first.norm(), second / second.norm())
    spanned = Plane(p, axes, (0.0, 0.0, 0.0, 0.0)).coordinates(torch.stack([p, q, r]))
    low, high = spanned.min(axis=0), spanned.max(axis=0)
    low, high = low - margin * (high - low), high + margin * (high - low)
    return Plane(p, axes, (float(low[0]), float(high[0]), float(low[1]), float(high[1])))


@dataclass(frozen=True)
class Slice:
    """The regions of a network in a window of a plane; `a` and `b` are the plane's coordinates."""

    plane: Plane
    polygons: list[Polygon]
    areas: np.ndarray
    segments: dict[str, np.ndarray]  # by layer: ends of pieces of its boundaries, (m, 2, 2)

    @property
    def count(self) -> int:
        """The number of regions."""
        return len(self.polygons)


def slice_regions(model: nn.Sequential, plane: Plane, *, max_regions: int = 100_000) -> Slice:
    """Return the linear regions of a network in the window of a plane.

    Args:
        model: Layers, norms with running statistics and activations with breakpoints in a
            Sequential, seen in evaluation mode. What bends inside of a region is refused.
        plane: `Plane(origin, axes, extent)`, or `plane_through` three inputs.
        max_regions: More than these raise ValueError.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1), nn.ReLU())
        >>> for layer, bias in ((model[0], 0.0), (model[2], -1.0)):
        ...     _ = nn.init.eye_(layer.weight), nn.init.constant_(layer.bias, bias)
        >>> regions = slice_regions(model, Plane(torch.zeros(2), torch.eye(2), (-2, 2, -2, 2)))
        >>> regions.count, regions.areas.sum().item(), regions.segments["2"].tolist()
        (6, 16.0, [[[1.0, 2.0], [1.0, 0.0]], [[1.0, -2.0], [1.0, 0.0]]])
    """
    _check_plane(plane)
    steps = _list_steps(model)
    a0, a1, b0, b1 = plane.extent
    middle = np.array([a0 + a1, b0 + b1]) / 2
    half = np.array([a1 - a0, b1 - b0]) / 2
    axes = [_float64(axis) * width for axis, width in zip(plane.axes, half, strict=True)]
    window = Plane(plane.at(middle), axes, (-1.0, 1.0, -1.0, 1.0))

    regions: list[Polygon] = [np.array([[-1.0, -1.0], [1.0, -1.0], [1.0, 1.0], [-1.0, 1.0]])]
    segments = {}
    layer = ""
    for number, (name, step) in enumerate(steps):
        if isinstance(step, nn.Linear | nn.modules.conv._ConvNd | gp.GmPLayer):
            layer = name
        if breaks(step) is not None:
            regions, ends = _cut_regions(window, steps[:number], layer, step, regions)
            segments[layer] = middle + half * np.array(ends).reshape(-1, 2, 2)
        if len(regions) > max_regions:
            raise ValueError(
                f"the window has more than max_regions={max_regions} regions. Take a smaller "
                "window or a smaller network, or allow more."
            )
    _check_straight(window, steps, regions)
    areas = np.array([_area(region) for region in regions]) * half.prod()
    return Slice(plane, [middle + half * region for region in regions], areas, segments)


def _check_plane(plane: Plane) -> None:
    if not isinstance(plane, Plane) or len(plane.axes) != 2 or len(plane.extent) != 4:
        raise ValueError(
            "slice_regions needs Plane(origin, two axes, (a0, a1, b0, b1)), or "
            f"plane_through(p, q, r); got {plane}."
        )
    shapes = [tuple(tensor.shape) for tensor in (plane.origin, *plane.axes)]
    if len(set(shapes)) > 1:
        raise ValueError(
            "origin and axes have the shape of one input, without the dimension of the batch; "
            f"got {shapes}."
        )
    a0, a1, b0, b1 = plane.extent
    is_finite = math.isfinite(a1 - a0) and math.isfinite(b1 - b0)
    if not (is_finite and a0 < a1 and b0 < b1):
        raise ValueError(f"extent is (a0, a1, b0, b1) with a0 < a1, b0 < b1; got {plane.extent}.")
    spread = torch.linalg.svdvals(torch.stack([_float64(axis).flatten() for axis in plane.axes]))
    if not (plane.origin.isfinite().all() and spread[-1] > 1e-9 * spread[0]):
        raise ValueError("origin must be finite, and the axes two different directions.")


def _list_steps(model: nn.Module) -> Steps:
    """Return the modules of a copy of the model in float64, in the order of their calls."""
    if not isinstance(model, nn.Sequential):
        raise ValueError(
            f"slice_regions takes an nn.Sequential; got {type(model).__name__}. Give the part of "
            "the model that is one."
        )
    steps: Steps = []
    for name, module in copy.deepcopy(model).cpu().double().eval().named_modules():
        if "." in name and not isinstance(
            model.get_submodule(name.rpartition(".")[0]), nn.Sequential
        ):
            continue  # a part of a module that is called as a whole
        if isinstance(module, nn.Sequential):
            continue
        if getattr(module, "activation", None) is not None:
            raise ValueError(
                f"{name!r} applies its activation itself. Build the layer without activation=, "
                "and put the activation behind it."
            )
        known = breaks(module)
        is_rounded = isinstance(module, nn.Hardsigmoid)  # torch's slope is off by 3e-8
        if is_rounded or (known is not None and not known.linear):
            raise ValueError(
                f"regions have straight sides where activations are piecewise linear; {name!r} is "
                f"{type(module).__name__}. Take ReLU or a relative of it."
            )
        steps.append((name, module))
    if all(breaks(module) is None for _, module in steps):
        raise ValueError("regions are made by activations with breakpoints, as ReLU; got none.")
    return steps


def _cut_regions(
    window: Plane, steps: Steps, layer: str, activation: nn.Module, regions: Sequence[Polygon]
) -> tuple[list[Polygon], list[np.ndarray]]:
    """Cut every region along the activation's boundaries; return the pieces and the cuts."""
    pieces: list[Polygon] = []
    ends: list[np.ndarray] = []
    for group in _group(regions):
        inside = np.stack([region.mean(axis=0) for region in group])
        z, slopes = _compute_jets(window, steps, inside)
        if not z.isfinite().all():
            raise ValueError(f"the pre-activations of {layer!r} are not finite in the window.")
        normals, offsets = _find_lines(activation, z, slopes, inside)
        for region, normal, offset in zip(group, normals, offsets, strict=True):
            parts = [region]
            heights = region @ normal.T + offset
            crosses = (heights.min(axis=0) < -ON_LINE) & (heights.max(axis=0) > ON_LINE)
            for line in crosses.nonzero()[0]:
                ends.append(_chord(region, normal[line], offset[line]))
                parts = [
                    half for part in parts for half in _split(part, normal[line], offset[line])
                ]
            pieces += parts
    return pieces, ends


def _group(regions: Sequence[Polygon]) -> Iterator[Sequence[Polygon]]:
    for start in range(0, len(regions), AT_A_TIME):
        yield regions[start : start + AT_A_TIME]


@torch.no_grad()
def _compute_jets(window: Plane, steps: Steps, points: np.ndarray) -> tuple[Tensor, Tensor]:
    """Return what the steps compute at points, (N, units), and the slopes, (2, N, ...)."""
    network = nn.Sequential(*(module for _, module in steps))
    x = window.at(points)
    slopes = []
    with warnings.catch_warnings():  # torch warns at its own first use of forward mode
        warnings.filterwarnings("ignore", r"`torch\.jit\.script` is deprecated")
        for axis in window.axes:
            both: Any = torch.func.jvp(network, (x,), (axis.expand_as(x).clone(),))
            slopes.append(both[1])
    return both[0], torch.stack(slopes)


def _find_lines(
    activation: nn.Module, z: Tensor, slopes: Tensor, points: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the lines of an activation's breakpoints, with one inner point for each region.

    Heights above them are normal (P, L, 2)^T (a, b) + offset (P, L), for L = breakpoints x units.
    """
    value = z.flatten(1).numpy()
    gradient = slopes.flatten(2).movedim(0, 2).numpy()
    length = np.linalg.norm(gradient, axis=2)
    rounding = CONSTANT * (np.abs(value) + length).max(axis=1, keepdims=True)
    is_constant = length <= rounding
    length[is_constant] = 1
    normal = np.where(is_constant[:, :, None], 0, gradient / length[:, :, None])

    known = breaks(activation)
    assert known is not None
    offsets = []
    for point in known.points:
        level: Any = point
        if isinstance(point, Tensor):  # SReLU's, along its channels
            dim = activation.dim % z.ndim if isinstance(activation, SReLU) else 1
            level = point.view(-1, *[1] * (z.ndim - 1 - dim)).expand(z.shape[1:]).flatten().numpy()
        height = value - level
        offset = height / length - np.einsum("pud,pd->pu", normal, points)
        side = np.where(height > rounding, np.inf, -np.inf)  # a constant unit meets no line
        offsets.append(np.where(is_constant, side, offset))
    return np.tile(normal, (1, len(offsets), 1)), np.concatenate(offsets, axis=1)


@torch.no_grad()
def _check_straight(window: Plane, steps: Steps, regions: Sequence[Polygon]) -> None:
    """Refuse a network that is not affine on each region.

    An affine function's value at a weighted mean of points is that mean of its values. The points
    are just inside each corner, so that a kink separates some of them. The weights are random, so
    that no symmetry hides a product of two coordinates.
    """
    random = np.random.default_rng(0)
    for group in _group(regions):
        owner = np.repeat(np.arange(len(group)), [len(region) for region in group])
        corners = [0.01 * region.mean(axis=0) + 0.99 * region for region in group]
        points = np.concatenate(corners)
        weights = random.uniform(0.5, 1.5, len(points))
        weights /= np.bincount(owner, weights)[owner]
        means = np.zeros((len(group), 2))
        np.add.at(means, owner, weights[:, None] * points)

        x = window.at(np.concatenate([means, points]))
        for name, module in steps:
            x = module(x)
            values = x.flatten(1).numpy()
            mixed = np.zeros_like(values[: len(group)])
            np.add.at(mixed, owner, weights[:, None] * values[len(group) :])
            error = np.abs(mixed - values[: len(group)]).max()
            if error > BENT * np.abs(values).max():
                raise ValueError(
                    "regions have straight sides where a network is affine between breakpoints; "
                    f"{name!r} ({type(module).__name__}) bends inside of a region. Take ReLU or a "
                    "relative of it, BatchNorm, average pooling, or the part before that module."
                )


def _area(polygon: Polygon) -> float:
    x, y = (polygon - polygon[0]).T  # relative to a corner, against rounding
    return (x * np.roll(y, -1) - np.roll(x, -1) * y).sum() / 2


def _meet(
    polygon: Polygon, normal: np.ndarray, offset: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the corners, each followed by the point where its next side meets a line, (2k, 2).

    Also return the corners' heights above the line, and which sides cross it.
    """
    heights = polygon @ normal + offset
    heights[np.abs(heights) <= ON_LINE] = 0
    following = np.roll(heights, -1)
    crosses = heights * following < 0
    share = heights / np.where(crosses, heights - following, 1)
    meets = polygon + share[:, None] * (np.roll(polygon, -1, axis=0) - polygon)
    return np.stack([polygon, meets], axis=1).reshape(-1, 2), heights, crosses


def _split(polygon: Polygon, normal: np.ndarray, offset: float) -> list[Polygon]:
    """Cut a polygon along a line; return its parts, or itself if the line does not cross it."""
    walk, heights, crosses = _meet(polygon, normal, offset)
    if not heights.min() < 0 < heights.max():
        return [polygon]
    above = np.stack([heights >= 0, crosses], axis=1).ravel()
    below = np.stack([heights <= 0, crosses], axis=1).ravel()
    return [walk[above], walk[below]]


def _chord(polygon: Polygon, normal: np.ndarray, offset: float) -> np.ndarray:
    """Return both ends of the piece of a line in a polygon, (2, 2)."""
    walk, heights, crosses = _meet(polygon, normal, offset)
    on_line = walk[np.stack([heights == 0, crosses], axis=1).ravel()]
    furthest = np.square(on_line - on_line[0]).sum(axis=1).argmax()  # rounding can add others
    return on_line[[0, furthest]]


def _float64(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float64)
