"""The inputs of a stack in the shapes that it works with: data, and one value per member."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray
Data = tuple[Array | Tensor, Array | Tensor]


def expand_data(data: Data, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return inputs (S, N, d) and targets (S, N, ...) on the device of the members' state.

    Example:
        >>> x, y = expand_data((np.zeros((20, 3)), np.zeros(20)), state=torch.zeros(5, 8))
        >>> x.shape, y.shape
        (torch.Size([5, 20, 3]), torch.Size([5, 20]))
    """
    x, y = (torch.as_tensor(part) for part in data)
    if y.is_floating_point():
        y = y.to(state.dtype)
    x, y = x.to(state), y.to(state.device)
    if x.ndim == 2:
        x, y = (part.expand(len(state), *part.shape) for part in (x, y))
    if x.ndim != 3 or len(x) != len(state) or x.shape[:2] != y.shape[:2]:
        raise ValueError(
            f"inputs are (N, d) and targets (N, ...), or both with {len(state)} members first; "
            f"got shapes {tuple(data[0].shape)} and {tuple(data[1].shape)}."
        )
    return x, y


def select_members(data: tuple[Tensor, Tensor], index: Array) -> tuple[Tensor, Tensor]:
    """Return the data of some members, without a copy of what is shared."""
    x, y = (part[: len(index)] if part.stride(0) == 0 else part[index] for part in data)
    return x, y


def expand_values(values: float | Sequence[float], size: int, name: str) -> Array:
    """Return one value for each of `size` members."""
    array = np.asarray(values)
    if array.ndim == 0:
        array = np.full(size, values)
    if array.shape != (size,):
        raise ValueError(f"{name} needs one value for each of {size} models; got {len(array)}.")
    return array
