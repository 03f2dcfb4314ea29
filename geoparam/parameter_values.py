"""Values for a layer's parameters: drawn, or computed from a plain weight and bias."""

import math
from typing import Literal

import torch
from torch import Tensor

from geoparam import sphere

Init = Literal["sphere", "glorot"]


def draw(out: int, n: int, init: Init, *, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Draw rows (out, n): `"sphere"`, the papers' text, or `"glorot"`, the code of their tables.

    They are uniform on the unit sphere, in float64, or Glorot-uniform.
    """
    if init not in ("sphere", "glorot"):
        raise ValueError(f"init is 'sphere', 'glorot' or None; got {init!r}.")
    if init == "sphere":
        return sphere.sample(out, n, device=device)
    bound = math.sqrt(6 / (n + out))
    return torch.empty(out, n, device=device, dtype=dtype).uniform_(-bound, bound)


def compute_distance(bias: Tensor, r: Tensor, dtype: torch.dtype) -> Tensor:
    """Return lam = b / r in float64, if that is a number of the type it is stored in."""
    check_finite(bias, "bias")
    b = sphere.wide(bias.detach())
    lost = ((r == 0) & (b != 0)).nonzero().flatten().tolist()
    if lost:
        raise ValueError(
            f"rows {lost[:8]} have a zero weight and a bias: such a unit has no boundary, "
            "and r * lam cannot hold its bias. Leave the layer standard or prune the row."
        )
    lam = torch.where(r == 0, 0, b / torch.where(r == 0, 1, r))
    if not lam.to(dtype).isfinite().all():
        raise ValueError(
            f"a weight is so short beside its bias that lam = b / r is no {dtype}. "
            "Leave the layer standard."
        )
    return lam


def check_finite(x: Tensor, name: str) -> None:
    """Raise where a tensor, called `name` in the error, holds NaN or infinity."""
    if not x.isfinite().all():
        raise ValueError(
            f"the {name} holds NaN or infinite values, which have no direction; got "
            f"{int((~x.isfinite()).sum())} of them. Repair or reinitialise the layer first."
        )
