"""The steps of one run of a model, as `trace` records them, and questions about them.

`Graph.calls` says what follows a layer up to its activation.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

WEIGHTED = ("layer", "embedding")
Step = tuple[int, str, str | None]  # number, op and name of a node


@dataclass(frozen=True)
class Node:
    """One step of the run."""

    # layer, norm, activation, embedding, sum (of several results), scale (arithmetic with
    # constants), view, same (cast, clone, dropout), average, max, other; input, index (an input
    # of integers), output
    kind: str
    op: str  # the function's name, or the class's in small letters: relu, batchnorm2d
    name: str | None = None  # the module's, or that of the weight's owner
    inputs: tuple[int, ...] = ()  # the steps whose results it reads
    shape: torch.Size = field(default_factory=torch.Size)
    channel: int | None = None  # where a layer has its channels, from the end
    is_call: bool = False  # of a module; a function may use a module's weight too
    func: Callable | None = None  # a function's call without its tensor, if it takes just one
    args: tuple = ()
    kwargs: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Call:
    """What follows one call of a layer up to its activation, as numbers of steps.

    It goes on as long as each result is used just once.
    """

    layer: int
    norm: int | None  # before the activation and before any sum
    activation: int | None
    path: tuple[str, ...]  # the other steps on the way: "sum", "max_pool2d", "transpose", ...


class Graph:
    """The steps of one run, in their order."""

    def __init__(
        self,
        nodes: Sequence[Node],
        dropped: Iterable[int] = (),
        batch_norms: Iterable[str] = (),
    ) -> None:
        self.nodes = tuple(nodes)
        self.batch_norms = tuple(batch_norms)  # modules whose tensors F.batch_norm got
        self.dropped = frozenset(dropped)  # steps that dropout or its like changes in training
        self._calls: dict[str, list[int]] = {}
        users: list[dict[int, None]] = [{} for _ in nodes]  # a set in order
        for index, node in enumerate(nodes):
            for source in node.inputs:
                users[source][index] = None
            if node.name is not None:
                self._calls.setdefault(node.name, []).append(index)
        self.users = [tuple(readers) for readers in users]

    def steps(self, numbers: Iterable[int]) -> list[Step]:
        """Return number, op and name of steps; those after the end of the run are left out."""
        ran = [number for number in numbers if number < len(self.nodes)]
        return [(number, self.nodes[number].op, self.nodes[number].name) for number in ran]

    @cached_property
    def layers(self) -> tuple[str, ...]:
        """The layers that ran, in the order of their first calls."""
        return self._names(range(len(self.nodes)))

    @cached_property
    def first(self) -> tuple[str, ...]:
        """The layers that read floating-point inputs, and no other layer's result."""
        return self._ends(range(len(self.nodes)), [node.inputs for node in self.nodes], "input")

    @cached_property
    def outputs(self) -> tuple[str, ...]:
        """The layers whose results reach the model's output, and no other layer."""
        return self._ends(reversed(range(len(self.nodes))), self.users, "output")

    def find(self, name: str) -> Node | None:
        """Return the first step of a module; None where it did not run."""
        numbers = self._calls.get(name)
        return self.nodes[numbers[0]] if numbers else None

    def norm_after(self, layer: str) -> tuple[Node | None, bool]:
        """Return the norm that follows `layer` in all its calls, and whether it is exclusive.

        It is if it reads the bare output of this layer, channels in dim 1, and neither is used in
        another place: a BatchNorm there can be folded into the layer and removed.
        """
        norms = []
        for call in self.calls(layer):
            norms.append(None if call.norm is None else self.nodes[call.norm])
        is_same = len({norm and (norm.op, norm.name) for norm in norms}) == 1
        is_exclusive = all(self._is_exclusive(layer, norm) for norm in norms)
        return norms[0] if is_same else None, is_exclusive

    def calls(self, layer: str) -> list[Call]:
        """Return the calls of `layer`, each with the steps that follow it up to an activation."""
        calls = [i for i in self._calls.get(layer, ()) if self.nodes[i].kind == "layer"]
        if not calls:
            raise ValueError(f"no layer {layer!r} ran; these did: {', '.join(self.layers)}")
        return [self._call(index) for index in calls]

    def _names(self, indices: Iterable[int]) -> tuple[str, ...]:
        names: dict[str, None] = {}  # a set in order
        for index in indices:
            if self.nodes[index].kind == "layer":
                names[self.nodes[index].name or ""] = None
        return tuple(names)

    def _ends(
        self, order: Iterable[int], near: Sequence[tuple[int, ...]], end: str
    ) -> tuple[str, ...]:
        """Return the layers that reach `end` along `near` without another layer in between."""
        reaching: set[int] = set()
        behind_layers: set[int] = set()
        for index in order:
            if self.nodes[index].kind == end or not reaching.isdisjoint(near[index]):
                reaching.add(index)
            for neighbour in near[index]:
                if neighbour in behind_layers or self.nodes[neighbour].kind in WEIGHTED:
                    behind_layers.add(index)
        return self._names(sorted(reaching - behind_layers))

    def _call(self, layer: int) -> Call:
        norm: int | None = None
        path: list[str] = []
        here = layer
        while len(self.users[here]) == 1:
            here = self.users[here][0]
            node = self.nodes[here]
            if node.kind == "activation":
                return Call(layer, norm, here, tuple(path))
            if node.kind == "norm" and norm is None and "sum" not in path:
                norm = here
            elif node.kind == "sum":
                path.append("sum")
            elif node.kind in ("scale", "view", "same", "average", "max"):
                path.append(node.op)
            else:
                break
        return Call(layer, norm, None, tuple(path))

    def _is_exclusive(self, layer: str, norm: Node | None) -> bool:
        if norm is None or norm.name is None:
            return False
        calls = self._calls[layer]
        read_by_norm: list[int] = []
        for index in self._calls[norm.name]:
            read_by_norm += self.nodes[index].inputs
        if sorted(read_by_norm) != calls:
            return False

        for index in calls:
            node = self.nodes[index]
            has_channels_in_dim_1 = len(node.shape) + (node.channel or 0) == 1
            if len(self.users[index]) != 1 or not has_channels_in_dim_1:
                return False
        return True
