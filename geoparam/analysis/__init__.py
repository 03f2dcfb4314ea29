"""What the units of a network do: their boundaries, how these move, the regions they make."""

from geoparam.analysis.boundary import Boundaries, boundaries, layer_boundaries
from geoparam.analysis.history import History
from geoparam.analysis.patterns import Patterns
from geoparam.analysis.quantities import QUANTITIES, LayerQuantity, UnitQuantity
from geoparam.analysis.readings import patterns
from geoparam.analysis.snapshot import Interval, Snapshot
from geoparam.analysis.tracker import BoundaryTracker
from geoparam.analysis.watch import watch
from geoparam.model.activations import SReLU, breaks

__all__ = [
    "QUANTITIES",
    "Boundaries",
    "BoundaryTracker",
    "History",
    "Interval",
    "LayerQuantity",
    "Patterns",
    "SReLU",
    "Snapshot",
    "UnitQuantity",
    "boundaries",
    "breaks",
    "layer_boundaries",
    "patterns",
    "watch",
]
