"""Arrays in, matplotlib axes out. Needs the extra: pip install 'geoparam[plots]'.

Every function takes arrays and returns the axis: save with ``ax.figure.savefig(path, dpi=150)``.
Nothing here computes results or touches pyplot's global state. Values that are not finite leave
gaps. All figures share these arguments:

    ax       the axis to draw on; None makes a figure
    legend   whether to explain the marks beside the axis
    steps    the number of each recorded step; 0, 1, ... by default
    layers   names of the layers, the first one at the top
"""

import matplotlib  # noqa: F401  here and first, so that its absence is named on every import

from geoparam.plots.curves import (
    convergence,
    displacement_curves,
    fit_1d,
    location_spectrum,
    rotation_curves,
)
from geoparam.plots.networks import (
    dead_units,
    layer_heatmap,
    region_slice,
    rotation_heatmap,
)
from geoparam.plots.style import (
    CYCLE,
    DASHED,
    DOTTED,
    SOLID,
    MethodStyle,
    curve_styles,
    legend_beside,
    method_style,
    new_figure,
    ordered_colours,
)
from geoparam.plots.units import decision_regions, plane, trajectories, unit_1d, unit_2d

__all__ = [
    "CYCLE",
    "DASHED",
    "DOTTED",
    "SOLID",
    "MethodStyle",
    "convergence",
    "curve_styles",
    "dead_units",
    "decision_regions",
    "displacement_curves",
    "fit_1d",
    "layer_heatmap",
    "legend_beside",
    "location_spectrum",
    "method_style",
    "new_figure",
    "ordered_colours",
    "plane",
    "region_slice",
    "rotation_curves",
    "rotation_heatmap",
    "trajectories",
    "unit_1d",
    "unit_2d",
]
