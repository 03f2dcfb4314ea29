"""Breakpoints of activations: the pre-activations at which a unit has a boundary.

ReLU and its relatives have one; ReLU6, Hardtanh, Hardswish and SReLU have two. Smooth activations
(GELU, SiLU, tanh) have none, and the papers leave them open: their units have directions only.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from geoparam.graph import Node

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
        parameters = (*self.breakpoints(), self.lower_slope - 1, self.upper_slope - 1)
        lower, upper, below, above = (_along_channels(t, z, self.dim) for t in parameters)
        bent = below * (z - lower).clamp(max=0) + above * (z - upper).clamp(min=0)
        return z + bent.to(z.dtype)


def _along_channels(value: Any, z: Tensor, dim: int) -> Any:
    """Return a number, or a vector over the channels in `dim`, so that it broadcasts with z."""
    if not isinstance(value, Tensor):
        return value
    if value.numel() == 1:
        return value.view([1] * z.ndim)
    return value.view(-1, *[1] * (z.ndim - 1 - dim % z.ndim))


@dataclass(frozen=True)
class Breaks:
    """An activation's breakpoints, in rising order, and where a unit counts as active."""

    points: tuple[float | Tensor, ...]  # numbers, or tensors with one number for each unit
    opens: bool = True  # whether a unit becomes active at the first point
    closes: bool = False  # whether it stops at the last one (ReLU6, Hardtanh)
    linear: bool = True  # whether the pieces are straight: the network is piecewise linear

    def active(self, z: Tensor, channel: int) -> Tensor:
        """Return where units are active, for pre-activations with channels in that dimension."""
        first, last = (_along_channels(p, z, channel) for p in (self.points[0], self.points[-1]))
        if self.opens and self.closes:
            return (z > first) & (z < last)
        return z > first if self.opens else z < last

    def above(self, z: Tensor, channel: int) -> Tensor:
        """Return whether pre-activations lie above each point, with a new first dimension."""
        return torch.stack([z > _along_channels(point, z, channel) for point in self.points])


FIXED = {
    **dict.fromkeys(("relu", "leaky_relu", "prelu", "rrelu"), Breaks((0.0,))),
    **dict.fromkeys(("elu", "selu", "celu"), Breaks((0.0,), linear=False)),
    "relu6": Breaks((0.0, 6.0), closes=True),
    "hardswish": Breaks((-3.0, 3.0), linear=False),
    "hardsigmoid": Breaks((-3.0, 3.0), closes=True),
}


def breaks(activation: Activation | None) -> Breaks | None:
    """Return the breakpoints of an activation: a module, a function, or a step of a trace.

    None for a smooth activation, for one that is not known, and where there is none.

    Example:
        >>> breaks(nn.ReLU6()).points, breaks(torch.relu).points, breaks(nn.GELU())
        ((0.0, 6.0), (0.0,), None)
    """
    if activation is None:
        return None
    name = _name(activation)
    if isinstance(activation, SReLU):
        return Breaks(tuple(point.detach() for point in activation.breakpoints()))
    if name in ("hardtanh", "clamp", "clamp_min", "clamp_max", "clip", "threshold"):
        return _limits(activation, name)
    return FIXED.get(name)


def _name(activation: Activation) -> str:
    """Return torch's name of the function: "leaky_relu" for LeakyReLU, F.leaky_relu, x.relu_."""
    if isinstance(activation, Node):
        return activation.op
    if isinstance(activation, nn.Module):
        short = type(activation).__name__.lower()
        return {"leakyrelu": "leaky_relu"}.get(short, short)
    return getattr(activation, "__name__", "").strip("_")


def _limits(activation: Activation, name: str) -> Breaks | None:
    """Return the breakpoints of an activation that has them as arguments."""
    single = {"threshold": ("threshold",), "clamp_max": ("max",)}
    by_place = {**single, "hardtanh": ("min_val", "max_val")}.get(name, ("min", "max"))
    given: dict[str, Any] = {"min_val": -1.0, "max_val": 1.0}
    if isinstance(activation, nn.Module):
        given |= vars(activation)
    elif isinstance(activation, Node):
        given |= dict(zip(by_place, activation.args, strict=False)) | activation.kwargs
    limits = [given.get(each) for each in by_place]
    points = tuple(float(limit) for limit in limits if limit is not None)
    closes = name != "threshold" and limits[-1] is not None
    opens = name != "clamp_max" and limits[0] is not None
    return Breaks(points, opens, closes) if points else None
