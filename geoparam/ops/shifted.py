"""A layer's weight and its bias, from which the input's mean is taken, as one step.

    w = r u(stored),     b = r lam - w^T E[x]

or, where r stays outside as an activation's scale, w = u and b = lam - w^T E[x]. The mean is given
as the sums `total` of `count` numbers per channel; it is the same at every tap of a unit, and each
group of units sees its own channels. On the way the running mean of batches makes its step.

Here is the specification, composed of `implementation`, `intrinsic` and `columns`; on GPUs
`shifted_triton` computes the same with one launch forward and two backward.
"""

import functools
import importlib
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from geoparam import ops
from geoparam.ops import columns, implementation, intrinsic


class How(NamedTuple):
    """How weight and bias are made.

    Attributes:
        coordinates: What is stored: "latitude", angles, or "unit", vectors.
        natural: Divide the latitudes' gradient by the sphere's metric.
        dtype: Of the weight and the bias.
        shape: Of a row: the channels of a group, and the kernel.
        channels_last: Whether the weight lies in this order.
        inside: Whether r is part of weight and bias.
        numbers: How many per channel are in `total`.
        momentum: Share of the new batch in the running mean.
    """

    coordinates: str
    natural: bool
    dtype: torch.dtype
    shape: tuple[int, ...]
    channels_last: bool
    inside: bool
    numbers: int
    momentum: float


def forward(
    stored: Tensor,
    r: Tensor,
    lam: Tensor | None,
    total: Tensor,
    running: tuple[Tensor, Tensor] | None,
    how: How,
) -> tuple[Tensor, Tensor]:
    """Return weight and bias; `running`, mean and number of batches, makes its step.

    Example:
        >>> how = How("unit", False, torch.float32, (2,), False, True, 10, 0.1)
        >>> d, r, lam = torch.tensor([[3., 4.]]), torch.tensor([5.]), torch.tensor([1.])
        >>> forward(d, r, lam, torch.tensor([10., 0.]), None, how)
        (tensor([[3., 4.]]), tensor([2.]))
    """
    if implementation.uses_triton(stored):
        return kernels().forward(stored, r, lam, total, running, how)
    scale = r if how.inside else None
    w = weight_of(stored, scale, how)
    return w, columns.shifted_bias(w, scale, lam, total, how.numbers, running, how.momentum)


def backward(
    grad_weight: Tensor,
    grad_bias: Tensor,
    stored: Tensor,
    r: Tensor,
    lam: Tensor | None,
    total: Tensor,
    weight: Tensor,
    how: How,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """Return the gradients of stored, r (None if it is outside), lam and total.

    `grad_bias` is (units,), or parts (parts, units) of it that are still to be added up.
    """
    if implementation.uses_triton(stored):
        return kernels().backward(grad_weight, grad_bias, stored, r, lam, total, weight, how)
    scale = r if how.inside else None
    grad_bias = grad_bias if grad_bias.ndim == 1 else grad_bias.sum(0)
    grad, by_bias, grad_lam, grad_total = columns.shifted_bias_backward(
        grad_bias, weight, grad_weight, scale, lam, total, how.numbers
    )
    grad_stored, by_weight = gradients_of(grad, stored, scale, how)
    grad_r = by_weight if by_bias is None else by_weight + by_bias
    return (
        grad_stored,
        grad_r.to(r.dtype) if how.inside else None,
        None if grad_lam is None or lam is None else grad_lam.to(lam.dtype),
        grad_total,
    )


def weight_of(stored: Tensor, r: Tensor | None, how: How) -> Tensor:
    """Return the weight alone."""
    module = implementation if how.coordinates == "latitude" else intrinsic
    return module.forward(stored, r, how.dtype, how.shape, how.channels_last)


def readable_weight(stored: Tensor, r: Tensor | None, how: How) -> Tensor:
    """Return the weight alone by an operation that can be differentiated, twice too."""
    made: dict[str, Any] = {"dtype": how.dtype, "shape": how.shape}
    made |= {"channels_last": how.channels_last}
    if how.coordinates == "latitude":
        return ops.weight(stored, r, natural=how.natural, **made)
    return intrinsic.weight(stored, r, **made)


def gradients_of(
    grad: Tensor, stored: Tensor, r: Tensor | None, how: How
) -> tuple[Tensor, Tensor]:
    """Return the gradients of stored and r for that of the weight alone."""
    if how.coordinates == "latitude":
        return implementation.backward(grad, stored, r, how.natural)
    return intrinsic.backward(grad, stored, r)


@functools.cache
def kernels() -> ModuleType:
    """Return the module of Triton kernels."""
    return importlib.import_module("geoparam.ops.shifted_triton")  # needs Triton
