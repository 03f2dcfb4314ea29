"""What the units of a network do: their boundaries, how these move, the regions they make."""

from geoparam.analysis.activations import SReLU, breaks
from geoparam.analysis.boundary import Boundaries, boundaries, layer_boundaries

__all__ = ["Boundaries", "SReLU", "boundaries", "breaks", "layer_boundaries"]
