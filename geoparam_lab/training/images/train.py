"""Train one network on images, so that a kill at any point costs minutes and changes nothing."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from geoparam_lab.data.image_source import Source
from geoparam_lab.training.images import callbacks, preparation, run_checkpoints
from geoparam_lab.training.images.loop import DIVERGED, Training
from geoparam_lab.training.images.settings import Outcome, Settings

if TYPE_CHECKING:
    from accelerate import Accelerator


def train(
    settings: Settings,
    source: Source,
    folder: Path,
    *,
    accelerator: "Accelerator | None" = None,
    checkpoint_every: int | None = None,
    keep: int = 2,
    tensorboard: bool = False,
    track: int | None = None,
    tick: callbacks.Tick | None = None,
) -> Outcome:
    """Train a network, from the newest checkpoint in `folder` if there is one.

    With several processes all of them call it, and all get the outcome; only the main one writes.

    Args:
        settings: everything that decides the numbers.
        source: the images.
        folder: for checkpoints, the final weights (``weights.pt``), TensorBoard's files and the
            tracker's. Checkpoints of other settings or other images in it are an error.
        accelerator: for several runs in one process; made here if None.
        checkpoint_every: steps between two checkpoints; there is always one after an epoch.
        keep: how many of the last checkpoints stay.
        tensorboard: whether the curves are written for TensorBoard too.
        track: steps between two records of a `BoundaryTracker`; None for no tracker.
        tick: called after every step with epoch, step and images per second of the epoch.
    """
    accelerator = accelerator or preparation.make_accelerator(settings.precision)
    preparation.check(settings, accelerator)
    store = run_checkpoints.Store(Path(folder), keep)
    with preparation.prepare_torch(settings, accelerator.device):
        try:
            training = Training(settings, source, accelerator, tick)
            _resume(training, store, track)
            _finish(training, store, checkpoint_every, tensorboard)
            return training.result()
        finally:
            accelerator.free_memory()  # else it keeps the networks of all runs


def _resume(training: Training, store: run_checkpoints.Store, track: int | None) -> None:
    """Go on from the newest checkpoint, if there is one."""
    state = None
    if training.is_main:
        store.remove_unfinished()
        state = store.read_newest(partial(_has_our_shapes, training))
    state = run_checkpoints.broadcast(state, training.accelerator)
    if state is not None:
        _check_same_run(training, state, store.folder)
        training.load_state_dict(state)
    if track is not None:
        training.follow(track, store.folder, state)


def _has_our_shapes(training: Training, state: run_checkpoints.State) -> bool:
    """Return whether the weights in a checkpoint of this run have the network's shapes."""
    if any(state[what] != ours for what, ours in training.identity.items()):
        return True  # of another run: `_check_same_run` refuses it, and it is not removed
    ours = {name: x.shape for name, x in training.model.state_dict().items()}
    every = (state[what] for what in ("model", "best_weights"))
    return all({n: x.shape for n, x in weights.items()} == ours for weights in every if weights)


def _check_same_run(training: Training, state: run_checkpoints.State, folder: Path) -> None:
    for what, ours in training.identity.items():
        theirs = state[what]
        other = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
        if other:
            had = ", ".join(f"{name}={theirs.get(name)!r}" for name in other)
            have = ", ".join(f"{name}={ours.get(name)!r}" for name in other)
            raise ValueError(
                f"the checkpoints in {folder} are of a run with other {what}: {had}; got {have}. "
                "Use another folder, or remove them."
            )


def _finish(
    training: Training,
    store: run_checkpoints.Store,
    checkpoint_every: int | None,
    tensorboard: bool,
) -> None:
    """Do the rest of a run."""

    def save() -> None:
        state = training.state_dict()  # all processes gather
        if training.is_main:
            store.write(state)

    writer: Any = None
    if tensorboard and training.is_main and training.outcome is None:
        from torch.utils.tensorboard import SummaryWriter

        folder = str(store.folder / "tensorboard")
        writer = SummaryWriter(folder, purge_step=training.epoch + 1)  # hides later ones
    while training.outcome is None:
        for step in training.steps():
            if checkpoint_every and step % checkpoint_every == 0 and step < training.batches.steps:
                save()
        if training.outcome is None:
            training.end_epoch()
        if writer and training.outcome != DIVERGED:
            for name, curve in training.curves.items():
                writer.add_scalar(name, curve[-1], training.epoch)
        if training.outcome is not None:
            weights = training.reported_weights()
            if training.is_main and weights is not None:
                store.write_weights(weights)
        save()
    if writer:
        writer.close()
