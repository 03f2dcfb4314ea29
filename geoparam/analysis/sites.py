"""Where the units of a model are: its layers, and the norm and activation that follow each.

They are found in one run of the model. Activations and max pools that show no layer's units (after
a concatenation, or a reshape) are found too: they belong to the regions of a network.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from geoparam.analysis.max_pool import MaxPool
from geoparam.arguments import warn_user
from geoparam.base_layer import GmPLayer
from geoparam.model.activations import Activation, SReLU, breaks
from geoparam.model.graph import Call, Graph, Node, Step
from geoparam.model.norms import UnknownNorm, find_feature_dim
from geoparam.model.run import refuse_non_batch, strip_wrappers, unwrap
from geoparam.model.trace import OPS, Filter, trace
from geoparam.model.unit_layers import (
    INSIDE_ATTENTION,
    UnitLayer,
    count_positions,
    find_custom_layers,
    find_other_units,
    find_unit_layers,
)
from geoparam.storage import list_few

Inputs = Tensor | Sequence[Any] | Mapping[str, Any]
Layers = Iterable[str] | Filter | None
Modules = Mapping[str, nn.Module]


@dataclass(frozen=True)
class Site:
    """A layer and what follows it; or an activation alone, and then `layer` is None.

    If something between layer and activation is not understood, `norm` is an `UnknownNorm`, and
    distances are NaN. `F.linear(x, layer.weight)` is no call of the layer.
    """

    name: str  # without the additions of torch.compile
    layer: nn.Module | None  # nn.MultiheadAttention stands for its input projection
    size: int = 0  # how many units the layer has
    channel: int = -1  # the units' dimension in the layer's output, from the end
    norm: nn.Module | None = None
    activation: Any = None  # a module, a function, a step of the trace, a MaxPool
    calls: tuple[Call, ...] = ()
    is_readable: bool = True  # the activation's input has the units where the layer's output has
    has_own_activation: bool = False  # the layer applies it itself, with r outside


@dataclass(frozen=True)
class Sites:
    """The chosen layers of a model by name, in the order of their calls.

    `others` are activations and max pools that no layer's site shows, each with the name of the
    layer before it. `graph` is the run in which they were found; None without one.
    """

    layers: dict[str, Site]
    others: list[Site] = field(default_factory=list)
    graph: Graph | None = None

    def __iter__(self) -> Iterator[Site]:
        return iter((*self.layers.values(), *self.others))

    @cached_property
    def steps(self) -> dict[int, Step]:
        """The steps of the run that are layers, norms and activations of a site, by number."""
        numbers = set[int | None]()
        for site in self:
            for call in site.calls:
                numbers |= {call.norm, call.activation}
                if site.layer is not None:
                    numbers.add(call.layer)
        if self.graph is None:
            return {}
        steps = self.graph.steps(number for number in numbers if number is not None)
        return {step[0]: step for step in steps}


def find_sites(
    model: nn.Module,
    inputs: Inputs | None = None,
    layers: Layers = None,
    kwargs: Mapping[str, Any] | None = None,
) -> Sites:
    """Return every layer with units, and what follows it.

    Args:
        inputs: A small batch as the model takes it, with `kwargs`; None for no run.
        layers: Names of the layers, or a function of module and name; all by default.
    """
    check_batch(inputs)
    model = unwrap(model)
    units = find_unit_layers(model)
    graph = None if inputs is None else trace(model, inputs, kwargs)
    ran = () if graph is None else graph.layers
    unseen = [name for name in units if name not in ran]  # they have directions, too
    modules = dict(model.named_modules())

    sites: dict[str, Site] = {}
    for name in (*ran, *unseen):
        if name not in units:  # a recurrent layer, or one that computes something else
            continue
        module = units[name].module
        site = Site(strip_wrappers(name), *units[name])
        if graph is not None and name in ran:
            site = _follow(site, graph, name, modules)
        if isinstance(module, GmPLayer) and module.activation is not None:
            site = _use_own_activation(site, module.activation)
        sites[site.name] = site

    custom = find_custom_layers(model)
    if custom and layers is None and sites:
        warn_user(
            f"{list_few(custom)}: a subclass that computes something of its own, so its units are "
            "left out."
        )
    left_out = find_other_units(model)
    if left_out and layers is None and sites:
        warn_user(
            f"{list_few(left_out)}: units of transposed convolutions, stacked experts and "
            "separate projections are not followed; what they activate counts in regions alone."
        )
    chosen = _choose(sites, layers, custom)
    others = [] if graph is None else _find_others(graph, modules, units, chosen)
    return Sites(chosen, others, graph)


def check_batch(inputs: Inputs | None) -> None:
    """Refuse a probe or example inputs that are not one batch, or an empty one."""
    if inputs is None:
        return
    refuse_non_batch(inputs)
    if isinstance(inputs, Tensor) and not inputs.numel():
        raise ValueError(
            "a probe, or example inputs, must not be empty; got a tensor of shape "
            f"{tuple(inputs.shape)}."
        )


def _choose(sites: Mapping[str, Site], layers: Layers, custom: Sequence[str]) -> dict[str, Site]:
    """Return the sites of the layers that a user chose; `custom` names those left out."""
    names = list(sites)
    if callable(layers):
        modules = {name: site.layer for name, site in sites.items() if site.layer is not None}
        names = [name for name, module in modules.items() if layers(module, name)]
    elif isinstance(layers, Iterable):
        names = [layers] if isinstance(layers, str) else list(layers)
    elif layers is not None:
        raise ValueError(f"layers are names, or a function of module and name; got {layers!r}.")

    missing = [name for name in names if name not in sites]
    left_out = (
        f" Left out, with a forward pass of their own: {list_few(custom)}." if custom else ""
    )
    if missing:
        raise ValueError(f"no layers {missing}; the model has: {', '.join(sites)}.{left_out}")
    if not names:
        raise ValueError(
            "there is no layer to look at: Linear, Conv1d-3d and their GmP forms have units. "
            "Give `layers` names, or a function of module and name that is true for some."
            f"{left_out}"
        )
    return {name: sites[name] for name in names}


def _use_own_activation(site: Site, activation: Activation) -> Site:
    """Return the site of a layer that applies its activation itself: nothing is in between."""
    calls = tuple(replace(call, norm=None, activation=None) for call in site.calls)
    site = replace(site, norm=None, activation=activation, calls=calls)
    return replace(site, is_readable=True, has_own_activation=True)


def _follow(site: Site, graph: Graph, name: str, modules: Modules) -> Site:
    """Return the site with the norm and activation that all calls of its layer have."""
    is_inside = isinstance(site.layer, INSIDE_ATTENTION)
    calls = [c for c in graph.calls(name) if is_inside or graph.nodes[c.layer].is_call]
    if not calls:  # in `F.linear(x, layer.weight.t())` the weight's rows are no units
        return site
    norms = [_find_norm(site, graph, call, modules) for call in calls]
    differ = any(norm is not norms[0] for norm in norms)
    return replace(
        site,
        norm=UnknownNorm() if differ else norms[0],
        activation=_find_activation(graph, calls, modules),
        calls=tuple(calls),
        is_readable=all(_has_units_in(graph, c, c.activation, site.channel) for c in calls),
    )


def _find_norm(site: Site, graph: Graph, call: Call, modules: Modules) -> nn.Module | None:
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
    assert site.layer is not None
    positions = count_positions(site.layer)
    dim = find_feature_dim(norm, site.size, len(node.shape), positions)
    mixes_units = "max" in kinds and isinstance(norm, nn.LayerNorm | nn.GroupNorm)
    if dim is None or mixes_units or not _has_units_in(graph, call, call.norm, dim):
        return UnknownNorm()
    return norm


def _find_activation(graph: Graph, calls: Sequence[Call], modules: Modules) -> Activation | None:
    """Return the activation that follows all calls of a layer, or None."""
    kinds = set()
    for call in calls:
        if call.activation is None or "getitem" in call.path:  # which may have left units out
            return None
        step = graph.nodes[call.activation]
        kinds.add((step.op, step.name, breaks(step)))
    if len(kinds) > 1:
        return None
    assert calls[0].activation is not None
    first = graph.nodes[calls[0].activation]
    module = modules.get(first.name) if first.name else None
    if module is None:
        return first
    if isinstance(module, SReLU) and module.lower.numel() > 1:
        dim = module.dim % len(first.shape)
        if not all(_has_units_in(graph, call, call.activation, dim) for call in calls):
            return None
    return module


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
    is_moved = any(OPS.get(name) in ("view", "average") for name in call.path)
    return not is_moved and dim == channel and shape[dim] == layer.shape[channel]


def _find_others(
    graph: Graph, modules: Modules, units: Mapping[str, UnitLayer], chosen: Mapping[str, Site]
) -> list[Site]:
    """Return the max pools, and the activations with breakpoints that no chosen site shows.

    Each has the name of the layer before it; if there is none, that of its function. Those that
    follow layers which were not chosen are left out.
    """
    names: dict[int | None, str] = {}
    for site in chosen.values():
        names |= {call.layer: site.name for call in site.calls}
    chosen_layers = {site.layer for site in chosen.values()}
    has_all_layers = chosen_layers == {unit.module for unit in units.values()}
    shown: set[int | None] = set()
    for site in chosen.values():
        if site.is_readable:
            shown |= {call.activation for call in site.calls}

    others = []
    for step, node in enumerate(graph.nodes):
        activation = None if step in shown else _read_activation(node, modules)
        if activation is None:
            continue

        before = _find_layer_before(graph, step)
        layer = None if before is None else graph.nodes[before].name
        is_wanted = has_all_layers or (before is None and isinstance(activation, MaxPool))
        if layer is not None and layer in units:
            is_wanted = units[layer].module in chosen_layers
        if is_wanted:
            channel = -1
            if isinstance(activation, SReLU):
                channel = activation.dim % len(node.shape) - len(node.shape)
            name = names.get(before, layer or node.op)
            call = Call(layer=-1, norm=None, activation=step, path=())
            others.append(Site(name, None, 0, channel, activation=activation, calls=(call,)))
    return others


def _read_activation(node: Node, modules: Modules) -> Any:
    """Return the max pool, or the activation with breakpoints, that a step is; or None."""
    if node.kind == "max" and node.func is not None:
        return MaxPool(node)
    if node.kind != "activation":
        return None
    module = None if node.name is None else modules.get(node.name)
    activation = module or node
    return activation if breaks(activation) else None


def _find_layer_before(graph: Graph, step: int) -> int | None:
    """Return the nearest layer that a step's input comes from; of several, the last one."""
    todo = set(graph.nodes[step].inputs)
    while todo:
        last = max(todo)
        if graph.nodes[last].kind == "layer":
            return last
        todo.remove(last)
        todo.update(graph.nodes[last].inputs)
    return None
