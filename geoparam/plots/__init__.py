"""Arrays in, matplotlib axes out. Needs the extra: pip install 'geoparam[plots]'.

Drawing functions take arrays and return the axis: save with ``ax.figure.savefig(path, dpi=150)``.
Nothing here computes results or touches pyplot's global state. Values that are not finite leave
gaps. Arguments, where they apply:

    ax       the axis to draw on; None makes a figure
    legend   whether to explain the marks beside the axis
    steps    the number of each recorded step; 0, 1, ... by default
    layers   names of the layers, the first one at the top
"""

import matplotlib  # noqa: F401  here and first, so that its absence is named on every import

from geoparam.plots.curves import displacement_curves, rotation_curves
from geoparam.plots.networks import dead_units, layer_heatmap, region_slice, rotation_heatmap
from geoparam.plots.style import (
    CYCLE,
    INK,
    MUTED,
    curve_styles,
    legend_beside,
    method_style,
    new_figure,
)
from geoparam.plots.units import plane, unit_1d, unit_2d

__all__ = [
    "CYCLE",
    "INK",
    "MUTED",
    "curve_styles",
    "dead_units",
    "displacement_curves",
    "layer_heatmap",
    "legend_beside",
    "method_style",
    "new_figure",
    "plane",
    "region_slice",
    "rotation_curves",
    "rotation_heatmap",
    "unit_1d",
    "unit_2d",
]
