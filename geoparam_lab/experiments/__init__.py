"""The papers' experiments. They need the extras: pip install 'geoparam[experiments]'."""
