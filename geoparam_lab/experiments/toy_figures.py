"""Figures of Levy and Banana: each method at the seed with its median test result."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from geoparam import plots
from geoparam_lab import methods
from geoparam_lab.data.banana_data import Banana
from geoparam_lab.data.synthetic import Regression
from geoparam_lab.experiments.toy_seeds import find_papers_lr, load_medians
from geoparam_lab.experiments.toys import Array
from geoparam_lab.run_folder import Run

LOWEST = -20  # the power of 2 at which figure 2c begins: smaller moves are after training


def new_columns(count: int, deep: int, size: tuple[float, float]) -> tuple[Figure, Array, Axes]:
    """Return a figure, a column of `deep` axes for each of `count` methods, and the upper right.

    Five columns are beside each other at most, the others below; `size` is that of a panel.

    Example:
        >>> figure, columns, corner = new_columns(7, 2, (4.0, 3.0))
        >>> columns.shape, len(figure.axes), corner is columns[4, 0]
        ((7, 2), 20, True)
    """
    wide = min(count, 5)
    bands = -(-count // wide)
    inches = (1.0 + size[0] * wide, size[1] * deep * bands)
    figure, axes = plots.new_figure(bands * deep, wide, size=inches)
    columns = axes.reshape(bands, deep, wide).swapaxes(1, 2).reshape(-1, deep)
    for spare in columns[count:].flat:
        spare.axis("off")
    return figure, columns[:count], axes[0, -1]


# --- Levy ----------------------------------------------------------------------------------------


def draw_moves(run: Run) -> Figure:
    """Draw figure 2c: the largest move of a unit in each update, a panel for each rate."""
    rates = run.config["lrs"]
    figure, axes = plots.new_figure(1, len(rates), size=(1.5 + 4.6 * len(rates), 4.2))
    for ax, lr in zip(axes[0], rates, strict=True):
        shown = load_medians(run, "test_rmse", lr)
        moves = {name: curves["moves"] for name, curves in shown.items()}
        plots.displacement_curves(moves, ax=ax, legend=ax is axes[0, -1])
        ax.axhline(1, color="black", linewidth=0.8, linestyle=":")
        ax.sharey(axes[0, 0])
        ax.set_ylim(bottom=2.0**LOWEST)
        ax.set_title(f"rate {lr:g}", loc="left")
    return figure


def draw_fits(run: Run, data: Regression) -> Figure:
    """Draw figure 2d-g: the fits, and below each where its units switch."""
    shown = load_medians(run, "test_rmse")
    figure, columns, _ = new_columns(len(shown), 2, size=(4.1, 3.6))
    grid = data.x_test[:, 0]
    for (above, below), (name, curves) in zip(columns, shown.items(), strict=True):
        colour = plots.method_style(methods.without_options(name)).colour
        plots.fit_1d(
            above,
            points=(data.x_train[:, 0], data.y_train),
            grid=grid,
            truth=data.y_test,
            prediction=curves["prediction"][-1],
            units=curves["locations"][-1],
            initial=curves["prediction"][0],
            colour=colour,
        )
        above.sharey(columns[0, 0])
        rmse = np.sqrt(np.mean((curves["prediction"][-1] - data.y_test) ** 2))
        rate = find_papers_lr(name, run.config["lrs"])
        title = f"{methods.title(name)}, rate {rate:g}: test RMSE {rmse:.3f}"
        above.set_title(title, loc="left")
        plots.location_spectrum(
            curves["locations"],
            limits=(grid.min(), grid.max()),
            steps=curves["steps"],
            colour=colour,
            ax=below,
        )
    columns[0, 0].legend(frameon=False)
    return figure


# --- Banana --------------------------------------------------------------------------------------


def draw_paths(run: Run, data: Banana) -> Figure:
    """Draw figure 3a-h: where the units' locations go, a row for each rate."""
    names, rates = run.config["methods"], run.config["lrs"]
    figure, columns, corner = new_columns(len(names), len(rates), size=(3.3, 3.5))
    for row, lr in zip(columns.T, rates, strict=True):
        for ax, (name, curves) in zip(
            row, load_medians(run, "test_accuracy", lr).items(), strict=True
        ):
            plots.trajectories(
                -curves["distance"][..., None] * curves["direction"],
                points=data.x_train,
                limits=(-4.0, 4.0),
                legend=ax is corner,
                ax=ax,
            )
            ax.set_title(f"{methods.title(name)}, rate {lr:g}", loc="left")
    return figure


def draw_rotations(run: Run) -> Figure:
    """Draw figure 3i: the largest turn of a unit in each update, at the highest rate."""
    shown = load_medians(run, "test_accuracy", max(run.config["lrs"]))
    turns = {name: curves["rotation"] for name, curves in shown.items()}
    figure, axes = plots.new_figure(1, 1, size=(7.0, 4.2))
    plots.rotation_curves(turns, ax=axes[0, 0])
    return figure


def draw_decisions(run: Run, data: Banana, grid: tuple[Array, Array]) -> Figure:
    """Draw figure 3j-m: what the networks decide on a grid, and their units' locations."""
    shown = load_medians(run, "test_accuracy")
    figure, columns, corner = new_columns(len(shown), 1, size=(3.6, 3.8))
    for ax, (name, curves) in zip(columns[:, 0], shown.items(), strict=True):
        plots.decision_regions(
            curves["logits"],
            grid=grid,
            points=data.x_test,
            labels=data.y_test,
            locations=-curves["distance"][-1][:, None] * curves["direction"][-1],
            level=0.0,
            legend=ax is corner,
            ax=ax,
        )
        accuracy = curves["frame_accuracy"][-1]
        rate = find_papers_lr(name, run.config["lrs"])
        title = f"{methods.title(name)}, rate {rate:g}: test accuracy {accuracy:.3f}"
        ax.set_title(title, loc="left")
    return figure
