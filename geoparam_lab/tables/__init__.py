"""Tables of runs: rows, estimates, and how they are written."""
