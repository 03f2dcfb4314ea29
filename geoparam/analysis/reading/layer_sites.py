"""Where the units of a model are: its layers, and the norm and activation that follow each.

They are found in one run of the model, as conversion finds them.
"""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from geoparam.analysis.reading.activations import Activation, Breaks, SReLU, breaks
from geoparam.analysis.reading.norms import UnknownNorm, find_feature_dim
from geoparam.base_layer import GmPLayer
from geoparam.conversion.plan import Inputs, kind_of, module_name, weight_name
from geoparam.graph import Call, Graph
from geoparam.input_mean_layers import InputMeanLayer
from geoparam.inspection import is_conv1d, strip_wrappers, unwrap
from geoparam.trace import OPS, Filter, trace

Layers = Iterable[str] | Filter | None

INSIDE_ATTENTION = (nn.MultiheadAttention, nn.modules.linear.NonDynamicallyQuantizableLinear)


@dataclass(frozen=True)
class Site:
    """A layer and what follows it.

    If something between layer and activation is not understood, `norm` is an `UnknownNorm`, and
    distances are NaN. `F.linear(x, layer.weight)` is no call of the layer. The numbers of steps
    hold for another run only if it takes the same steps.
    """

    name: str  # without the additions of torch.compile
    layer: nn.Module  # nn.MultiheadAttention stands for its input projection
    norm: nn.Module | None = None
    activation: Activation | None = None  # a module, a function or a step of the trace
    channel: int = -1  # the units' dimension in the layer's output, from the end
    calls: tuple[Call, ...] = ()
    readable: bool = True  # the activation's input has the units where the layer's output has
    graph: Graph | None = None  # of the run in which it was found

    @property
    def breaks(self) -> Breaks | None:
        """The breakpoints as they are now (those of SReLU are learned); None if it is smooth."""
        return breaks(self.activation)

    @property
    def own_activation(self) -> bool:
        """Whether the layer applies its activation itself, with r outside."""
        return isinstance(self.layer, GmPLayer) and self.layer.activation is not None


def find_sites(
    model: nn.Module,
    inputs: Inputs | None = None,
    layers: Layers = None,
    kwargs: Mapping[str, Any] | None = None,
) -> dict[str, Site]:
    """Return every layer with units, in the order of their calls, and what follows it.

    Args:
        inputs: A small batch as the model takes it, with `kwargs`; None for no trace.
        layers: Names of the layers, or a function of module and name; all by default.
    """
    model = unwrap(model)
    modules = dict(model.named_modules())
    graph = None if inputs is None else trace(model, inputs, kwargs)
    ran = () if graph is None else graph.layers
    all_names = (weight_name(name, module) for name, module in modules.items())
    found: dict[str, Site] = {}
    for name in dict.fromkeys((*ran, *all_names)):  # a layer that did not run has directions too
        module = modules.get(module_name(name, modules))
        if module is not None and has_units(module, name):
            public = strip_wrappers(name)
            channel = -1 - len(getattr(module, "kernel_size", ()))
            site = Site(public, module, channel=channel, graph=graph)
            if graph is not None and name in ran:
                site = _follow(site, graph, name, modules)
            if site.own_activation:  # nothing is between the two
                site = replace(site, norm=None, activation=module.activation, readable=True)
            found[site.name] = site
    return _choose(found, layers)


def took_same_steps(sites: Iterable[Site], graph: Graph) -> bool:
    """Return whether a run took the steps in which the sites were found."""

    def describe(site: Site, run: Graph | None) -> list[tuple[str, str | None]]:
        calls = ((call.layer, call.norm, call.activation) for call in site.calls)
        steps = [step for call in calls for step in call if step is not None]
        nodes = () if run is None else run.nodes
        return [(nodes[step].op, nodes[step].name) for step in steps if step < len(nodes)]

    return all(describe(site, graph) == describe(site, site.graph) for site in sites)


def copy_in_float64(module: nn.Module) -> nn.Module:
    """Return a copy of a module that no gradient reaches."""
    # torch's older weight_norm leaves computed weights on modules, and these cannot be copied.
    computed = {
        id(value): value.detach().clone()
        for part in module.modules()
        for value in vars(part).values()
        if isinstance(value, Tensor) and not value.is_leaf
    }
    return copy.deepcopy(module, computed).double().requires_grad_(False)


def has_units(module: nn.Module, name: str = "") -> bool:
    """Return whether a module is a layer whose weight has one row, or column, for each unit.

    A subclass of torch's layers only if it computes what they do, as for conversion.
    """
    if isinstance(module, nn.MultiheadAttention):
        return name.endswith("in_proj_weight") and module.in_proj_weight is not None
    known = kind_of(module) in ("linear", "conv", "transposed")
    return (known or isinstance(module, GmPLayer | InputMeanLayer)) and count_units(module) > 0


def count_units(layer: Any) -> int:
    """Return how many units a layer has."""
    if isinstance(layer, nn.MultiheadAttention):
        return 3 * layer.embed_dim
    if isinstance(layer, GmPLayer):
        return layer.weight_shape[0]
    if is_conv1d(layer):
        return layer.nf
    return layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels


def has_positions(layer: nn.Module) -> bool:
    """Return whether a unit of the layer has outputs at several places of one example."""
    return len(getattr(layer, "kernel_size", ())) > 0


def check_norm(norm: nn.Module | None, layer: nn.Module) -> nn.Module | None:
    """Return the norm that a user gives for a layer; raise ValueError for one of another kind."""
    units, positions = count_units(layer), has_positions(layer)
    dims = (find_feature_dim(norm, units, rank, positions) for rank in range(2, 6))
    if norm is not None and all(dim is None for dim in dims):
        raise ValueError(
            f"{type(norm).__name__} is not known as a norm of this layer's {units} units."
        )
    return norm


def _follow(site: Site, graph: Graph, name: str, modules: Mapping[str, nn.Module]) -> Site:
    """Return the site with the norm and activation that all calls of its layer have."""
    inside = isinstance(site.layer, INSIDE_ATTENTION)
    calls = [c for c in graph.calls(name) if inside or graph.nodes[c.layer].is_call]
    if not calls:  # in `F.linear(x, layer.weight.t())` the weight's rows are no units
        return site
    norms = [_norm(site, graph, call, modules) for call in calls]
    differ = any(norm is not norms[0] for norm in norms)
    return replace(
        site,
        norm=UnknownNorm() if differ else norms[0],
        activation=_activation(graph, calls, modules),
        calls=tuple(calls),
        readable=all(_has_units_in(graph, c, c.activation, site.channel) for c in calls),
    )


def _norm(
    site: Site, graph: Graph, call: Call, modules: Mapping[str, nn.Module]
) -> nn.Module | None:
    """Return the norm after one call of a layer, if its features are the layer's units."""
    kinds = {OPS.get(step, step) for step in call.path}
    if call.activation is not None and kinds & {"arithmetic", "average"}:
        return UnknownNorm()
    if call.norm is None:
        return None
    node = graph.nodes[call.norm]
    norm = None if node.name is None else modules.get(node.name)
    if norm is None:
        return UnknownNorm()
    rank = len(node.shape)
    dim = find_feature_dim(norm, count_units(site.layer), rank, has_positions(site.layer))
    pooled = "max" in kinds and isinstance(norm, nn.LayerNorm | nn.GroupNorm)  # they mix units
    if dim is None or pooled or not _has_units_in(graph, call, call.norm, dim):
        return UnknownNorm()
    return norm


def _activation(
    graph: Graph, calls: Sequence[Call], modules: Mapping[str, nn.Module]
) -> Activation | None:
    """Return the activation that follows all calls of a layer, or None."""
    steps = [None if call.activation is None else graph.nodes[call.activation] for call in calls]
    step = steps[0]
    if step is None or len({s and (s.op, s.name, breaks(s)) for s in steps}) > 1:
        return None
    found = modules.get(step.name) if step.name else None
    for call in calls:
        if "getitem" in call.path:  # it may have left units out
            return None
        if isinstance(found, SReLU) and found.lower.numel() > 1:
            if not _has_units_in(graph, call, call.activation, found.dim % len(step.shape)):
                return None
    return step if found is None else found


def _has_units_in(graph: Graph, call: Call, step: int | None, dim: int) -> bool:
    """Return whether there is a `step` whose input is known to have the layer's units in `dim`.

    A norm with as many features as a layer has units may still have others: positions, the units
    of one head, or the units in another order. So no step up to the activation may be a view.
    """
    if step is None:
        return False
    layer, shape = graph.nodes[call.layer], graph.nodes[step].shape
    dim = len(shape) + dim if dim < 0 else dim
    channel = len(layer.shape) + (-1 if layer.channel is None else layer.channel)
    moved = any(OPS.get(name) in ("view", "average") for name in call.path)
    return not moved and dim == channel and shape[dim] == layer.shape[channel]


def _choose(found: dict[str, Site], layers: Layers) -> dict[str, Site]:
    if layers is None:
        chosen = found
    elif callable(layers):
        chosen = {name: site for name, site in found.items() if layers(site.layer, name)}
    else:
        wanted = [layers] if isinstance(layers, str) else list(layers)
        missing = [name for name in wanted if name not in found]
        if missing:
            raise ValueError(f"no layers {missing}; the model has: {', '.join(found)}.")
        chosen = {name: found[name] for name in wanted}
    if not chosen:
        raise ValueError(
            "there is no layer to look at: Linear, Conv1d-3d and their GmP forms have units. "
            "Give `layers` names, or a function of module and name that is true for some."
        )
    return chosen
