"""The arrays behind a slider, checked and packed for the page.

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

from geoparam.plots import CYCLE, curve_styles
from geoparam_lab import experiments
from geoparam_lab.experiments.experiment import Slider

Array = np.ndarray


def pack_slider(arrays: Mapping[str, Array]) -> dict[str, Any]:
    """Return what the page's script needs to draw a slider, from curves/slider_NAME.npz.

    Its axes are S seeds, M methods, T frames, and more: see `experiment.Slider`.
    """
    kind = str(arrays.get("kind", ""))
    slider = find_slider(kind)
    methods = [str(title) for title in np.ravel(_get(arrays, "methods"))]
    steps = np.ravel(_get(arrays, "steps"))
    seeds = [int(seed) for seed in np.ravel(_get(arrays, "seeds"))]
    sizes = {"S": len(seeds), "M": len(methods), "T": len(steps)}
    found = _check_shapes(arrays, slider.axes, sizes)
    styles = curve_styles(title.partition(",")[0].partition("(")[0].strip() for title in methods)
    return {
        "kind": kind,
        "methods": methods,
        "seeds": seeds,
        "median": _check_shapes(arrays, {"median": "M"}, sizes)["median"].tolist(),
        "colours": [style.colour for style in styles],
        # in widths of the line; none for a solid line
        "dashes": [[] if isinstance(s.dash, str) else [2 * n for n in s.dash[1]] for s in styles],
        "units": list(CYCLE),
        "steps": [float(step) for step in steps],
        "arrays": {name: pack(array) for name, array in found.items()},
    }


def find_slider(kind: str) -> Slider:
    """Return the slider of an experiment."""
    slider = experiments.find(kind).slider
    if slider is None:
        known = [e.name for e in experiments.EXPERIMENTS.values() if e.slider]
        raise ValueError(f"kind must be one of {', '.join(known)}; got {kind!r}.")
    return slider


def pack(array: Array) -> dict[str, Any]:
    """Return an array as its shape, its type and its compressed bytes.

    Bytes, whose last axes are frames, rows and columns, become differences between frames.

    Example:
        >>> found = pack(np.ones((2, 3)))
        >>> found["shape"], np.frombuffer(zlib.decompress(base64.b64decode(found["data"])), "<f4")
        ([2, 3], array([1., 1., 1., 1., 1., 1.], dtype=float32))
    """
    if array.dtype == np.uint8:
        content, kind = np.diff(array, axis=-3, prepend=array[..., :1, :, :] * 0), "u1"
    else:
        content, kind = _round(array.astype("<f4")), "f4"
    text = base64.b64encode(zlib.compress(np.ascontiguousarray(content).tobytes(), 9)).decode()
    return {"shape": list(array.shape), "type": kind, "data": text}


def _round(array: Array) -> Array:
    """Return float32 with 12 bits of mantissa; the others are 0."""
    bits = array.view("<u4") + np.uint32(0x400) * np.isfinite(array)
    return (bits & np.uint32(0xFFFFF800)).view("<f4")


def _get(arrays: Mapping[str, Array], name: str) -> Array:
    if name not in arrays or np.size(arrays[name]) == 0:
        raise ValueError(f"{name} is missing or empty.")
    return np.asarray(arrays[name])


def _check_shapes(
    arrays: Mapping[str, Array], shapes: Mapping[str, str], sizes: dict[str, int]
) -> dict[str, Array]:
    """Return the arrays, where all are there and their axes fit each other."""
    found = {}
    for name, axes in shapes.items():
        array = found[name] = _get(arrays, name)
        expected = [sizes.setdefault(a, int(a)) if a.isdigit() else sizes.get(a) for a in axes]
        if len(axes) != array.ndim or any(
            e not in (None, got) for e, got in zip(expected, array.shape, strict=True)
        ):
            said = ", ".join(str(sizes.get(axis, axis)) for axis in axes)
            raise ValueError(f"{name} has shape {array.shape}, which is not ({said}).")
        sizes.update(zip(axes, array.shape, strict=True))
    return found
