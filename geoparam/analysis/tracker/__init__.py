"""BoundaryTracker: how boundaries move in training, what is measured and what is kept."""

from geoparam.analysis.tracker.history import History
from geoparam.analysis.tracker.tracker import BoundaryTracker

__all__ = ["BoundaryTracker", "History"]
