"""A grid shared through Optuna: every point is done, whoever fails, stops or is killed."""

import itertools
import math
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from geoparam_lab.training import shared_study

GRID = {"method": ["sp", "gmp"], "lr": [0.01, 0.1, 0.3]}
LEFT_BEHIND = """
import os, signal, sys
from geoparam_lab.training import shared_study
from test_shared_study import GRID
def work(point):
    os.kill(os.getpid(), signal.SIGKILL)
shared_study.share(work, GRID, sys.argv[1], "study")
"""
WORKER = """
import sys
from geoparam_lab.training import shared_study
from test_shared_study import GRID
def work(point):
    print(point["method"], point["lr"], flush=True)
    sys.stdin.readline()  # until the other has one, too
    return point["lr"], [point["method"], point["lr"]]
def waiting(left):
    print("waiting for", left, flush=True)
    shared_study.PAUSE = 0.01
print(len(shared_study.share(work, GRID, sys.argv[1], "study", waiting)), "points")
"""

pytest.importorskip("optuna")


@pytest.fixture(params=["database", "journal"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/a.db" if request.param == "database" else f"{tmp_path}/a.log"


class Work:
    """Remembers the points it was given, and what it should raise at which."""

    def __init__(self, *errors: tuple[int, BaseException]) -> None:
        self.errors, self.points = dict(errors), []

    def __call__(self, point: shared_study.Point) -> tuple[float, Any]:
        self.points.append(tuple(point.values()))
        if len(self.points) in self.errors:
            raise self.errors[len(self.points)]
        return point["lr"], list(point.values())


def share(work: Any, storage: str, name: str = "study", **options: Any) -> list[Any]:
    return shared_study.share(work, GRID, storage, name, **options)


EXPECTED = [(point, list(point.values())) for point in shared_study.points(GRID)]


def process(script: str, storage: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", script, storage],
        cwd=Path(__file__).parent,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_every_point_is_done_once(storage: str) -> None:
    work = Work()
    assert share(work, storage) == EXPECTED
    assert sorted(work.points) == sorted(itertools.product(*GRID.values()))


def test_a_finished_study_is_not_done_again(storage: str) -> None:
    share(Work(), storage)
    work = Work()
    assert share(work, storage) == EXPECTED and work.points == []


def test_another_name_is_another_study(storage: str) -> None:
    share(Work(), storage)
    work = Work()
    share(work, storage, name="other")
    assert len(work.points) == len(EXPECTED)


@pytest.mark.parametrize(
    ("number", "error"), [(1, KeyboardInterrupt()), (3, RuntimeError()), (6, RuntimeError())]
)
def test_a_point_that_failed_is_done_by_the_next(
    storage: str, number: int, error: BaseException
) -> None:
    first, second = Work((number, error)), Work()
    with pytest.raises(type(error)):
        share(first, storage)
    assert share(second, storage) == EXPECTED
    assert len(first.points) == number and len(second.points) == len(EXPECTED) - number + 1


def test_points_of_a_killed_process_are_done_by_others(
    storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = process(LEFT_BEHIND, storage)
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL
    monkeypatch.setattr(shared_study, "SILENCE", 1)
    work, waits = Work(), []
    assert share(work, storage, waiting=waits.append) == EXPECTED
    assert sorted(work.points) == sorted(itertools.product(*GRID.values()))
    assert set(waits) <= {1}  # it depends on time whether one has to wait


def test_who_is_heard_of_is_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(shared_study.time, "monotonic", lambda: now)
    pulse, found = shared_study._Pulse(), []
    for now in (0, 100, 200, 300):
        steady = SimpleNamespace(number=0, user_attrs={"beat": now})
        fading = SimpleNamespace(number=1, user_attrs={"beat": min(now, 100)})
        found.append([trial.number for trial in pulse.silent([steady, fading])])
    assert found == [[], [], [], [1]]


def test_processes_take_different_points(storage: str) -> None:
    workers = [process(WORKER, storage) for _ in range(2)]
    taken = [[], []]
    for _ in range(len(EXPECTED) // 2):
        for worker, own in zip(workers, taken, strict=True):
            own.append(worker.stdout.readline())
        for worker in workers:
            worker.stdin.write("\n")
            worker.stdin.flush()
    rest = [worker.communicate()[0].splitlines() for worker in workers]
    assert [lines[-1] for lines in rest] == ["6 points"] * 2
    assert {line for lines in rest for line in lines} <= {"6 points", "waiting for 1"}
    assert len({*taken[0], *taken[1]}) == len(EXPECTED)


def test_the_last_point_is_waited_for_and_not_taken_twice(storage: str) -> None:
    slow, fast = process(WORKER, storage), process(WORKER, storage)
    held = slow.stdout.readline()
    taken = []
    for _ in range(len(EXPECTED) - 1):
        taken.append(fast.stdout.readline())
        fast.stdin.write("\n")
        fast.stdin.flush()
    assert fast.stdout.readline() == "waiting for 1\n" and held not in taken
    assert slow.communicate("\n")[0] == "6 points\n"
    assert fast.communicate()[0].endswith("6 points\n")


def test_of_those_who_take_a_point_at_once_one_does_it(
    storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All see that nobody has the point before one of them takes it."""
    done, met = [], threading.local()
    standing, all_here = shared_study._standing, threading.Barrier(4)

    def together(study: Any) -> Any:
        found = standing(study)
        if not hasattr(met, "others"):
            met.others = all_here.wait()
        return found

    def work(point: shared_study.Point) -> tuple[float, Any]:
        done.append(point)
        return 0.0, "done"

    monkeypatch.setattr(shared_study, "_standing", together)
    monkeypatch.setattr(shared_study, "PAUSE", 0.01)
    with ThreadPoolExecutor(4) as pool:
        found = [
            pool.submit(shared_study.share, work, {"x": [1]}, storage, "one") for _ in range(4)
        ]
    assert [future.result() for future in found] == [[({"x": 1}, "done")]] * 4
    assert len(done) == 1


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_point_without_a_value_is_done(storage: str, value: float) -> None:
    results = shared_study.share(lambda point: (value, value), {"x": [1]}, storage, "study")
    assert repr(results) == repr([({"x": 1}, value)])


def test_the_best_point_can_be_asked_of_the_study(tmp_path: Path) -> None:
    import optuna

    storage = f"sqlite:///{tmp_path}/a.db"
    share(Work(), storage)
    study = optuna.load_study(study_name="study", storage=storage)
    assert study.best_value == 0.01 and set(study.best_params) == set(GRID)


def test_names_of_studies_tell_data_and_configuration_apart() -> None:
    names = {
        shared_study.study_name("uci", config, [array])
        for config in ({"seeds": 3}, {"seeds": 4})
        for array in (np.zeros(3), np.ones(3))
    }
    assert len(names) == 4


def test_a_new_database_can_be_opened_by_many_at_once(tmp_path: Path) -> None:
    """Optuna makes its tables without a lock: those who come second get errors of any kind."""
    for number in range(3):
        url = f"sqlite:///{tmp_path}/{number}.db"
        with ThreadPoolExecutor(4) as pool:
            opened = [pool.submit(shared_study._study, url, "one", GRID) for _ in range(4)]
        assert {future.result().study_name for future in opened} == {"one"}


@pytest.mark.parametrize("storage", ["nonsense://x", "sqlite:////no/such/folder/search.db"])
def test_a_storage_that_cannot_be_opened_is_an_error_in_words(storage: str) -> None:
    with pytest.raises(ValueError, match="cannot be opened"):
        shared_study.check(storage)
