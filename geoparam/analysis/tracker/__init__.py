"""BoundaryTracker: how boundaries move in training, what is measured and what is kept."""
