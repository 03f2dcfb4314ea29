"""What the units of a network do: their boundaries, how these move, the regions they make."""

from geoparam.analysis.boundary import Boundaries, boundaries, layer_boundaries
from geoparam.analysis.partition import Patterns, patterns
from geoparam.analysis.reading.activations import SReLU, breaks
from geoparam.analysis.tracker.history import History
from geoparam.analysis.tracker.tracker import BoundaryTracker

__all__ = [
    "Boundaries",
    "BoundaryTracker",
    "History",
    "Patterns",
    "SReLU",
    "boundaries",
    "breaks",
    "layer_boundaries",
    "patterns",
]
