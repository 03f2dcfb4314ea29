"""Tables of runs: estimates, rows and columns, notes, formats."""
