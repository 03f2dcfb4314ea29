"""The processes that train one network together, started by torchrun or accelerate launch.

All of them do the same runs in the same order, and one leads: it alone reads and writes the run's
folder and knows which run is next, which may depend on what other machines have done (`search`).
The others are told. They may have to wait for days, while another machine finishes the last runs
of a sweep, so that the word goes through a group of its own that does not lose patience.
"""

from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from accelerate import Accelerator

PATIENCE = timedelta(days=365)


class Crew:
    """This process and those that were started with it.

    Args:
        accelerator: Accelerate's, which knows them.

    Attributes:
        size: how many there are.
        leads: whether this one tells the others what to do.
    """

    def __init__(self, accelerator: "Accelerator") -> None:
        self.accelerator = accelerator
        self.size: int = accelerator.num_processes
        self.leads: bool = accelerator.is_main_process
        self._group: Any = None
        if self.size > 1:
            self._group = dist.new_group(backend="gloo", timeout=PATIENCE)

    def tell(self, task: Any) -> None:
        """Let the others do a task; None sends them home."""
        if self.size > 1:
            dist.broadcast_object_list([task], src=0, group=self._group)

    def told(self) -> Iterator[Any]:
        """Yield the tasks that the leading process tells, until it sends this one home."""
        while True:
            heard = [None]
            dist.broadcast_object_list(heard, src=0, group=self._group)
            if heard[0] is None:
                return
            yield heard[0]
