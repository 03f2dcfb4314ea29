"""A weight's shape and how it is laid out in memory.

A convolution on channels_last images wants its weight in that order too, since cuDNN would
otherwise copy it in every call.
"""

import functools
import math
from typing import NamedTuple


class Layout(NamedTuple):
    """A weight's size and strides; in memory its rows follow one another.

    With positions = 1 a row is in order; else it is (channels, positions) and is laid out as
    (positions, channels).
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    positions: int


def layout_of(
    latitude_size: tuple[int, ...], shape: tuple[int, ...] | None, channels_last: bool
) -> Layout:
    """Return the layout of a weight whose rows have this shape.

    Example:
        >>> layout_of((8, 26), (3, 3, 3), True)
        Layout(size=(8, 3, 3, 3), stride=(27, 1, 9, 3), positions=9)
    """
    lead, n = tuple(latitude_size[:-1]), latitude_size[-1] + 1
    inner = (n,) if shape is None else tuple(shape)
    if math.prod(inner) != n:
        raise ValueError(
            f"a row of {n} elements, one more than its latitudes, cannot have the shape {inner}."
        )
    positions = math.prod(inner[1:])
    if not (channels_last and len(lead) == 1 and len(inner) in (3, 4) and 1 < positions < n):
        return Layout((*lead, *inner), _strides((*lead, *inner)), 1)
    inner_strides = _strides((*inner[1:], inner[0]))[:-1]
    return Layout((*lead, *inner), (n, 1, *inner_strides), positions)


def _strides(size: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(size[i + 1 :]) for i in range(len(size)))


layout_for = functools.lru_cache(maxsize=4096)(layout_of)  # for sizes that are known


@functools.lru_cache(maxsize=4096)
def positions_of(size: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Return the kernel positions of a weight that is laid out position by position; else 0."""
    if len(size) not in (4, 5):
        return 0
    layout = layout_of((size[0], math.prod(size[1:]) - 1), tuple(size[1:]), True)
    return layout.positions if stride == layout.stride else 0
