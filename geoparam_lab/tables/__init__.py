"""Tables of runs: the papers' numbers, estimates, rows and columns, formats."""
