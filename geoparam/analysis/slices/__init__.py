"""Linear regions of a network in a plane: planes, polygons, and the network cut by them."""

from geoparam.analysis.slices.plane import Plane, plane_through
from geoparam.analysis.slices.slice import Slice, slice_regions

__all__ = ["Plane", "Slice", "plane_through", "slice_regions"]
