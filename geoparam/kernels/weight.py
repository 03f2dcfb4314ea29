"""The operator in plain torch: the specification, and what CPUs use.

With Q_k = cos(a_1) ... cos(a_k), the length that remains behind angle k, and t_k = tan(a_k):

    w_k = r t_k Q_k,  w_n = r Q_{n-1}
    S_k = sum_{j>k} g_j u_j,   dL/da_k = r (Q_k g_k - t_k S_k),   dL/dr = S_0      for g = dL/dw

Poles. No float is pi/2, so t is finite (2e7 in float32, 2e16 in float64) where Q is as small:
their products are exact, nothing is divided, and an angle behind many poles, where Q underflows,
gets the gradient 0. S_k is summed from the right, so that no larger term has been in it.

Precision. Cosines are computed and multiplied in float64: rounded to float32, the many that are
near 1 would cost the weight 4e-6 at n = 4608 and the gradient 5e-5 at n = 25088. Everything else
has the digits of float32, or of float64 for float64 latitudes.

Speed. Most of the time goes into cosines and tangents, so `forward` hands Q and t to `backward`.
Rows are computed in blocks, so that intermediate results stay in the processor's cache.
"""

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from geoparam.sphere import wide

SMALLEST_METRIC = 0.01
"""The natural gradient divides by the metric, bounded below by this."""

_BLOCK = 1 << 17  # elements: fastest of 2^14 to 2^17 on a core with 1 MB of cache

Saved = tuple[Tensor, Tensor]
"""Q_1, ..., Q_{n-1} and t_1, ..., t_{n-1}, both (rows, n - 1)."""


def forward(latitude: Tensor, r: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Saved]:
    """Return the weight rows (rows, n) for latitudes (rows, n - 1) and scales (rows,)."""

    def compute(latitude: Tensor, r: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        q, tan = _compute_lengths(latitude)
        w = torch.cat([tan * q, _last_length(q)], dim=1)
        if r is not None:
            w.mul_(r.unsqueeze(1))
        return w.to(dtype), q, tan

    weight, q, tan = _compute_in_blocks(compute, latitude, r)
    return weight, (q, tan)


def backward(
    grad: Tensor, latitude: Tensor, r: Tensor | None, natural: bool, saved: Saved | None
) -> tuple[Tensor, Tensor]:
    """Return dL/dlatitude (rows, n - 1) and dL/dr (rows,) for grad = dL/dweight (rows, n).

    `saved` is what `forward` returned beside the weight, or None to compute it again.
    """

    def compute(grad: Tensor, q: Tensor, tan: Tensor, r: Tensor | None) -> tuple[Tensor, Tensor]:
        g = grad.to(q.dtype)
        change = q * g[:, :-1]  # Q_k g_k
        terms = torch.cat([tan * change, _last_length(q) * g[:, -1:]], dim=1)  # g_k u_k
        s = terms.flip(1).cumsum_(1).flip(1)

        change.addcmul_(tan, s[:, 1:], value=-1)
        if natural:
            change[:, 1:].div_(q[:, :-1].square().clamp_(min=SMALLEST_METRIC))
        if r is not None:
            change.mul_(r.unsqueeze(1))
        return change.to(latitude.dtype), terms.sum(dim=1)

    q, tan = _compute_lengths(latitude) if saved is None else saved
    grad_latitude, grad_r = _compute_in_blocks(compute, grad, q, tan, r)
    return grad_latitude, grad_r.to(latitude.dtype if r is None else r.dtype)


def _compute_lengths(latitude: Tensor) -> Saved:
    """Return Q and t, in float32 or, for float64 latitudes, in float64."""
    working_type = torch.promote_types(latitude.dtype, torch.float32)
    q = wide(latitude).cos().cumprod_(dim=1)
    return q.to(working_type), latitude.to(working_type).tan()


def _last_length(q: Tensor) -> Tensor:
    """Return Q_{n-1} (rows, 1), which is 1 where there is no angle."""
    return q[:, -1:] if q.shape[1] else q.new_ones(len(q), 1)


def _compute_in_blocks(compute: Callable[..., tuple], *tensors: Tensor | None) -> Any:
    """Apply `compute` to blocks of rows of all tensors, and join its results."""
    first = tensors[0]
    assert first is not None
    if first.numel() <= _BLOCK:
        return compute(*tensors)

    size = max(1, _BLOCK // first.shape[1])
    blocks = [itertools.repeat(None) if x is None else x.split(size) for x in tensors]
    results = [compute(*block) for block in zip(*blocks, strict=False)]
    return tuple(map(torch.cat, zip(*results, strict=True)))
