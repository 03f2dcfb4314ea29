"""Train one network on images, so that a kill costs an epoch at most and changes nothing."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from geoparam_lab.data.image_source import Source
from geoparam_lab.training import run_checkpoints
from geoparam_lab.training.images import preparation
from geoparam_lab.training.images.loop import BOUNDARIES, DIVERGED, StepReport, Training
from geoparam_lab.training.images.settings import Outcome, Settings
from geoparam_lab.training.processes import make_accelerator, prepare_torch

if TYPE_CHECKING:
    from accelerate import Accelerator


def train(
    settings: Settings,
    source: Source,
    folder: Path,
    *,
    accelerator: "Accelerator | None" = None,
    tensorboard: bool = False,
    track: int | None = None,
    report: StepReport | None = None,
) -> Outcome:
    """Train a network, from the checkpoint in `folder` if there is one.

    With several processes all of them call it, and all get the outcome; only the main one writes.

    Args:
        settings: everything that decides the numbers.
        source: the images.
        folder: for the checkpoint, the final weights (``weights.pt``), TensorBoard's files and
            the tracker's. A checkpoint in it is of the same settings and images.
        accelerator: for several runs in one process; made here if None.
        tensorboard: whether the curves are written for TensorBoard too.
        track: steps between two records of a `BoundaryTracker`; None for no tracker.
        report: called after every step with epoch, step and images per second of the epoch.
    """
    accelerator = accelerator or make_accelerator(settings.precision)
    preparation.check(settings, accelerator)
    with prepare_torch(settings.seed, settings.deterministic, accelerator.device):
        try:
            training = Training(settings, source, accelerator, report)
            state = run_checkpoints.resume(training, folder)
            if track is not None:
                training.start_tracker(track, folder, state)
            _finish(training, folder, tensorboard)
            made = {run_checkpoints.WEIGHTS: True, "tensorboard": tensorboard, BOUNDARIES: track}
            if training.is_main:
                (folder / run_checkpoints.FINISHED).write_text("\n".join(filter(made.get, made)))
            return training.result()
        finally:
            accelerator.free_memory()  # else it keeps the networks of all runs


def _finish(training: Training, folder: Path, tensorboard: bool) -> None:
    """Do the rest of a run, with a checkpoint after every epoch."""
    writer: Any = None
    if tensorboard and training.is_main and training.outcome is None:
        from torch.utils.tensorboard import SummaryWriter

        place = str(folder / "tensorboard")
        writer = SummaryWriter(place, purge_step=training.epoch + 1)  # hides later ones
    while training.outcome is None:
        training.train_epoch()
        if training.outcome is None:
            training.end_epoch()
        if writer and training.outcome != DIVERGED:
            for name, curve in training.curves.items():
                writer.add_scalar(name, curve[-1], training.epoch)
        state = training.state_dict()  # all processes gather
        if training.is_main and training.outcome not in (None, DIVERGED):
            run_checkpoints.write(folder / run_checkpoints.WEIGHTS, state["model"])
        if training.is_main:
            run_checkpoints.write_checkpoint(folder, state)
    if writer:
        writer.close()
