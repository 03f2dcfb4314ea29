"""Convex polygons in a plane, and lines that cut them."""

import numpy as np

ON_LINE = 1e-11  # of half the window

Polygon = np.ndarray  # corners (k, 2), counter-clockwise


def area(polygon: Polygon) -> float:
    """Return the area inside of a polygon."""
    x, y = (polygon - polygon[0]).T  # relative to a corner, against rounding
    return (x * np.roll(y, -1) - np.roll(x, -1) * y).sum() / 2


def _walk(
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


def split(polygon: Polygon, normal: np.ndarray, offset: float) -> list[Polygon]:
    """Cut a polygon along a line; return its parts, or itself if the line does not cross it."""
    walk, heights, crosses = _walk(polygon, normal, offset)
    if not heights.min() < 0 < heights.max():
        return [polygon]
    sides = (heights >= 0, heights <= 0)
    return [walk[np.stack([side, crosses], axis=1).ravel()] for side in sides]


def chord(polygon: Polygon, normal: np.ndarray, offset: float) -> np.ndarray:
    """Return both ends of the piece of a line in a polygon, (2, 2)."""
    walk, heights, crosses = _walk(polygon, normal, offset)
    return _ends(walk[np.stack([heights == 0, crosses], axis=1).ravel()])


def cell_above(polygon: Polygon, normal: np.ndarray, offset: np.ndarray) -> Polygon:
    """Return the part of a polygon above lines (L, 2), (L,); without corners if it is empty."""
    for n, c in zip(normal, offset, strict=True):
        heights = polygon @ n + c
        if heights.max() <= ON_LINE:
            return polygon[:0]
        if heights.min() < -ON_LINE:
            polygon = split(polygon, n, c)[0]
    return polygon


def side_on(polygon: Polygon, normal: np.ndarray, offset: float) -> list[np.ndarray]:
    """Return both ends of the side of a polygon that is on a line, (2, 2), if there is one."""
    on = polygon[np.abs(polygon @ normal + offset) <= 10 * ON_LINE]
    return [_ends(on)] if len(on) > 1 else []


def _ends(found: np.ndarray) -> np.ndarray:
    """Return the two points on a line that are furthest apart; rounding can add others."""
    return found[[0, np.square(found - found[0]).sum(axis=1).argmax()]]
