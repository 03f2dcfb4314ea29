"""Curves over inputs and over training: fits, spectra, stability, convergence."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.transforms import blended_transform_factory

from geoparam.plots.style import (
    INK,
    MUTED,
    MethodStyle,
    as_array,
    axis_or_new,
    curve_styles,
    finite,
    legend_beside,
    step_numbers,
)


def fit_1d(
    ax: Axes | None = None,
    *,
    points: tuple[np.ndarray, np.ndarray],
    grid: np.ndarray,
    truth: np.ndarray,
    prediction: np.ndarray,
    units: np.ndarray,
    initial: np.ndarray | None = None,
    colour: str = INK,
) -> Axes:
    """Data, truth and prediction over one input, with a tick where each unit switches.

    `points` are inputs and targets of the data; `truth`, `prediction` and `initial` (the network
    before training) are the values at the inputs `grid`; `units` are the units' locations.

    Example:
        >>> x = np.linspace(-1, 1, 9)
        >>> ax = fit_1d(points=(x, x), grid=x, truth=x, prediction=x, units=x[::2])
        >>> ax.get_xlabel()
        'x     (ticks: where units switch; 5 of 5 in view)'
    """
    grid = as_array("grid", grid, ("grid",))
    ax = axis_or_new(ax)

    def draw(name: str, values: np.ndarray, **line: Any) -> None:
        ax.plot(grid, finite(as_array(name, values, grid.shape)), **line)

    if initial is not None:
        draw("initial", initial, color=MUTED, linewidth=1.2, linestyle=":", label="at start")
    dash = (0, (4, 2))
    draw("truth", truth, color=MUTED, linewidth=1.2, linestyle=dash, label="true function")
    draw("prediction", prediction, color=colour, linewidth=2.0, label="network")
    ax.plot(*points, "o", color=INK, markersize=3.2, label="training data")
    inside = _within(np.asarray(units), low := grid.min(), high := grid.max())
    ticks = blended_transform_factory(ax.transData, ax.transAxes)
    ax.vlines(inside, 0, 0.05, transform=ticks, color=colour, linewidth=0.9, alpha=0.7)
    ax.set_xlim(low, high)
    ax.set_ylabel("y")
    ax.set_xlabel(f"x     (ticks: where units switch; {len(inside)} of {len(units)} in view)")
    ax.locator_params(axis="x", nbins=5)
    return ax


def _within(values: np.ndarray, low: float, high: float) -> np.ndarray:
    return values[(values >= low) & (values <= high)]


def location_spectrum(
    locations: np.ndarray,
    *,
    limits: tuple[float, float],
    steps: np.ndarray | None = None,
    rows: int = 12,
    colour: str = INK,
    ax: Axes | None = None,
) -> Axes:
    """Bars of ticks, one tick a unit: where the units are, from the first step up to the last.

    `locations` are (steps, units), of which `rows` steps are drawn, evenly chosen; `limits` are
    the lowest and highest input in view.

    Example:
        >>> ax = location_spectrum(np.random.randn(100, 20), limits=(-2, 2), rows=4)
        >>> [label.get_text() for label in ax.get_yticklabels()]
        ['0', '33', '66', '99']
    """
    locations = as_array("locations", locations, ("steps", "units"))
    steps = step_numbers(steps, len(locations))
    chosen = np.unique(np.linspace(0, len(locations) - 1, rows).round().astype(int))
    ax = axis_or_new(ax, size=(6.0, 0.9 + 0.22 * len(chosen)))
    beside: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "size": 8}
    for row, step in enumerate(chosen):
        inside = _within(locations[step], *limits)
        ax.vlines(inside, row - 0.38, row + 0.38, color=colour, linewidth=1.0, alpha=0.7)
        ax.annotate(f"{len(inside)}", (1.01, row), va="center", **beside)
    ax.annotate("in view", (1.01, len(chosen) - 0.3), **beside)
    ax.set_yticks(range(len(chosen)), [f"{steps[step]:,.0f}" for step in chosen], size=8)
    ax.grid(visible=False)
    ax.set(xlim=limits, ylim=(-0.6, len(chosen) - 0.4), xlabel="location φ", ylabel="step")
    ax.locator_params(axis="x", nbins=5)
    return ax


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
    for values, style in _with_styles(curves):
        values = as_array("a curve", values, ("steps",))
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


def _with_styles(curves: Mapping[str, Any]) -> list[tuple[Any, MethodStyle]]:
    return list(zip(curves.values(), curve_styles(curves), strict=True))


def _loggable(values: np.ndarray) -> np.ndarray:
    """The values that a logarithmic axis can show; NaN, a gap, for the others."""
    return np.where(values > 0, finite(values), np.nan)


def _medians(at: np.ndarray, values: np.ndarray, bins: int = 100) -> tuple[np.ndarray, np.ndarray]:
    """Centres of equal stretches of the curve, and the median of what is finite in each."""
    parts = np.array_split(np.arange(len(values)), min(bins, len(values)))
    known = [values[p][np.isfinite(values[p])] for p in parts]
    middle = [np.median(v) if len(v) else np.nan for v in known]
    return np.array([at[p].mean() for p in parts]), np.array(middle)


def convergence(
    curves: Mapping[str, np.ndarray],
    *,
    label: str,
    epochs: np.ndarray | None = None,
    legend: bool = True,
    ax: Axes | None = None,
) -> Axes:
    """A measure over epochs: mean over seeds, and the standard error of that mean as a band.

    A seed that ended early is filled with NaN; the mean is then that of the seeds still there.
    The papers' figure is two of these, training beside validation.

    Each method has values (seeds, epochs); `label` says what was measured, such as "top-5 training
    accuracy (%)". Epochs are 1, 2, ... by default.

    Example:
        >>> ax = convergence({"bn": np.random.rand(3, 90)}, label="top-5 accuracy")
        >>> ax.get_xlabel(), ax.get_ylabel()
        ('epoch', 'top-5 accuracy')
    """
    ax = axis_or_new(ax)
    for values, style in _with_styles(curves):
        values = as_array("a curve", values, ("seeds", "epochs"))
        at = step_numbers(epochs, values.shape[1], first=1)
        mean, error = _mean_and_error(values)
        alone = "o" if len(at) == 1 else None  # a line needs two points
        ax.plot(at, mean, **style.line, linewidth=1.8, marker=alone, label=style.title)
        ax.fill_between(at, mean - error, mean + error, color=style.colour, alpha=0.2, linewidth=0)
    ax.set(xlabel="epoch", ylabel=label)
    if legend:
        legend_beside(ax)
    return ax


def _mean_and_error(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean over the finite rows and its standard error; NaN where no, or one, row is finite."""
    known = np.isfinite(values)
    count = known.sum(axis=0)
    mean = np.where(known, values, 0.0).sum(axis=0) / np.where(count, count, np.nan)
    squares = np.where(known, values - mean, 0.0) ** 2
    variance = squares.sum(axis=0) / np.where(count > 1, count - 1, np.nan)
    return mean, np.sqrt(variance / np.where(count, count, np.nan))
