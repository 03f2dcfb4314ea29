"""A run's work in tasks: each is done once, by this process or several, and kept in the folder.

A task gives some records, and perhaps arrays. It names the keys of its records beforehand, so that
a resumed run skips what is there. If a kill left only some of its records, the whole task is done
again and the missing ones are added: its numbers do not depend on what was finished before.

A task has one thread, and cores are used by processes: on two busy cores ten small networks took
1.3 ms an epoch with one thread and 20 to 116 ms with two. The processes only compute, this one
alone writes, and they end when it ends. (For large networks a session may leave the threads.)
"""

import contextlib
import functools
import itertools
import math
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
from typing import Any, NamedTuple

import numpy as np
import torch

from geoparam_lab import methods
from geoparam_lab.run_folder import Record, Run
from geoparam_lab.session import count_cores as count_cores
from geoparam_lab.training import shared_study

Key = tuple[Any, ...]
Progress = Callable[[str, float, int], None]  # a title, how much is done, and of how much
Tick = Callable[..., None]  # the epoch, how many records are left, and perhaps a remark

INTERVAL = 0.3  # seconds between two reports of a task


@dataclass(frozen=True)
class Done:
    """The result of a task: a record for each of its keys, and arrays by file and name."""

    records: list[Record]
    curves: Mapping[str, Mapping[str, np.ndarray]] = field(default_factory=dict)


class Task(NamedTuple):
    """Networks or layers that are measured together; each is the key of its record."""

    title: str
    keys: tuple[Any, ...]

    def __str__(self) -> str:
        return self.title


Work = Callable[[Any, Tick], Any]
Meter = Callable[[Sequence[Any], Tick], Iterable[Record]]  # measures some keys
Report = Callable[[Any, int, float, str], None]


class Session:
    """The work that one call does for a run, and its progress.

    A task is hashable and has the `keys` of its records; its text is its title.

    Args:
        run: the folder.
        work: does a task and returns `Done`; calls a `Tick` now and then.
        total: how many records there will be.
        jobs: how many processes work; 1 is this one.
        progress: shows how many records are done.
        threads: for a task; None leaves them as they are.
        finished: called with a task when all of it is in the folder.
    """

    def __init__(
        self,
        run: Run,
        work: Callable[[Any, Tick], Done],
        total: int,
        jobs: int = 1,
        progress: Progress | None = None,
        *,
        threads: int | None = 1,
        finished: Callable[[Any], None] | None = None,
    ) -> None:
        self.run, self.work, self.total, self.jobs = run, work, total, jobs
        self.progress = progress or (lambda title, done, total: None)
        self.threads = threads
        self.finished = finished or (lambda task: None)
        self.keys = {self._key(record) for record in run.records()}
        self.open: dict[Any, float] = {}  # records that are left of each task that has begun

    def spread(self, tasks: Iterable[Any], patient: bool = False) -> None:
        """Do the tasks that are not done, in this order; if patient, as `spread` is."""
        todo = [task for task in tasks if not self._is_done(task)]
        options = (self.jobs, self._report, self.threads, patient)
        for task, done in spread(self.work, todo, *options):
            self._keep(task, done)

    def share(self, tasks: Iterable[Any], study: Any, value: str) -> None:
        """Do the tasks together with other processes: see `shared_study.share`.

        Args:
            tasks: a task's name in the study is the first of its keys.
            study: see `shared_study.open_study`.
            value: the field of the records whose mean is a task's value.
        """
        by_name = {str(task.keys[0]): task for task in tasks}

        def work(name: str) -> tuple[float, Any]:
            [(_, done)] = spread(self.work, [by_name[name]], 1, self._report, self.threads)
            curves = {
                file: {key: np.asarray(array).tolist() for key, array in arrays.items()}
                for file, arrays in done.curves.items()
            }
            result = {"records": done.records, "curves": curves}
            return float(np.mean([record[value] for record in done.records])), result

        for name, result in shared_study.share(work, list(by_name), study).items():
            if not self._is_done(by_name[name]):
                self._keep(by_name[name], Done(**result))

    def _keep(self, task: Any, done: Done) -> None:
        for name, arrays in done.curves.items():
            self.run.save_curves(name, **arrays)
        for record in done.records:
            if self._key(record) not in self.keys:
                self.run.append(record)
                self.keys.add(self._key(record))
        self.open.pop(task, None)
        self.finished(task)
        self._show(str(task))

    def _is_done(self, task: Any) -> bool:
        return self.keys.issuperset(task.keys)

    def _key(self, record: Record) -> Key:
        return tuple(record[name] for name in self.run.info["key"])

    def _report(self, task: Any, epoch: int, left: float, remark: str) -> None:
        self.open[task] = left
        self._show(f"{task}, epoch {epoch:,}" + (f", {remark}" if remark else ""))

    def _show(self, title: str) -> None:
        begun = sum(len(task.keys) - left for task, left in self.open.items())
        self.progress(title, min(len(self.keys) + begun, self.total), self.total)


def measure_missing(
    run: Run, tasks: Sequence[Task], measure: Meter, jobs: int | None, progress: Progress | None
) -> None:
    """Do the tasks that are not done; `measure` gives the results of each of a task's keys."""
    total = sum(len(task.keys) for task in tasks)
    work = functools.partial(_measure, measure)
    Session(run, work, total, jobs or count_cores(), progress).spread(tasks)


def _measure(measure: Meter, task: Task, tick: Tick) -> Done:
    found = zip(task.keys, measure(task.keys, tick), strict=True)
    return Done([key._asdict() | own for key, own in found])


def check_names(what: str, names: Sequence[str], allowed: Sequence[str]) -> None:
    """Raise ValueError where a name is not allowed, or there is none."""
    wrong = [name for name in names if name not in allowed]
    if wrong or not names:
        got = ", ".join(map(repr, wrong)) or "none"
        raise ValueError(f"{what} must be of {', '.join(allowed)}; got {got}.")


def check_counts(**counts: int | None) -> None:
    """Raise ValueError where a number of things is below 1; None stands for no number."""
    for name, count in counts.items():
        if count is not None and count < 1:
            raise ValueError(f"{name} must be >= 1; got {count}.")


def check_rates(lrs: Sequence[float]) -> list[float]:
    """Return learning rates in order, each once; raise ValueError where one cannot be."""
    if not lrs or not all(0 < lr < math.inf for lr in lrs):
        raise ValueError(f"lrs must be learning rates above 0 and finite; got {list(lrs)}.")
    return sorted({float(lr) for lr in lrs})


def check_methods(names: Sequence[str]) -> list[str]:
    """Return methods, each once; raise ValueError where one is not known."""
    plain = [methods.without_options(name) for name in names]
    check_names("methods", plain, tuple(methods.METHODS))
    return list(dict.fromkeys(names))


# --- processes ----------------------------------------------------------------------------------


def spread(
    work: Work,
    tasks: Sequence[Any],
    jobs: int = 1,
    report: Report | None = None,
    threads: int | None = 1,
    patient: bool = False,
) -> Iterator[tuple[Any, Any]]:
    """Do all tasks, and yield each with its result as soon as it is done.

    Args:
        work: called with a task and a `Tick`. With several jobs it must be picklable.
        tasks: in the order in which they are begun.
        jobs: how many processes do them; 1 is this one.
        report: called with a task and what it ticked, at most every INTERVAL seconds.
        threads: for a task in this process; None leaves them. Other processes have one.
        patient: after Ctrl-C finish the tasks that have begun; a second one stops at once.
    """
    report = report or (lambda task, epoch, left, remark: None)
    jobs = min(jobs, len(tasks))
    with _note_interrupts(patient) as interrupts:
        if jobs > 1:
            yield from _spread_over_processes(work, tasks, jobs, report, interrupts)
        else:
            for task in tasks:
                with limit_threads(threads):
                    result = work(task, _throttle(report, task))
                yield task, result
                if interrupts:
                    break
    if interrupts:
        raise KeyboardInterrupt


@contextlib.contextmanager
def limit_threads(threads: int | None) -> Iterator[None]:
    """Let torch use this many threads within the context; None changes nothing."""
    before = torch.get_num_threads()
    torch.set_num_threads(before if threads is None else threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def _handle_interrupts(handler: Any) -> Iterator[None]:
    """Install a handler of Ctrl-C; only the main thread receives it, or may change that."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _note_interrupts(patient: bool) -> Iterator[list[int]]:
    """If patient, note the first Ctrl-C in a list; the second is handled as usual."""
    interrupts: list[int] = []
    before = signal.getsignal(signal.SIGINT)

    def note(number: int, frame: object) -> None:
        interrupts.append(number)
        signal.signal(signal.SIGINT, before)
        print("\nFinishing what has begun. Ctrl-C again stops at once.", file=sys.stderr)

    with _handle_interrupts(note) if patient else contextlib.nullcontext():
        yield interrupts


def _throttle(report: Report, task: Any) -> Tick:
    """Return a tick that reports at most every INTERVAL seconds."""
    last = time.monotonic()

    def tick(epoch: int, left: float, remark: str = "") -> None:
        nonlocal last
        if time.monotonic() - last >= INTERVAL:
            last = time.monotonic()
            report(task, epoch, left, remark)

    return tick


def _spread_over_processes(
    work: Work, tasks: Sequence[Any], jobs: int, report: Report, interrupts: Sequence[int]
) -> Iterator[tuple[Any, Any]]:
    context = multiprocessing.get_context("spawn")  # torch and its threads do not survive a fork
    ticks, stop = context.Queue(), context.Event()
    with ProcessPoolExecutor(jobs, context, _start_worker, (ticks, stop)) as pool:
        running: dict[Future[Any], int] = {}
        waiting = iter(enumerate(tasks))

        def submit() -> None:
            with _handle_interrupts(signal.SIG_IGN):  # which processes started here inherit
                for n, task in itertools.islice(waiting, jobs - len(running)):
                    running[pool.submit(_call, work, task, n)] = n

        try:
            submit()
            while running:
                finished, _ = wait(running, INTERVAL, FIRST_COMPLETED)
                with contextlib.suppress(queue.Empty):
                    while True:
                        number, *ticked = ticks.get_nowait()
                        report(tasks[number], *ticked)
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


# --- in a working process -----------------------------------------------------------------------

_ticks: Any = None
_stop: Any = None


class _Stopped(Exception):
    """The parent process does not want the result any more."""


def _start_worker(ticks: Any, stop: Any) -> None:
    global _ticks, _stop
    _ticks, _stop = ticks, stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent receives it, and sets stop
    torch.set_num_threads(1)
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _call(work: Work, task: Any, number: int) -> Any:
    report = _throttle(lambda *ticked: _ticks.put(ticked), number)

    def tick(epoch: int, left: float, remark: str = "") -> None:
        if _stop.is_set():
            raise _Stopped
        report(epoch, left, remark)

    return work(task, tick)
