r"""The linear regions of a small network of two inputs, exactly.

A piecewise linear network divides a window of its input plane into convex polygons, on each of
which it is one affine map. They are found activation by activation. In a region all activations so
far have a fixed pattern, so each unit's next pre-activation is affine there,

    z(x) = z_0 + g^T x,

known from its value and derivative (by forward mode) at one inner point. Each breakpoint t gives
the unit a line z(x) = t. Lines that cross the region cut it, and their part in it is a piece of
that unit's boundary. In the next region it is another line: a deep unit's boundary bends where it
meets an earlier one.

A plane through the inputs of a larger network, as through three images p, q and r, is a layer in
front of it: an nn.Linear with the weight [q - p, r - p] and the bias p, and an nn.Unflatten.

All arithmetic is in float64, on a copy of the model. The window is scaled to [-1, 1]^2. There, a
line closer than 1e-11 to a corner goes through it, and a unit whose z changes by less than 1e-13
of the largest z of its layer is constant.
"""

import copy
import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

import geoparam as gp
from geoparam.analysis import breaks

Array = np.ndarray
Polygon = Array  # corners (k, 2), counter-clockwise

ON_LINE = 1e-11  # of half the window
CONSTANT = 1e-13  # of the largest pre-activation
WINDOW = np.array([[-1.0, -1.0], [1.0, -1.0], [1.0, 1.0], [-1.0, 1.0]])
LAYERS = (nn.Linear, _ConvNd, gp.GmPLayer)
SHAPES = (nn.Flatten, nn.Unflatten, nn.Identity, nn.Dropout)
AFFINE = (*LAYERS, *SHAPES, _BatchNorm, gp.InputMeanNorm, nn.AvgPool2d)


@dataclass(frozen=True)
class Regions:
    """The regions of a network in a window of its input plane."""

    polygons: list[Polygon]
    areas: Array
    segments: Mapping[str, Array]  # by layer: ends of pieces of its boundaries, (m, 2, 2)


def find_regions(
    model: nn.Sequential,
    extent: tuple[float, float, float, float],
    *,
    max_regions: int = 100_000,
) -> Regions:
    """Return the linear regions of a network in a window of its input plane.

    Args:
        model: Layers, norms with running statistics, and ReLU or another piecewise linear
            activation in a Sequential, on the CPU, seen in evaluation mode.
        extent: The lowest and highest first input of the window, then of the second.
        max_regions: More than these raise ValueError.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1), nn.ReLU())
        >>> for layer, bias in ((model[0], 0.0), (model[2], -1.0)):
        ...     _ = nn.init.eye_(layer.weight), nn.init.constant_(layer.bias, bias)
        >>> regions = find_regions(model, (-2, 2, -2, 2))
        >>> len(regions.polygons), regions.areas.sum().item(), regions.segments["2"].tolist()
        (6, 16.0, [[[1.0, 2.0], [1.0, 0.0]], [[1.0, -2.0], [1.0, 0.0]]])
    """
    left, right, bottom, top = extent
    if not (-math.inf < left < right < math.inf and -math.inf < bottom < top < math.inf):
        raise ValueError(
            "extent is (left, right, bottom, top) with left < right and bottom < top; got "
            f"{extent}."
        )
    middle = np.array([left + right, bottom + top]) / 2
    half = np.array([right - left, top - bottom]) / 2
    before = nn.Sequential(Scale(half, middle))  # the steps before an activation
    regions: list[Polygon] = [WINDOW]
    segments: dict[str, Array] = {}
    layer = ""
    for name, step in _list_steps(copy.deepcopy(model).double().eval()):
        if isinstance(step, LAYERS):
            layer = name
        if breaks(step) is not None:
            regions, ends = _cut_regions(before, layer, step, regions)
            segments[layer] = middle + half * np.array(ends).reshape(-1, 2, 2)
        before.append(step)
        if len(regions) > max_regions:
            raise ValueError(
                f"the window has more than max_regions={max_regions} regions. Take a smaller "
                "window or a smaller network, or allow more."
            )
    if not segments:
        raise ValueError("regions are made by activations with breakpoints, as ReLU; got none.")

    areas = np.array([_find_area(region) for region in regions]) * half.prod()
    return Regions([middle + half * region for region in regions], areas, segments)


class Scale(nn.Module):
    """From the scaled window, [-1, 1]^2, to the inputs."""

    def __init__(self, half: Array, middle: Array) -> None:
        super().__init__()
        self.factor, self.shift = torch.from_numpy(half), torch.from_numpy(middle)

    def forward(self, points: Tensor) -> Tensor:
        return self.shift + self.factor * points


def _list_steps(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules in the order of their calls; raise where one is not piecewise linear."""
    if not isinstance(model, nn.Sequential):
        raise ValueError(f"find_regions takes an nn.Sequential; got {type(model).__name__}.")
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
    thresholds = breaks(module)
    if thresholds is not None:
        is_rounded = isinstance(module, nn.Hardsigmoid)  # torch's slope is off by 3e-8
        is_shared = not any(isinstance(point, Tensor) for point in thresholds.points)
        return thresholds.linear and is_shared and not is_rounded
    if isinstance(module, _BatchNorm) and module.running_mean is None:
        return False
    return isinstance(module, AFFINE) and getattr(module, "activation", None) is None


def _cut_regions(
    before: nn.Module, layer: str, activation: nn.Module, regions: list[Polygon]
) -> tuple[list[Polygon], list[Array]]:
    """Cut every region along the activation's boundaries; return the pieces and the cuts."""
    inside = np.stack([region.mean(axis=0) for region in regions])
    z, slopes = _compute_jets(before, inside)
    if not np.isfinite(z).all():
        raise ValueError(f"the pre-activations of {layer!r} are not finite in the window.")
    normals, offsets = _find_lines(activation, z, slopes, inside)

    pieces: list[Polygon] = []
    ends: list[Array] = []
    for region, normal, offset in zip(regions, normals, offsets, strict=True):
        parts = [region]
        heights = region @ normal.T + offset
        crosses = (heights.min(axis=0) < -ON_LINE) & (heights.max(axis=0) > ON_LINE)
        for line in crosses.nonzero()[0]:
            ends.append(_find_chord(region, normal[line], offset[line]))
            parts = [half for part in parts for half in _split(part, normal[line], offset[line])]
        pieces += parts
    return pieces, ends


@torch.no_grad()
def _compute_jets(network: nn.Module, points: Array) -> tuple[Array, Array]:
    """Return what a network computes at points, (N, units), and the slopes, (N, units, 2)."""
    x = torch.from_numpy(points)
    slopes = []
    with warnings.catch_warnings():  # torch warns at its own first use of forward mode
        warnings.filterwarnings("ignore", r"`torch\.jit\.script` is deprecated")
        for axis in torch.eye(2).double():
            jet: Any = torch.func.jvp(network, (x,), (axis.expand_as(x).clone(),))
            z, slope = jet
            slopes.append(slope.flatten(1))
    return z.flatten(1).numpy(), torch.stack(slopes, dim=2).numpy()


def _find_lines(
    activation: nn.Module, z: Array, slopes: Array, points: Array
) -> tuple[Array, Array]:
    """Return the lines of an activation's breakpoints, with one inner point for each region.

    Heights above them are normal (P, L, 2)^T x + offset (P, L), for L = breakpoints x units.
    """
    lengths = np.linalg.norm(slopes, axis=2)
    rounding = CONSTANT * (np.abs(z) + lengths).max(axis=1, keepdims=True)
    is_constant = lengths <= rounding
    lengths[is_constant] = 1
    normals = np.where(is_constant[:, :, None], 0, slopes / lengths[:, :, None])
    at_points = (normals * points[:, None]).sum(axis=2)

    thresholds: Any = breaks(activation)
    offsets = []
    for threshold in thresholds.points:
        offset = (z - threshold) / lengths - at_points
        offsets.append(np.where(is_constant, np.inf, offset))  # a constant unit has no line
    return np.tile(normals, (1, len(offsets), 1)), np.concatenate(offsets, axis=1)


def _find_area(polygon: Polygon) -> float:
    x, y = (polygon - polygon[0]).T  # relative to a corner, against rounding
    return (x * np.roll(y, -1) - np.roll(x, -1) * y).sum() / 2


def _mark_line(polygon: Polygon, normal: Array, offset: float) -> tuple[Polygon, Array]:
    """Return the polygon with a corner wherever it meets a line, and the corners' heights."""
    heights = polygon @ normal + offset
    heights[np.abs(heights) <= ON_LINE] = 0
    following = zip(np.roll(polygon, -1, axis=0), np.roll(heights, -1), strict=True)
    corners, marked = [], []
    for corner, height, (end, end_height) in zip(polygon, heights, following, strict=True):
        corners.append(corner)
        marked.append(height)
        if height * end_height < 0:
            corners.append(corner + height / (height - end_height) * (end - corner))
            marked.append(0.0)
    return np.array(corners), np.array(marked)


def _split(polygon: Polygon, normal: Array, offset: float) -> list[Polygon]:
    """Cut a polygon along a line; return its parts, or itself if the line does not cross it."""
    corners, heights = _mark_line(polygon, normal, offset)
    if not heights.min() < 0 < heights.max():
        return [polygon]
    return [corners[heights >= 0], corners[heights <= 0]]


def _find_chord(polygon: Polygon, normal: Array, offset: float) -> Array:
    """Return both ends of the piece of a line in a polygon, (2, 2)."""
    corners, heights = _mark_line(polygon, normal, offset)
    on_line = corners[heights == 0]
    furthest = np.square(on_line - on_line[0]).sum(axis=1).argmax()  # rounding can add others
    return on_line[[0, furthest]]
