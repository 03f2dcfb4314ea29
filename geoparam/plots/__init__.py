"""Curves and heat maps of a tracker's history: arrays in, matplotlib axes out.

Needs the extra: pip install 'geoparam[plots]'. Save a figure with ``ax.figure.savefig(path)``.
Nothing here computes results or touches pyplot's global state.
"""

import matplotlib  # noqa: F401  here and first, so that its absence is named on every import

from geoparam.plots.curves import layer_curves
from geoparam.plots.heatmaps import layer_heatmap
from geoparam.plots.style import INK, MUTED, new_figure

__all__ = [
    "INK",
    "MUTED",
    "layer_curves",
    "layer_heatmap",
    "new_figure",
]
