"""The insides of tables: the papers' numbers, estimates, what stands in which row, formats."""
