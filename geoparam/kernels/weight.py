"""The operator in plain torch: the specification, and for devices without C or Triton.

With Q_k = cos(a_1) ... cos(a_k), the length that is left behind angle k, and t_k = tan(a_k):

    w_k = r t_k Q_k,  w_n = r Q_{n-1}
    S_k = sum_{j>k} g_j u_j,  dL/da_k = r (Q_k g_k - t_k S_k),  dL/dr = S_0      for g = dL/dw

Poles. No float is pi/2, so t is finite (2e7 in float32, 2e16 in float64) where Q is as small:
their products are exact, nothing is divided, and an angle behind many poles, where Q underflows,
gets the gradient 0. S_k is summed from the right, so that no larger term has been in it.

Precision. Cosines are taken and multiplied in float64: rounded to float32, the many that are near
1 would cost the weight 4e-6 at n = 4608 and the gradient 5e-5 at n = 25088.
"""

import torch
from torch import Tensor

from geoparam.sphere import wide, wide_type

SMALLEST_METRIC = 0.01
"""The natural gradient divides by the metric, bounded below by this."""


def forward(latitude: Tensor, r: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the weight rows (rows, n) for latitudes (rows, n - 1) and scales (rows,)."""
    a, q = _angles_and_lengths(latitude)
    if r is not None:
        q.mul_(r[:, None])
    weight = latitude.new_empty(q.shape, dtype=dtype)
    torch.mul(a.tan(), q[:, 1:], out=weight[:, :-1])
    weight[:, -1] = q[:, -1]
    return weight


def backward(
    grad: Tensor, latitude: Tensor, r: Tensor | None, natural: bool
) -> tuple[Tensor, Tensor]:
    """Return dL/dlatitude (rows, n - 1) and dL/dr (rows,) for grad = dL/dweight (rows, n)."""
    a, q = _angles_and_lengths(latitude)
    q, g, tan = q.to(a.dtype), grad.to(a.dtype), a.tan()
    along = torch.empty_like(g)  # g_k u_k, and then its sums from the right
    torch.mul(tan, q[:, 1:], out=along[:, :-1])
    along[:, -1] = q[:, -1]
    s = along.mul_(g).flip(-1).cumsum_(-1).flip(-1)
    change = torch.addcmul(q[:, 1:] * g[:, :-1], tan, s[:, 1:], value=-1)
    if natural:
        change.div_(q[:, :-1].square().clamp_(min=SMALLEST_METRIC))
    change = change if r is None else change.mul_(r[:, None])
    return change.to(latitude.dtype), s[:, 0].to(latitude.dtype if r is None else r.dtype)


def _angles_and_lengths(latitude: Tensor) -> tuple[Tensor, Tensor]:
    """Return the latitudes in the working type, and Q_0 = 1, Q_1, ..., Q_{n-1} in float64."""
    a = latitude if latitude.dtype == torch.float64 else latitude.float()
    q = torch.empty(a.shape[0], a.shape[1] + 1, dtype=wide_type(a.device), device=a.device)
    q[:, 0] = 1
    torch.cos(wide(a), out=q[:, 1:])
    return a, q.cumprod_(dim=-1)
