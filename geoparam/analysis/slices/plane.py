"""A plane through input space, with a window in which regions are computed."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Plane(NamedTuple):
    """A window in a plane through input space: origin + a axes[0] + b axes[1]."""

    origin: Tensor  # an input, without the dimension of the batch
    axes: Sequence[Tensor]  # two directions of its shape; torch.eye(2) for two inputs
    extent: tuple[float, float, float, float]  # lowest a, highest a, lowest b, highest b

    def at(self, points: Tensor | np.ndarray) -> Tensor:
        """Return the inputs at points (N, 2) of the plane, in float64."""
        coefficients = torch.as_tensor(points, dtype=torch.float64)
        origin, *axes = (_float64(t) for t in (self.origin, *self.axes))
        return origin + torch.tensordot(coefficients, torch.stack(axes), dims=1)

    def coordinates(self, inputs: Tensor) -> np.ndarray:
        """Return the coordinates (N, 2) of inputs, or of their nearest points in the plane."""
        axes = torch.stack([_float64(axis).flatten() for axis in self.axes])
        offsets = (_float64(inputs) - _float64(self.origin)).flatten(1)
        return (offsets @ torch.linalg.pinv(axes)).numpy()


def plane_through(p: Tensor, q: Tensor, r: Tensor, margin: float = 0.25) -> Plane:
    """Return the plane through three inputs, with orthonormal axes, and a window around them.

    The first axis points from p to q. `margin` is how much wider the window is on each side than
    what the three span.

    Example:
        >>> a, b, c = torch.tensor([0., 0., 1.]), torch.tensor([4., 0., 1.]), torch.ones(3)
        >>> plane = plane_through(a, b, c, margin=0)
        >>> [axis.tolist() for axis in plane.axes], plane.extent
        ([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]], (0.0, 4.0, 0.0, 1.0))
    """
    p, q, r = (_float64(point) for point in (p, q, r))
    first = q - p
    second = (r - p) - first * ((r - p) * first).sum() / (first * first).sum()
    if not float(second.norm()) > 1e-6 * float((r - p).norm()):  # float32 rounds that much
        raise ValueError("three points that lie on one line make no plane. Take others.")
    axes = (first / first.norm(), second / second.norm())
    spanned = Plane(p, axes, (0.0, 0.0, 0.0, 0.0)).coordinates(torch.stack([p, q, r]))
    low, high = spanned.min(axis=0), spanned.max(axis=0)
    more = margin * (high - low)
    a0, a1, b0, b1 = np.stack([low - more, high + more], axis=1).flatten().tolist()
    return Plane(p, axes, (a0, a1, b0, b1))


def check_plane(plane: Plane) -> Plane:
    """Return the plane in float64; raise ValueError if shapes, axes or extent are wrong."""
    if not isinstance(plane, Plane) or len(plane.axes) != 2 or len(plane.extent) != 4:
        raise ValueError(
            "slice_regions needs the plane: Plane(origin, two axes, (a0, a1, b0, b1)), or "
            f"plane_through(p, q, r); got {plane}."
        )
    origin, first, second = (_float64(tensor) for tensor in (plane.origin, *plane.axes))
    if not first.shape == second.shape == origin.shape:
        raise ValueError(
            "origin and axes have the shape of one input, without the dimension of the batch; got "
            f"{', '.join(str(tuple(t.shape)) for t in (origin, first, second))}."
        )
    a0, a1, b0, b1 = plane.extent
    if not (math.isfinite(a1 - a0) and math.isfinite(b1 - b0) and a0 < a1 and b0 < b1):
        raise ValueError(f"extent is (a0, a1, b0, b1) with a0 < a1, b0 < b1; got {plane.extent}.")
    spread = torch.linalg.svdvals(torch.stack([first.flatten(), second.flatten()]))
    if not (origin.isfinite().all() and spread[-1] > 1e-9 * spread[0]):
        raise ValueError("origin must be finite, and the axes two different directions.")
    return Plane(origin, (first, second), plane.extent)


def scale_window(plane: Plane) -> tuple[Plane, np.ndarray, np.ndarray]:
    """Return the plane with its window scaled to [-1, 1]^2; the old middle and half widths."""
    a0, a1, b0, b1 = plane.extent
    middle, half = np.array([a0 + a1, b0 + b1]) / 2, np.array([a1 - a0, b1 - b0]) / 2
    axes = (plane.axes[0] * half[0], plane.axes[1] * half[1])
    return Plane(plane.at(middle), axes, (-1.0, 1.0, -1.0, 1.0)), middle, half


def _float64(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float64)
