"""A run's work in tasks: each done once, by this process or by several, and kept in the folder.

A task gives some records, and perhaps arrays. It says beforehand which keys its records have, so
that a resumed run leaves out what is there. Where only some of its records are there, as a kill
may leave it, all of it is done again and what was missing is added: a task is never done by
halves, and so its numbers do not depend on what was finished before.

Small networks gain nothing from threads, and lose much by them where other programs run: on two
busy cores ten networks on Yacht took 1.3 ms an epoch with one thread and 20 to 116 ms with two.
So a task has one thread, and cores are used by processes. These only compute; this process alone
writes. They end when it ends, however that happens. (A large network is another matter: a session
may leave the threads as they are.)
"""

import contextlib
import itertools
import multiprocessing
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from geoparam_lab.run_folder import Record, Run
from geoparam_lab.training import shared_study

Key = tuple[Any, ...]
Progress = Callable[[str, int, int], None]

INTERVAL = 0.3  # seconds between two reports of a task


class Tick(Protocol):
    """Called now and then with the epoch, how much is left to do, and perhaps a remark."""

    def __call__(self, epoch: int, left: int, remark: str = "", /) -> None: ...


class Task(Protocol):
    """What is done in one go; hashable, and its text is its title."""

    @property
    def keys(self) -> Sequence[Key]:
        """The keys of its records, one for each, in the order of the run's key."""

    @property
    def name(self) -> str:
        """Under which its arrays are kept."""


@dataclass(frozen=True)
class Done:
    """What a task gave.

    Args:
        records: one for each of the task's keys.
        arrays: by name; none are kept where there are none.
    """

    records: list[Record]
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)


Work = Callable[[Any, Tick], Done]
Report = Callable[[Any, int, int, str], None]


class Session:
    """The work that one call does for a run, and how far it is.

    Args:
        run: the folder.
        work: does a task. It is given a function to call now and then with the epoch and how many
            of the task's records are still open.
        total: how many records there will be.
        jobs: how many processes work; 1 is this one.
        progress: called with a title, how many records are done and how many there are.
        weight: units of progress in a record, so that a part of one can be reported: `work` then
            says how much is left, of this for each record.
        threads: what a task may use; None leaves them as they are.
        finished: called with a task when all of it is in the folder.
        arrays: whether processes that share the work get its arrays, too.
    """

    def __init__(
        self,
        run: Run,
        work: Work,
        total: int,
        jobs: int = 1,
        progress: Progress | None = None,
        *,
        weight: int = 1,
        threads: int | None = 1,
        finished: Callable[[Any], None] | None = None,
        arrays: bool = False,
    ) -> None:
        self.run, self.work, self.total, self.jobs = run, work, total, jobs
        self.progress = progress or (lambda title, done, total: None)
        self.weight, self.threads, self.arrays = weight, threads, arrays
        self.finished = finished or (lambda task: None)
        self.keys = {self._key(record) for record in run.records()}
        self.open: dict[Any, int] = {}  # what is left of the tasks under way

    def spread(self, tasks: Iterable[Any]) -> None:
        """Do the tasks that are not done, in this order."""
        todo = [task for task in tasks if not self._is_done(task)]
        for task, done in spread(self.work, todo, self.jobs, self._report, self.threads):
            self._keep(task, done)

    def share(
        self, tasks: Sequence[tuple[shared_study.Point, Any]], value: str, storage: str, study: str
    ) -> None:
        """Do the tasks together with other processes: see `search.share`.

        Args:
            tasks: each with the point of a grid that it belongs to; a point may have several.
            value: the field of the records whose mean is a point's value.
            storage: where the study is.
            study: its name.
        """
        points = [point for point, _ in tasks]
        grid = {name: list(dict.fromkeys(p[name] for p in points)) for name in points[0]}

        def work(at: shared_study.Point) -> tuple[float, Any]:
            own = [task for point, task in tasks if point == at]
            done = {task.name: self._done(task) for task in own}
            records = [record for each in done.values() for record in each.records]
            arrays = {name: _listed(each.arrays) for name, each in done.items() if self.arrays}
            result = {"records": records, "arrays": arrays}
            return float(np.mean([record[value] for record in records])), result

        def waiting(left: int) -> None:
            self._show(f"others work on the last {left} points of {study}")

        for at, result in shared_study.share(work, grid, storage, study, waiting):
            for task in (task for point, task in tasks if point == at):
                keys = set(task.keys)
                records = [r for r in result["records"] if self._key(r) in keys]
                arrays = {k: np.array(v) for k, v in result["arrays"].get(task.name, {}).items()}
                if not self._is_done(task):
                    self._keep(task, Done(records, arrays))

    def _done(self, task: Any) -> Done:
        """Return what a task gave, from the folder or by doing it."""
        if self._is_done(task):
            records = [record for record in self.run.records() if self._key(record) in task.keys]
            there = self.arrays and task.name in self.run.curve_names()
            return Done(records, self.run.curves(task.name) if there else {})
        [(_, done)] = spread(self.work, [task], 1, self._report, self.threads)
        self._keep(task, done)
        return done

    def _keep(self, task: Any, done: Done) -> None:
        if done.arrays:
            self.run.save_curves(task.name, **done.arrays)
        self._add(done.records)
        self.open.pop(task, None)
        self.finished(task)
        self._show(str(task))

    def _add(self, records: Iterable[Record]) -> None:
        for record in records:
            if self._key(record) not in self.keys:
                self.run.append(record)
                self.keys.add(self._key(record))

    def _is_done(self, task: Any) -> bool:
        return self.keys.issuperset(task.keys)

    def _key(self, record: Record) -> Key:
        return tuple(record[name] for name in self.run.info["key"])

    def _report(self, task: Any, epoch: int, left: int, remark: str) -> None:
        self.open[task] = left
        self._show(f"{task}, epoch {epoch:,}" + (f", {remark}" if remark else ""))

    def _show(self, title: str) -> None:
        under_way = sum(self.weight * len(task.keys) - left for task, left in self.open.items())
        total = self.weight * self.total
        self.progress(title, min(self.weight * len(self.keys) + under_way, total), total)


def _listed(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    return {name: np.asarray(array).tolist() for name, array in arrays.items()}


def check_names(what: str, given: Sequence[str], allowed: Sequence[str]) -> None:
    """Raise ValueError where a name is not among those there are, or none is given.

    Example:
        >>> check_names("methods", ["spp"], ("sp", "gmp"))
        Traceback (most recent call last):
        ...
        ValueError: methods must be of sp, gmp; got 'spp'.
    """
    wrong = [name for name in given if name not in allowed]
    if wrong or not given:
        got = ", ".join(map(repr, wrong)) or "none"
        raise ValueError(f"{what} must be of {', '.join(allowed)}; got {got}.")


# --- processes ----------------------------------------------------------------------------------


def spread(
    work: Callable[[Any, Tick], Any],
    tasks: Sequence[Any],
    jobs: int = 1,
    report: Report | None = None,
    threads: int | None = 1,
    patient: bool = False,
) -> Iterator[tuple[Any, Any]]:
    """Do all tasks, and yield each with its result as soon as it is done.

    Args:
        work: called with a task and a function of two numbers, which it calls now and then. With
            several jobs it must be picklable.
        tasks: in the order in which they are begun.
        jobs: how many processes do them; 1 is this one.
        report: called with a task, those two numbers and a remark, but not too often.
        threads: that this process may use for a task; None leaves them as they are. Processes of
            their own have one.
        patient: after Ctrl-C finish the tasks under way, then stop; a second one stops at once.

    Example:
        >>> def square(task, tick):
        ...     return task**2
        >>> list(spread(square, [2, 3]))
        [(2, 4), (3, 9)]
    """
    report = report or (lambda task, epoch, left, remark: None)
    noting: contextlib.AbstractContextManager[list[int]] = contextlib.nullcontext([])
    with _note_interrupts() if patient else noting as interrupts:
        if min(jobs, len(tasks)) > 1:
            yield from _in_processes(work, tasks, min(jobs, len(tasks)), report, interrupts)
        else:
            for task in tasks:
                with contextlib.nullcontext() if threads is None else limited(threads):
                    result = work(task, _seldom(report, task))
                yield task, result
                if interrupts:
                    break
    if interrupts:
        raise KeyboardInterrupt


@contextlib.contextmanager
def _note_interrupts() -> Iterator[list[int]]:
    """Note the first Ctrl-C in a list, and leave the second to Python."""
    interrupts: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield interrupts  # only the main thread hears it, or may change that
        return
    before = signal.getsignal(signal.SIGINT)

    def note(number: int, frame: object) -> None:
        interrupts.append(number)
        signal.signal(signal.SIGINT, before)
        print("\nFinishing what has begun. Ctrl-C again stops at once.", file=sys.stderr)

    signal.signal(signal.SIGINT, note)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)


def cores() -> int:
    """Return how many cores this process may use."""
    allowed = getattr(os, "sched_getaffinity", None)
    return len(allowed(0)) if allowed else os.cpu_count() or 1


@contextlib.contextmanager
def limited(threads: int) -> Iterator[None]:
    """Let torch use this many threads within the context.

    Example:
        >>> with limited(1):
        ...     torch.get_num_threads()
        1
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _seldom(report: Report, task: Any) -> Tick:
    """Return a function that reports of a task what comes INTERVAL seconds after the last."""
    last = time.monotonic()

    def tick(epoch: int, left: int, remark: str = "") -> None:
        nonlocal last
        if time.monotonic() - last >= INTERVAL:
            last = time.monotonic()
            report(task, epoch, left, remark)

    return tick


def _in_processes(
    work: Callable[[Any, Tick], Any],
    tasks: Sequence[Any],
    jobs: int,
    report: Report,
    interrupts: Sequence[int],
) -> Iterator[tuple[Any, Any]]:
    context = multiprocessing.get_context("spawn")  # torch and its threads do not survive a fork
    ticks, stop = context.Queue(), context.Event()
    with ProcessPoolExecutor(jobs, context, _begin, (ticks, stop)) as pool:
        running: dict[Future[Any], int] = {}
        waiting = iter(enumerate(tasks))

        def submit() -> None:
            with _deaf():  # as are the processes that begin here, before they can say so
                for n, task in itertools.islice(waiting, jobs - len(running)):
                    running[pool.submit(_call, work, task, n)] = n

        try:
            submit()
            while running:
                finished, _ = wait(running, INTERVAL, FIRST_COMPLETED)
                for number, epoch, left, remark in _waiting(ticks):
                    report(tasks[number], epoch, left, remark)
                for future in finished:
                    yield tasks[running.pop(future)], future.result()
                if not interrupts:
                    submit()
        except BrokenProcessPool as error:
            raise RuntimeError(
                "a working process ended without a word: killed, or out of memory; or a script "
                "started it that does not guard its own calls by if __name__ == '__main__'. "
                "Go on with resume, or try jobs=1."
            ) from error
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _deaf() -> Iterator[None]:
    """Ignore Ctrl-C for a moment."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread hears it, or may change that
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _waiting(ticks: Any) -> Iterator[tuple[int, int, int, str]]:
    """Yield what is in the queue."""
    with contextlib.suppress(queue.Empty):
        while True:
            yield ticks.get_nowait()


# --- in a working process -----------------------------------------------------------------------

_ticks: Any = None
_stop: Any = None


class _Stopped(Exception):
    """The process that asked for the work does not want it any more."""


def _begin(ticks: Any, stop: Any) -> None:
    global _ticks, _stop
    _ticks, _stop = ticks, stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too, and says stop
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Wait until the parent is gone, killed perhaps, and go too."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _call(work: Callable[[Any, Tick], Any], task: Any, number: int) -> Any:
    seldom = _seldom(lambda *told: _ticks.put(told), number)

    def tick(epoch: int, left: int, remark: str = "") -> None:
        if _stop.is_set():
            raise _Stopped
        seldom(epoch, left, remark)

    return work(task, tick)
