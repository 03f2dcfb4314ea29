"""Geometry of the rows of many matrices in one call, before and after an optimizer's step.

A row w of a weight is r u, with |u| = 1 and r of either sign. All rows of a model are numbered one
after the other, so each quantity of a row (r, the length R at which its direction is stored, ...)
is one flat tensor. `grad_v` is dL/dv.

    enter    r = sign(r) |w|,  u = w / r,  grad_r = <g, u>
             dL/dv = (r / R) (g - grad_r u)        the gradient for W = r v / |v| at |v| = R
             w = R u                               where w is stepped itself
    leave    w = r w / |w|
    measure  along = <d, u>,  across = |d - along u|       of an increment d to R u
    turn_coefficients      a and b such that a w + b d is w after a turn
    rotate   w = a w + b d
    enter_biases, leave_biases                     b = r L / R', R' the layer's mean |r|

A zero row has no direction: its gradients are 0 and it stays zero. A matrix is any dense float32
or float64 tensor whose memory has one row after the other, each with n elements. All operands have
the elements of a row in the same order.

`Rows` is plain torch, one matrix after the other, and the specification. `rows_triton` is for GPUs
and `rows_native` for CPUs with a C compiler.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from geoparam.kernels.selection import choose_kernels
from geoparam.sphere import nonzero

PerRow = tuple[Tensor, ...]  # flat tensors, one element for each row
Matrices = list[Tensor] | PerRow
SMALLEST_R = 1e-3  # times R: the least |r| of a row whose r would have changed its sign


class Rows:
    """The rows of matrices of given shapes, of the type and device of `like`.

    With a process `group`, `outs` are each matrix's numbers of rows over all processes.
    Without `match` biases are stepped as in converted layers.

    Example:
        >>> w, r = torch.tensor([[3.0, 4.0]]), torch.tensor([1.0])
        >>> rows = Rows([w.shape], w)
        >>> g, grad_v = torch.tensor([[1.0, 0.0]]), torch.empty(1, 2)
        >>> grad_r, grad_norm = torch.empty(2, 1)
        >>> rows.enter([w], [g], [grad_v], (torch.ones(1), r, grad_r, grad_norm), rescales=True)
        >>> r, grad_r, w  # w is at length 1 until it leaves
        (tensor([5.]), tensor([0.6000]), tensor([[0.6000, 0.8000]]))
        >>> rows.leave([w], r, r_before=r)
        >>> w
        tensor([[3., 4.]])
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, int]],
        like: Tensor,
        outs: Sequence[int] | None = None,
        group: Any = None,
        match: bool = True,
    ) -> None:
        self.shapes, self.match = shapes, match
        self.counts, self.widths = ([shape[i] for shape in shapes] for i in (0, 1))
        self.device, self.dtype, self.group = like.device, like.dtype, group
        self.total = sum(self.counts)
        self.lengths = torch.tensor(self.counts, device=self.device)
        self.outs = torch.tensor(outs or self.counts, dtype=like.dtype, device=self.device)

    def enter(
        self, w: Matrices, g: Matrices, grad_v: Matrices, per_row: PerRow, rescales: bool
    ) -> None:
        """Write dL/dv to `grad_v`; where it `rescales`, w becomes R u.

        `per_row` are the length R, and r, which has its sign. This writes r = sign |w|,
        grad_r = <g, u>, and a norm of g, of which only `grad_norm > 0` is used: the row has a
        gradient.
        """
        self._run("enter", (w, g, grad_v), per_row, rescales=rescales)

    def leave(self, w: Matrices, r: Tensor, r_before: Tensor) -> None:
        """Bring rows of any length to length r; a row of zeros stays zero."""
        self._run("leave", (w,), (r, r_before))

    def measure(self, w: Matrices, d: Matrices, r: Tensor) -> tuple[Tensor, Tensor]:
        """Return how far each row of d goes along w / r, and across it."""
        along, across = torch.empty_like(r), torch.empty_like(r)
        self._run("measure", (w, d), (r, along, across))
        return along, across

    def rotate(self, w: Matrices, d: Matrices, a: Tensor, b: Tensor) -> None:
        """Write a w + b d to w."""
        self._run("rotate", (w, d), (a, b))

    def _run(
        self, name: str, operands: Sequence[Matrices], per_row: Sequence[Tensor], **options: bool
    ) -> None:
        """Run a function on every matrix; `per_row` are flat tensors. Subclasses have kernels."""
        columns = [x[:, None].split(self.counts) for x in per_row]
        for i, (count, width) in enumerate(self.shapes):
            matrices = [each[i].as_strided((count, width), (width, 1)) for each in operands]
            _FUNCTIONS[name](*matrices, *(each[i] for each in columns), **options)

    def turn_coefficients(
        self, per_row: PerRow, turn: Tensor | None, limit: float
    ) -> tuple[Tensor, Tensor]:
        """Return a and b that turn each row by the angle of its increment d, at most by `limit`.

        `turn` has an angle in radians for each matrix, or is None. With it, the angles are scaled
        to this root mean square; they are 0 where all increments or all gradients are 0. A limit
        of 0 stands for 4 times the turn. r keeps its sign: to cross 0 would turn a row by pi.
        """
        along, across, length, grad_norm, r_before, r = per_row
        keep_signs(r, r_before, length)
        if turn is None:
            angle = torch.atan2(across, length + along).clamp(max=limit)
        else:
            square, moving = self.layer_sums(across.square(), grad_norm > 0).unbind(dim=1)
            rms = (square / self.outs.clamp(min=1)).sqrt()
            speed = torch.where((rms == 0) | (moving == 0), 0, turn / nonzero(rms))
            most = turn.new_full(turn.shape, limit) if limit else 4 * turn
            angle = torch.minimum(across * self.per_row(speed), self.per_row(most))
        scale = nonzero(r_before)
        b = torch.where(across > 0, r * angle.sin() / across, 0)
        return r / scale * angle.cos() - b * along / scale, b

    def enter_biases(
        self, b: Tensor, grad_b: Tensor, r: Tensor, grad_r: Tensor, lam: Tensor, grad_lam: Tensor
    ) -> None:
        """Write what is stepped for biases b = r lam, and its gradient, to `lam` and `grad_lam`.

        Where |b| <= |r| that is R' lam, so that b moves as fast as a plain one, and lam dL/db is
        added to grad_r. Elsewhere it is b itself: lam would move it 1 + lam^2 times as fast.
        Without `match` it is lam everywhere.
        """
        is_near, _, stretch = self._stretch(b, r)
        torch.mul(stretch, b, out=lam)
        torch.div(grad_b, stretch, out=grad_lam)
        grad_r.add_(torch.where(is_near, b / nonzero(r), 0) * grad_b)

    def leave_biases(self, b: Tensor, r: Tensor, r_before: Tensor, lam: Tensor) -> None:
        """Write the biases from the stepped `lam`, which becomes b / r."""
        is_near, mean, stretch = self._stretch(b, r_before)
        is_still = (lam == stretch * b) & (r == r_before)
        stepped = torch.where(is_near, r * lam / mean, lam)
        b.copy_(torch.where(is_still, b, stepped))
        lam.copy_(torch.where(r == 0, 0, b / nonzero(r)))

    def _stretch(self, b: Tensor, r: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return which biases are stepped as R' b / r, R' by row, and the factor: R' / r, or 1."""
        if not self.match:
            is_near, mean = r != 0, torch.ones_like(r)
        else:
            is_near = (r != 0) & (b.abs() <= r.abs())
            means = self.layer_means(r.abs())
            mean = self.per_row(nonzero(means))
        return is_near, mean, torch.where(is_near, mean / nonzero(r), 1)

    def layer_sums(self, *per_row: Tensor) -> Tensor:
        """Return the sums over the rows of each matrix, in all processes: (matrices, columns)."""
        columns = torch.stack([x.to(self.dtype) for x in per_row], dim=1)
        sums = torch.segment_reduce(columns, "sum", lengths=self.lengths, initial=0, unsafe=True)
        if self.group is not None:
            dist.all_reduce(sums, group=self.group)
        return sums

    def layer_means(self, per_row: Tensor) -> Tensor:
        """Return the mean over the rows of each matrix, in all processes."""
        return self.layer_sums(per_row)[:, 0] / self.outs.clamp(min=1)

    def per_row(self, per_layer: Tensor) -> Tensor:
        """Return one number for each matrix as one for each row."""
        return per_layer.repeat_interleave(self.lengths, output_size=self.total)

    def split(self, per_row: Tensor) -> tuple[Tensor, ...]:
        """Return the part of a flat tensor that belongs to each matrix."""
        return per_row.split(self.counts)


def _enter(
    w: Tensor, g: Tensor, grad_v: Tensor,
    length: Tensor, r: Tensor, grad_r: Tensor, grad_norm: Tensor, rescales: bool,
) -> None:  # fmt: skip
    r.copy_(_norm(w).copysign(r))
    u = w / nonzero(r)
    grad_r.copy_((g * u).sum(dim=1, keepdim=True))
    grad_norm.copy_(torch.linalg.vector_norm(g, ord=torch.inf, dim=1, keepdim=True))
    grad_v.copy_(r / length * (g - grad_r * u))
    if rescales:
        w.mul_(length / nonzero(r))


def _leave(w: Tensor, r: Tensor, r_before: Tensor) -> None:
    r.mul_(r_before != 0)
    w.mul_(r / nonzero(_norm(w)))


def _measure(w: Tensor, d: Tensor, r: Tensor, along: Tensor, across: Tensor) -> None:
    u = w / nonzero(r)
    along.copy_((d * u).sum(dim=1, keepdim=True))
    across.copy_(_norm(d - along * u))


def _rotate(w: Tensor, d: Tensor, a: Tensor, b: Tensor) -> None:
    w.copy_(a * w + b * d)


_FUNCTIONS: dict[str, Any] = {
    "enter": _enter, "leave": _leave, "measure": _measure, "rotate": _rotate,
}  # fmt: skip


def addresses(matrices: Matrices) -> tuple[int, ...]:
    """Return the matrices' addresses in memory."""
    return tuple([x.data_ptr() for x in matrices])


def rows_for(shapes: Sequence[tuple[int, int]], like: Tensor, *others: Any) -> Rows:
    """Return the rows, with the arguments of `Rows`, in the fastest form for type and device."""
    make: type[Rows] = Rows
    if any(count for count, _ in shapes) and like.dtype in (torch.float32, torch.float64):
        kernels = choose_kernels(like)
        if kernels == "triton":
            from geoparam.kernels.rows_triton import TritonRows as make  # needs Triton
        elif kernels == "native":
            from geoparam.kernels.rows_native import NativeRows as make  # builds on this module
    return make(shapes, like, *others)


def keep_signs(r: Tensor, r_before: Tensor, length: Tensor) -> None:
    """Where r has changed its sign, set it to a tenth of r before, at least SMALLEST_R R."""
    least = torch.minimum(r_before.abs(), SMALLEST_R * length)
    kept = torch.maximum(0.1 * r_before.abs(), least).copysign(r_before)
    r.copy_(torch.where(r * r_before < 0, kept, r) * (r_before != 0))


def _norm(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=1, keepdim=True)
