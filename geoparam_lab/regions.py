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
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

import geoparam as gp
from geoparam.analysis import breaks

ON_LINE = 1e-11  # of half the window
CONSTANT = 1e-13  # of the largest pre-activation
LAYERS = (nn.Linear, _ConvNd, gp.GmPLayer)
AFFINE = (*LAYERS, _BatchNorm, gp.InputMeanNorm, nn.AvgPool2d, nn.Flatten, nn.Dropout, nn.Identity)

Polygon = np.ndarray  # corners (k, 2), counter-clockwise


class Plane(NamedTuple):
    """A window in a plane through input space: origin + a axes[0] + b axes[1]."""

    origin: Tensor  # an input, without the dimension of the batch
    axes: Sequence[Tensor]  # two directions of its shape; torch.eye(2) for two inputs
    extent: tuple[float, float, float, float]  # lowest a, highest a, lowest b, highest b

    def at(self, points: Tensor | np.ndarray) -> Tensor:
        """Return the inputs at points (N, 2) of the plane, in float64."""
        coefficients = torch.as_tensor(points, dtype=torch.float64)
        axes = torch.stack([axis.double() for axis in self.axes])
        return self.origin.double() + torch.tensordot(coefficients, axes, dims=1)


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
        model: Layers, norms with running statistics, and ReLU or another piecewise linear
            activation in a Sequential, on the CPU, seen in evaluation mode.
        plane: `Plane(origin, axes, extent)`.
        max_regions: More than these raise ValueError.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1), nn.ReLU())
        >>> for layer, bias in ((model[0], 0.0), (model[2], -1.0)):
        ...     _ = nn.init.eye_(layer.weight), nn.init.constant_(layer.bias, bias)
        >>> regions = slice_regions(model, Plane(torch.zeros(2), torch.eye(2), (-2, 2, -2, 2)))
        >>> regions.count, regions.areas.sum().item(), regions.segments["2"].tolist()
        (6, 16.0, [[[1.0, 2.0], [1.0, 0.0]], [[1.0, -2.0], [1.0, 0.0]]])
    """
    a0, a1, b0, b1 = plane.extent
    if not (-math.inf < a0 < a1 < math.inf and -math.inf < b0 < b1 < math.inf):
        raise ValueError(f"extent is (a0, a1, b0, b1) with a0 < a1, b0 < b1; got {plane.extent}.")
    middle = np.array([a0 + a1, b0 + b1]) / 2
    half = np.array([a1 - a0, b1 - b0]) / 2
    axes = [axis.double() * width for axis, width in zip(plane.axes, half, strict=True)]
    window = Plane(plane.at(middle), axes, (-1.0, 1.0, -1.0, 1.0))

    regions: list[Polygon] = [np.array([[-1.0, -1.0], [1.0, -1.0], [1.0, 1.0], [-1.0, 1.0]])]
    segments: dict[str, np.ndarray] = {}
    before = nn.Sequential()  # the steps before an activation
    layer = ""
    for name, step in _list_steps(copy.deepcopy(model).double().eval()):
        if isinstance(step, LAYERS):
            layer = name
        if breaks(step) is not None:
            regions, ends = _cut_regions(window, before, layer, step, regions)
            segments[layer] = middle + half * np.array(ends).reshape(-1, 2, 2)
        before.append(step)
        if len(regions) > max_regions:
            raise ValueError(
                f"the window has more than max_regions={max_regions} regions. Take a smaller "
                "window or a smaller network, or allow more."
            )
    if not segments:
        raise ValueError("regions are made by activations with breakpoints, as ReLU; got none.")
    areas = np.array([_area(region) for region in regions]) * half.prod()
    return Slice(plane, [middle + half * region for region in regions], areas, segments)


def _list_steps(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules in the order of their calls; raise where one is not piecewise linear."""
    if not isinstance(model, nn.Sequential):
        raise ValueError(f"slice_regions takes an nn.Sequential; got {type(model).__name__}.")
    for name, module in model.named_children():
        if isinstance(module, nn.Sequential):
            yield from _list_steps(module, f"{prefix}{name}.")
            continue
        if not _is_piecewise_linear(module):
            raise ValueError(
                "regions have straight sides where a network is affine between breakpoints; "
                f"{prefix + name!r} is {module}. Take layers without an activation of their own, "
                "norms with running statistics, ReLU or a relative of it, average pooling, or the "
                "part before that module."
            )
        yield prefix + name, module


def _is_piecewise_linear(module: nn.Module) -> bool:
    known = breaks(module)
    if known is not None:
        is_rounded = isinstance(module, nn.Hardsigmoid)  # torch's slope is off by 3e-8
        is_shared = not any(isinstance(point, Tensor) for point in known.points)
        return known.linear and is_shared and not is_rounded
    if isinstance(module, _BatchNorm) and module.running_mean is None:
        return False
    return isinstance(module, AFFINE) and getattr(module, "activation", None) is None


def _cut_regions(
    window: Plane, before: nn.Module, layer: str, activation: nn.Module, regions: list[Polygon]
) -> tuple[list[Polygon], list[np.ndarray]]:
    """Cut every region along the activation's boundaries; return the pieces and the cuts."""
    inside = np.stack([region.mean(axis=0) for region in regions])
    z, slopes = _compute_jets(window, before, inside)
    if not z.isfinite().all():
        raise ValueError(f"the pre-activations of {layer!r} are not finite in the window.")
    normals, offsets = _find_lines(activation, z, slopes, inside)

    pieces: list[Polygon] = []
    ends: list[np.ndarray] = []
    for region, normal, offset in zip(regions, normals, offsets, strict=True):
        parts = [region]
        heights = region @ normal.T + offset
        crosses = (heights.min(axis=0) < -ON_LINE) & (heights.max(axis=0) > ON_LINE)
        for line in crosses.nonzero()[0]:
            ends.append(_chord(region, normal[line], offset[line]))
            parts = [half for part in parts for half in _split(part, normal[line], offset[line])]
        pieces += parts
    return pieces, ends


@torch.no_grad()
def _compute_jets(window: Plane, network: nn.Module, points: np.ndarray) -> tuple[Tensor, Tensor]:
    """Return what a network computes at points, (N, units), and the slopes, (N, units, 2)."""
    x = window.at(points)
    slopes = []
    with warnings.catch_warnings():  # torch warns at its own first use of forward mode
        warnings.filterwarnings("ignore", r"`torch\.jit\.script` is deprecated")
        for axis in window.axes:
            jet: Any = torch.func.jvp(network, (x,), (axis.expand_as(x).clone(),))
            z, slope = jet
            slopes.append(slope.flatten(1))
    return z.flatten(1), torch.stack(slopes, dim=2)


def _find_lines(
    activation: nn.Module, z: Tensor, slopes: Tensor, points: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the lines of an activation's breakpoints, with one inner point for each region.

    Heights above them are normal (P, L, 2)^T (a, b) + offset (P, L), for L = breakpoints x units.
    """
    value, gradient = z.numpy(), slopes.numpy()
    length = np.linalg.norm(gradient, axis=2)
    rounding = CONSTANT * (np.abs(value) + length).max(axis=1, keepdims=True)
    is_constant = length <= rounding
    length[is_constant] = 1
    normal = np.where(is_constant[:, :, None], 0, gradient / length[:, :, None])

    known: Any = breaks(activation)
    offsets = []
    for point in known.points:
        height = value - point
        offset = height / length - np.einsum("pud,pd->pu", normal, points)
        side = np.where(height > rounding, np.inf, -np.inf)  # a constant unit meets no line
        offsets.append(np.where(is_constant, side, offset))
    return np.tile(normal, (1, len(offsets), 1)), np.concatenate(offsets, axis=1)


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
