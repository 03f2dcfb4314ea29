"""A sweep: many runs of a network, each a task with a folder for its checkpoint.

A run that diverges is a record like any other, with NaN for its results, and the sweep goes on.

**Resuming.** A run's record is written when it is finished; until then it may have checkpoints in
checkpoints/NAME of the folder, from which the same command with `resume` goes on. What the numbers
depend on, the data's checksum too, is in config.json, and a resumed sweep must have the same.

**Several processes.** Under torchrun or accelerate launch all processes train each network
together: the main one chooses the run and writes, the others receive it. Otherwise runs may be
done side by side by jobs on one GPU, or shared among machines by a study (`shared_study`); each
machine ends with all records and curves.
"""

import contextlib
import functools
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from geoparam_lab.checks import Users, check_counts, check_effect, find_defaults
from geoparam_lab.run_folder import Record, Run
from geoparam_lab.training import shared_study
from geoparam_lab.training.network_training import Outcome
from geoparam_lab.training.run_checkpoints import FINISHED
from geoparam_lab.training.tasks import Done, Progress, Session, Task, Tick, throttle

DRAW_EVERY = 60  # seconds between two drawings of a sweep's figures


@dataclass(frozen=True)
class Sweep:
    """What a kind of sweep does.

    Args:
        experiment: the name of its command.
        settings: the dataclass of a run's settings.
        axes: entries of the configuration that say how much is done, not how.
        list_tasks: returns the runs, given the configuration and the records of those done.
        draw: draws the figures of a folder.
        users: settings that only some runs use, as `check_effect` takes them.
        unit: what a run's progress is counted in.
    """

    experiment: str
    settings: type
    axes: Sequence[str]
    list_tasks: Callable[[Record, Sequence[Record]], list[Task]]
    draw: Callable[[Run], None]
    users: Users
    unit: str = "step"

    def make_config(self, axes: Record, settings: Record) -> Record:
        """Return the configuration; raise ValueError where an option is unknown or empty."""
        common = find_defaults(self.settings)
        unknown = [name for name in settings if name not in common]
        if unknown:
            raise ValueError(f"settings are {', '.join(common)}; got {', '.join(unknown)}.")
        for name, values in axes.items():
            if isinstance(values, (list, tuple)) and not values:
                raise ValueError(f"{name} must not be empty.")
        check_counts(seeds=axes["seeds"])
        config = axes | common | settings
        return {
            name: list(value) if isinstance(value, (tuple, list)) else value
            for name, value in config.items()
        }

    def check_effect(self, runs: Sequence[object], out: str | Path) -> None:
        """Raise ValueError where a setting changes nothing in any run of a new folder.

        A sweep that goes on has the settings of its first call, and perhaps other methods.
        """
        if not (Path(out) / "config.json").exists():
            check_effect(runs, self.users)

    def conduct(
        self,
        work: "Work",
        config: Record,
        *,
        is_main: bool,
        command: str | None = None,
        resume: bool = False,
        jobs: int = 1,
        storage: str | None = None,
        progress: Progress | None = None,
    ) -> Run | None:
        """Do the runs of a sweep that are not done; return its folder, in the main process.

        Args:
            work: does one run.
            config: all that decides the numbers.
            is_main: whether this process leads those that were started together.
            command: what a user types to do it again.
            resume: go on with the sweep in the folder.
            jobs: runs side by side, each in a process of its own.
            storage: a file or database through which machines share the runs.
            progress: shows how many runs are done.
        """
        if not is_main:
            work.assist()
            return None
        try:
            study = None
            if storage is not None:
                study = shared_study.open_study(storage, self.experiment, config)
            folder = Run.create(
                work.out,
                self.experiment,
                config,
                command,
                key=["name"],
                resume=resume,
                may_change=self.axes,
                defaults=find_defaults(self.settings),
            )
        except BaseException:  # the other processes wait for a task, or None
            _send(None)
            raise

        with folder:
            self._work_off(work, folder, config, study, jobs, progress)
            self.draw(folder)
            with contextlib.suppress(OSError):  # absent, or not empty
                (work.out / "checkpoints").rmdir()
        _send(None)
        return folder

    def _work_off(
        self,
        work: "Work",
        folder: Run,
        config: Record,
        study: Any,
        jobs: int,
        progress: Progress | None,
    ) -> None:
        """Do all runs, and those that their records ask for."""
        draw_sometimes = throttle(self.draw, DRAW_EVERY)

        def finish(task: Task) -> None:
            work.clean(task)
            draw_sometimes(folder)

        tasks: list[Task] = []
        while (wanted := self.list_tasks(config, folder.records())) != tasks:
            tasks = wanted
            finished = {record["name"] for record in folder.records()}
            for task in tasks:
                if task.name in finished:  # perhaps killed between its record and the cleaning
                    work.clean(task)
            session = Session(
                folder,
                work,
                len(tasks),
                jobs,
                progress,
                threads=None,
                finished=finish,
                unit=self.unit,
            )
            if study is None:
                session.spread(tasks)
            else:
                session.share(tasks, study, "val_loss")


@dataclass(frozen=True)
class Work:
    """Does one run, with all processes that were started together.

    Args:
        out: the folder of the sweep.
        train: trains a network to its end, given settings, data, a folder and `tick`.
        load: returns the data.
        kept: files of a finished run that are moved to other places: a folder and a suffix.
    """

    out: Path
    train: Callable[..., Outcome]
    load: Callable[[], Any]
    kept: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    def __call__(self, task: Task, tick: Tick) -> Done:
        _send(task)
        return self._train(task, tick)

    def assist(self) -> None:
        """Train every network that the main process sends."""
        while (task := _send(None)) is not None:
            self._train(task)

    def _train(self, task: Task, tick: Tick | None = None) -> Done:
        outcome = self.train(task.settings, self.load(), self._find_folder(task), tick=tick)
        record = {"name": task.name, **outcome.record, **task.labels}
        return Done([record], {task.name: outcome.curves})

    def _find_folder(self, task: Task) -> Path:
        """Return the place of a run's checkpoint."""
        return self.out / "checkpoints" / task.name

    def clean(self, task: Task) -> None:
        """Move what is kept of a recorded run to its place, and remove what else it has left."""
        folder = self._find_folder(task)
        for file, (place, suffix) in self.kept.items():
            if (folder / FINISHED).exists() and (folder / file).exists():
                target = self.out / place / f"{task.name}{suffix}"
                target.parent.mkdir(exist_ok=True)
                (folder / file).replace(target)
        shutil.rmtree(folder, ignore_errors=True)


@functools.lru_cache(maxsize=1)  # a working process trains many networks on the same data
def load_once(load: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a function returns for some arguments, and keep the last of these results."""
    return load(*arguments)


def _send(task: Task | None) -> Task | None:
    """Return in all processes what the main one sends: the next run, or None at the end."""
    from accelerate.utils import broadcast_object_list

    [sent] = broadcast_object_list([task])
    received: Task | None = sent
    return received
