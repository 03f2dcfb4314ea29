"""The processes that train one network together, started by torchrun or accelerate launch.

The main process alone reads and writes the run's folder and chooses the next run, which may depend
on what other machines have done (`shared_study`). It broadcasts each run to the others. They may
wait for days, so the broadcast has a process group of its own with a very long timeout.
"""

from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from accelerate import Accelerator

PATIENCE = timedelta(days=365)


class Crew:
    """This process and those that were started with it."""

    def __init__(self, accelerator: "Accelerator") -> None:
        self.accelerator = accelerator
        self.size: int = accelerator.num_processes
        self.leads: bool = accelerator.is_main_process  # whether this is the main one
        self._group: Any = None
        if self.size > 1:
            self._group = dist.new_group(backend="gloo", timeout=PATIENCE)

    def send(self, task: Any) -> None:
        """Send a task to the other processes; None ends them."""
        if self.size > 1:
            dist.broadcast_object_list([task], src=0, group=self._group)

    def receive(self) -> Iterator[Any]:
        """Yield the tasks that the main process sends, until None."""
        while True:
            tasks = [None]
            dist.broadcast_object_list(tasks, src=0, group=self._group)
            if tasks[0] is None:
                return
            yield tasks[0]
