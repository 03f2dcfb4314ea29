"""How a layer stores its units' directions: as latitudes, as unit vectors, or as a sign.

The three objects share one vocabulary: `name` of the stored tensor, `shape` of it for n inputs,
`encode` from rows (out, n) of any length, and `decode` to weight rows, scaled by r where it is
given. A zero row has no direction; it gets the last axis.
"""

from typing import Literal

import torch
from torch import Tensor

from geoparam import functional, sphere

__all__ = ["Coordinates", "coordinates_for"]

Name = Literal["angles", "intrinsic"]

_SHORTEST = 1e-12  # a vector that was set to 0 stays finite


class Angles:
    """The papers' hyperspherical coordinates, as `latitude` (out, n - 1) = pi/2 - theta."""

    name = "latitude"

    def shape(self, out: int, n: int) -> tuple[int, ...]:
        return out, n - 1

    def encode(self, rows: Tensor) -> Tensor:
        return sphere.to_latitude(rows)

    def decode(
        self, stored: Tensor, r: Tensor | None, natural: bool, dtype: torch.dtype | None
    ) -> Tensor:
        return functional.weight(stored, r, natural=natural, dtype=dtype)


class Intrinsic:
    """The direction itself, as `unit` (out, n), of which only the direction counts.

    d / ||d|| has a gradient tangent to the sphere, so a step e of a unit vector turns it by at
    most arcsin ||e||, the same in every direction: the papers' bound without their coordinates.
    """

    name = "unit"

    def shape(self, out: int, n: int) -> tuple[int, ...]:
        return out, n

    def encode(self, rows: Tensor) -> Tensor:
        unit = sphere.normalise(rows)
        unit[..., -1] += ~unit.any(dim=-1)
        return unit

    def decode(
        self, stored: Tensor, r: Tensor | None, natural: bool, dtype: torch.dtype | None
    ) -> Tensor:
        d = stored if stored.dtype == torch.float64 else stored.float()
        scale = torch.linalg.vector_norm(d, dim=-1, keepdim=True).clamp(min=_SHORTEST).reciprocal()
        if dtype is None:
            dtype = stored.dtype if r is None else torch.promote_types(stored.dtype, r.dtype)
        return (d * (scale if r is None else scale * r[..., None])).to(dtype)


class Sign:
    """One input: there is no angle, only a `sign` (out,), drawn once and not learned."""

    name = "sign"

    def shape(self, out: int, n: int) -> tuple[int, ...]:
        return (out,)

    def encode(self, rows: Tensor) -> Tensor:
        return torch.where(rows.squeeze(-1) < 0, -1, 1)

    def decode(
        self, stored: Tensor, r: Tensor | None, natural: bool, dtype: torch.dtype | None
    ) -> Tensor:
        row = (stored if r is None else stored * r).unsqueeze(-1)
        return row if dtype is None else row.to(dtype)


Coordinates = Angles | Intrinsic | Sign


def normalise_(unit: Tensor) -> None:
    """Divide the rows of `unit` (out, n) by their lengths in place; zero rows stay zero."""
    precise = torch.promote_types(unit.dtype, torch.float32)
    length = torch.linalg.vector_norm(unit, dim=-1, keepdim=True, dtype=precise)
    unit.div_(torch.where(length == 0, 1, length))


def coordinates_for(name: str, fan_in: int) -> Coordinates:
    """Return the coordinates called `name` for units with `fan_in` inputs."""
    known: dict[str, Coordinates] = {"angles": Angles(), "intrinsic": Intrinsic()}
    if name not in known:
        raise ValueError(f"coordinates are 'angles' or 'intrinsic'; got {name!r}.")
    return Sign() if fan_in == 1 else known[name]
