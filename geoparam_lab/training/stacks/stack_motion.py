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
        self.members: list[Array] = []  # of each record
        self.moves: list[Tensor] = []  # rotation and displacement, (2, members)
        self.waiting: list[tuple[Tensor, Tensor]] = []  # the last records, of the same members
        self.last: Tensor | None = None  # place of these members before those

    @torch.no_grad()
    def add(self, members: Array, normal: Tensor, offset: Tensor) -> None:
        """Record normals (S, units, d) and offsets (S, units) of these members."""
        if self.waiting and len(members) < len(self.members[-1]):
            self._measure()
        if self.last is not None and not self.waiting:
            self.last = self.last[:, np.searchsorted(self.members[-1], members)]
        self.members.append(members)
        self.waiting.append((normal.clone(), offset.clone()))  # views of what training changes
        if len(self.waiting) == BLOCK:
            self._measure()

    @torch.no_grad()
    def motion(self) -> Motion:
        """Return everything recorded so far."""
        self._measure()
        array = np.full((2, len(self.moves), self.size), np.nan)
        for index, (move, members) in enumerate(zip(self.moves, self.members[1:], strict=True)):
            array[:, index, members] = move.numpy()
        return Motion(*array)

    def _measure(self) -> None:
        """Measure the records that wait."""
        if not self.waiting:
            return
        normals, offsets = map(torch.stack, zip(*self.waiting, strict=True))
        places = _place(normals, offsets)  # (2, records, S, units, d)
        if self.last is not None:
            places = torch.cat([self.last.unsqueeze(1), places], dim=1)
        self.moves += _measure_moves(places[:, :-1], places[:, 1:]).unbind(1)
        self.last = places[:, -1]
        self.waiting = []


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
