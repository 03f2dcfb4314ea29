"""How the boundaries of a stack's first hidden layer move: the curves of the papers' figures.

Between two records, a step or an epoch apart, a unit turns by a rotation in degrees and its
location phi, the point of its boundary nearest to the origin, moves by a displacement; the curves
show the largest of each. All methods are measured alike, by the normal and the offset that
`batched.boundaries` finds. The normal points to the active side, so that a side that flips is a
turn by 180 degrees. A unit without a boundary (a zero normal) has neither direction nor location,
NaN, and does not count as moving.

Records wait until there are some dozens of them, and are then measured at once: a record is a few
hundred numbers and the time goes into calls. One by one they took a third of Banana's training.
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
    """Arrays over records and members; NaN where a member had stopped.

    Args:
        rotation: largest rotation of any unit since the record before, in degrees, (records, S).
        displacement: largest |phi - phi before|, (records, S).
        direction: unit vectors (1 + records, S, units, d), those before training first; only if
            all was to be kept.
        location: phi, in the same shape.
    """

    rotation: Array
    displacement: Array
    direction: Array | None = None
    location: Array | None = None


class Recorder:
    """Takes boundaries, one record after the other, of the members that are left.

    Args:
        size: the number of members at the start.
        full: whether to keep directions and locations, or only how far they moved at most.

    Example:
        >>> recorder, offset = Recorder(size=1, full=False), torch.ones(1, 1)
        >>> recorder.add(np.array([0]), torch.tensor([[[1.0, 0.0]]]), offset)
        >>> recorder.add(np.array([0]), torch.tensor([[[0.0, 3.0]]]), 3 * offset)
        >>> recorder.motion().rotation.round(3).tolist()
        [[90.0]]
    """

    def __init__(self, size: int, full: bool) -> None:
        self.size = size
        self.full = full
        self.members: list[Array] = []
        self.moves: list[Tensor] = []  # rotation and displacement, (2, S)
        self.places: list[Tensor] = []  # direction and location, (2, S, units, d)
        self.waiting: list[tuple[Tensor, Tensor]] = []  # of the same members, the last ones
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
        moves = self._over_all(self.moves, self.members[1:])
        if not self.full:
            return Motion(moves[:, 0], moves[:, 1])
        places = self._over_all(self.places, self.members)
        return Motion(moves[:, 0], moves[:, 1], places[:, 0], places[:, 1])

    def _measure(self) -> None:
        """Measure what waits."""
        if not self.waiting:
            return
        normals, offsets = map(torch.stack, zip(*self.waiting, strict=True))
        places = _place(normals, offsets)  # (2, records, S, units, d)
        if self.full:
            self.places += places.unbind(1)
        if self.last is not None:
            places = torch.cat([self.last.unsqueeze(1), places], dim=1)
        self.moves += _moves(places[:, :-1], places[:, 1:]).unbind(1)
        self.last = places[:, -1]
        self.waiting = []

    def _over_all(self, rows: list[Tensor], members: list[Array]) -> Array:
        """Return an array (records, 2, S, ...) of the rows, each (2, members, ...)."""
        rest = rows[0].shape[2:] if rows else ()
        array = np.full((len(rows), 2, self.size, *rest), np.nan)
        for index, (row, those) in enumerate(zip(rows, members, strict=True)):
            array[index, :, those] = row.cpu().numpy().swapaxes(0, 1)
        return array


def _place(normal: Tensor, offset: Tensor) -> Tensor:
    """Return directions and locations, (2, ..., units, d), in float64."""
    length = sphere.length(normal)
    length = torch.where(length == 0, torch.nan, length)
    direction = sphere.normalise(normal) + 0 * length.unsqueeze(-1)
    return torch.stack([direction, -(offset / length).unsqueeze(-1) * direction])


def _moves(before: Tensor, after: Tensor) -> Tensor:
    """Return the largest rotation and displacement over units, (2, ...)."""
    rotation = sphere.angle_between(before[0], after[0]).rad2deg()
    displacement = (after[1] - before[1]).norm(dim=-1)
    return torch.stack([rotation, displacement]).nan_to_num(0.0, posinf=torch.inf).amax(-1)
