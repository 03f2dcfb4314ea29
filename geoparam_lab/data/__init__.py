"""Data sets of the experiments, as numpy arrays."""
