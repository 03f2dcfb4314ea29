"""How the boundaries of a stack's first hidden layer move: the curves of the papers' figures.

Between two records a unit turns by a rotation in degrees, and its location phi, the point of its
boundary nearest to the origin, moves by a displacement; the curves show the largest of each. All
methods are measured alike, by the normal and the offset of `batched.boundaries`. The normal points
to the active side, so a side that flips is a turn by 180 degrees. A unit without a boundary (a
zero normal) does not count as moving.

Records are measured 64 at a time: one by one they took a third of Banana's training.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from geoparam import sphere

Array = np.ndarray
BLOCK = 64  # records that are measured at once


@dataclass(frozen=True)
class Motion:
    """The largest motion of any unit since the record before; NaN where a member had stopped."""

    rotation: Array  # in degrees, (records, S)
    displacement: Array  # |phi - phi before|, (records, S)


class Recorder:
    """Takes boundaries, one record after the other, of the members that are left of `size`."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.left: list[Array] = []  # who was left at each record
        self.moves: list[Tensor] = []  # rotation and displacement, (2, records, S)
        self.waiting: list[tuple[Tensor, Tensor]] = []  # since the last one that was measured

    @torch.no_grad()
    def add(self, members: Array, normal: Tensor, offset: Tensor) -> None:
        """Record normals (S, units, d) and offsets (S, units) of these members."""
        every = [
            part.new_full((self.size, *part.shape[1:]), torch.nan) for part in (normal, offset)
        ]
        every[0][members], every[1][members] = normal, offset
        self.left.append(np.isin(np.arange(self.size), members))
        self.waiting.append((every[0], every[1]))
        if len(self.waiting) > BLOCK:
            self._measure()

    @torch.no_grad()
    def motion(self) -> Motion:
        """Return everything recorded so far."""
        self._measure()
        array = torch.cat(self.moves, dim=1).numpy()
        return Motion(*np.where(np.stack(self.left)[1:], array, np.nan))

    def _measure(self) -> None:
        """Measure the records that wait; the last of them waits for the next."""
        places = _place(*map(torch.stack, zip(*self.waiting, strict=True)))
        self.moves.append(_measure_moves(places[:, :-1], places[:, 1:]))
        self.waiting = self.waiting[-1:]


def _place(normal: Tensor, offset: Tensor) -> Tensor:
    """Return directions and locations, (2, ..., units, d), in float64."""
    length = sphere.length(normal)
    length = torch.where(length == 0, torch.nan, length)
    direction = sphere.normalise(normal) + 0 * length.unsqueeze(-1)
    return torch.stack([direction, -(offset / length).unsqueeze(-1) * direction])


def _measure_moves(before: Tensor, after: Tensor) -> Tensor:
    """Return the largest rotation and displacement over units, (2, ...)."""
    rotation = sphere.angle_between(before[0], after[0]).rad2deg()
    displacement = (after[1] - before[1]).norm(dim=-1)
    return torch.stack([rotation, displacement]).nan_to_num(0.0, posinf=torch.inf).amax(-1)
