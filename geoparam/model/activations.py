"""The one table of activations, with their breakpoints: where a unit has a boundary.

ReLU and its relatives have one; ReLU6, Hardtanh, Hardswish and SReLU have two. Smooth activations
(GELU, SiLU, tanh) have none, and the papers leave them open: their units have directions only.

To teach the library a new activation, add its function's name to `ACTIVATIONS`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from geoparam.model.graph import Node
from geoparam.norm import along_channels

Activation = nn.Module | Callable[[Tensor], Tensor] | Node


class SReLU(nn.Module):
    r"""The S-shaped rectified linear unit: the identity between two breakpoints, bent outside.

    z + (a_l - 1) min(z - t_l, 0) + (a_r - 1) max(z - t_r, 0), with breakpoints t_l <= t_r
    (`lower`, `upper`) and slopes a_l, a_r beyond them (`lower_slope`, `upper_slope`), all of them
    learned, one for each channel or one for all. It starts as a leaky ReLU.

    Args:
        num_parameters: Number of channels, or 1 to share.
        dim: The channels' dimension.

    Reference:
        Jin et al., *Deep Learning with S-shaped Rectified Linear Activation Units*, AAAI 2016.

    Example:
        >>> SReLU(upper_slope=0.5)(torch.tensor([[-1., 0.5, 3.]]))
        tensor([[-0.2000,  0.5000,  2.0000]], grad_fn=<AddBackward0>)
    """

    def __init__(
        self,
        num_parameters: int = 1,
        lower: float = 0.0,
        upper: float = 1.0,
        lower_slope: float = 0.2,
        upper_slope: float = 1.0,
        dim: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not lower <= upper:
            raise ValueError(f"the breakpoints need lower <= upper; got {lower} and {upper}.")
        self.dim = dim

        def fill(value: float) -> nn.Parameter:
            return nn.Parameter(torch.full((num_parameters,), value, device=device, dtype=dtype))

        self.lower, self.upper = fill(lower), fill(upper)
        self.lower_slope, self.upper_slope = fill(lower_slope), fill(upper_slope)

    def breakpoints(self) -> tuple[Tensor, Tensor]:
        """Return t_l and t_r; where learning has crossed them, t_r is t_l."""
        return self.lower, torch.maximum(self.lower, self.upper)

    def forward(self, z: Tensor) -> Tensor:
        lower, upper = (along_channels(point, z, self.dim) for point in self.breakpoints())
        below = along_channels(self.lower_slope - 1, z, self.dim)
        above = along_channels(self.upper_slope - 1, z, self.dim)
        low_part = below * (z - lower).clamp(max=0)
        high_part = above * (z - upper).clamp(min=0)
        return z + (low_part + high_part).to(z.dtype)


@dataclass(frozen=True)
class Breaks:
    """An activation's breakpoints, in rising order, and where a unit counts as active."""

    points: tuple[float | Tensor, ...]  # numbers, or tensors with one number for each unit
    opens: bool = True  # whether a unit becomes active at the first point
    closes: bool = False  # whether it stops at the last one (ReLU6, Hardtanh)
    linear: bool = True  # whether the pieces are straight: the network is piecewise linear

    def above(self, z: Tensor, channel: int) -> Tensor:
        """Return whether pre-activations are above each point, (K, *z.shape)."""
        return torch.stack([z > along_channels(point, z, channel) for point in self.points])

    def active(self, z: Tensor, channel: int) -> Tensor:
        """Return where units are active, for pre-activations with channels in that dimension."""
        first = along_channels(self.points[0], z, channel)
        last = along_channels(self.points[-1], z, channel)
        if not self.opens:
            return z < last
        if not self.closes:
            return z > first
        return (z > first) & (z < last)

    def measure_shares(self, z: Tensor, channel: int) -> Tensor:
        """Return the share of points at which each unit is active, then above each breakpoint.

        NaN for a unit with a pre-activation that is NaN; (1 + K, units).
        """
        sides = (self.active(z, channel), *self.above(z, channel))
        shares = torch.stack([_share(side, channel) for side in sides])
        has_diverged = _share(z.isnan(), channel) > 0
        shares[:, has_diverged] = torch.nan
        return shares


def _share(sides: Tensor, channel: int) -> Tensor:
    """Return the share of points that are True; from counts, so that all of them are exactly 1."""
    channel %= sides.ndim  # a run that takes other steps may show another rank
    by_unit = sides.movedim(channel, 0).reshape(sides.shape[channel], -1)
    return by_unit.sum(dim=1).double() / by_unit.shape[1]


@dataclass(frozen=True)
class Limits:
    """An activation whose breakpoints are arguments: where a unit opens, and where it closes."""

    lower: str | None
    upper: str | None

    def read(self, activation: Activation) -> Breaks | None:
        """Return the breakpoints of a module, or of a call that a trace recorded."""
        values: dict[Any, Any] = {"min_val": -1.0, "max_val": 1.0}  # hardtanh's defaults
        if isinstance(activation, nn.Module):
            values |= vars(activation)
        elif isinstance(activation, Node):
            by_position = [name for name in (self.lower, self.upper) if name is not None]
            values |= zip(by_position, activation.args, strict=False)
            values |= activation.kwargs

        low, high = values.get(self.lower), values.get(self.upper)
        points = tuple(float(limit) for limit in (low, high) if limit is not None)
        if not points:
            return None
        return Breaks(points, opens=low is not None, closes=high is not None)


SMOOTH = (
    "gelu",
    "new_gelu",
    "quick_gelu",
    "fast_gelu",
    "gelu_tanh",
    "silu",
    "swish",
    "mish",
    "glu",
    "sigmoid",
    "logsigmoid",
    "tanh",
    "tanhshrink",
    "softplus",
    "softsign",
    "sin",
)
ACTIVATIONS: dict[str, Breaks | Limits | None] = {  # by torch's name of the function
    "relu": Breaks((0.0,)),
    "leaky_relu": Breaks((0.0,)),
    "prelu": Breaks((0.0,)),
    "rrelu": Breaks((0.0,)),
    "elu": Breaks((0.0,), linear=False),
    "selu": Breaks((0.0,), linear=False),
    "celu": Breaks((0.0,), linear=False),
    "relu6": Breaks((0.0, 6.0), closes=True),
    "hardswish": Breaks((-3.0, 3.0), linear=False),
    "hardsigmoid": Breaks((-3.0, 3.0), closes=True),
    "hardtanh": Limits("min_val", "max_val"),
    "clamp": Limits("min", "max"),
    "clip": Limits("min", "max"),
    "clamp_min": Limits("min", None),
    "clamp_max": Limits(None, "max"),
    "threshold": Limits("threshold", None),
    "srelu": None,  # its breakpoints are learned: the class has them
    "softshrink": None,  # has breakpoints, which are not followed
    "hardshrink": None,
    **dict.fromkeys(SMOOTH),
}
BY_MODULE = {name.replace("_", ""): name for name in ACTIVATIONS}  # "leakyrelu": LeakyReLU


def breaks(activation: Activation | None) -> Breaks | None:
    """Return the breakpoints of an activation: a module, a function, or a step of a trace.

    None for a smooth activation, for one that is not known, and where there is none.

    Example:
        >>> breaks(nn.ReLU6()).points, breaks(torch.relu).points, breaks(nn.GELU())
        ((0.0, 6.0), (0.0,), None)
    """
    if activation is None:
        return None
    if isinstance(activation, SReLU):
        return Breaks(tuple(point.detach() for point in activation.breakpoints()))
    entry = ACTIVATIONS.get(_find_name(activation))
    return entry.read(activation) if isinstance(entry, Limits) else entry


def _find_name(activation: Activation) -> str:
    """Return the table's name: "leaky_relu" for LeakyReLU, F.leaky_relu and x.relu_."""
    if isinstance(activation, Node):
        return activation.op
    if isinstance(activation, nn.Module):
        kind = type(activation).__name__.lower()
        return BY_MODULE.get(kind, kind)
    return getattr(activation, "__name__", "").strip("_")
