"""The arrays behind a slider, packed for the page.

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

Array = np.ndarray


_ABOUT = ("kind", "methods", "seeds", "median", "steps")  # what is shown; the rest is numbers


def pack_slider(arrays: Mapping[str, Array]) -> dict[str, Any]:
    """Return what the page's script needs to draw a slider, from curves/slider_NAME.npz.

    Arrays over training have the axes seeds, methods, frames, and more.
    """
    kind, *lists = (arrays[name].tolist() for name in _ABOUT)
    methods, seeds, median, steps = lists
    styles = curve_styles(title.partition(",")[0].partition("(")[0].strip() for title in methods)
    return {
        "kind": kind,
        "methods": methods,
        "seeds": seeds,
        "median": median,
        "colours": [style.colour for style in styles],
        # in widths of the line; none for a solid line
        "dashes": [[] if isinstance(s.dash, str) else [2 * n for n in s.dash[1]] for s in styles],
        "units": list(CYCLE),
        "steps": steps,
        "arrays": {name: pack(array) for name, array in arrays.items() if name not in _ABOUT},
    }


def pack(array: Array) -> dict[str, Any]:
    """Return an array as its shape, its type and its compressed bytes.

    Bytes, whose last axes are frames, rows and columns, become differences between frames.
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
