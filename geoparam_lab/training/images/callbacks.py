"""What is called while a network trains. Neither a tick nor the tracker changes a number."""

from collections.abc import Callable

Tick = Callable[[int, int, float], None]  # epoch, step, and images per second of the epoch

BOUNDARIES = "boundaries.npy"  # the tracker's history
PROBE = 64  # images on which a tracker sees dead units and regions
