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
from typing import Any

import torch
from torch import Tensor

from geoparam.kernels.selection import choose_kernels

_LARGE = 1 << 15  # elements: where a copy of a matrix costs more than the calls it saves


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

        members = defaultdict[tuple[int, int], list[int]](list)
        for i, (count, width) in enumerate(shapes):
            is_large = count * width > _LARGE
            members[width, i if is_large else -1].append(i)

        numbers = torch.arange(self.total, device=self.device)
        parts = numbers.split([count for count, _ in shapes])
        self.stacks = [_Stack(indices, parts) for indices in members.values()]
        in_stacks = torch.cat([stack.numbers for stack in self.stacks])
        self.order = in_stacks.argsort()  # where each row is in the stacks, one after the other

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
        results = []
        for stack in self.stacks:  # one after the other, while it is in the cache
            x, y = stack.join(w), stack.join(g)
            before, at_length = stack.take(r_before), stack.take(length)
            r = torch.linalg.vector_norm(x, dim=1).copysign(before)
            size = torch.linalg.vector_norm(y, dim=1)
            grad_r = torch.linalg.vecdot(x, y) / r.where(r != 0, 1)

            is_long, is_new = r.isinf(), (r == 0) & (before == 0)
            grad_r = grad_r.where(~is_long, 0)
            by_g = (r / at_length).where(~is_long, 0).where(~is_new, 1)
            by_w = -grad_r / at_length
            gradient = torch.mul(y, by_g[:, None], out=stack.find_memory(grad_d))
            stack.scatter(gradient.addcmul_(x, by_w[:, None]), grad_d)
            results.append(torch.stack([r, torch.where(is_new, -size, grad_r), size]))
        return self._gather(results)

    def measure(
        self, w: Sequence[Tensor], d: Sequence[Tensor], r: Tensor, work: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return how far each row of d goes along w / r, and across it; `work` is overwritten."""
        results = []
        for stack in self.stacks:
            x, y = stack.join(w), stack.join(d)
            own_r = stack.take(r)
            divisor = own_r.where(own_r != 0, 1)
            along = torch.linalg.vecdot(x, y) / divisor

            # |d|^2 - along^2 would lose digits.
            by_w = (-along / divisor)[:, None]
            rest = torch.addcmul(y, x, by_w, out=stack.find_memory(work))
            results.append(torch.stack([along, torch.linalg.vector_norm(rest, dim=1)]))
        return self._gather(results)

    def combine(self, w: Sequence[Tensor], d: Sequence[Tensor], a: Tensor, b: Tensor) -> None:
        """Write a w + b d to d."""
        for stack in self.stacks:
            result = stack.join(d).mul_(stack.take(b)[:, None])
            result.addcmul_(stack.join(w), stack.take(a)[:, None])
            stack.scatter(result, d)

    def _gather(self, by_stack: list[Tensor]) -> Any:
        """Return each quantity of all rows from (quantities, rows) of each stack."""
        return torch.cat(by_stack, dim=1)[:, self.order].unbind()


class _Stack:
    """Matrices of equal width, as one: which they are, and which rows among all they have."""

    def __init__(self, members: list[int], numbers: Sequence[Tensor]) -> None:
        self.members = members
        self.counts = [len(numbers[i]) for i in members]
        self.numbers = torch.cat([numbers[i] for i in members])
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
        return per_row[self.numbers]


def rows_for(shapes: Sequence[tuple[int, int]], like: Tensor) -> Rows:
    """Return the rows in the fastest form for their type and device."""
    if sum(count for count, _ in shapes) and choose_kernels(like) == "triton":
        from geoparam.kernels.rows_triton import TritonRows  # needs Triton

        return TritonRows(shapes, like)
    return Rows(shapes, like)
