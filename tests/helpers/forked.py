"""Processes that begin with torch: forked from a server that has imported it and runs nothing.

A new interpreter needs five seconds for that on a slow machine; these need none.
"""

import multiprocessing
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["geoparam_lab.experiments", "torch.distributed.fsdp", "accelerate"]
)


def start(function: Callable[..., None], *arguments: Any, daemon: bool = True) -> BaseProcess:
    """Call a function of a module in a process of its own; a daemon may not start others."""
    process = CONTEXT.Process(target=function, args=arguments, daemon=daemon)
    process.start()
    return process


def end(process: BaseProcess) -> int | None:
    """Wait for a process, and return how it ended; None if it still runs after five minutes."""
    process.join(300)
    return process.exitcode
