"""Performance ratios, each against its peer in the same run: `python -m benchmarks.NAME`."""
