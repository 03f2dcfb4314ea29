"""Curves over training: how far units move and turn in each step."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure  # noqa: F401  for the example

from geoparam.plots import MUTED
from geoparam_lab.plots.method_styles import curve_styles


def displacement_curves(curves: Mapping[str, np.ndarray], *, ax: Axes) -> None:
    """Draw the largest move of any location in each step, (seeds, steps) for each method.

    The axis is in powers of 2. The largest of any seed is a thin line, so that no jump is hidden;
    the running median over seeds and steps is bold. NaN is after a seed's end.

    Example:
        >>> ax = Figure().subplots()
        >>> curves = {"sp": 2.0 ** np.arange(16)[None], "gmp": np.full((3, 16), 0.1)}
        >>> displacement_curves(curves, ax=ax)
        >>> ax.get_legend_handles_labels()[1]
        ['SP', 'GmP']
    """
    for style, curve in zip(curve_styles(curves), curves.values(), strict=True):
        values = _loggable(np.asarray(curve, dtype=float))
        largest = np.fmax.reduce(values, axis=0)
        ax.plot(largest, color=style.colour, linewidth=0.5, alpha=0.3, zorder=1.5)
        centres, medians = _medians(values)
        ax.plot(centres, medians, **style.line, linewidth=1.8, label=style.title)
    ax.margins(x=0)
    ax.set_yscale("log", base=2)
    ax.set(xlabel="step", ylabel="largest move of a location, max |Δφ|")


def rotation_curves(curves: Mapping[str, np.ndarray], *, ax: Axes) -> None:
    """Draw the largest rotation of any unit in each step, in degrees, likewise."""
    displacement_curves(curves, ax=ax)
    ax.set_ylabel("largest rotation of a unit (degrees)")
    ax.axhline(180, color=MUTED, linewidth=1.0, linestyle=":")
    place: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "ha": "right"}
    place |= {"xytext": (0, 3), "textcoords": "offset points"}
    ax.annotate("180°: turned round", (1.0, 180), **place, color=MUTED, size=8)


def _loggable(values: np.ndarray) -> np.ndarray:
    """The values that a logarithmic axis can show; NaN, a gap, for the others."""
    return np.where((values > 0) & np.isfinite(values), values, np.nan)


def _medians(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Centres of 100 equal stretches of the steps, and the median of what is finite in each."""
    steps = np.arange(values.shape[1])
    centres, medians = [], []
    for stretch in np.array_split(steps, min(100, len(steps))):
        part = values[:, stretch]
        finite = part[np.isfinite(part)]
        centres.append(stretch.mean())
        medians.append(np.median(finite) if len(finite) else np.nan)
    return np.array(centres), np.array(medians)
