"""Convex polygons by the thousand, and lines that cut them: numpy arrays, no loop over polygons.

M polygons are `corners` (M, V, 2), counter-clockwise, and `sizes` (M,): polygon i has the first
sizes[i] corners, and the rest repeat its last one. A line is told by the signed distances of the
corners from it, `heights` (M, V), positive on one side and negative on the other. Corners at the
height 0 are on the line: who calls rounds small heights to 0, so that a line through a corner, or
along a side, makes no polygon without area.
"""

from typing import NamedTuple

import numpy as np


class Polygons(NamedTuple):
    """M convex polygons with up to V corners."""

    corners: np.ndarray
    sizes: np.ndarray

    def pick(self, chosen: np.ndarray | slice) -> "Polygons":
        """Return some of them."""
        return Polygons(self.corners[chosen], self.sizes[chosen])

    def inner(self) -> np.ndarray:
        """Return the mean of each one's corners, (M, 2): a point well inside, however thin.

        Example:
            >>> rectangle(0, 2, 0, 1).inner()
            array([[1. , 0.5]])
        """
        real = np.arange(self.corners.shape[1]) < self.sizes[:, None]
        return np.einsum("mvd,mv->md", self.corners, real) / self.sizes[:, None]

    def areas(self) -> np.ndarray:
        """Return the area of each, (M,).

        Example:
            >>> rectangle(0, 2, 0, 1).areas()
            array([2.])
        """
        x, y = np.moveaxis(self.corners - self.corners[:, :1], -1, 0)  # small numbers: no rounding
        return (x * np.roll(y, -1, axis=1) - np.roll(x, -1, axis=1) * y).sum(axis=1) / 2

    def separate(self) -> list[np.ndarray]:
        """Return the corners of each, (k, 2)."""
        return [corners[:k].copy() for corners, k in zip(self.corners, self.sizes, strict=True)]


def rectangle(left: float, right: float, low: float, high: float) -> Polygons:
    """Return one rectangle."""
    corners = np.array([[left, low], [right, low], [right, high], [left, high]], dtype=float)
    return Polygons(corners[None], np.array([4]))


def join(parts: list[Polygons]) -> Polygons:
    """Return the polygons of several groups as one."""
    widest = max(part.corners.shape[1] for part in parts)
    corners = [_widen(part.corners, widest) for part in parts]
    return Polygons(np.concatenate(corners), np.concatenate([part.sizes for part in parts]))


def split(polygons: Polygons, heights: np.ndarray) -> tuple[Polygons, Polygons]:
    """Cut each polygon along its line; return what lies above, and what lies below.

    Example:
        >>> above, below = split(rectangle(0, 2, 0, 1), np.array([[-1., 1., 1., -1.]]))
        >>> above.separate()[0].tolist()
        [[1.0, 0.0], [2.0, 0.0], [2.0, 1.0], [1.0, 1.0]]
    """
    walk, crosses = _walk(polygons, heights)
    halves = []
    for side in (heights >= 0, heights <= 0):
        real = side & (np.arange(side.shape[1]) < polygons.sizes[:, None])
        halves.append(_gather(walk, _alternate(real, crosses)))
    return halves[0], halves[1]


def chords(polygons: Polygons, heights: np.ndarray) -> np.ndarray:
    """Return the ends of the piece of each line that lies in its polygon, (M, 2, 2).

    Example:
        >>> chords(rectangle(0, 2, 0, 1), np.array([[-1., 1., 1., -1.]])).tolist()
        [[[1.0, 0.0], [1.0, 1.0]]]
    """
    walk, crosses = _walk(polygons, heights)
    found = _gather(walk, _alternate(heights == 0, crosses)).corners
    # Rounding can put neighbouring corners on the line: the ends are the two furthest apart.
    far = np.square(found - found[:, :1]).sum(axis=2).argmax(axis=1)
    return np.stack([found[:, 0], found[np.arange(len(found)), far]], axis=1)


def _walk(polygons: Polygons, heights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return corners, each followed by where the side after it meets the line, (M, 2V, 2).

    And which sides do meet it between their corners, (M, V).
    """
    following = np.roll(heights, -1, axis=1)
    crosses = heights * following < 0
    place = heights / np.where(crosses, heights - following, 1)
    sides = np.roll(polygons.corners, -1, axis=1) - polygons.corners
    meets = polygons.corners + place[:, :, None] * sides
    return _alternate(polygons.corners, meets), crosses


def _alternate(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return (M, 2V, ...) with the entries of two arrays (M, V, ...) in turn."""
    return np.stack([a, b], axis=2).reshape(len(a), 2 * a.shape[1], *a.shape[2:])


def _gather(walk: np.ndarray, keep: np.ndarray) -> Polygons:
    """Return the points to keep of each walk, in their order."""
    count = keep.sum(axis=1)
    first = np.argsort(~keep, axis=1, kind="stable")[:, : count.max(initial=1)]
    place = np.minimum(np.arange(first.shape[1]), np.maximum(count, 1)[:, None] - 1)
    order = np.take_along_axis(first, place, axis=1)
    return Polygons(np.take_along_axis(walk, order[:, :, None], axis=1), count)


def _widen(corners: np.ndarray, width: int) -> np.ndarray:
    lacking = width - corners.shape[1]
    return np.pad(corners, ((0, 0), (0, lacking), (0, 0)), mode="edge") if lacking else corners
