"""Linear regions of a network in a plane."""
