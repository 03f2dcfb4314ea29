"""Max pools: which input of each window wins.

A max pool is piecewise linear: it returns one input of each window, and its regions end where
another input wins. Of equal inputs the first in the window's order wins.
"""

from collections.abc import Mapping
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from geoparam.analysis.reading.layer_sites import Site
from geoparam.conversion.plan import Inputs
from geoparam.graph import Call, Graph, Node
from geoparam.trace import trace


class MaxPool:
    """The windows of one step of a trace that is a max pool, or an adaptive one.

    A window is a product of ranges of positions, one for each pooled dimension. They are found by
    calling the step on images that are 1 at one position of a dimension and 0 elsewhere.
    """

    def __init__(self, node: Node) -> None:
        self.node = node
        self.dims = int(node.op[-2])  # max_pool2d
        self._ranges = lru_cache(maxsize=4)(self._find_ranges)

    def windows(self, x: Tensor) -> Tensor:
        """Return the inputs (..., *sizes) of every window, (..., *outputs, K).

        Where a window reaches outside, or is smaller than others, its first inputs are repeated.
        """
        lead = x.ndim - self.dims
        for d, places in enumerate(self._ranges(x.shape[lead:], x.device)):
            dim = lead + 2 * d  # each dimension before has become two: outputs and places
            x = x.index_select(dim, places.flatten()).unflatten(dim, places.shape)
        places_last = [lead + 2 * d + 1 for d in range(self.dims)]
        return x.movedim(places_last, list(range(-self.dims, 0))).flatten(-self.dims)

    def __call__(self, x: Tensor) -> Tensor:
        """Return which input of each window wins, as a bool for each place."""
        each = self.windows(x)
        return each.argmax(dim=-1, keepdim=True) == torch.arange(each.shape[-1], device=x.device)

    def _find_ranges(self, sizes: torch.Size, device: torch.device) -> list[Tensor]:
        """Return for each dimension the places of each output, (outputs, K)."""
        return [self._find_range(sizes, d).to(device) for d in range(self.dims)]

    def _find_range(self, sizes: torch.Size, d: int) -> Tensor:
        n, func = sizes[d], self.node.func
        assert func is not None
        shape = [n if k == d else 1 for k in range(self.dims)]
        probe = torch.eye(n, device="cpu").view(n, 1, *shape).expand(n, 1, *sizes).contiguous()
        pooled = func(probe, *self.node.args, **self.node.kwargs)
        inside = pooled.movedim(2 + d, 1).flatten(2)[:, :, 0].t() > 0.5  # of each output
        size, rows = int(inside.sum(dim=1).max()), [row.nonzero()[:, 0] for row in inside]
        return torch.stack([F.pad(row, (0, size - len(row)), value=int(row[0])) for row in rows])


def find_pools(model: nn.Module, inputs: Inputs, sites: Mapping[str, Site]) -> dict[str, Site]:
    """Run the model and return its max pools as sites, so that `observe` can read their inputs.

    A pool has the name of the layer before it; if there is none, that of its function. Pools after
    layers outside of `sites`, and calls that pass their input by keyword, are left out.
    """
    graph = trace(model, inputs)
    layers = {call.layer: site.name for site in sites.values() for call in site.calls}
    found = {}
    for step, node in enumerate(graph.nodes):
        if node.kind != "max" or node.func is None:
            continue
        before = _layer_before(graph, step)
        if before is None or before in layers:
            name = node.op if before is None else layers[before]
            calls = (Call(-1, None, step, ()),)
            found[f"{step} {name}"] = Site(
                name, nn.Identity(), activation=MaxPool(node), calls=calls, graph=graph
            )
    return found


def _layer_before(graph: Graph, step: int) -> int | None:
    """Return the nearest layer that a step's input comes from; of several, the last one."""
    todo = list(graph.nodes[step].inputs)
    while todo:
        here = max(todo)
        if graph.nodes[here].kind == "layer":
            return here
        todo.remove(here)
        todo += [source for source in graph.nodes[here].inputs if source not in todo]
    return None
