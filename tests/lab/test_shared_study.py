"""Tasks shared through Optuna: each is done, whoever fails, stops or is killed."""

import math
import os
import signal
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import forked
import pytest

from geoparam_lab.run_folder import Run
from geoparam_lab.training import shared_study
from geoparam_lab.training.tasks import Done, Session, Task, Tick

NAMES = ["a", "bb", "ccc", "dddd", "e-e-e", "ffffff"]

pytest.importorskip("optuna")


@pytest.fixture(params=["{}/study", "sqlite:///{}/study.db"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(request.param).format(tmp_path)


class Work:
    """Remembers the tasks it did, and calls `instead` at one of them, counted from 1."""

    def __init__(self, number: int = 0, instead: Callable[[], None] | None = None) -> None:
        self.number = number
        self.instead = instead
        self.tasks: list[str] = []

    def __call__(self, task: Task, tick: Tick) -> Done:
        self.tasks.append(task.title)
        if len(self.tasks) == self.number and self.instead is not None:
            self.instead()
        return Done([{"name": task.title, "value": len(task.title)}])


def share_in(run: Run, work: Any, storage: str, **config: Any) -> None:
    """Do the tasks of a study in this run."""
    tasks = [Task(name, ((name,),)) for name in NAMES]
    study = shared_study.open_study(storage, "study", config)
    Session(run, work, len(tasks)).share(tasks, study, "value")


def share(work: Any, storage: str, **config: Any) -> list[str]:
    """Do the tasks in a new folder, and return the names in it."""
    with tempfile.TemporaryDirectory() as folder:
        run = Run.create(folder, "study", {}, key=("name",))
        share_in(run, work, storage, **config)
        return sorted(record["name"] for record in run.records())


def kill_at_the_third(storage: str) -> None:
    share(Work(3, lambda: os.kill(os.getpid(), signal.SIGKILL)), storage)


def hold_the_first(storage: str, pipe: Connection) -> None:
    """Do the tasks, but wait within the first until the test allows going on."""

    def hold() -> None:
        pipe.send(work.tasks[0])
        pipe.recv()

    work = Work(1, hold)
    names = share(work, storage)
    pipe.send((names, work.tasks))


def test_every_task_of_a_study_is_done_once(storage: str) -> None:
    first, second = Work(), Work()

    assert share(first, storage) == NAMES
    assert share(second, storage) == NAMES

    assert sorted(first.tasks) == NAMES
    assert second.tasks == []


def test_another_study_does_its_own_tasks(storage: str) -> None:
    share(Work(), storage)

    other = Work()
    share(other, storage, seeds=4)

    assert len(other.tasks) == len(NAMES)


@pytest.mark.parametrize(("number", "error"), [(1, KeyboardInterrupt()), (6, RuntimeError())])
def test_a_task_that_failed_is_done_by_the_next(
    storage: str, number: int, error: BaseException
) -> None:
    first, second = Work(number, Mock(side_effect=error)), Work()

    with pytest.raises(type(error)):
        share(first, storage)
    names = share(second, storage)

    assert names == NAMES
    assert len(first.tasks) == number
    assert len(second.tasks) == len(NAMES) - (number - 1)


def test_tasks_of_a_killed_process_are_done_by_others(storage: str) -> None:
    status = forked.end(forked.start(kill_at_the_third, storage))
    assert status == -signal.SIGKILL

    work = Work()
    names = share(work, storage)

    assert names == NAMES
    assert len(work.tasks) == len(NAMES) - 2


def test_a_task_that_another_process_works_on_is_done_last(storage: str) -> None:
    pipe, pipe_of_process = forked.CONTEXT.Pipe()
    forked.start(hold_the_first, storage, pipe_of_process)
    pipe_of_process.close()  # so that a process that fails does not let the test wait
    held_task = pipe.recv()

    work = Work()
    names = share(work, storage)

    assert names == NAMES
    assert sorted(work.tasks) == NAMES
    assert work.tasks[-1] == held_task
    pipe.send("go on")
    assert pipe.recv() == (NAMES, [held_task])


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_task_without_a_finite_value_is_done(storage: str, value: float) -> None:
    def work(task: Task, tick: Tick) -> Done:
        return Done([{"name": task.title, "value": value}])

    assert share(work, storage) == NAMES


def test_the_study_knows_its_best_task(storage: str) -> None:
    share(Work(), storage)

    study = shared_study.open_study(storage, "study", {})

    assert study.best_value == 1
    assert study.best_trial.user_attrs["task"] == "('a',)"


@pytest.mark.parametrize("storage", ["nonsense://x", "/no/such/folder/search"])
def test_a_storage_that_cannot_be_opened_is_a_clear_error(storage: str) -> None:
    with pytest.raises(ValueError, match="cannot be opened"):
        shared_study.open_study(storage, "study", {})


@pytest.mark.parametrize(
    "content", [b"SQLite format 3\0\xdf\n", b"words\nwords\n", b'{"a": 1}\n', b"12", b"word"]
)
def test_a_file_of_another_kind_is_no_storage(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "search"
    path.write_bytes(content)

    with pytest.raises(ValueError, match="holds something else"):
        shared_study.open_study(str(path), "uci", {})

    assert path.read_bytes() == content


def test_tasks_that_a_resumed_folder_holds_are_not_done_again(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", "study", {}, key=("name",))
    for name in NAMES[:2]:
        run.append({"name": name, "value": 1})

    work = Work()
    share_in(run, work, str(tmp_path / "study"))

    assert sorted(work.tasks) == NAMES[2:]
    assert len(run.records()) == len(NAMES)
