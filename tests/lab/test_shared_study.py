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
    """Remembers the tasks it did, and does something else at one of them."""

    def __init__(self, number: int = 0, instead: Callable[[], None] | None = None) -> None:
        self.number, self.instead = number, instead
        self.tasks: list[str] = []

    def __call__(self, task: Task, tick: Tick) -> Done:
        self.tasks.append(task.title)
        if len(self.tasks) == self.number and self.instead is not None:
            self.instead()
        return Done([{"name": task.title, "value": len(task.title)}])


def share(work: Any, storage: str, **config: Any) -> list[str]:
    """Do the tasks, and return the names in the folder."""
    tasks = [Task(name, ((name,),)) for name in NAMES]
    study = shared_study.open_study(storage, "study", config)
    with tempfile.TemporaryDirectory() as folder:
        run = Run.create(folder, "study", {}, key=("name",))
        Session(run, work, len(tasks)).share(tasks, study, "value")
        return sorted(record["name"] for record in run.records())


def kill_at_the_third(storage: str) -> None:
    share(Work(3, lambda: os.kill(os.getpid(), signal.SIGKILL)), storage)


def hold_the_first(storage: str, pipe: Connection) -> None:
    def hold() -> None:
        pipe.send(work.tasks[0])
        pipe.recv()  # until the test says so

    work = Work(1, hold)
    pipe.send((share(work, storage), work.tasks))


def test_every_task_is_done_once_in_each_study(storage: str) -> None:
    first, again, other = Work(), Work(), Work()
    assert share(first, storage) == share(again, storage) == NAMES
    assert sorted(first.tasks) == NAMES
    assert again.tasks == []
    share(other, storage, seeds=4)
    assert len(other.tasks) == len(NAMES)


@pytest.mark.parametrize(("number", "error"), [(1, KeyboardInterrupt()), (6, RuntimeError())])
def test_a_task_that_failed_is_done_by_the_next(
    storage: str, number: int, error: BaseException
) -> None:
    first, second = Work(number, Mock(side_effect=error)), Work()
    with pytest.raises(type(error)):
        share(first, storage)
    assert share(second, storage) == NAMES
    assert len(first.tasks) == number and len(second.tasks) == len(NAMES) - number + 1


def test_tasks_of_a_killed_process_are_done_by_others(storage: str) -> None:
    assert forked.end(forked.start(kill_at_the_third, storage)) == -signal.SIGKILL
    work = Work()
    assert share(work, storage) == NAMES
    assert len(work.tasks) == len(NAMES) - 2


def test_a_task_that_another_process_works_on_is_done_last(storage: str) -> None:
    pipe, its = forked.CONTEXT.Pipe()
    forked.start(hold_the_first, storage, its)
    its.close()  # so that a process that fails does not let the test wait
    held, work = pipe.recv(), Work()
    assert share(work, storage) == NAMES
    assert sorted(work.tasks) == NAMES and work.tasks[-1] == held
    pipe.send("go on")
    assert pipe.recv() == (NAMES, [held])


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_task_without_a_finite_value_is_done(storage: str, value: float) -> None:
    work = lambda task, tick: Done([{"name": task.title, "value": value}])  # noqa: E731
    assert share(work, storage) == NAMES


def test_the_study_knows_its_best_task(storage: str) -> None:
    share(Work(), storage)
    study = shared_study.open_study(storage, "study", {})
    assert study.best_value == 1 and study.best_trial.user_attrs["task"] == "('a',)"


@pytest.mark.parametrize("storage", ["nonsense://x", "/no/such/folder/search"])
def test_a_storage_that_cannot_be_opened_is_a_clear_error(storage: str) -> None:
    with pytest.raises(ValueError, match="cannot be opened"):
        shared_study.open_study(storage, "study", {})


@pytest.mark.parametrize(
    "content", [b"SQLite format 3\0\xdf\n", b"words\nwords\n", b'{"a": 1}\n', b"12", b"word"]
)
def test_a_file_of_another_kind_is_no_storage(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "search").write_bytes(content)
    with pytest.raises(ValueError, match="holds something else"):
        shared_study.open_study(str(tmp_path / "search"), "uci", {})
    assert (tmp_path / "search").read_bytes() == content


def test_what_a_resumed_folder_holds_is_not_done_again(tmp_path: Path) -> None:
    tasks = [Task(name, ((name,),)) for name in NAMES]
    run = Run.create(tmp_path / "run", "study", {}, key=("name",))
    for name in NAMES[:2]:
        run.append({"name": name, "value": 1})
    study, work = shared_study.open_study(str(tmp_path / "study"), "study", {}), Work()
    Session(run, work, len(tasks)).share(tasks, study, "value")
    assert sorted(work.tasks) == NAMES[2:] and len(run.records()) == len(NAMES)
