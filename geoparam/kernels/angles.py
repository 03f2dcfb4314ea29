"""Rows w = r u whose directions an optimizer steps as latitudes: the parts of its step.

    take up         latitudes and r of rows that were written since the last step
    differentiate   dL/dlatitude and dL/dr, from dL/dw
    move            from the old latitudes by the increments; rows may be turned back
    compute         w = r u

Latitudes are stored times a length, one for each row; gradients and increments are those of these
products. All rows of all matrices are numbered one after the other. Their elements are one flat
tensor, so are their latitudes, and a quantity of a row (r, length, ...) is another one, all in
float32 or all in float64.

A row of zeros has no direction. Where its stored r is 0 too, it has never had one: it is new, and
takes its first direction from the gradient. Otherwise it was pruned, and its latitudes wait.

`AngleRows` is plain torch and the specification; `angles_triton` is for GPUs.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from geoparam import sphere
from geoparam.kernels import weight
from geoparam.kernels.selection import choose_kernels


class AngleRows:
    """The rows of matrices of given shapes (rows, n), n > 1; equal neighbours count as one matrix.

    Example:
        >>> rows = AngleRows([(1, 2)], length=torch.tensor([2.0]))
        >>> w, g, stored, grad = torch.tensor([3.0, 4.0]), torch.ones(2), *torch.zeros(2, 1)
        >>> r = torch.zeros(1)
        >>> rows.take_up(w, torch.zeros(2), stored, r)
        tensor([5.])
        >>> stored  # 2 atan(3 / 4)
        tensor([1.2870])
        >>> rows.differentiate(g, stored, r, r, grad), grad  # (4 - 3) / 2
        (tensor([1.4000]), tensor([0.5000]))
    """

    def __init__(self, shapes: Sequence[tuple[int, int]], length: Tensor) -> None:
        self.length = length
        self.matrices: list[tuple[int, int]] = []
        for n, members in groupby(shapes, key=lambda shape: shape[1]):
            self.matrices.append((sum(rows for rows, _ in members), n))

    def take_up(self, w: Tensor, written: Tensor, stored: Tensor, r: Tensor) -> Tensor:
        """Read rows that are not as `written` into `stored` and r, which keeps its sign.

        A row of zeros keeps what is stored. `written` becomes w. Return r, 0 for rows of zeros.
        """
        results = []
        parts = self._cut((w, written), (stored,), (self.length, r))
        for w, written, stored, length, r in parts:
            has_direction = w.any(dim=1)
            is_changed = (w != written).any(dim=1)
            if not _is_none(is_changed):
                written.copy_(w)
                sign = torch.where(r < 0, -1, 1)
                is_changed &= has_direction
                _put(r, is_changed, sphere.length(w) * sign)
                _store(stored, is_changed, w * sign[:, None], length)
            results.append(r.where(has_direction, 0))
        return torch.cat(results)

    def differentiate(
        self, g: Tensor, stored: Tensor, r: Tensor, r_stored: Tensor, grad: Tensor
    ) -> Tensor:
        """Write the gradient of `stored` to `grad`; return that of r, for g = dL/dw.

        r is 0 for rows of zeros. Of a new row it is -|g|: its r will grow along the descent.
        """
        results = []
        parts = self._cut((g,), (stored, grad), (self.length, r, r_stored))
        for g, stored, grad, length, r, r_stored in parts:
            latitude = stored / length[:, None]
            by_latitude, by_r = weight.backward(g, latitude, r, False, None)
            torch.div(by_latitude, length[:, None], out=grad)

            is_zero = r == 0
            if not _is_none(is_zero):
                by_r = by_r.where(~is_zero, 0)
                is_new = is_zero & (r_stored == 0)
                by_r = torch.where(is_new, -g.norm(dim=1), by_r)
            results.append(by_r)
        return torch.cat(results)

    def move(
        self,
        increment: Tensor,
        stored: Tensor,
        w: Tensor,
        g: Tensor,
        r_before: Tensor,
        r_stored: Tensor,
        r: Tensor,
        max_angle: Any,
    ) -> Tensor:
        """Make the increments the new latitudes; return which rows were stepped at all.

        A new row had no latitudes to step: it takes the direction of the descent, or of the ascent
        where r was stepped below 0, as with maximize=True, and a positive r. It waits while its
        gradient is 0.
        """
        results = []
        parts = self._cut((w, g), (increment, stored), (self.length, r_before, r_stored, r))
        for w, g, increment, stored, length, r_before, r_stored, r in parts:
            results.append(increment.any(dim=1) | (r != r_before))
            increment.add_(stored)
            if max_angle is not None:
                _turn_back(increment, length, w, r_before, max_angle)

            is_new = (r_before == 0) & (r_stored == 0)
            if not _is_none(is_new):
                is_born = is_new & g.any(dim=1)
                sign = torch.where(r < 0, 1, -1)
                _store(increment, is_born, g * sign[:, None], length)
                _put(r, is_new, is_born * r.abs())
        return torch.cat(results)

    def compute(self, stored: Tensor, r: Tensor, is_chosen: Tensor, w: Tensor) -> None:
        """Write r u to the chosen rows of w."""
        parts = self._cut((w,), (stored,), (self.length, r, is_chosen))
        for w, stored, length, r, is_chosen in parts:
            _put(w, is_chosen[:, None], _compute(stored, length, r))

    def _cut(
        self, elements: Sequence[Tensor], angles: Sequence[Tensor], per_row: Sequence[Tensor]
    ) -> Iterator[tuple[Tensor, ...]]:
        """Yield each matrix's part of flat tensors."""
        row = first = 0
        for rows, n in self.matrices:
            last_row, last = row + rows, first + rows * n
            parts = [x[first:last].view(rows, n) for x in elements]
            parts += [x[first - row : last - last_row].view(rows, n - 1) for x in angles]
            yield *parts, *[x[row:last_row] for x in per_row]
            row, first = last_row, last


def _compute(stored: Tensor, length: Tensor, r: Tensor) -> Tensor:
    return weight.forward(stored / length[:, None], r, r.dtype)[0]


def _turn_back(stored: Tensor, length: Tensor, w: Tensor, r_before: Tensor, most: Any) -> None:
    """Turn units back that went further: w = cos(most) u + sin(most) e, e across u."""
    u = sphere.normalise(w * r_before.sign()[:, None])
    v = sphere.normalise(_compute(stored, length, torch.ones_like(length)))

    along = (u * v).sum(dim=1, keepdim=True)
    e = sphere.normalise(v - along * u)
    turned = math.cos(most) * u + math.sin(most) * e
    _store(stored, sphere.angle_between(u, v) > most, turned, length)


def _store(stored: Tensor, is_chosen: Tensor, vectors: Tensor, length: Tensor) -> None:
    """Store the directions of the chosen vectors."""
    if not _is_none(is_chosen):
        _put(stored, is_chosen[:, None], sphere.to_latitude(vectors) * length[:, None])


def _put(target: Tensor, is_chosen: Tensor, values: Tensor) -> None:
    target.copy_(torch.where(is_chosen, values, target))


def _is_none(is_chosen: Tensor) -> bool:
    """Return whether no row is chosen; False on a GPU without looking, which would wait for it."""
    return is_chosen.is_cpu and not is_chosen.any()


def angle_rows_for(shapes: Sequence[tuple[int, int]], length: Tensor) -> AngleRows:
    """Return the rows in the fastest form for their type and device."""
    if sum(count for count, _ in shapes) and choose_kernels(length) == "triton":
        from geoparam.kernels.angles_triton import TritonAngleRows  # needs Triton

        return TritonAngleRows(shapes, length)
    return AngleRows(shapes, length)
