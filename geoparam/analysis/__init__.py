"""What the units of a network do: their boundaries, how these move, the regions they make."""

from geoparam.analysis.boundary import Boundaries, boundaries, layer_boundaries
from geoparam.analysis.parameter_steps import make_steps
from geoparam.analysis.partition import Patterns, patterns
from geoparam.analysis.perturbation import DELTAS, Response, perturb, respond
from geoparam.analysis.reading.activations import SReLU, breaks
from geoparam.analysis.tracker.history import History
from geoparam.analysis.tracker.tracker import BoundaryTracker

__all__ = [
    "DELTAS",
    "Boundaries",
    "BoundaryTracker",
    "History",
    "Patterns",
    "Response",
    "SReLU",
    "boundaries",
    "breaks",
    "layer_boundaries",
    "make_steps",
    "patterns",
    "perturb",
    "respond",
]
