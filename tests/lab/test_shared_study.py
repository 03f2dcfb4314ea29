"""Tasks shared through Optuna: each is done, whoever fails, stops or is killed."""

import math
import os
import signal
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import forked
import numpy as np
import pytest

from geoparam_lab.training import shared_study

TASKS = ["a", "bb", "ccc", "dddd", "e-e-e", "ffffff"]

pytest.importorskip("optuna")


@pytest.fixture
def storage(tmp_path: Path) -> str:
    return str(tmp_path / "study.db")


class Work:
    """Remembers the tasks it did, and raises at some of them."""

    def __init__(self, *errors: tuple[int, BaseException]) -> None:
        self.errors: dict[int, BaseException] = dict(errors)
        self.tasks: list[str] = []

    def __call__(self, task: str) -> tuple[float, Any]:
        self.tasks.append(task)
        if len(self.tasks) in self.errors:
            raise self.errors[len(self.tasks)]
        return len(task), [task]


def share(work: Any, storage: str, name: str = "study", **options: Any) -> dict[str, Any]:
    return shared_study.share(work, TASKS, storage, name, **options)


EXPECTED = {task: [task] for task in TASKS}


def die_at_a_task(storage: str) -> None:
    def work(task: str) -> None:
        with sqlite3.connect(storage) as database:  # only what had a heartbeat can fall silent
            while not database.execute("SELECT count(*) FROM trial_heartbeats").fetchone()[0]:
                pass
        os.kill(os.getpid(), signal.SIGKILL)

    share(work, storage)


def work_when_told(storage: str, pipe: Connection) -> None:
    def work(task: str) -> tuple[float, Any]:
        pipe.send(task)
        pipe.recv()  # until the test says so
        return len(task), [task]

    def waiting(left: int) -> None:
        pipe.send(f"waiting for {left}")
        shared_study.PAUSE = 0.01

    pipe.send(len(share(work, storage, waiting=waiting)))


def test_every_task_is_done_once_in_each_study(storage: str) -> None:
    first, again, other = Work(), Work(), Work()
    assert share(first, storage) == share(again, storage) == EXPECTED
    assert sorted(first.tasks) == sorted(TASKS)
    assert again.tasks == []
    share(other, storage, name="other")
    assert len(other.tasks) == len(EXPECTED)


@pytest.mark.parametrize(("number", "error"), [(1, KeyboardInterrupt()), (6, RuntimeError())])
def test_a_task_that_failed_is_done_by_the_next(
    storage: str, number: int, error: BaseException
) -> None:
    first, second = Work((number, error)), Work()
    with pytest.raises(type(error)):
        share(first, storage)
    assert share(second, storage) == EXPECTED
    assert len(first.tasks) == number and len(second.tasks) == len(EXPECTED) - number + 1


def test_tasks_of_a_killed_process_are_done_by_others(
    storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert forked.end(forked.start(die_at_a_task, storage)) == -signal.SIGKILL
    monkeypatch.setattr(shared_study, "SILENCE", 1)
    work, waits = Work(), []
    assert share(work, storage, waiting=waits.append) == EXPECTED
    assert sorted(work.tasks) == sorted(TASKS)
    assert set(waits) <= {1}  # whether there is a wait depends on time


def test_the_last_task_is_waited_for_and_not_done_twice(storage: str) -> None:
    (slow, its), (fast, theirs) = (forked.CONTEXT.Pipe() for _ in range(2))
    for pipe in (its, theirs):
        forked.start(work_when_told, storage, pipe)
        pipe.close()  # so that a process that ends is noticed
    held, done = slow.recv(), []
    for _ in range(len(EXPECTED) - 1):
        done.append(fast.recv())
        fast.send("go on")
    assert fast.recv() == "waiting for 1" and held not in done
    assert len(set(done)) == len(EXPECTED) - 1
    slow.send("go on")
    assert slow.recv() == len(EXPECTED)
    while isinstance(said := fast.recv(), str):
        assert said == "waiting for 1"
    assert said == len(EXPECTED)


def test_processes_that_start_at_once_do_each_task_once(
    storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They also create the tables at once, which Optuna does without a lock."""
    monkeypatch.setattr(shared_study, "PAUSE", 0.01)
    work = Work()
    with ThreadPoolExecutor(4) as pool:
        results = [pool.submit(share, work, storage) for _ in range(4)]
    assert [each.result() for each in results] == [EXPECTED] * 4
    assert sorted(work.tasks) == sorted(TASKS)


def test_a_task_queued_twice_is_done_once(storage: str) -> None:
    """Two processes may queue the same task before either sees the other's."""
    study = shared_study._open_study(storage, "study")
    for _ in range(2):
        for task in TASKS:
            study.enqueue_trial({}, {"task": task})
    work = Work()
    assert share(work, storage) == EXPECTED and len(work.tasks) == len(EXPECTED)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_task_without_a_finite_value_is_done(storage: str, value: float) -> None:
    results = shared_study.share(lambda task: (value, value), ["x"], storage, "study")
    assert repr(results) == repr({"x": value})


def test_the_study_knows_its_best_task(storage: str) -> None:
    import optuna

    share(Work(), storage)
    study = optuna.load_study(study_name="study", storage=f"sqlite:///{storage}")
    assert study.best_value == 1 and study.best_trial.user_attrs["task"] == "a"


def test_study_names_tell_data_and_configuration_apart() -> None:
    names = {
        shared_study.name_study("uci", config, [array])
        for config in ({"seeds": 3}, {"seeds": 4})
        for array in (np.zeros(3), np.ones(3))
    }
    assert len(names) == 4


@pytest.mark.parametrize("storage", ["nonsense://x", "/no/such/folder/search.db"])
def test_a_storage_that_cannot_be_opened_is_a_clear_error(storage: str) -> None:
    with pytest.raises(ValueError, match="cannot be opened"):
        shared_study.check_storage(storage)
