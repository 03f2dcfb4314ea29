"""Figures and axes as all plots have them."""

import numpy as np
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

INK, MUTED, PALE = "#222222", "#8a8a8a", "#eeeeee"


def new_figure(rows: int, columns: int, size: tuple[float, float]) -> tuple[Figure, np.ndarray]:
    """Return a figure outside of pyplot, `size` in inches, and its axes (rows, columns)."""
    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1, compress=True)
    figure = Figure(figsize=size, layout=layout)
    axes = figure.subplots(rows, columns, squeeze=False)
    for ax in axes.flat:
        ax.spines[["top", "right"]].set_visible(False)
        ax.spines[["left", "bottom"]].set_color(MUTED)
        ax.tick_params(color=MUTED, labelcolor=INK)
        ax.grid(color=PALE, linewidth=0.8)
        ax.set_axisbelow(True)
    return figure, axes
