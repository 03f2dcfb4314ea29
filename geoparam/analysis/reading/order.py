"""Where a layer's units are in what a later step of a trace is given.

A norm with as many features as a layer has units may still have others: positions, the units of
one head, or the same in another order. As for folding, the units' numbers are sent through the
views on the way.
"""

from dataclasses import replace

import torch
from torch import Tensor

from geoparam.graph import Call, Graph, _carry, _numbered
from geoparam.trace import OPS


def in_order(graph: Graph, call: Call, step: int, dim: int) -> bool:
    """Return whether what `step` is given has the layer's units in `dim`, in their order."""
    made, seen = graph.nodes[call.layer], graph.nodes[step]
    channel = len(made.shape) + (-1 if made.channel is None else made.channel)
    count = made.shape[channel]
    if not 0 <= dim < len(seen.shape) or seen.shape[dim] != count:
        return False
    if all(OPS.get(name) not in ("view", "average") for name in call.path):
        return dim == channel  # nothing moves dimensions
    units = _units_at(graph, call, step)
    if units is None or units.ndim != len(seen.shape) or units.shape[dim] != count:
        return False
    numbers = torch.arange(count, device="cpu").reshape(-1, *[1] * (units.ndim - dim - 1))
    return torch.equal(units, numbers.expand_as(units))


def has_all(graph: Graph, call: Call, step: int) -> bool:
    """Return whether `step` is given all units of the layer, wherever they are."""
    made = graph.nodes[call.layer]
    count = made.shape[-1 if made.channel is None else made.channel]
    units = _units_at(graph, call, step)
    return units is not None and units.unique().numel() == count


def _units_at(graph: Graph, call: Call, step: int) -> Tensor | None:
    """Return to which unit each number that `step` is given belongs; None if that is not seen."""
    with torch.device("cpu"):  # also where the model is made on "meta"
        units: Tensor | None = _numbered(graph.nodes[call.layer])
    here = graph.users[call.layer][0]
    while here != step and units is not None:
        node = graph.nodes[here]
        if node.kind in ("view", "average", "max"):
            units = _carry(replace(node, kind="average") if node.kind == "max" else node, units)
        elif node.shape != units.shape:
            units = None
        here = graph.users[here][0]
    return units
