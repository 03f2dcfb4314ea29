"""Geometry of the rows of many matrices, before and after an optimizer's step.

A row w of a weight is r u, with |u| = 1 and r of either sign. An optimizer steps an increment d of
the stored direction R u, where R is the length at which directions are stored:

    project  r = sign |w|,  u = w / r,  grad_r = <g, u>
             dL/dd = (r / R) (g - grad_r u)        the gradient for w = r v / |v| at |v| = R
    measure  along = <d, u>,  across = |d - along u|
    combine  d = a w + b d                         which is the new row, for the right a and b

All rows of all matrices are numbered one after the other, so each quantity of a row (r, R, ...) is
one flat tensor. A matrix is contiguous (rows, columns), in float32 or float64.

A zero row has no direction. Where r is 0 too, the row has never had one: `project` gives it the
plain gradient g, so that its increment can become its direction. Otherwise the row was pruned, and
its gradient is 0. So it is for a row too long for the type of its square.

`Rows` is plain torch and the specification; `rows_triton` is for GPUs.
"""

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from geoparam.kernels.selection import choose_kernels

_LARGE = 1 << 16  # elements: where a copy of a matrix costs more than the calls it saves


class Rows:
    """The rows of matrices of given shapes, of the type and device of `like`.

    Small matrices of equal width are stacked: for them the number of calls counts.

    Example:
        >>> w, g, d = torch.tensor([[3.0, 4.0]]), torch.tensor([[1.0, 0.0]]), torch.zeros(1, 2)
        >>> rows, grad_d = Rows([(1, 2)], w), torch.empty(1, 2)
        >>> r, grad_r, _ = rows.project([w], [g], [grad_d], torch.ones(1), torch.ones(1))
        >>> r, grad_r, grad_d
        (tensor([5.]), tensor([0.6000]), tensor([[ 3.2000, -2.4000]]))
        >>> rows.combine([w], [d], a=torch.tensor([2.0]), b=torch.tensor([0.0]))
        >>> d
        tensor([[6., 8.]])
    """

    def __init__(self, shapes: Sequence[tuple[int, int]], like: Tensor) -> None:
        self.shapes = shapes
        self.total = sum(count for count, _ in shapes)
        self.device, self.dtype = like.device, like.dtype

        stacks = defaultdict[tuple[int, int], list[int]](list)
        for i, (count, width) in enumerate(shapes):
            is_large = count * width > _LARGE
            stacks[width, i if is_large else -1].append(i)

        first_rows = [0]
        for count, _ in shapes:
            first_rows.append(first_rows[-1] + count)
        spans = [slice(*pair) for pair in zip(first_rows, first_rows[1:], strict=False)]
        self.stacks = [_Stack(members, spans, self.device) for members in stacks.values()]
        numbers = torch.cat([stack.numbers for stack in self.stacks])
        self.order = numbers.argsort()  # where each row is in the stacks, one after the other

    def project(
        self,
        w: Sequence[Tensor],
        g: Sequence[Tensor],
        grad_d: Sequence[Tensor],
        length: Tensor,
        r_before: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Write dL/dd to `grad_d`; return r, grad_r and |g| of each row.

        r has the sign of `r_before`. Of a row that has never had a direction grad_r is -|g|: its
        length will grow along the descent.
        """
        pairs = [(stack.join(w), stack.join(g)) for stack in self.stacks]
        r = self._gather([torch.linalg.vector_norm(x, dim=1) for x, _ in pairs]).copysign(r_before)
        size_g = self._gather([torch.linalg.vector_norm(y, dim=1) for _, y in pairs])
        by_r = self._gather([torch.linalg.vecdot(x, y) for x, y in pairs]) / r.where(r != 0, 1)

        is_new = (r == 0) & (r_before == 0)
        by_r = torch.where(r.isinf(), 0, by_r)
        by_g = torch.where(is_new, 1, torch.where(r.isinf(), 0, r / length))[:, None]
        by_w = (-by_r / length)[:, None]
        for stack, (x, y) in zip(self.stacks, pairs, strict=True):
            gradient = torch.mul(y, stack.take(by_g), out=stack.find_memory(grad_d))
            gradient.addcmul_(x, stack.take(by_w))
            stack.scatter(gradient, grad_d)
        return r, torch.where(is_new, -size_g, by_r), size_g

    def measure(
        self, w: Sequence[Tensor], d: Sequence[Tensor], r: Tensor, work: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return how far each row of d goes along w / r, and across it; `work` is overwritten."""
        pairs = [(stack.join(w), stack.join(d)) for stack in self.stacks]
        divisor = r.where(r != 0, 1)
        along = self._gather([torch.linalg.vecdot(x, y) for x, y in pairs]) / divisor
        by_w = (-along / divisor)[:, None]
        sizes = []
        for stack, (x, y) in zip(self.stacks, pairs, strict=True):  # |d|^2 - along^2: few digits
            rest = torch.addcmul(y, x, stack.take(by_w), out=stack.find_memory(work))
            sizes.append(torch.linalg.vector_norm(rest, dim=1))
        return along, self._gather(sizes)

    def combine(self, w: Sequence[Tensor], d: Sequence[Tensor], a: Tensor, b: Tensor) -> None:
        """Write a w + b d to d."""
        a, b = a[:, None], b[:, None]
        for stack in self.stacks:
            result = stack.join(d).mul_(stack.take(b))
            result.addcmul_(stack.join(w), stack.take(a))
            stack.scatter(result, d)

    def _gather(self, by_stack: list[Tensor]) -> Tensor:
        """Return one tensor of all rows from one for each stack."""
        return torch.cat(by_stack)[self.order]


class _Stack:
    """Matrices of equal width, as one: which they are, and which rows among all they have."""

    def __init__(self, members: list[int], spans: list[slice], device: torch.device) -> None:
        self.members, self.span = members, spans[members[0]]
        self.counts = [spans[i].stop - spans[i].start for i in members]
        ranges = [torch.arange(spans[i].start, spans[i].stop, device=device) for i in members]
        self.numbers = torch.cat(ranges)
        self.is_single = len(members) == 1

    def join(self, matrices: Sequence[Tensor]) -> Tensor:
        """Return the matrices as one: a single one itself, several as a copy."""
        if self.is_single:
            return matrices[self.members[0]]
        return torch.cat([matrices[i] for i in self.members])

    def find_memory(self, matrices: Sequence[Tensor]) -> Tensor | None:
        """Return where results can be written at once; None where they have to be scattered."""
        return matrices[self.members[0]] if self.is_single else None

    def scatter(self, joined: Tensor, matrices: Sequence[Tensor]) -> None:
        """Write a copy back to the matrices; a single one has been written already."""
        if not self.is_single:
            parts = joined.split(self.counts)
            torch._foreach_copy_([matrices[i] for i in self.members], parts)

    def take(self, per_row: Tensor) -> Tensor:
        """Return the entries of these rows."""
        return per_row[self.span] if self.is_single else per_row[self.numbers]


def rows_for(shapes: Sequence[tuple[int, int]], like: Tensor) -> Rows:
    """Return the rows in the fastest form for their type and device."""
    if sum(count for count, _ in shapes) and choose_kernels(like) == "triton":
        from geoparam.kernels.rows_triton import TritonRows  # needs Triton

        return TritonRows(shapes, like)
    return Rows(shapes, like)
