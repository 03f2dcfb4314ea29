"""The papers' figures: arrays in, drawn on a matplotlib axis that is given.

Values that are not finite leave gaps. `legend_beside` explains the marks beside an axis.
"""

from geoparam.plots import INK, MUTED, new_figure
from geoparam_lab.plots.method_styles import CYCLE, curve_styles, method_style
from geoparam_lab.plots.panels import legend_beside, new_columns, tick_values
from geoparam_lab.plots.single_units import plane, unit_1d, unit_2d
from geoparam_lab.plots.stability_curves import displacement_curves, rotation_curves

__all__ = [
    "CYCLE",
    "INK",
    "MUTED",
    "curve_styles",
    "displacement_curves",
    "legend_beside",
    "method_style",
    "new_columns",
    "new_figure",
    "plane",
    "rotation_curves",
    "tick_values",
    "unit_1d",
    "unit_2d",
]
