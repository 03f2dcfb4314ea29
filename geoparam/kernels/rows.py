"""Geometry of the rows of many matrices in one call: what the optimizer does around a step.

A row w of a weight is r u, with |u| = 1 and r of either sign. All rows of a model are numbered one
after the other, so what belongs to a row (r, the length R at which its direction is stored, ...)
is one flat tensor. Four functions serve the optimizer:

    enter    r = sign(r) |w|,  u = w / r,  slope = <g, u>,  v = R u
             dL/dv = (r / R) (g - slope u)         the gradient for W = r v / |v| at |v| = R
    leave    w = r v / |v|
    measure  d = v - c w,  along = <d, u>,  across = |d - along u|
    rotate   w = a w + b d

A zero row has no direction: its gradients are 0 and it stays zero. A matrix is any dense float32
or float64 tensor whose memory has one row after the other, each with n elements; their order
within a row does not matter, if it is the same in all operands.

This file has the form in plain torch, one matrix after the other; `rows_triton` is for GPUs and
`rows_native` for CPUs with a C compiler.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from geoparam.kernels.selection import choose_kernels

Matrices = Sequence[Tensor]


class Rows:
    """The rows of matrices of given shapes, of the type and device of `like`.

    Example:
        >>> w, r = torch.tensor([[3.0, 4.0]]), torch.tensor([1.0])
        >>> rows = Rows([w.shape], w)
        >>> g, by_v = torch.tensor([[1.0, 0.0]]), torch.empty(1, 2)
        >>> slope, peak, stretch = torch.empty(3, 1)
        >>> rows.enter([w], [g], [by_v], [w], torch.ones(1), r, slope, peak, stretch)
        >>> r, slope, w  # w is at length 1 until it leaves
        (tensor([5.]), tensor([0.6000]), tensor([[0.6000, 0.8000]]))
        >>> rows.leave([w], r)
        >>> w
        tensor([[3., 4.]])
    """

    def __init__(self, shapes: Sequence[tuple[int, int]], like: Tensor) -> None:
        self.counts = [count for count, _ in shapes]
        self.widths = [width for _, width in shapes]
        self.device, self.dtype = like.device, like.dtype
        self.total = sum(self.counts)

    def enter(
        self,
        w: Matrices,
        g: Matrices,
        by_v: Matrices,
        v: Matrices | None,
        length: Tensor,
        r: Tensor,
        slope: Tensor,
        peak: Tensor,
        stretch: Tensor,
    ) -> None:
        """Write dL/dv to `by_v` and R u to `v`, which may be `w` itself, or None for nowhere.

        Per row `length` is R and r has a sign; written are r = sign |w|, the slope dL/dr = <g, u>,
        the peak, which is the largest |g|, and the stretch R / r from w to v.
        """
        per_row = [self.split(x) for x in (length, r, slope, peak, stretch)]
        for i, (length_, r_, slope_, peak_, stretch_) in enumerate(zip(*per_row, strict=True)):
            x, y, by = (_flat(matrices[i], self.widths[i]) for matrices in (w, g, by_v))
            r_.copy_(torch.linalg.vector_norm(x, dim=1).copysign(r_))
            u = x / _nonzero(r_)[:, None]
            slope_.copy_((y * u).sum(dim=1))
            peak_.copy_(torch.linalg.vector_norm(y, ord=torch.inf, dim=1))
            stretch_.copy_(length_ / _nonzero(r_))
            by.copy_((r_ / length_)[:, None] * (y - slope_[:, None] * u))
            if v is not None:
                _flat(v[i], self.widths[i]).copy_(stretch_[:, None] * x)

    def leave(self, v: Matrices, r: Tensor) -> None:
        """Bring rows of any length to length r."""
        for x, r_, n in zip(v, self.split(r), self.widths, strict=True):
            x = _flat(x, n)
            x.mul_((r_ / _nonzero(torch.linalg.vector_norm(x, dim=1)))[:, None])

    def measure(self, w: Matrices, v: Matrices, c: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
        """Return how far each row of v - c w goes along w / r, and across it."""
        along, across = torch.empty_like(r), torch.empty_like(r)
        per_row = [self.split(x) for x in (c, r, along, across)]
        for i, (c_, r_, along_, across_) in enumerate(zip(*per_row, strict=True)):
            x, y = _flat(w[i], self.widths[i]), _flat(v[i], self.widths[i])
            d, u = y - c_[:, None] * x, x / _nonzero(r_)[:, None]
            along_.copy_((d * u).sum(dim=1))
            across_.copy_(torch.linalg.vector_norm(d - along_[:, None] * u, dim=1))
        return along, across

    def rotate(self, w: Matrices, v: Matrices, c: Tensor, a: Tensor, b: Tensor) -> None:
        """Write a w + b (v - c w) to w."""
        per_row = [self.split(x) for x in (c, a, b)]
        for i, (c_, a_, b_) in enumerate(zip(*per_row, strict=True)):
            x, y = _flat(w[i], self.widths[i]), _flat(v[i], self.widths[i])
            d = y - c_[:, None] * x
            x.copy_(a_[:, None] * x + b_[:, None] * d)

    def split(self, per_row: Tensor) -> tuple[Tensor, ...]:
        """Return the part of a flat tensor that belongs to each matrix."""
        return per_row.split(self.counts)


def rows_for(shapes: Sequence[tuple[int, int]], like: Tensor) -> Rows:
    """Return the rows in the form that serves their type and device best."""
    has_rows = any(count for count, _ in shapes)
    if not has_rows or like.dtype not in (torch.float32, torch.float64):
        return Rows(shapes, like)
    kernels = choose_kernels(like)
    if kernels == "triton":
        from geoparam.kernels.rows_triton import TritonRows  # needs Triton

        return TritonRows(shapes, like)
    if kernels == "native":
        from geoparam.kernels.rows_native import NativeRows  # it builds on this module

        return NativeRows(shapes, like)
    return Rows(shapes, like)


def _flat(matrix: Tensor, n: int) -> Tensor:
    return matrix.as_strided((matrix.numel() // n, n), (n, 1))


def _nonzero(x: Tensor) -> Tensor:
    return torch.where(x == 0, 1, x)
