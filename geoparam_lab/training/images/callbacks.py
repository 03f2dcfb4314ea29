"""TensorBoard and the boundary tracker of a training; neither changes a number of the run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

import geoparam as gp

Tick = Callable[[int, int, float], None]

BOUNDARIES = "boundaries.npy"
PROBE = 64  # images on which a tracker sees dead units and regions


def make_writer(folder: Path, epochs: int) -> Any:
    """Return a TensorBoard writer that continues after so many epochs, and hides later ones."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ModuleNotFoundError as error:
        message = "TensorBoard is missing: pip install 'geoparam[experiments]', or tensorboard."
        raise ModuleNotFoundError(message, name="tensorboard") from error
    return SummaryWriter(str(folder / "tensorboard"), purge_step=epochs + 1)


def make_tracker(
    model: nn.Module, every: int, images: Tensor, folder: Path, resume: bool
) -> gp.BoundaryTracker:
    """Return a tracker whose history is a file in the folder, with images as its probe."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / BOUNDARIES
    return gp.BoundaryTracker(
        model, every, probe=images, file=file, resume=resume and file.exists()
    )
