"""Figures of Levy and Banana: each method at the seed with its median test result."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from geoparam_lab import methods, plots
from geoparam_lab.data.banana_data import Banana
from geoparam_lab.data.synthetic import Regression
from geoparam_lab.experiments.toys import (
    Array,
    Arrays,
    find_common_lr,
    load_medians,
    load_motions,
)
from geoparam_lab.plots import CYCLE, INK, MUTED
from geoparam_lab.run_folder import Run

LOWEST = -20  # the power of 2 at which figure 2c begins: smaller moves are after training
BARS = 12  # steps of figure 2d-g at which locations are shown
REACH = 4.0  # of the inputs in view in figure 3a-h
CLASSES = ((CYCLE[0], "o", "#d6e8f3"), (CYCLE[1], "^", "#fbeccb"))  # colour, marker, fill


def _find_in_view(locations: Array, low: Any, high: Any) -> Array:
    """Return which locations, (units,) or (units, 2), are between two corners."""
    inside = (locations >= low) & (locations <= high)
    return inside.reshape(len(inside), -1).all(axis=1)


def draw_moves(run: Run) -> Figure:
    """Draw figure 2c: the largest move of a unit in each update, a panel for each rate."""
    rates = run.config["lrs"]
    figure, axes = plots.new_figure(1, len(rates), size=(1.5 + 4.6 * len(rates), 4.2))
    for ax, lr in zip(axes[0], rates, strict=True):
        moves = load_motions(run, "moves", lr)
        plots.displacement_curves(moves, ax=ax)
        ax.axhline(1, color="black", linewidth=0.8, linestyle=":")
        ax.sharey(axes[0, 0])
        ax.set_ylim(bottom=2.0**LOWEST)
        ax.set_title(f"rate {lr:g}", loc="left")
    plots.legend_beside(axes[0, -1])
    return figure


def draw_fits(run: Run, data: Regression) -> Figure:
    """Draw figure 2d-g: the fits, and below each where its units switch."""
    shown = load_medians(run, "test_rmse")
    figure, columns, _ = plots.new_columns(len(shown), 2, size=(4.1, 3.6))
    for (above, below), (method, title, rmse, curves) in zip(columns, shown, strict=True):
        colour = plots.method_style(methods.without_options(method)).colour
        draw_fit(above, data, curves, colour)
        above.sharey(columns[0, 0])
        above.set_title(f"{title}: test RMSE {rmse:.3f}", loc="left")
        draw_locations(below, curves, (data.x_test.min(), data.x_test.max()), colour)
    columns[0, 0].legend(frameon=False)
    return figure


def draw_fit(ax: Axes, data: Regression, curves: Arrays, colour: str) -> None:
    """Draw the network before and after training, and a tick where each unit switches."""
    grid = data.x_test[:, 0]
    start, end = (np.where(np.isfinite(y), y, np.nan) for y in curves["prediction"][[0, -1]])
    ax.plot(grid, start, ":", color=MUTED, label="at start")
    ax.plot(grid, data.y_test, "--", color=MUTED, label="true function")
    ax.plot(grid, end, color=colour, linewidth=2.0, label="network")
    ax.plot(data.x_train[:, 0], data.y_train, "o", color=INK, ms=3.2, label="training data")

    units = curves["locations"][-1]
    inside = units[_find_in_view(units, grid.min(), grid.max())]
    ax.vlines(inside, 0, 0.05, color=colour, lw=0.9, transform=ax.get_xaxis_transform())
    ax.set(xlim=(grid.min(), grid.max()), ylabel="y")
    ax.set_xlabel(f"x     (ticks: where units switch; {len(inside)} of {len(units)} in view)")
    ax.locator_params(axis="x", nbins=5)


def draw_locations(ax: Axes, curves: Arrays, limits: tuple[float, float], colour: str) -> None:
    """Draw bars of ticks, one tick a unit: where the units are, from the first step upwards."""
    locations, steps = curves["locations"], curves["steps"]
    frames = np.unique(np.linspace(0, len(steps) - 1, BARS).round().astype(int))
    for row, frame in enumerate(frames):
        inside = locations[frame][_find_in_view(locations[frame], *limits)]
        ax.vlines(inside, row - 0.38, row + 0.38, color=colour, linewidth=1.0, alpha=0.7)

    ax.set_yticks(range(len(frames)), [f"{steps[frame]:,.0f}" for frame in frames], size=8)
    ax.grid(visible=False)
    ax.set(xlim=limits, ylim=(-0.6, len(frames) - 0.4), xlabel="location φ", ylabel="step")
    ax.locator_params(axis="x", nbins=5)


def find_locations(curves: Arrays) -> Array:
    """Return the units' locations in every frame, (frames, units, 2)."""
    return -curves["distance"][..., None] * curves["direction"]


def draw_paths(run: Run, data: Banana) -> Figure:
    """Draw figure 3a-h: where the units' locations go, a row for each rate."""
    names, rates = run.config["methods"], run.config["lrs"]
    figure, columns, corner = plots.new_columns(len(names), len(rates), size=(3.3, 3.5))
    for row, lr in zip(columns.T, rates, strict=True):
        for ax, median in zip(row, load_medians(run, "test_accuracy", lr), strict=True):
            draw_path(ax, find_locations(median.curves), data.x_train)
            ax.set_title(median.title, loc="left")
    plots.legend_beside(corner)
    return figure


def draw_path(ax: Axes, locations: Array, points: Array) -> None:
    """Draw the paths of the units' locations, (frames, units, 2), and the data's points."""
    plots.plane(ax, (-REACH, REACH))
    ax.plot(*points.T, ".", color=MUTED, markersize=2.5, alpha=0.5, label="data")
    for unit, path in enumerate(locations.swapaxes(0, 1)):
        colour = CYCLE[unit % len(CYCLE)]
        ax.plot(*path.T, color=colour, linewidth=1.1, alpha=0.85)
        first, last = ("start", "end") if unit == 0 else (None, None)
        ax.plot(*path[0], "o", color=colour, mfc="white", markersize=5, label=first, zorder=5)
        ax.plot(*path[-1], "*", color=colour, mec=INK, mew=0.6, ms=11, label=last, zorder=6)
    inside = _find_in_view(locations[-1], -REACH, REACH).sum()
    ax.set_xlabel(f"$x_1$     ({inside} of {len(locations[-1])} units end in view)")


def draw_rotations(run: Run) -> Figure:
    """Draw figure 3i: the largest turn of a unit in each update, all methods at one rate."""
    turns = load_motions(run, "rotation", find_common_lr(run))
    figure, axes = plots.new_figure(1, 1, size=(7.0, 4.2))
    plots.rotation_curves(turns, ax=axes[0, 0])
    plots.legend_beside(axes[0, 0])
    return figure


def draw_decisions(run: Run, data: Banana, grid: tuple[Array, Array]) -> Figure:
    """Draw figure 3j-m: what the networks decide on a grid, and their units' locations."""
    shown = load_medians(run, "test_accuracy")
    figure, columns, corner = plots.new_columns(len(shown), 1, size=(3.6, 3.8))
    for ax, (_, title, accuracy, curves) in zip(columns[:, 0], shown, strict=True):
        draw_decision(ax, curves["logits"], grid, data)
        draw_stars(ax, find_locations(curves)[-1], grid)
        ax.set_title(f"{title}: test accuracy {accuracy:.3f}", loc="left")
    plots.legend_beside(corner)
    return figure


def draw_decision(ax: Axes, logits: Array, grid: tuple[Array, Array], data: Banana) -> None:
    """Fill what a network decides on a grid of inputs, and draw the test points."""
    is_finite = np.isfinite(logits)
    fills = ListedColormap([fill for *_, fill in CLASSES])
    sides = np.where(is_finite, logits > 0, np.nan)
    ax.pcolormesh(*grid, sides, cmap=fills, vmin=0, vmax=1, shading="nearest")
    finite = logits[is_finite]
    if (finite < 0).any() and (finite > 0).any():  # contour warns without a line
        ax.contour(
            *grid, np.where(is_finite, logits, np.nan), levels=[0], colors=INK, linewidths=2.6
        )
        ax.plot([], [], color=INK, linewidth=2.6, label="decision")
    for label, (colour, marker, _) in enumerate(CLASSES):
        part = data.x_test[data.y_test == label].T
        ax.plot(*part, marker, color=colour, markersize=3.6, alpha=0.8, label=f"class {label}")


def draw_stars(ax: Axes, locations: Array, grid: tuple[Array, Array]) -> None:
    """Draw a star at each unit's location, and say how many are on the grid."""
    low, high = np.array([[side.min(), side.max()] for side in grid]).T
    star: dict[str, Any] = {"color": CYCLE[3], "mec": "white", "ms": 15, "zorder": 6}
    ax.plot(*locations.T, "*", **star, label="location φ")
    ax.set(xlim=(low[0], high[0]), ylim=(low[1], high[1]), ylabel="$x_2$")
    inside = _find_in_view(locations, low, high).sum()
    ax.set_xlabel(f"$x_1$     ({inside} of {len(locations)} locations in view)")
