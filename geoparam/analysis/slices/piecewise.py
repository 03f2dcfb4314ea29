"""A piecewise linear network in a plane: its activations, and their inputs there.

The network must be affine between known breakpoints. `find_activations` refuses steps that are
not, by name; `explain_bend` names the place where only the values show a bend.
"""

import math
import warnings
from collections.abc import Mapping

import numpy as np
import torch
import torch.autograd.forward_ad as forward_mode
from torch import Tensor, nn

from geoparam.analysis.reading.activations import Activation, breaks
from geoparam.analysis.reading.layer_sites import Site, copy_in_float64
from geoparam.analysis.reading.norms import has_running
from geoparam.analysis.reading.probe import MaxPool, make_site, observe, read_activation
from geoparam.analysis.slices.plane import Plane
from geoparam.base_layer import GmPLayer
from geoparam.graph import Graph, Node
from geoparam.inspection import strip_wrappers, unwrap
from geoparam.trace import trace


class Network:
    """A copy of a model in float64, and its pre-activations at points of a plane.

    Attributes:
        graph: The steps of a run.
        sites: Every activation and max pool, one call each, in the order of the run.
        size: How many elements a run computes for one point.
    """

    def __init__(self, model: nn.Module, plane: Plane) -> None:
        self.model = copy_in_float64(unwrap(model)).cpu().eval()
        self.plane = plane
        # Two points: with one, `contiguous` and the like are no-ops that the trace does not see.
        self.graph = trace(self.model, plane.at(np.zeros((2, 2))))
        self.sites = find_activations(self.model, self.graph)
        self.size = sum(math.prod(node.shape) for node in self.graph.nodes) // 2

    def compute_jets(self, site: Site, points: np.ndarray) -> tuple[Tensor, Tensor]:
        """Return the pre-activations at points, (N, ...), and their slopes, (2, N, ...)."""
        x = self.plane.at(points)
        values: list[Tensor] = []
        slopes: list[Tensor] = []

        def see(_: Site, z: Tensor, __: int) -> None:
            value, slope = forward_mode.unpack_dual(z)
            values.append(value)
            slopes.append(torch.zeros_like(value) if slope is None else slope)

        for axis in self.plane.axes:
            with forward_mode.dual_level():
                with warnings.catch_warnings():  # torch warns at its own first use of forward mode
                    warnings.filterwarnings("ignore", r"`torch\.jit\.script` is deprecated")
                    dual = forward_mode.make_dual(x, axis.expand_as(x).clone())
                observe(self.model, dual, {site.name: site}, see)
        _check_values(site.name, values[0], len(points))
        return values[0], torch.stack(slopes)


def _check_values(name: str, z: Tensor, points: int) -> None:
    if len(z) != points:
        raise ValueError(
            f"examples must be in the first dimension of each pre-activation; {name!r} has "
            f"{len(z)} there for {points} examples."
        )
    if not z.isfinite().all():
        raise ValueError(f"the pre-activations of {name!r} are not finite in the window.")


def find_activations(model: nn.Module, graph: Graph) -> dict[str, Site]:
    """Return each call of an activation, by its layer's name, and of a max pool, by its own."""
    modules = dict(model.named_modules())
    layers = {c.activation: n for n in reversed(graph.layers) for c in graph.calls(n)}
    found: dict[str, Site] = {}
    for step, node in enumerate(graph.nodes):
        module = None if node.name is None else modules.get(node.name)
        layer = module if isinstance(module, GmPLayer) else None  # may apply its own activation
        activation = read_activation(node, modules) or (layer and layer.activation)
        _check_straight(node, step, module, activation)
        if activation is not None:
            name = _free_name(layers.get(step) or node.name or node.op, found)
            found[name] = make_site(name, activation, step, graph, layer)
    if not found:
        raise ValueError(
            "regions are made by activations with breakpoints, as ReLU; no step of the run is one."
        )
    return found


def _free_name(name: str, taken: Mapping[str, object]) -> str:
    name = strip_wrappers(name)
    again = (f"{name} ({number})" for number in range(2, len(taken) + 2))
    return next(each for each in (name, *again) if each not in taken)


def _check_straight(
    node: Node, step: int, module: nn.Module | None, activation: Activation | None
) -> None:
    """Refuse a step that is not affine between known breakpoints."""
    known = breaks(activation)
    bent = activation is not None and (known is None or not known.linear)
    smooth = bent and not isinstance(activation, MaxPool)
    rounded = node.op == "hardsigmoid"  # torch's slope is off by 3e-8, which leaves slivers
    norm = node.kind == "norm" and node.op != "batch_norm" and not has_running(module)
    if smooth or rounded or norm or (node.kind == "max" and activation is None):
        why = "whose slope torch rounds to float32" if rounded else "which is not"
        raise ValueError(
            "regions have straight sides where a network is affine between breakpoints that are "
            f"known; got {_describe(node, step)}, {why}. Take ReLU or a relative of it, "
            "BatchNorm, pooling; or give the part of the model before that step."
        )


def _describe(node: Node, step: int) -> str:
    return f"{node.op} {node.name!r}" if node.name else f"{node.op} (step {step})"


def explain_bend(graph: Graph, step: int) -> str:
    """Say that the input of a step is bent, and what may have bent it."""
    return (
        "regions have straight sides where a network is affine between breakpoints that are "
        f"known, in float64; the input of {_describe(graph.nodes[step], step)} is bent inside of "
        "a region. Give a model, or a part of one, without steps such as abs, maximum, products "
        "of two results or casts to narrower types."
    )
