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
        self.left: list[Array] = []  # which members were left at each record
        self.moves: list[Tensor] = []  # rotation and displacement, (2, records, S)
        self.waiting: list[list[Tensor]] = []  # not measured yet, and one before them

    @torch.no_grad()
    def add(self, members: Array, normal: Tensor, offset: Tensor) -> None:
        """Record normals (S, units, d) and offsets (S, units) of these members."""
        every = [x.new_full((self.size, *x.shape[1:]), torch.nan) for x in (normal, offset)]
        every[0][members], every[1][members] = normal, offset
        self.left.append(np.isin(np.arange(self.size), members))
        self.waiting.append(every)
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
        normal, offset = map(torch.stack, zip(*self.waiting, strict=True))
        length = sphere.length(normal)
        length = torch.where(length == 0, torch.nan, length)
        direction = sphere.normalise(normal) + 0 * length.unsqueeze(-1)
        location = -(offset / length).unsqueeze(-1) * direction
        rotation = sphere.angle_between(direction[:-1], direction[1:]).rad2deg()
        displacement = (location[1:] - location[:-1]).norm(dim=-1)
        moves = torch.stack([rotation, displacement]).nan_to_num(0.0, posinf=torch.inf)
        self.moves.append(moves.amax(-1))
        self.waiting = self.waiting[-1:]
