"""What watches a training: a progress display, TensorBoard, a boundary tracker.

None of them changes a number of the run, and each is there only if asked for.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import geoparam as gp

Tick = Callable[[int, int, float], None]

INTERVAL = 0.3  # seconds between two ticks
BOUNDARIES = "boundaries.npy"


class Ticker:
    """Calls `tick` with epoch, step and images per second, at most every 0.3 s.

    Example:
        >>> clock = iter([0.0, 0.2, 0.5, 0.5, 0.6])
        >>> ticker = Ticker(print, now=lambda: next(clock))
        >>> for step in (1, 2, 3):
        ...     ticker(0, step, images=100)
        0 2 400.0
    """

    def __init__(self, tick: Tick | None, now: Callable[[], float] = time.perf_counter) -> None:
        self._tick, self._now = tick, now
        self._last, self._images = now(), 0

    def restart(self) -> None:
        """Start counting here: what went before was no training."""
        self._last, self._images = self._now(), 0

    def __call__(self, epoch: int, step: int, images: int) -> None:
        if self._tick is None:
            return
        self._images += images
        elapsed = self._now() - self._last
        if elapsed >= INTERVAL:
            self._tick(epoch, step, self._images / elapsed)
            self.restart()


def make_writer(folder: Path, epochs: int) -> Any:
    """Return a TensorBoard writer that continues after so many epochs, and hides later ones."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ModuleNotFoundError as error:
        message = "TensorBoard is missing: pip install 'geoparam[experiments]', or tensorboard."
        raise ModuleNotFoundError(message, name="tensorboard") from error
    return SummaryWriter(str(folder / "tensorboard"), purge_step=epochs + 1)


def make_tracker(
    model: nn.Module, every: int, size: int, device: torch.device, folder: Path, resume: bool
) -> gp.BoundaryTracker:
    """Return a tracker whose history is a file in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    images = torch.zeros(2, 3, size, size, device=device)
    file = folder / BOUNDARIES
    return gp.BoundaryTracker(
        model, every, example_inputs=images, file=file, resume=resume and file.exists()
    )
