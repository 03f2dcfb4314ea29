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
import math
import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from geoparam_lab.run_folder import Record, Run
from geoparam_lab.session import count_cores

Progress = Callable[[str, float, int], None]  # takes a title, how much is done, of how much
Tick = Callable[..., None]  # takes the epoch or step, how many records are left, perhaps a remark

INTERVAL = 0.3  # seconds between two reports of a task


@dataclass(frozen=True)
class Done:
    """The result of a task: a record for each of its keys, and arrays by file and name."""

    records: list[Record]
    curves: Mapping[str, Mapping[str, np.ndarray]] = field(default_factory=dict)

    def to_json(self) -> Record:
        """Return it with lists in place of arrays."""
        curves = {
            file: {name: np.asarray(array).tolist() for name, array in arrays.items()}
            for file, arrays in self.curves.items()
        }
        return {"records": self.records, "curves": curves}


@dataclass(frozen=True)
class Task:
    """Networks or layers that are trained or measured together, each with a record.

    Args:
        title: for a progress display.
        keys: of its records.
        settings: where it is one network of a sweep, all that decides its numbers but the data.
        labels: what the record of that network says besides, such as what was tuned.
    """

    title: str
    keys: tuple[Any, ...]
    settings: Any = None
    labels: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def name(self) -> str:
        """What the record, the curves and the checkpoint of one network are called."""
        return str(self.keys[0][0])

    def __str__(self) -> str:
        return self.title


Work = Callable[[Any, Tick], Done]
Results = Generator[tuple[Any, Done], None, None]


class Session:
    """The work that one call does for a run, and its progress.

    A task is hashable and has the `keys` of its records; its text is its title.

    Args:
        run: the folder.
        work: does a task; calls a `Tick` now and then. With several jobs it must be picklable.
        total: how many records there will be.
        jobs: how many processes work; 1 is this one, None is one for each core.
        progress: shows how many records are done.
        threads: for a task in this process; None leaves them. Other processes have one.
        finished: called with a task when all of it is in the folder.
        unit: what ticks count.
    """

    def __init__(
        self,
        run: Run,
        work: Work,
        total: int,
        jobs: int | None = 1,
        progress: Progress | None = None,
        *,
        threads: int | None = 1,
        finished: Callable[[Any], None] | None = None,
        unit: str = "epoch",
    ) -> None:
        self.run, self.work, self.total = run, work, total
        self.jobs = jobs or count_cores()
        self.progress = progress or (lambda title, done, total: None)
        self.threads, self.unit = threads, unit
        self.finished = finished or (lambda task: None)
        self.keys = {run.key_of(record) for record in run.records()}
        self.open: dict[Any, float] = {}  # records that are left of each task that has begun

    def spread(self, tasks: Iterable[Any]) -> None:
        """Do the tasks that are not done, in this order."""
        todo = [task for task in tasks if not self._is_done(task)]
        if min(self.jobs, len(todo)) < 2:
            for task in todo:
                self._keep(task, self._do(task))
            return
        with contextlib.closing(self._work_in_processes(todo)) as results:
            for task, done in results:
                self._keep(task, done)

    def share(self, tasks: Sequence[Any], study: Any, value: str) -> None:
        """Do the tasks with every process that makes this call, and return when all are done.

        A trial of the study is one try at a task. Each process takes the next task that no other
        process has started. When all are started, it repeats one that is not finished, because the
        process that started it may have been killed. So no process waits for another, and every
        folder ends with the results of all. What this folder holds already is not done again.

        Args:
            tasks: a task's name in the study is the first of its keys.
            study: see `shared_study.open_study`.
            value: the field of the records whose mean is a task's value, the lower the better.
        """
        from optuna.trial import TrialState

        names = {task: str(task.keys[0]) for task in tasks}
        while True:
            trials = study.get_trials(deepcopy=False)
            ended = [trial.user_attrs for trial in trials if "result" in trial.user_attrs]
            # Of several results of one task the first counts.
            results = {trial["task"]: trial["result"] for trial in reversed(ended)}

            left = []
            for task in tasks:
                if self._is_done(task):
                    continue
                if names[task] in results:
                    self._keep(task, Done(**results[names[task]]))
                else:
                    left.append(task)
            if not left:
                return

            begun = [t.user_attrs.get("task") for t in trials if t.state == TrialState.RUNNING]
            free = [task for task in left if names[task] not in begun]
            task = random.choice(free or left)
            trial = study.ask()
            trial.set_user_attr("task", names[task])
            done = self._do(task)
            trial.set_user_attr("result", done.to_json())
            mean = float(np.mean([record[value] for record in done.records]))
            study.tell(trial, mean if math.isfinite(mean) else math.inf)  # NaN would be a failure

    def _keep(self, task: Any, done: Done) -> None:
        for name, arrays in done.curves.items():
            self.run.save_curves(name, **arrays)
        for record in done.records:
            if self.run.key_of(record) not in self.keys:
                self.run.append(record)
                self.keys.add(self.run.key_of(record))
        self.open.pop(task, None)
        self.finished(task)
        self._show(str(task))

    def _is_done(self, task: Any) -> bool:
        return self.keys.issuperset(task.keys)

    def _report(self, task: Any, count: int, left: float, remark: str = "") -> None:
        self.open[task] = left
        self._show(f"{task}, {self.unit} {count:,}" + (f", {remark}" if remark else ""))

    def _show(self, title: str) -> None:
        begun = sum(len(task.keys) - left for task, left in self.open.items())
        self.progress(title, min(len(self.keys) + begun, self.total), self.total)

    def _do(self, task: Any) -> Done:
        with limit_threads(self.threads):
            return self.work(task, throttle(functools.partial(self._report, task), INTERVAL))

    def _work_in_processes(self, todo: Sequence[Any]) -> Results:
        context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
        ticks, stop = context.Queue(), context.Event()
        jobs = min(self.jobs, len(todo))
        with ProcessPoolExecutor(jobs, context, _start_worker, (ticks, stop)) as pool:
            try:
                with _ignore_interrupts():  # which processes started here inherit
                    tasks = {pool.submit(_call, self.work, t, n): t for n, t in enumerate(todo)}
                left = set(tasks)
                while left:
                    finished, left = wait(left, INTERVAL, FIRST_COMPLETED)
                    while not ticks.empty():
                        number, *ticked = ticks.get()
                        self._report(todo[number], *ticked)
                    # An error ends the loop: what finished beside it is kept first.
                    for future in sorted(finished, key=lambda f: f.exception() is not None):
                        yield tasks[future], future.result()
            except BrokenProcessPool as error:
                raise ChildProcessError(
                    "a working process ended without a word: killed, or out of memory; or a "
                    "script started it that does not guard its own calls by if __name__ == "
                    "'__main__'. Go on with resume, or try jobs=1."
                ) from error
            finally:
                stop.set()
                pool.shutdown(cancel_futures=True)


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
def _ignore_interrupts() -> Iterator[None]:
    """Ignore Ctrl-C; only the main thread receives it, or may change that."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def throttle(function: Callable[..., None], seconds: float) -> Callable[..., None]:
    """Return a function that calls this one at most once per `seconds`; the first is skipped."""
    last = time.monotonic()

    def call(*arguments: Any) -> None:
        nonlocal last
        if time.monotonic() - last >= seconds:
            function(*arguments)
            last = time.monotonic()

    return call


_ticks: Any = None
_stop: Any = None


class _Stopped(Exception):
    """The parent process does not want the result any more."""


def _start_worker(ticks: Any, stop: Any) -> None:
    global _ticks, _stop  # of a working process
    _ticks, _stop = ticks, stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent receives it, and sets stop
    torch.set_num_threads(1)
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _call(work: Work, task: Any, number: int) -> Done:
    report = throttle(lambda *ticked: _ticks.put((number, *ticked)), INTERVAL)

    def tick(*ticked: Any) -> None:
        if _stop.is_set():
            raise _Stopped
        report(*ticked)

    return work(task, tick)
