"""What the width and the claims share: tasks whose members are the keys of their records."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from geoparam_lab.run_folder import Record, Run
from geoparam_lab.training.tasks import Done, Progress, Session, Tick, count_cores

Meter = Callable[[Sequence[Any], Tick], Iterable[Record]]  # measures some members


class Task(NamedTuple):
    """Networks or layers that are measured together; each is the key of its record."""

    title: str
    keys: tuple[Any, ...]

    def __str__(self) -> str:
        return self.title


def measure_missing(
    run: Run, tasks: Sequence[Task], measure: Meter, jobs: int | None, progress: Progress | None
) -> None:
    """Do the tasks that are not done; `measure` gives the results of each of a task's keys."""
    total = sum(len(task.keys) for task in tasks)
    work = functools.partial(_work, measure)
    Session(run, work, total, jobs or count_cores(), progress).spread(tasks)


def _work(measure: Meter, task: Task, tick: Tick) -> Done:
    found = zip(task.keys, measure(task.keys, tick), strict=True)
    return Done([key._asdict() | own for key, own in found])


def select_records(records: Iterable[Record], **fields: Any) -> list[Record]:
    """Return the records that have these values."""
    return [r for r in records if all(r[name] == value for name, value in fields.items())]
