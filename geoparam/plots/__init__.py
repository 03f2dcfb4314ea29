"""Arrays in, matplotlib axes out. Needs the extra: pip install 'geoparam[plots]'.

Every function takes arrays and an axis, makes a figure of its own where none is given, and
returns the axis: save with ``ax.figure.savefig(path, dpi=150)``. Nothing here computes results
or touches pyplot's global state. Values that are not finite leave gaps.
"""

import matplotlib  # noqa: F401  here and first, so that its absence is named on every import

from geoparam.plots.curves import (
    convergence,
    displacement_curves,
    fit_1d,
    location_spectrum,
    over_rates,
    rotation_curves,
    training_curves,
)
from geoparam.plots.networks import (
    dead_units,
    layer_heatmap,
    region_changes,
    region_slice,
    rotation_heatmap,
)
from geoparam.plots.planes import decision_regions, trajectories
from geoparam.plots.style import COLOURS, MethodStyle, method_style, new_figure
from geoparam.plots.units import perturbation, unit_1d, unit_2d

__all__ = [
    "COLOURS",
    "MethodStyle",
    "convergence",
    "dead_units",
    "decision_regions",
    "displacement_curves",
    "fit_1d",
    "layer_heatmap",
    "location_spectrum",
    "method_style",
    "new_figure",
    "over_rates",
    "perturbation",
    "region_changes",
    "region_slice",
    "rotation_curves",
    "rotation_heatmap",
    "training_curves",
    "trajectories",
    "unit_1d",
    "unit_2d",
]
