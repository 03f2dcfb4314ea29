"""Quantiles of many short stretches of one long vector, without waiting for the device."""

from collections.abc import Sequence

import torch
from torch import Tensor


class Quantiles:
    """Quantiles of each layer's units, for values of all units in one vector.

    Layers of similar size, up to a factor of two, are sorted together as the rows of one matrix.
    Values interpolate linearly, as numpy's do; NaN counts as missing, and all missing give NaN.

    Args:
        counts: The number of units of each layer, in the order of the vector.
        levels: Which quantiles, from 0 to 1.

    Example:
        >>> Quantiles([3, 2], (0.5, 1.0))(torch.tensor([[5., 1., 3., torch.nan, 7.]]))
        tensor([[[3., 5.],
                 [7., 7.]]])
    """

    def __init__(
        self,
        counts: Sequence[int],
        levels: Sequence[float],
        device: torch.device | str | None = None,
    ) -> None:
        self.total = sum(counts)
        self._levels = torch.tensor(levels, dtype=torch.float64, device=device)
        ends = torch.tensor([0, *counts]).cumsum(0).tolist()
        sizes: dict[int, list[int]] = {}
        for layer, count in enumerate(counts):
            sizes.setdefault(count.bit_length(), []).append(layer)
        order = [layer for layers in sizes.values() for layer in layers]
        self._back = torch.tensor(order).argsort().to(device)
        self._places = []
        for layers in sizes.values():
            places = torch.full((len(layers), max(counts[i] for i in layers)), self.total)
            for row, layer in enumerate(layers):
                places[row, : counts[layer]] = torch.arange(ends[layer], ends[layer + 1])
            self._places.append(places.to(device))

    def __call__(self, values: Tensor) -> Tensor:
        """Return the quantiles (Q, layers, levels) of values (Q, total)."""
        missing = values.new_full((len(values), 1), torch.nan)
        values = torch.cat([values, missing], dim=1)
        levels = self._levels.to(values.dtype)
        found = [_of_rows(values[:, places], levels) for places in self._places]
        return torch.cat(found, dim=1)[:, self._back]


def _of_rows(rows: Tensor, levels: Tensor) -> Tensor:
    """Return quantiles (..., levels) over the last dimension; NaN sorts behind all numbers."""
    ordered = rows.sort(dim=-1).values
    last = (~rows.isnan()).sum(dim=-1, keepdim=True) - 1
    place = levels * last.clamp(min=0)
    low, high = (ordered.gather(-1, p.long()) for p in (place.floor(), place.ceil()))
    between = torch.lerp(low, high, place - place.floor())
    return torch.where(low == high, low, between)  # infinity has no way to itself
