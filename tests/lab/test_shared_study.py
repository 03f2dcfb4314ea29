"""Tasks shared through Optuna: each is done, whoever fails, stops or is killed."""

import math
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import forked
import numpy as np
import pytest

from geoparam_lab.training import shared_study

TASKS = ["a", "bb", "ccc", "dddd", "e-e-e", "ffffff"]
EXPECTED = {task: [task] for task in TASKS}

pytest.importorskip("optuna")


@pytest.fixture(params=["{}/study", "sqlite:///{}/study.db"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(request.param).format(tmp_path)


class Work:
    """Remembers the tasks it did, and does something else at one of them."""

    def __init__(self, number: int = 0, instead: Callable[[], None] | None = None) -> None:
        self.number, self.instead = number, instead
        self.tasks: list[str] = []

    def __call__(self, task: str) -> tuple[float, Any]:
        self.tasks.append(task)
        if len(self.tasks) == self.number and self.instead is not None:
            self.instead()
        return len(task), [task]


def share(work: Any, storage: str, **config: Any) -> dict[str, Any]:
    return shared_study.share(work, TASKS, shared_study.open_study(storage, "study", config))


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
    assert share(first, storage) == share(again, storage) == EXPECTED
    assert sorted(first.tasks) == TASKS
    assert again.tasks == []
    share(other, storage, seeds=4)
    assert len(other.tasks) == len(EXPECTED)


@pytest.mark.parametrize(("number", "error"), [(1, KeyboardInterrupt()), (6, RuntimeError())])
def test_a_task_that_failed_is_done_by_the_next(
    storage: str, number: int, error: BaseException
) -> None:
    def fail() -> None:
        raise error

    first, second = Work(number, fail), Work()
    with pytest.raises(type(error)):
        share(first, storage)
    assert share(second, storage) == EXPECTED
    assert len(first.tasks) == number and len(second.tasks) == len(EXPECTED) - number + 1


def test_tasks_of_a_killed_process_are_done_by_others(storage: str) -> None:
    assert forked.end(forked.start(kill_at_the_third, storage)) == -signal.SIGKILL
    work = Work()
    assert share(work, storage) == EXPECTED
    assert len(work.tasks) == len(EXPECTED) - 2


def test_a_task_that_another_process_works_on_is_done_last(storage: str) -> None:
    pipe, its = forked.CONTEXT.Pipe()
    forked.start(hold_the_first, storage, its)
    held, work = pipe.recv(), Work()
    assert share(work, storage) == EXPECTED
    assert sorted(work.tasks) == TASKS and work.tasks[-1] == held
    pipe.send("go on")
    assert pipe.recv() == (EXPECTED, [held])


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_task_without_a_finite_value_is_done(storage: str, value: float) -> None:
    study = shared_study.open_study(storage, "study", {})
    results = shared_study.share(lambda task: (value, value), ["x"], study)
    assert repr(results) == repr({"x": value})


def test_the_study_knows_its_best_task(storage: str) -> None:
    share(Work(), storage)
    study = shared_study.open_study(storage, "study", {})
    assert study.best_value == 1 and study.best_trial.user_attrs["task"] == "a"


def test_study_names_tell_data_and_configuration_apart(storage: str) -> None:
    names = {
        shared_study.open_study(storage, "uci", config, [array]).study_name
        for config in ({"seeds": 3}, {"seeds": 4})
        for array in (np.zeros(3), np.ones(3))
    }
    assert len(names) == 4


@pytest.mark.parametrize("storage", ["nonsense://x", "/no/such/folder/search"])
def test_a_storage_that_cannot_be_opened_is_a_clear_error(storage: str) -> None:
    with pytest.raises(ValueError, match="cannot be opened"):
        shared_study.open_study(storage, "study", {})


@pytest.mark.parametrize("content", [b"SQLite format 3\0\xdf\n", b"words\nwords\n", b'{"a": 1}\n'])
def test_a_file_of_another_kind_is_no_storage(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "search").write_bytes(content)
    with pytest.raises(ValueError, match="holds something else"):
        shared_study.open_study(str(tmp_path / "search"), "uci", {})
