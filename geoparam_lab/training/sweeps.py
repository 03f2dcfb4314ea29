"""A sweep: many runs of a network, each a task with a folder for its checkpoint.

Under torchrun or accelerate launch all processes train each network together: the main one chooses
the run and writes, the others receive it. Otherwise runs may be done side by side by jobs on one
GPU, or shared among machines by a study (`shared_study`).
"""

import contextlib
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from geoparam_lab.run_folder import Run
from geoparam_lab.training.tasks import Done, Progress, Session, Tick, throttle

DRAW_EVERY = 60  # seconds between two drawings of a sweep's figures


@dataclass(frozen=True)
class Work:
    """Does one run, with all processes that were started together."""

    out: Path

    def __call__(self, task: Any, tick: Tick) -> Done:
        _send(task)
        return self.train(task, tick)

    def assist(self) -> None:
        """Train every run that the main process sends."""
        while (task := _send(None)) is not None:
            self.train(task)

    def train(self, task: Any, tick: Tick | None = None) -> Done:
        """Train one network to its end."""
        raise NotImplementedError

    def folder(self, task: Any) -> Path:
        """Return the place of a run's checkpoint."""
        return self.out / "checkpoints" / task.name

    def clean(self, task: Any) -> None:
        """Remove what a recorded run has left."""
        shutil.rmtree(self.folder(task), ignore_errors=True)


def conduct(
    work: Work,
    todo: Sequence[Any],
    start: Callable[[], tuple[Run, Any]],
    draw: Callable[[Run], None],
    *,
    is_main: bool,
    jobs: int = 1,
    progress: Progress | None = None,
    unit: str = "epoch",
) -> Run | None:
    """Do the runs of a sweep that are not done; return its folder, in the main process.

    Args:
        work: does one run.
        todo: the runs.
        start: called in the main process; returns the folder, and the study that shares the runs
            or None.
        draw: draws the figures of the folder, now and then and at the end.
        is_main: whether this process leads those that were started together.
        jobs: runs side by side, each in a process of its own.
        progress: shows how many runs are done.
        unit: what a run's progress is counted in.
    """
    if not is_main:
        work.assist()
        return None
    try:
        folder, study = start()
    except BaseException:  # the other processes wait for a task, or None
        _send(None)
        raise
    draw_sometimes = throttle(draw, DRAW_EVERY)

    def finish(task: Any) -> None:
        work.clean(task)
        draw_sometimes(folder)

    with folder:
        options: Any = {"progress": progress, "threads": None, "finished": finish, "unit": unit}
        session = Session(folder, work, len(todo), jobs, **options)
        finished = {record["name"] for record in folder.records()}
        for task in todo:
            if task.name in finished:
                work.clean(task)  # a kill may have come after its record, before it was cleaned
        if study is None:
            session.spread(todo)
        else:
            session.share(todo, study, "val_loss")
        draw(folder)
        with contextlib.suppress(OSError):  # absent, or not empty
            (work.out / "checkpoints").rmdir()
    _send(None)
    return folder


def _send(task: Any) -> Any:
    """Return in all processes what the main one sends: the next run, or None at the end."""
    from accelerate.utils import broadcast_object_list

    [sent] = broadcast_object_list([task])
    return sent
