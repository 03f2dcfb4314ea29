"""Two processes with a gloo group, started once and given one function after the other.

A function that fails or does not end in time fails the test with the process's traceback; the
processes are then thrown away and the next test gets new ones.
"""

import functools
import inspect
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from forked import CONTEXT


class Processes:
    """`run(f, *args)` calls f(*args) in every process, each of which has its rank."""

    def __init__(self, count: int = 2) -> None:
        self.count = count
        self._workers: list[tuple[BaseProcess, Connection]] = []

    def run(self, function: Callable[..., None], *args: Any, timeout: float = 60) -> None:
        workers = self._workers or self._start()
        for _, pipe in workers:
            pipe.send((function, args))
        try:
            self._collect({pipe: rank for rank, (_, pipe) in enumerate(workers)}, timeout)
        except BaseException:
            self.stop()
            raise

    def _collect(self, waiting: dict[Any, int], timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while waiting:
            ready = wait(list(waiting), timeout=deadline - time.monotonic())
            if not ready:
                raise TimeoutError(f"processes {list(waiting.values())} ran for {timeout} s.")
            for pipe in ready:
                rank, error = waiting.pop(pipe), pipe.recv()
                if error is not None:
                    raise AssertionError(f"process {rank} of {self.count}:\n{error}")

    def _start(self) -> list[tuple[BaseProcess, Connection]]:
        self._folder = tempfile.TemporaryDirectory()
        meeting_point = str(Path(self._folder.name) / "store")  # a file needs no free port
        for rank in range(self.count):
            ours, theirs = CONTEXT.Pipe()
            process = CONTEXT.Process(
                target=_work, args=(rank, self.count, meeting_point, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._workers.append((process, ours))
        return self._workers

    def stop(self) -> None:
        for process, _ in self._workers:
            process.kill()
        self._workers = []


def in_both(function: Callable[..., None]) -> Callable[..., None]:
    """Make a test of a function: both processes call it, with the test's arguments."""
    parameters = list(inspect.signature(function).parameters.values())

    @functools.wraps(function)
    def test(processes: Processes, **given: Any) -> None:
        processes.run(test, *(given[parameter.name] for parameter in parameters))

    own = inspect.Parameter("processes", inspect.Parameter.KEYWORD_ONLY)
    test.__signature__ = inspect.Signature([*parameters, own])  # type: ignore[attr-defined]
    return test


def _work(rank: int, count: int, meeting_point: str, pipe: Connection) -> None:
    warnings.filterwarnings("error", module="geoparam")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting_point}", rank=rank, world_size=count
    )
    while True:
        function, args = pipe.recv()
        torch.manual_seed(0)
        try:
            getattr(function, "__wrapped__", function)(*args)
            pipe.send(None)
        except BaseException:  # pytest's failures are no Exceptions
            pipe.send(traceback.format_exc())
