"""The operator in plain torch: the specification, and what CPUs use.

With Q_k = cos(a_1) ... cos(a_k), the length that remains behind angle k, and t_k = tan(a_k):

    w_k = r sin(a_k) Q_{k-1},  w_n = r Q_{n-1}
    S_k = sum_{j>k} g_j u_j,   dL/da_k = r (Q_k g_k - t_k S_k),   dL/dr = S_0     for g = dL/dw

Poles. No float is pi/2, so t is finite (2e7 in float32, 2e16 in float64) where Q is as small:
their products are exact, nothing is divided, and an angle behind many poles, where Q underflows,
gets the gradient 0. S_k is summed from the right, so that no larger term has been in it.

Precision. Cosines are computed and multiplied in float64: rounded to float32, the many that are
near 1 would cost the weight 4e-6 at n = 4608 and the gradient 5e-5 at n = 25088. Everything else
has the digits of float32, or of float64 for float64 latitudes.

Speed. The cosines take a third of the time, so `forward` returns the lengths Q for `backward`.
Rows are computed in blocks, so that intermediate results stay in the processor's cache.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from geoparam.sphere import wide

SMALLEST_METRIC = 0.01
"""The natural gradient divides by the metric, bounded below by this."""

_BLOCK = 1 << 17  # elements: fastest of 2^14 to 2^17 on a core with 1 MB of cache


def forward(latitude: Tensor, r: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the weight rows (rows, n) for latitudes (rows, n - 1) and scales (rows,), and Q."""

    def compute(latitude: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
        q = _compute_lengths(latitude)
        w = q * r.unsqueeze(1)
        w[:, :-1].mul_(latitude.to(q.dtype).sin())
        return w.to(dtype), q

    return _compute_in_blocks(compute, latitude, _or_ones(r, latitude))


def backward(
    grad: Tensor, latitude: Tensor, r: Tensor | None, natural: bool, lengths: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return dL/dlatitude (rows, n - 1) and dL/dr (rows,) for grad = dL/dweight (rows, n).

    `lengths` is the Q that `forward` returned, or None to compute it again.
    """

    def compute(
        latitude: Tensor, r: Tensor, grad: Tensor, *lengths: Tensor
    ) -> tuple[Tensor, Tensor]:
        q = lengths[0] if lengths else _compute_lengths(latitude)
        g = grad.to(q.dtype)
        tan = latitude.to(q.dtype).tan()

        change = q[:, 1:] * g[:, :-1]  # Q_k g_k
        terms = q * g
        torch.mul(tan, change, out=terms[:, :-1])  # g_k u_k
        s = terms.flip(1).cumsum_(1).flip(1)

        change.addcmul_(tan, s[:, 1:], value=-1)
        if natural:
            change.div_(q[:, :-1].square().clamp_(min=SMALLEST_METRIC))
        change.mul_(r.unsqueeze(1))
        return change.to(latitude.dtype), terms.sum(dim=1).to(r.dtype)

    given = () if lengths is None else (lengths,)
    return _compute_in_blocks(compute, latitude, _or_ones(r, latitude), grad, *given)


def _compute_lengths(latitude: Tensor) -> Tensor:
    """Return Q_0 = 1, Q_1, ..., Q_{n-1}, in float32 or, for float64 latitudes, in float64."""
    cos = wide(latitude).cos()
    one = cos.new_ones(len(cos), 1)
    q = torch.cat([one, cos], dim=1).cumprod_(dim=1)
    return q.to(torch.promote_types(latitude.dtype, torch.float32))


def _or_ones(r: Tensor | None, latitude: Tensor) -> Tensor:
    return latitude.new_ones(len(latitude)) if r is None else r


def _compute_in_blocks(
    compute: Callable[..., tuple[Tensor, Tensor]], latitude: Tensor, *others: Tensor
) -> tuple[Tensor, Tensor]:
    """Apply `compute` to blocks of rows of all tensors, and join its results."""
    size = max(1, _BLOCK // (latitude.shape[1] + 1))
    if len(latitude) <= size:
        return compute(latitude, *others)

    blocks = zip(*(x.split(size) for x in (latitude, *others)), strict=True)
    first, second = zip(*(compute(*block) for block in blocks), strict=True)
    return torch.cat(first), torch.cat(second)
