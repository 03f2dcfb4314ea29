"""What repeats the papers: data, methods, training, experiments, tables, the report page.

It uses geoparam as any user would, by its public names alone. Experiments need the extras:
pip install 'geoparam[experiments]'.
"""
