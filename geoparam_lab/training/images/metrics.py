"""Loss, top-1 and top-5 over many batches, summed on the device: adding a batch never waits."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from accelerate import Accelerator

TOP = 5


class Result(NamedTuple):
    """Means over some images; `top1` and `top5` are shares of them."""

    loss: float
    top1: float
    top5: float


class Sums:
    """Sums over the images of this process: loss, top-1 and top-5 hits, and how many they are."""

    def __init__(self, device: torch.device) -> None:
        precise = torch.float32 if device.type == "mps" else torch.float64
        self.totals = torch.zeros(4, dtype=precise, device=device)

    @torch.no_grad()
    def add(self, loss: Tensor, logits: Tensor, labels: Tensor) -> None:
        """Add a batch: its loss, summed over images, and its hits."""
        guesses = logits.topk(min(TOP, logits.shape[1])).indices
        right = guesses == labels.unsqueeze(1)
        hits = torch.stack([right[:, 0].sum(), right.sum()])
        self.totals[:3] += torch.cat([loss.detach().reshape(1), hits])
        self.totals[3] += len(labels)

    def over_processes(self, accelerator: "Accelerator") -> list[float]:
        """Return the totals of all processes; a collective call."""
        joint: Tensor = accelerator.reduce(self.totals, "sum")
        return joint.tolist()

    def load(self, totals: list[float]) -> None:
        """Continue from these totals."""
        self.totals.copy_(torch.tensor(totals, dtype=self.totals.dtype))


def average(totals: list[float]) -> Result:
    """Return means from totals."""
    *sums, count = totals
    return Result(*(value / count for value in sums))


def find_epoch(accuracies: Sequence[float], level: float) -> int | None:
    """Return the epoch, from 1 on, at which a level was reached and not lost again.

    Example:
        >>> [find_epoch([30, 41, 39, 42, 43], level) for level in (20, 40, 50)]
        [1, 4, None]
    """
    below = [epoch for epoch, accuracy in enumerate(accuracies, start=1) if accuracy < level]
    last = below[-1] if below else 0
    return last + 1 if last < len(accuracies) else None
