"""How a layer stores its units' directions: as latitudes, as unit vectors, or as a sign.

A coordinate system knows all that depends on it: the name and shape of the stored tensor, how rows
are encoded and decoded, the sphere's metric in it, and how it is kept on the sphere after a step.
A zero row has no direction; it gets the last axis. Below the systems is what else a layer's
parameters are computed from.
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


class Coordinates:
    """A way to store directions (out, n); `stored` is the tensor that holds them."""

    name: str  # of the stored tensor
    is_learned = True
    # Whether the sphere's metric in these coordinates differs from the identity, so that equal
    # steps turn units by unequal angles.
    has_metric = False

    def shape(self, out: int, n: int) -> tuple[int, ...]:
        """Return the shape of the stored tensor."""
        raise NotImplementedError

    def encode(self, rows: Tensor) -> Tensor:
        """Return the stored values, in float64, for rows of any length."""
        raise NotImplementedError

    def decode(self, stored: Tensor, r: Tensor | None, natural: bool, dtype: Type) -> Tensor:
        """Return the unit rows, or weight rows r u."""
        raise NotImplementedError

    def theta(self, stored: Tensor) -> Tensor:
        """Return the papers' angles (out, n - 1)."""
        latitude = sphere.to_latitude(self.decode(stored, None, False, None))
        return (math.pi / 2 - latitude).to(stored.dtype)

    def metric(self, stored: Tensor) -> Tensor:
        """Return the metric's diagonal: a small step e turns a unit by sqrt(sum_k m_k e_k^2)."""
        return torch.ones_like(stored)

    def retract_(self, stored: Tensor) -> None:
        """Bring directions back onto the sphere after a step."""


class Angles(Coordinates):
    """The papers' hyperspherical coordinates, as `latitude` (out, n - 1) = pi/2 - theta."""

    name = "latitude"
    has_metric = True

    def shape(self, out: int, n: int) -> tuple[int, ...]:
        return (out, n - 1)

    def encode(self, rows: Tensor) -> Tensor:
        return sphere.to_latitude(rows)

    def decode(self, stored: Tensor, r: Tensor | None, natural: bool, dtype: Type) -> Tensor:
        return functional.weight(stored, r, natural=natural, dtype=dtype)

    def theta(self, stored: Tensor) -> Tensor:
        return math.pi / 2 - stored

    def metric(self, stored: Tensor) -> Tensor:
        return sphere.metric(stored)


class Intrinsic(Coordinates):
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
        if functional.can_use_function(d, r):
            rows = _Rows.apply(d, r)
        else:
            rows = d * _divide(None if r is None else r.unsqueeze(-1), _length(d))
        return rows.to(dtype or functional.result_type(stored, r))

    def retract_(self, stored: Tensor) -> None:
        """Divide the rows by their lengths, in place; zero rows stay zero."""
        stored.div_(_length(stored))


class _Rows(torch.autograd.Function):
    """r d / ||d|| with a backward pass in a third of the calls of autograd's."""

    @staticmethod
    def forward(ctx: Any, d: Tensor, r: Tensor | None) -> Tensor:
        length = _length(d)
        column = None if r is None else r.unsqueeze(-1)
        ctx.save_for_backward(d, r, column, length)
        return d * _divide(column, length)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return (r / ||d||) (g - u u^T g) and u^T g."""
        d, r, column, length = ctx.saved_tensors
        if torch.is_grad_enabled():  # second derivatives need its graph
            length = _length(d)
            column = None if r is None else r.unsqueeze(-1)
        elif _has_kernel(grad, d, r):
            # torch's weight_norm is the same map, and its kernel the same formula.
            grad_d, grad_r = torch.ops.aten._weight_norm_interface_backward.default(
                grad.contiguous(), d.contiguous(), column.contiguous(), length, 0
            )
            return grad_d, grad_r.squeeze(-1)

        u = d / length
        along = (grad * u).sum(-1, keepdim=True)
        tangent = torch.addcmul(grad, u, along, value=-1)
        return tangent * _divide(column, length), None if r is None else along.squeeze(-1)


def _has_kernel(grad: Tensor, d: Tensor, r: Tensor | None) -> bool:
    """Return whether torch's kernel serves these devices and types."""
    if r is None or not grad.dtype == d.dtype == r.dtype:
        return False
    return d.device.type in ("cpu", "cuda") and functional.can_use_function(grad)


def _divide(column: Tensor | None, length: Tensor) -> Tensor:
    """Return r / ||d|| as a column, or 1 / ||d|| without r."""
    return length.reciprocal() if column is None else column / length


class Sign(Coordinates):
    """One input: there is no angle, only a `sign` (out,), drawn once and not learned."""

    name = "sign"
    is_learned = False

    def shape(self, out: int, n: int) -> tuple[int, ...]:
        return (out,)

    def encode(self, rows: Tensor) -> Tensor:
        return torch.where(rows.squeeze(-1) < 0, -1, 1)

    def decode(self, stored: Tensor, r: Tensor | None, natural: bool, dtype: Type) -> Tensor:
        signed = stored if r is None else stored * r
        rows = signed.unsqueeze(-1)
        return rows if dtype is None else rows.to(dtype)


_SYSTEMS: dict[str, Coordinates] = {"angles": Angles(), "intrinsic": Intrinsic()}


def coordinates_for(name: str, fan_in: int, natural: bool = False) -> Coordinates:
    """Return the coordinates called `name` for units with `fan_in` inputs."""
    if name not in tuple(_SYSTEMS):
        raise ValueError(f"coordinates are 'angles' or 'intrinsic'; got {name!r}.")
    if natural and not _SYSTEMS[name].has_metric:
        raise ValueError(
            "natural=True corrects the gradient of angles; intrinsic coordinates need no "
            "correction. Use coordinates='angles' or natural=False."
        )
    return Sign() if fan_in == 1 else _SYSTEMS[name]


def _length(rows: Tensor) -> Tensor:
    """Return the lengths (..., 1) of rows in float32 or better, and never 0."""
    dtype = None if rows.dtype == torch.float64 else torch.float32
    # In float32 a sum of 300,000 squares loses 2e-6 (CPU).
    is_long = rows.shape[-1] > 1 << 16
    sum_type = sphere.wide_type(rows.device) if is_long else dtype
    length = torch.linalg.vector_norm(rows, dim=-1, keepdim=True, dtype=sum_type)
    return length.to(dtype or length.dtype).clamp(min=_SHORTEST)


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
    """Return lam = b / r in float64; raise if `dtype`, in which it is stored, cannot hold it."""
    check_finite(bias, "bias")
    b = sphere.wide(bias.detach())
    without_direction = (r == 0) & (b != 0)
    if without_direction.any():
        rows = without_direction.nonzero().flatten().tolist()
        raise ValueError(
            f"rows {rows[:8]} have a zero weight and a bias: such a unit has no boundary, "
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
    """Raise if a tensor, called `name` in the error, holds NaN or infinity."""
    if not x.isfinite().all():
        raise ValueError(
            f"the {name} holds NaN or infinite values, which have no direction; got "
            f"{int((~x.isfinite()).sum())} of them. Repair or reinitialise the layer first."
        )


def check_assigned(name: str, value: Any, shape: tuple[int, ...]) -> None:
    """Raise if a weight or bias, called `name` in the error, cannot be one of this shape."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.is_meta:
        kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"the {name} is a tensor of floating-point values; got {kind}.")
    if tuple(value.shape) != shape:
        raise ValueError(f"the {name} has shape {shape}; got {tuple(value.shape)}.")
