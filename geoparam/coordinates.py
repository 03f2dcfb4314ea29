"""How a layer stores its units' directions: as latitudes, as unit vectors, or as a sign.

The three objects share one vocabulary: `name` of the stored tensor, `encode` from rows (out, n) of
any length, and `decode` to weight rows, scaled by r where it is given. A zero row has no
direction; it gets the last axis. Below them is what else a layer's parameters are computed from.
"""

import math
from typing import Any, Literal

import torch
from torch import Tensor

from geoparam import functional, sphere

__all__ = ["Coordinates", "coordinates_for"]

Name = Literal["angles", "intrinsic"]
Init = Literal["sphere", "glorot"]
Type = torch.dtype | None

STEEPEST = 100  # |b| / |r| beyond which a small change of r moves the bias too far
_SHORTEST = 1e-12  # a vector that was set to 0 stays finite


class Angles:
    """The papers' hyperspherical coordinates, as `latitude` (out, n - 1) = pi/2 - theta."""

    name = "latitude"

    def shape(self, out: int, n: int) -> tuple[int, ...]:
        return (out, n - 1)

    def encode(self, rows: Tensor) -> Tensor:
        return sphere.to_latitude(rows)

    def decode(self, stored: Tensor, r: Tensor | None, natural: bool, dtype: Type) -> Tensor:
        return functional.weight(stored, r, natural=natural, dtype=dtype)


class Intrinsic:
    """The direction itself, as `unit` (out, n), of which only the direction counts.

    d / ||d|| has a gradient tangent to the sphere, so a step e of a unit vector turns it by at
    most arcsin ||e||, the same in every direction: the papers' bound without their coordinates.
    """

    name = "unit"

    def shape(self, out: int, n: int) -> tuple[int, ...]:
        return (out, n)

    def encode(self, rows: Tensor) -> Tensor:
        unit = sphere.normalise(rows)
        unit[..., -1] += ~unit.any(dim=-1)
        return unit

    def decode(self, stored: Tensor, r: Tensor | None, natural: bool, dtype: Type) -> Tensor:
        d = stored if stored.dtype == torch.float64 else stored.float()
        scale = _length(d).clamp(min=_SHORTEST).reciprocal()
        rows = d * (scale if r is None else scale * r[..., None])
        return rows.to(functional.result_type(stored, r) if dtype is None else dtype)


class Sign:
    """One input: there is no angle, only a `sign` (out,), drawn once and not learned."""

    name = "sign"

    def shape(self, out: int, n: int) -> tuple[int, ...]:
        return (out,)

    def encode(self, rows: Tensor) -> Tensor:
        return torch.where(rows.squeeze(-1) < 0, -1, 1)

    def decode(self, stored: Tensor, r: Tensor | None, natural: bool, dtype: Type) -> Tensor:
        row = (stored if r is None else stored * r).unsqueeze(-1)
        return row if dtype is None else row.to(dtype)


Coordinates = Angles | Intrinsic | Sign


def normalise_(unit: Tensor) -> None:
    """Divide the rows of `unit` (out, n) by their lengths in place; zero rows stay zero."""
    unit.div_(sphere.nonzero(_length(unit)))


def _length(rows: Tensor) -> Tensor:
    """Return the lengths (out, 1) of rows, in float32 or better."""
    precise = torch.promote_types(rows.dtype, torch.float32)
    is_long = rows.shape[-1] > 1 << 16  # float32 loses 2e-6 in a sum of 300,000 squares (CPU)
    dtype = sphere.wide_type(rows.device) if is_long else precise
    return torch.linalg.vector_norm(rows, dim=-1, keepdim=True, dtype=dtype).to(precise)


def coordinates_for(name: str, fan_in: int) -> Coordinates:
    """Return the coordinates called `name` for units with `fan_in` inputs."""
    known: dict[str, Coordinates] = {"angles": Angles(), "intrinsic": Intrinsic()}
    if name not in known:
        raise ValueError(f"coordinates are 'angles' or 'intrinsic'; got {name!r}.")
    return Sign() if fan_in == 1 else known[name]


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
    lam = torch.where(r == 0, 0, b / sphere.nonzero(r))
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


def check_assigned(name: str, value: Any, shape: tuple[int, ...]) -> None:
    """Raise where a weight or bias, called `name` in the error, cannot be one of this shape."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.is_meta:
        kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"the {name} is a tensor of floating-point values; got {kind}.")
    if tuple(value.shape) != shape:
        raise ValueError(f"the {name} has shape {shape}; got {tuple(value.shape)}.")
