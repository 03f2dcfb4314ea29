"""What the units of a network do: their boundaries, how these move, the regions they make."""

from geoparam.analysis.boundary import Boundaries, boundaries, layer_boundaries
from geoparam.analysis.partition import Patterns, patterns
from geoparam.analysis.perturbation import Response, perturb, sweep
from geoparam.analysis.reading.activations import SReLU, breaks
from geoparam.analysis.slices import Slice, slice_regions
from geoparam.analysis.slicing.planes import Plane, plane_through
from geoparam.analysis.tracker import BoundaryTracker
from geoparam.analysis.tracking.history import History

__all__ = [
    "Boundaries",
    "BoundaryTracker",
    "History",
    "Patterns",
    "Plane",
    "Response",
    "SReLU",
    "Slice",
    "boundaries",
    "breaks",
    "layer_boundaries",
    "patterns",
    "perturb",
    "plane_through",
    "slice_regions",
    "sweep",
]
