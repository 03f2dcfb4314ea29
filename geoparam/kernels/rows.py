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
its gradient is 0.

`Rows` is plain torch and the specification; `rows_triton` is for GPUs.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from geoparam.kernels.selection import choose_kernels
from geoparam.sphere import nonzero

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
        r, grad_r, size_g = torch.empty((3, self.total), dtype=self.dtype, device=self.device)
        for stack in self.stacks:
            x, y = stack.join(w), stack.join(g)
            before, at_length = stack.take(r_before), stack.take(length)
            scale = torch.linalg.vector_norm(x, dim=1).copysign(before)
            is_new = (scale == 0) & (before == 0)
            size = torch.linalg.vector_norm(y, dim=1)
            by_scale = torch.linalg.vecdot(x, y) / nonzero(scale)

            by_g = torch.where(is_new, 1, scale / at_length)
            gradient = torch.mul(y, by_g[:, None], out=stack.find_memory(grad_d))
            gradient.addcmul_(x, (-by_scale / at_length)[:, None])
            stack.scatter(gradient, grad_d)
            stack.put(r, scale)
            stack.put(grad_r, torch.where(is_new, -size, by_scale))
            stack.put(size_g, size)
        return r, grad_r, size_g

    def measure(
        self, w: Sequence[Tensor], d: Sequence[Tensor], r: Tensor, work: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return how far each row of d goes along w / r, and across it; `work` is overwritten."""
        along, across = torch.empty((2, self.total), dtype=self.dtype, device=self.device)
        for stack in self.stacks:
            x, y = stack.join(w), stack.join(d)
            scale = nonzero(stack.take(r))
            parallel = torch.linalg.vecdot(x, y) / scale
            # |d|^2 - along^2 would have few digits.
            memory = stack.find_memory(work)
            rest = torch.addcmul(y, x, (-parallel / scale)[:, None], out=memory)

            stack.put(along, parallel)
            stack.put(across, torch.linalg.vector_norm(rest, dim=1))
        return along, across

    def combine(self, w: Sequence[Tensor], d: Sequence[Tensor], a: Tensor, b: Tensor) -> None:
        """Write a w + b d to d."""
        for stack in self.stacks:
            result = stack.join(d)
            result.mul_(stack.take(b)[:, None])
            result.addcmul_(stack.join(w), stack.take(a)[:, None])
            stack.scatter(result, d)


class _Stack:
    """Matrices of equal width, as one: their numbers, and their rows among all."""

    def __init__(self, members: list[int], spans: list[slice], device: torch.device) -> None:
        self.members = members
        self.counts = [spans[i].stop - spans[i].start for i in members]
        self.span = spans[members[0]]
        self.numbers: Tensor | None = None
        if len(members) > 1:
            self.numbers = torch.cat(
                [torch.arange(spans[i].start, spans[i].stop, device=device) for i in members]
            )

    def join(self, matrices: Sequence[Tensor]) -> Tensor:
        if self.numbers is None:
            return matrices[self.members[0]]
        return torch.cat([matrices[i] for i in self.members])

    def find_memory(self, matrices: Sequence[Tensor]) -> Tensor | None:
        """Return where results can be written at once; None where they have to be scattered."""
        return matrices[self.members[0]] if self.numbers is None else None

    def scatter(self, joined: Tensor, matrices: Sequence[Tensor]) -> None:
        if self.numbers is not None:
            parts = joined.split(self.counts)
            torch._foreach_copy_([matrices[i] for i in self.members], parts)

    def take(self, per_row: Tensor) -> Tensor:
        return per_row[self.span] if self.numbers is None else per_row[self.numbers]

    def put(self, per_row: Tensor, values: Tensor) -> None:
        per_row[self.span if self.numbers is None else self.numbers] = values


def rows_for(shapes: Sequence[tuple[int, int]], like: Tensor) -> Rows:
    """Return the rows in the fastest form for their type and device."""
    if sum(count for count, _ in shapes) and choose_kernels(like) == "triton":
        from geoparam.kernels.rows_triton import TritonRows  # needs Triton

        return TritonRows(shapes, like)
    return Rows(shapes, like)
