"""The arrays behind a slider, checked, thinned and packed for the page.

Numbers travel as zlib-compressed bytes in base64, which browsers unpack by themselves
(DecompressionStream). Floats are float32 with 12 bits of mantissa, which is a quarter of a
thousandth and finer than a pixel, and compress to half. Decision regions are bytes; a frame is
stored as its difference to the frame before, modulo 256, since little changes between two.
"""

import base64
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from geoparam.plots import CYCLE, MethodStyle, curve_styles

Array = np.ndarray

FRAMES, SIDE = 100, 64  # at most: frames of a slider, pixels of a decision region's side

# Axes: M methods, T frames, G points of a grid, N points of data, U units, H and W pixels.
SHAPES = {
    "levy": {
        "grid": "G",
        "truth": "G",
        "x": "N",
        "y": "N",
        "prediction": "MTG",
        "locations": "MTU",
        "loss": "MT",
        "moves": "MT",
    },
    "banana": {
        "x": "N2",
        "y": "N",
        "limits": "4",
        "score": "MTHW",
        "direction": "MTU2",
        "distance": "MTU",
        "accuracy": "MT",
        "rotation": "MT",
    },
}


def payload(arrays: Mapping[str, Array]) -> dict[str, Any]:
    """Return what the page's script needs to draw a slider.

    Args:
        arrays: those of a run's curves/slider_NAME.npz.

    Example:
        >>> arrays = {"kind": np.array("levy"), "methods": np.array(["SP"]), "steps": np.arange(3)}
        >>> for name, shape in SHAPES["levy"].items():
        ...     arrays[name] = np.zeros([{"M": 1, "T": 3}.get(axis, 5) for axis in shape])
        >>> found = payload(arrays)
        >>> found["methods"], found["arrays"]["prediction"]["shape"]
        (['SP'], [1, 3, 5])
    """
    kind = str(arrays.get("kind", ""))
    if kind not in SHAPES:
        raise ValueError(f"kind must be one of {', '.join(SHAPES)}; got {kind!r}.")
    methods = [str(title) for title in np.ravel(_needed(arrays, "methods"))]
    steps = np.ravel(_needed(arrays, "steps"))
    checked = _checked(arrays, SHAPES[kind], {"M": len(methods), "T": len(steps)})
    frames = thinned(len(steps), FRAMES)
    for name, axes in SHAPES[kind].items():
        if "T" in axes:
            checked[name] = checked[name].take(frames, axis=axes.index("T"))
    if kind == "banana":
        checked["score"] = _coarser(checked["score"])
    styles = curve_styles(map(_method, methods))
    return {
        "kind": kind,
        "methods": methods,
        "colours": [style.colour for style in styles],
        "dashes": [[2 * part for part in _pattern(style)] for style in styles],
        "units": list(CYCLE),
        "steps": [float(step) for step in steps[frames]],
        "arrays": {name: packed(array) for name, array in checked.items()},
    }


def thinned(count: int, most: int) -> Array:
    """Return indices of at most `most` of `count` things, the first and the last among them.

    Example:
        >>> thinned(3, 9).tolist(), thinned(9, 3).tolist()
        ([0, 1, 2], [0, 4, 8])
    """
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(int))


def packed(array: Array) -> dict[str, Any]:
    """Return an array as its shape, its type and its compressed bytes; bytes as differences.

    Example:
        >>> found = packed(np.ones((2, 3)))
        >>> found["shape"], np.frombuffer(zlib.decompress(base64.b64decode(found["data"])), "<f4")
        ([2, 3], array([1., 1., 1., 1., 1., 1.], dtype=float32))
    """
    if array.dtype == np.uint8:
        content, kind = np.diff(array, axis=1, prepend=array[:, :1] * 0), "u1"
    else:
        content, kind = _rounded(array.astype("<f4")), "f4"
    text = base64.b64encode(zlib.compress(np.ascontiguousarray(content).tobytes(), 9)).decode()
    return {"shape": list(array.shape), "type": kind, "data": text}


def _rounded(array: Array) -> Array:
    """Return float32 with 12 bits of mantissa; the others are 0."""
    bits = array.view("<u4") + np.uint32(0x400) * np.isfinite(array)
    return (bits & np.uint32(0xFFFFF800)).view("<f4")


def _method(title: str) -> str:
    """Return the method in a title such as "SP, rate 0.1"."""
    return title.partition(",")[0].partition("(")[0].strip()


def _pattern(style: MethodStyle) -> tuple[float, ...]:
    """Return lengths of dashes and gaps, in widths of the line; none for a solid line."""
    return () if isinstance(style.dash, str) else style.dash[1]


def _needed(arrays: Mapping[str, Array], name: str) -> Array:
    if name not in arrays or np.size(arrays[name]) == 0:
        raise ValueError(f"{name} is missing or empty.")
    return np.asarray(arrays[name])


def _checked(
    arrays: Mapping[str, Array], shapes: Mapping[str, str], sizes: dict[str, int]
) -> dict[str, Array]:
    """Return the arrays, where all are there and their axes fit each other."""
    found = {}
    for name, axes in shapes.items():
        array = found[name] = _needed(arrays, name)
        expected = [sizes.setdefault(a, int(a)) if a.isdigit() else sizes.get(a) for a in axes]
        if len(axes) != array.ndim or any(
            e not in (None, got) for e, got in zip(expected, array.shape, strict=True)
        ):
            raise ValueError(
                f"{name} has shape {array.shape}, which is not ({_said(axes, sizes)})."
            )
        sizes.update(zip(axes, array.shape, strict=True))
    return found


def _said(axes: str, sizes: Mapping[str, int]) -> str:
    return ", ".join(str(sizes.get(axis, axis)) for axis in axes)


def _coarser(score: Array) -> Array:
    """Return decision regions as bytes with sides of at most SIDE pixels."""
    if score.dtype != np.uint8:
        score = np.nan_to_num(255 * score.astype(float), nan=127.5).clip(0, 255).astype(np.uint8)
    for axis in (2, 3):
        score = _shorter(score, axis)
    return score


def _shorter(score: Array, axis: int) -> Array:
    """Return bytes interpolated at SIDE places along an axis that has more."""
    count = score.shape[axis]
    if count <= SIDE:
        return score
    places = np.linspace(0, count - 1, SIDE)
    low = np.minimum(places.astype(int), count - 2)
    share = (places - low).reshape([-1 if a == axis else 1 for a in range(score.ndim)])
    below, above = score.take(low, axis), score.take(low + 1, axis)
    return (below * (1 - share) + above * share).round().astype(np.uint8)
