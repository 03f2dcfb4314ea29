"""Tasks of a run: done once each, by one process or several, and never written twice."""

import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import forked
import numpy as np
import pytest
import torch

from geoparam_lab.run_folder import Run
from geoparam_lab.training import tasks
from geoparam_lab.training.tasks import Done, Session


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork processes instead of spawning them; test_levy.py's slow test spawns."""
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: forked.CONTEXT)


@dataclass(frozen=True)
class Batch:
    """A task that squares some numbers."""

    numbers: tuple[int, ...]

    @property
    def keys(self) -> list[tuple[int]]:
        return [(number,) for number in self.numbers]

    @property
    def name(self) -> str:
        return f"from-{self.numbers[0]}"


def squares(task: Batch, tick: tasks.Tick) -> Done:
    tick(1, 0)
    records = [{"number": number, "square": number**2} for number in task.numbers]
    return Done(records, {task.name: {"numbers": np.array(task.numbers)}})


def count_threads(task: Batch, tick: tasks.Tick) -> Done:
    return Done([{"number": task.numbers[0], "threads": torch.get_num_threads()}])


def fail_at_9(task: Batch, tick: tasks.Tick) -> Done:
    if task.numbers == (9,):
        raise ZeroDivisionError("task 9")
    return count_threads(task, tick)


def interrupt(pid: int, task: Batch, tick: tasks.Tick) -> Done:
    """Press Ctrl-C in the process that asked, at task 0, and finish all the same."""
    if task.numbers == (0,):
        os.kill(pid, signal.SIGINT)
    time.sleep(0.1)  # all would be done before the asker has heard of it
    return squares(task, tick)


def vanish(task: Batch, tick: tasks.Tick) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def never_finish_task_0(task: Batch, tick: tasks.Tick) -> Done:
    while task.numbers == (0,):
        tick(0, 1)
    return squares(task, tick)


def say_and_sleep(port: int, task: Batch, tick: tasks.Tick) -> None:
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(b"here")
        time.sleep(600)


def spread_sleepers(folder: Path, port: int) -> None:
    multiprocessing.get_context = lambda method: forked.CONTEXT
    run = Run.create(folder, "squares", {}, key=("number",))
    Session(run, partial(say_and_sleep, port), 2, jobs=2).spread(singles(2))


def singles(count: int) -> list[Batch]:
    return [Batch((number,)) for number in range(count)]


TASKS = [Batch((0, 1)), Batch((2, 3, 4)), Batch((5,))]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run.create(tmp_path / "run", "squares", {}, key=("number",))


def session(run: Run, work: Any = squares, **options: Any) -> Session:
    return Session(run, work, total=6, **options)


def test_all_records_and_arrays_are_kept(run: Run) -> None:
    session(run).spread(TASKS)

    assert run.records() == [{"number": n, "square": n**2} for n in range(6)]
    assert run.curve_names() == ["from-0", "from-2", "from-5"]


def test_a_finished_task_is_not_done_again(run: Run) -> None:
    session(run).spread(TASKS[:2])
    tasks_done = []

    def work(task: Batch, tick: tasks.Tick) -> Done:
        tasks_done.append(task)
        return squares(task, tick)

    session(run, work).spread(TASKS)

    assert tasks_done == TASKS[2:]
    assert len(run.records()) == 6


def test_a_task_with_missing_records_is_done_whole_and_written_once(run: Run) -> None:
    run.append({"number": 3, "square": "kept"})

    session(run).spread(TASKS)

    records = run.records()
    assert [record["number"] for record in records] == [3, 0, 1, 2, 4, 5]
    assert records[0]["square"] == "kept"
    lines = (run.folder / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 6


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("jobs", [1, 2])
def test_a_task_has_one_thread(jobs: int, run: Run) -> None:
    session(run, count_threads, jobs=jobs).spread(singles(3))

    assert {record["threads"] for record in run.records()} == {1}


def test_the_error_of_a_task_is_raised(run: Run) -> None:
    with pytest.raises(ZeroDivisionError, match="task 9"):
        session(run, fail_at_9).spread(singles(10))


def test_an_error_leaves_the_number_of_threads_as_it_was(run: Run) -> None:
    with tasks.limit_threads(2):
        with pytest.raises(ZeroDivisionError):
            session(run, fail_at_9).spread(singles(10))

        assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("quick")
def test_tasks_that_finished_beside_an_error_are_kept(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait = tasks.wait
    monkeypatch.setattr(tasks, "wait", lambda left, *_: wait(left))  # until all are done

    with pytest.raises(ZeroDivisionError, match="task 9"):
        session(run, fail_at_9, jobs=2).spread(singles(10))

    numbers = [record["number"] for record in run.records()]
    assert sorted(numbers) == [0, 1, 2, 3, 4, 5, 6, 7, 8]


def test_threads_may_be_left_as_they_are(run: Run) -> None:
    with tasks.limit_threads(2):
        session(run, count_threads, threads=None).spread(singles(1))

    assert run.records() == [{"number": 0, "threads": 2}]


def test_progress_within_a_task_is_reported(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "INTERVAL", 0)
    steps: list[Any] = []

    def work(task: Batch, tick: tasks.Tick) -> Done:
        tick(3, 0.5, "fast")
        return squares(task, tick)

    def progress(*step: Any) -> None:
        steps.append(step)

    Session(run, work, 6, progress=progress).spread(TASKS[2:])

    assert steps == [
        (f"{TASKS[2]}, epoch 3, fast", 0.5, 6),
        (f"{TASKS[2]}, epoch 1", 1, 6),
        (f"{TASKS[2]}", 1, 6),
    ]


def test_a_finished_task_is_reported_when_all_of_it_is_written(run: Run) -> None:
    reports: list[Any] = []

    def finished(task: Batch) -> None:
        reports.append((task, run.curve_names()))

    session(run, finished=finished).spread(TASKS[:2])

    assert reports == [(TASKS[0], ["from-0"]), (TASKS[1], ["from-0", "from-2"])]


@pytest.fixture
def default_interrupt() -> Iterator[None]:
    """Ctrl-C raises, also where the tests were started with it ignored, as in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("default_interrupt", "quick")
@pytest.mark.parametrize("jobs", [1, 2])
def test_ctrl_c_keeps_finished_tasks(jobs: int, run: Run) -> None:
    work = partial(interrupt, os.getpid())
    first, *others = singles(7)
    order = [*others[:-1], first, others[-1]]  # one task comes after the interruption

    with pytest.raises(KeyboardInterrupt):
        session(run, work, jobs=jobs).spread(order)

    assert 0 < len(run.records()) < 7
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("quick")
def test_a_process_that_vanishes_is_reported(run: Run) -> None:
    with pytest.raises(ChildProcessError, match="ended without a word.*jobs=1"):
        session(run, vanish, jobs=2).spread(singles(2))


@pytest.mark.usefixtures("quick")
def test_an_error_stops_the_other_processes(run: Run) -> None:
    """It is raised only when the process that never finishes has ended."""
    fail = Mock(side_effect=ValueError("a full disk"))

    with pytest.raises(ValueError, match="full disk"):
        session(run, never_finish_task_0, jobs=2, finished=fail).spread(singles(2))


def test_a_killed_process_takes_its_processes_along(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(60)
        port = server.getsockname()[1]
        process = forked.start(spread_sleepers, tmp_path, port, daemon=False)
        connections = [server.accept()[0] for _ in range(2)]
        for connection in connections:
            connection.settimeout(60)
            assert connection.recv(4) == b"here"

        process.kill()

        for connection in connections:
            assert connection.recv(4) == b""  # its process has ended
