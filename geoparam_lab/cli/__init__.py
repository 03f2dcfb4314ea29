"""Commands of the laboratory: demo, run, table, report."""
