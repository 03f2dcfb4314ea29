"""Where the units of a model are: its layers, and the norm and activation that follow each.

They are found as conversion finds them, in one run of the model, or they are given.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from geoparam.analysis.activations import Activation, Breaks, breaks
from geoparam.graph import Call, Graph
from geoparam.plan import Inputs
from geoparam.trace import trace
from geoparam.unit import GmPLayer

Layers = Iterable[str] | Callable[[nn.Module, str], bool] | None
Follows = Mapping[str, tuple[nn.Module | None, Activation | None]]

WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)


@dataclass(frozen=True)
class Site:
    """A layer and what follows it.

    Attributes:
        name: The layer's name, without the additions of torch.compile.
        layer: The module; nn.MultiheadAttention stands for its input projection.
        norm: The norm between layer and activation.
        activation: What follows: a module, a function, a step of the trace; None if nothing does.
        channel: The units' dimension in the layer's output, from the end.
        through_sum: The activation comes after a sum with other results.
        calls: The steps of the trace: the layer, its norm and its activation, for every call.
        readable: The activation's input has the units where the layer's output has them.
    """

    name: str
    layer: nn.Module
    norm: nn.Module | None = None
    activation: Activation | None = None
    channel: int = -1
    through_sum: bool = False
    calls: tuple[Call, ...] = ()
    readable: bool = True

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
    follows: Follows | None = None,
) -> dict[str, Site]:
    """Return every layer with units, in the order of their calls, and what follows it.

    Args:
        model: Any model; what DDP and torch.compile wrap is looked into.
        inputs: A small batch as the model takes it, to see the steps of one run.
        layers: Names of the layers, or a function of module and name; all by default.
        follows: Norm and activation by layer name, where they are known better. Without `inputs`
            nothing else is known.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 2))
        >>> sites = find_sites(model, torch.zeros(1, 4))
        >>> list(sites), sites["0"].norm is model[1], sites["0"].breaks.points
        (['0', '3'], True, (0.0,))
    """
    model = unwrap(model)
    graph = None if inputs is None else trace(model, inputs)
    modules = dict(model.named_modules())
    ran = () if graph is None else graph.layers
    found: dict[str, Site] = {}
    for name in dict.fromkeys((*ran, *modules)):  # what did not run has directions all the same
        module = modules.get(_holder(name))
        if module is not None and has_units(module, name):
            site = Site(_public(name), module, channel=_channel(module))
            if graph is not None and name in ran:
                site = _traced(site, graph, name, modules)
            found[site.name] = _own(site)
    for name, (norm, activation) in (follows or {}).items():
        if name not in found:
            raise ValueError(f"follows names {name!r}; the layers are: {', '.join(found)}.")
        found[name] = replace(found[name], norm=norm, activation=activation)
    return _chosen(found, layers)


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside of DDP and torch.compile."""
    inner: Any = model
    while isinstance(inner, WRAPPERS) or hasattr(inner, "_orig_mod"):
        inner = inner.module if isinstance(inner, WRAPPERS) else inner._orig_mod
    return inner


def has_units(module: nn.Module, name: str = "") -> bool:
    """Return whether a module is a layer whose weight has one row for each unit."""
    if isinstance(module, nn.MultiheadAttention):
        return name.endswith("in_proj_weight") and module.in_proj_weight is not None
    if isinstance(module, nn.modules.conv._ConvTransposeNd):
        return False  # what a unit sees is no row of its weight
    known = (GmPLayer, nn.Linear, nn.modules.conv._ConvNd)
    return isinstance(module, known) or is_transposed(module)


def is_transposed(module: nn.Module) -> bool:
    """Return whether it is transformers' Conv1D, a linear layer with weight (in, out)."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def _traced(site: Site, graph: Graph, name: str, modules: Mapping[str, nn.Module]) -> Site:
    chain, calls = graph.after(name), tuple(graph.calls(name))
    norm = modules.get(chain.norm.name or "") if chain.norm is not None else None
    step = chain.activation
    named = None if step is None or not step.name else modules.get(step.name)
    views = any(_moves_units(graph, call) for call in calls)
    return replace(
        site,
        norm=norm,
        activation=step if named is None else named,
        through_sum=chain.through_sum,
        calls=calls,
        readable=step is not None and not views,
    )


def _own(site: Site) -> Site:
    """Where a layer applies its own activation, nothing is between the two."""
    if not isinstance(site.layer, GmPLayer) or site.layer.activation is None:
        return site
    activation = site.layer.activation
    return replace(site, norm=None, activation=activation, through_sum=False, readable=True)


def _moves_units(graph: Graph, call: Call) -> bool:
    """Return whether the activation sees the units elsewhere than the layer put them."""
    if call.activation is None:
        return False
    made, seen = graph.nodes[call.layer], graph.nodes[call.activation]
    channel = -1 if made.channel is None else made.channel
    same_rank = len(made.shape) == len(seen.shape)
    viewed = any(step in VIEWS for step in call.path)
    return viewed or not same_rank or made.shape[channel] != seen.shape[channel]


VIEWS = frozenset(
    "view reshape flatten unflatten permute transpose swapaxes swapdims movedim t T mT".split()
)


def _channel(module: nn.Module) -> int:
    if isinstance(module, GmPLayer):
        return module.channel_dim
    size = getattr(module, "kernel_size", ())
    return -1 - len(size)


def _holder(name: str) -> str:
    """Return the name of the module that holds a layer; attention holds its projection."""
    return name.removesuffix("in_proj_weight").removesuffix(".")


def _public(name: str) -> str:
    return re.sub(r"\b_orig_mod\.", "", name)


def _chosen(found: dict[str, Site], layers: Layers) -> dict[str, Site]:
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


def tensors_to(value: Any, device: torch.device) -> Any:
    """Return nested inputs with their tensors on `device`."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {key: tensors_to(item, device) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(tensors_to(item, device) for item in value)
    return value
