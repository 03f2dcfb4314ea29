"""Max pools, which are piecewise linear: they return one input of each window.

Their regions end where another input wins. Of equal inputs the first in the window's order wins.
"""

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from geoparam.model.graph import Node


class MaxPool:
    """The windows of one step of a trace that is a max pool, or an adaptive one.

    A window is a product of ranges of positions, one for each pooled dimension. They are found by
    calling the step on images that are 1 at one position of a dimension and 0 elsewhere.
    """

    def __init__(self, node: Node) -> None:
        self.node = node
        self.dims = int(node.op[-2])  # max_pool2d
        self._range = lru_cache(maxsize=12)(self._find_range)

    def windows(self, x: Tensor) -> Tensor:
        """Return the inputs (..., *sizes) of every window, (..., *outputs, K).

        Where a window reaches outside, or is smaller than others, its first inputs are repeated.
        """
        lead = x.ndim - self.dims
        sizes = x.shape[lead:]
        for d in range(self.dims):
            dim = lead + 2 * d  # each dimension before has become two: outputs and places
            places = self._range(sizes, x.device, d)
            x = x.index_select(dim, places.flatten()).unflatten(dim, places.shape)
        of_places = [lead + 2 * d + 1 for d in range(self.dims)]
        last = list(range(-self.dims, 0))
        return x.movedim(of_places, last).flatten(-self.dims)

    def __call__(self, x: Tensor) -> Tensor:
        """Return which input of each window wins, as a bool for each place."""
        inputs = self.windows(x)
        places = torch.arange(inputs.shape[-1], device=x.device)
        return inputs.argmax(dim=-1, keepdim=True) == places

    def _find_range(self, sizes: torch.Size, device: torch.device, d: int) -> Tensor:
        """Return the places of each output in one dimension, (outputs, K)."""
        assert self.node.func is not None
        n = sizes[d]
        shape = [n if k == d else 1 for k in range(self.dims)]
        images = torch.eye(n, device="cpu").view(n, 1, *shape)
        images = images.expand(n, 1, *sizes).contiguous()
        pooled = self.node.func(images, *self.node.args, **self.node.kwargs)
        if isinstance(pooled, tuple):  # with return_indices
            pooled = pooled[0]
        along_d = pooled.movedim(2 + d, 1).flatten(2)[:, :, 0]
        is_inside = along_d.t() > 0.5  # (outputs, positions)
        size = int(is_inside.sum(dim=1).max())
        places = []
        for row in is_inside:
            inside = row.nonzero()[:, 0]
            missing = size - len(inside)
            places.append(F.pad(inside, (0, missing), value=int(inside[0])))
        return torch.stack(places).to(device)
