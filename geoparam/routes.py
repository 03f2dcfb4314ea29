"""How a convolution is taken in few passes, for inputs and parameters of one kind.

To find that out takes longer than to launch a kernel, and in training the same is found over and
over. So it is a function of shapes, types and options alone, and remembered.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx import Proxy

from geoparam.ops import implementation
from geoparam.ops.shifted import How


class Geometry(NamedTuple):
    """Where a convolution looks."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


class Means(NamedTuple):
    """The mean of the input, which is subtracted: of how many numbers, and what it moves."""

    numbers: int
    momentum: float | None
    is_own: bool  # the batch's own, tracked, and of this process alone


class Route(NamedTuple):
    """How a convolution is applied.

    Attributes:
        relu: Whether the layer has a ReLU of its own: then r is outside of it, as a scale, and
            the result's sums are gathered.
        how: How weight and bias are made of what is stored; if that is the weight already, only
            the bias is.
        stores_weight: Whether it is.
        is_product: Whether it is a product of matrices, to which a bias costs nothing.
        has_epilogue: Whether cuDNN applies bias and ReLU in the convolution's own kernel.
    """

    geometry: Geometry
    relu: bool
    how: How
    stores_weight: bool
    is_product: bool
    has_epilogue: bool

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        stride, padding, dilation, groups = self.geometry
        none = (0,) * len(stride)
        return torch.convolution(x, weight, bias, stride, padding, dilation, False, none, groups)


@functools.lru_cache(maxsize=4096)
def route(
    size: torch.Size,
    strides: tuple[int, ...],
    dtype: torch.dtype,
    is_cuda: bool,
    weight_shape: tuple[int, ...],
    geometry: Geometry | None,
    relu: bool,
    coordinates: str | None,
    natural: bool,
    types: tuple[torch.dtype, ...],
    has_bias: bool,
    means: Means | None,
) -> Route | None:
    """Return the route for an input of this kind; None if there is none.

    Args:
        size, strides, dtype, is_cuda: of the input.
        geometry: None if it pads unevenly.
        coordinates: what the weight is made of; None if it is given.
        types: of the parameters; none if autocast gives them another.
        means: None if no mean is subtracted.
    """
    units, width, *kernel = weight_shape
    if (
        geometry is None
        or len(size) != len(kernel) + 2
        or size[1] != width * geometry.groups
        or not all(one == dtype for one in types)
        or not (relu or has_bias or means)
        or not (means is None or (means.is_own and means.momentum is not None))
    ):
        return None
    like = torch.empty_strided(size, strides, dtype=dtype, device="meta")
    last = like.ndim == 4 and like.is_contiguous(memory_format=torch.channels_last)
    how = How(
        coordinates or "",
        natural,
        dtype,
        tuple(weight_shape[1:]),
        is_cuda and last and not like.is_contiguous(),
        not relu,
        1 if means is None else means.numbers,
        0.0 if means is None or means.momentum is None else means.momentum,
    )
    pointwise = all(k == 1 for k in kernel) and geometry[:3] == ((1, 1), (0, 0), (1, 1))
    return Route(
        geometry,
        relu,
        how,
        coordinates is None,
        last and pointwise and geometry.groups == 1,
        last and is_cuda and geometry.groups == 1 and _has_epilogue(dtype, units, width),
    )


def _has_epilogue(dtype: torch.dtype, units: int, width: int) -> bool:
    half = dtype in (torch.bfloat16, torch.float16)
    return half and units % 8 == 0 and width % 8 == 0 and torch.version.hip is None


def makes_weight(coordinates: str, x: Tensor) -> bool:
    """Return whether a weight can be made as a part of the convolution's step."""
    return coordinates == "latitude" or (coordinates == "unit" and implementation.uses_triton(x))


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return the type autocast would give a weight, so that it can be made in it directly."""
    if isinstance(x, Proxy) or x.dtype == torch.float64:
        return None
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def is_channels_last(x: Tensor) -> bool:
    """Return whether cuDNN would want the weight for this input in the same order."""
    if isinstance(x, Proxy) or x.ndim != 4 or not x.is_cuda:
        return False
    return x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
