"""What torch.compile finds of a layer that trains on a GPU.

A compiler fuses what it sees, but not everything: it takes a mean in a pass of its own, makes a
weight, its bias and their gradients in a dozen small kernels, and adds up gradients in passes that
follow one another. Ops of our own stand for these, and leave kernels in its graph (`shifted_op`,
`means`, `rectified`). The function is that of `unit`, equal to rounding.
"""

from typing import Any

import torch
from torch import Tensor

from geoparam import fused
from geoparam.ops import means, rectified, shifted_op, stem
from geoparam.routes import autocast_dtype, is_channels_last


def forward(layer: Any, x: Tensor) -> Tensor | None:
    """Return what a layer computes, or None where a compiler does as well without our ops."""
    norm, activation = layer.input_norm, layer.activation
    if norm is not None and not layer.mean_in_bias and layer._pads_zeros:
        return None
    made_at_once = norm is not None and _is_made_at_once(layer)
    rectified_at_once = _is_rectified_at_once(layer, x)
    if not (made_at_once or rectified_at_once or _adds_its_bias_apart(layer, x)):
        return None
    parts = _parts_of_bias(layer, x) if made_at_once and activation is None else 0
    if made_at_once:
        weight, bias = _parameters_at_once(layer, x, parts)
    else:
        mean = None if norm is None else norm.mean(x)
        weight, bias = layer._map_parameters(autocast_dtype(x), mean, is_channels_last(x))
    if parts:
        return rectified.added(layer._map(x, weight, None), bias)
    if rectified_at_once:
        bias = layer.bias if norm is None else bias  # as it is: it rounds nothing
        return _rectified(layer, x, weight, bias)
    if bias is None or not _adds_its_bias_apart(layer, x):
        z = layer._map(x, weight, bias)
    else:
        z = layer._map(x, weight, None) + layer._per_channel(bias)
    return z if activation is None else layer._activated(z)


def _rectified(layer: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return r relu(z + b) by one op, with the convolution in it where x is images."""
    geometry = layer._geometry() if layer.padding_mode == "zeros" else None
    images = x.to(autocast_dtype(x) or x.dtype)
    if geometry is not None and stem.possible(images, weight, geometry.groups):
        return stem.convolved(images, weight, bias, layer.r, *geometry[:3])
    return rectified.rectified(layer._map(x, weight, None), bias, layer.r)


def _is_made_at_once(layer: Any) -> bool:
    """Return whether weight and bias, with the mean in it, are one op."""
    return layer._coordinates.name != "sign" and shifted_op.wanted(layer._stored)


def _is_rectified_at_once(layer: Any, x: Tensor) -> bool:
    """Return whether r relu(z + b) is one op, whose gradients are made in one pass."""
    if layer.activation is None or len(layer.weight_shape) != 4:
        return False
    return rectified.possible(x) and fused.is_relu(layer.activation)


def _adds_its_bias_apart(layer: Any, x: Tensor) -> bool:
    """Return whether the bias is better outside of the convolution.

    The backward pass of an activation needs its input. As a convolution's result that would be
    written once without the bias and once with it; added apart, the sum is computed again.
    """
    return layer.activation is not None and x.is_cuda and len(layer.weight_shape) > 2


def _parts_of_bias(layer: Any, x: Tensor) -> int:
    """Return how often the bias is given, so that its gradient comes in as many parts; 0: once.

    The parts are gathered in the pass that makes the gradient.
    """
    if len(layer.weight_shape) != 4 or x.ndim != 4:
        return 0
    return means.number_of_parts(x, layer.weight_shape[0], _positions(layer, x))


def _positions(layer: Any, x: Tensor) -> int:
    """Return how many positions the result of a convolution has."""
    left, right, top, bottom = layer._pads
    geometry = layer.kernel_size, layer._each(layer.dilation), layer._each(layer.stride)
    padded = x.shape[2] + top + bottom, x.shape[3] + left + right
    height, width = (
        (size - dilation * (kernel - 1) - 1) // stride + 1
        for size, kernel, dilation, stride in zip(padded, *geometry, strict=True)
    )
    return height * width


def _parameters_at_once(layer: Any, x: Tensor, parts: int) -> tuple[Tensor, Tensor]:
    """Return weight and bias, less what the mean contributes, by one op."""
    stored, r, cast = layer._stored, layer.r, autocast_dtype(x)
    mean, batches = layer.input_norm.mean_and_batches(x)
    return shifted_op.weight_and_bias(
        stored,
        r,
        layer.lam,
        mean,
        batches,
        coordinates=layer._coordinates.name,
        natural=layer.natural,
        inside=layer.activation is None,
        dtype=cast or torch.promote_types(stored.dtype, r.dtype),
        shape=layer.weight_shape[1:],
        channels_last=is_channels_last(x),
        parts=parts,
    )
