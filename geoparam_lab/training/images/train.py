"""Train one network on images, so that a kill costs an epoch at most and changes nothing."""

from pathlib import Path
from typing import TYPE_CHECKING

from geoparam_lab.data.image_source import Source
from geoparam_lab.training import run_checkpoints
from geoparam_lab.training.images.loop import BOUNDARIES, Training
from geoparam_lab.training.images.settings import Outcome, Settings
from geoparam_lab.training.network_training import StepReport
from geoparam_lab.training.processes import prepare_run

if TYPE_CHECKING:
    from accelerate import Accelerator


def train(
    settings: Settings,
    source: Source,
    folder: Path,
    *,
    accelerator: "Accelerator | None" = None,
    track: int | None = None,
    report: StepReport | None = None,
) -> Outcome:
    """Train a network, from the checkpoint in `folder` if there is one.

    With several processes all of them call it, and all get the outcome; only the main one writes.

    Args:
        settings: everything that decides the numbers.
        source: the images.
        folder: for the checkpoint, the final weights (``weights.pt``) and the tracker's file. A
            checkpoint in it is of the same settings and images.
        accelerator: one with options of its own, such as sharding; made here if None.
        track: steps between two records of a `BoundaryTracker`; None for no tracker.
        report: called after every step with epoch, step and images per second of the epoch.
    """
    with prepare_run(settings, settings.precision, accelerator) as prepared:
        training = Training(settings, source, prepared, report)
        state = training.resume(folder)
        is_cut = state is None or (track is None and training.outcome is None)
        if is_cut and training.is_main:  # a killed run's history, which is not gone on with
            (folder / BOUNDARIES).unlink(missing_ok=True)
        if track is not None:
            training.start_tracker(track, folder, state)
        training.finish(folder)
        if training.is_main:
            (folder / run_checkpoints.FINISHED).touch()
        return training.result()
