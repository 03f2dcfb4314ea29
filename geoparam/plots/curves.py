"""Curves over training: how far units move and turn in each step."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from geoparam.plots.style import (
    MUTED,
    as_array,
    axis_or_new,
    curve_styles,
    legend_beside,
    step_numbers,
)


def displacement_curves(
    curves: Mapping[str, np.ndarray],
    *,
    steps: np.ndarray | None = None,
    legend: bool = True,
    ax: Axes | None = None,
) -> Axes:
    """The largest move of any location in each step, (steps,) for each method, in powers of 2.

    Every value is a thin line, so that no jump is hidden; the running median is in bold.

    Example:
        >>> ax = displacement_curves({"sp": 2.0 ** np.arange(16), "gmp": np.full(16, 0.1)})
        >>> [text.get_text() for text in ax.get_legend().get_texts()]
        ['SP', 'GmP']
    """
    ax = axis_or_new(ax)
    for style, curve in zip(curve_styles(curves), curves.values(), strict=True):
        values = as_array("a curve", curve, ("steps",))
        at = step_numbers(steps, len(values))
        ax.plot(at, _loggable(values), color=style.colour, linewidth=0.5, alpha=0.25, zorder=1.5)
        centres, medians = _medians(at, values)
        ax.plot(centres, _loggable(medians), **style.line, linewidth=1.8, label=style.title)
    ax.margins(x=0)
    ax.set_yscale("log", base=2)
    ax.set(xlabel="step", ylabel="largest move of a location, max |Δφ|")
    if legend:
        legend_beside(ax)
    return ax


def rotation_curves(
    curves: Mapping[str, np.ndarray],
    *,
    steps: np.ndarray | None = None,
    legend: bool = True,
    ax: Axes | None = None,
) -> Axes:
    """The largest rotation of any unit in each step, in degrees, as `displacement_curves` draws.

    Example:
        >>> ax = rotation_curves({"sp": np.array([0.5, 170.0]), "gmp": np.array([0.5, 1.0])})
        >>> ax.get_ylabel()
        'largest rotation of a unit (degrees)'
    """
    ax = displacement_curves(curves, steps=steps, legend=legend, ax=ax)
    ax.set_ylabel("largest rotation of a unit (degrees)")
    ax.axhline(180, color=MUTED, linewidth=1.0, linestyle=":")
    place: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "ha": "right"}
    place |= {"xytext": (0, 3), "textcoords": "offset points"}
    ax.annotate("180°: turned round", (1.0, 180), **place, color=MUTED, size=8)
    return ax


def _loggable(values: np.ndarray) -> np.ndarray:
    """The values that a logarithmic axis can show; NaN, a gap, for the others."""
    return np.where((values > 0) & np.isfinite(values), values, np.nan)


def _medians(at: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Centres of 100 equal stretches of the curve, and the median of what is finite in each."""
    parts = np.array_split(np.arange(len(values)), min(100, len(values)))
    known = [values[p][np.isfinite(values[p])] for p in parts]
    middle = [np.median(v) if len(v) else np.nan for v in known]
    return np.array([at[p].mean() for p in parts]), np.array(middle)
