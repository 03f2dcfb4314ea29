"""Where the units of a model are: its layers, and the norm and activation that follow each.

They are found as conversion finds them, in one run of the model, or they are given.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from geoparam.analysis.reading.activations import Activation, Breaks, SReLU, breaks
from geoparam.analysis.reading.norms import Unknown, feature_dim, mixes_units
from geoparam.analysis.reading.order import has_all, in_order
from geoparam.base_layer import GmPLayer
from geoparam.conversion.plan import Inputs, kind_of
from geoparam.graph import Call, Graph
from geoparam.input_mean_layers import InputMeanLayer
from geoparam.trace import OPS, _Recorder, trace

Layers = Iterable[str] | Callable[[nn.Module, str], bool] | None
Follows = Mapping[str, tuple[nn.Module | None, Activation | None]]

INNER = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
INSIDE_ATTENTION = (nn.MultiheadAttention, nn.modules.linear.NonDynamicallyQuantizableLinear)
WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)


@dataclass(frozen=True)
class Site:
    """A layer and what follows it.

    Attributes:
        name: The layer's name, without the additions of torch.compile.
        layer: The module; nn.MultiheadAttention stands for its input projection.
        norm: The norm between layer and activation; `Unknown` where what is between them is not
            understood, so that boundaries have no distance.
        activation: What follows: a module, a function, a step of the trace; None if nothing does.
        channel: The units' dimension in the layer's output, from the end.
        through_sum: The activation comes after a sum with other results.
        calls: The steps of the trace: the layer, its norm and its activation, for every call of
            the layer; where a function uses its weight for something else, that is no call.
        readable: The activation's input has the units where the layer's output has them.
        steps: What these steps of the trace were, function and module: in another run they are
            the same only if the model takes the same way.
    """

    name: str
    layer: nn.Module
    norm: nn.Module | None = None
    activation: Activation | None = None
    channel: int = -1
    through_sum: bool = False
    calls: tuple[Call, ...] = ()
    readable: bool = True
    steps: Mapping[int, tuple[str, str | None]] = field(default_factory=dict)

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
    kwargs: Mapping[str, Any] | None = None,
) -> dict[str, Site]:
    """Return every layer with units, in the order of their calls, and what follows it.

    Args:
        model: Any model; what DDP and torch.compile wrap is looked into.
        inputs: A small batch as the model takes it, to see the steps of one run.
        layers: Names of the layers, or a function of module and name; all by default.
        follows: Norm and activation by layer name, where they are known better. Without `inputs`
            nothing else is known.
        kwargs: Further keyword arguments for the run.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 2))
        >>> sites = find_sites(model, torch.zeros(1, 4))
        >>> list(sites), sites["0"].norm is model[1], sites["0"].breaks.points
        (['0', '3'], True, (0.0,))
    """
    model = unwrap(model)
    modules = dict(model.named_modules())
    graph: Graph | None = None
    callers: dict[int, nn.Module | None] = {}
    if inputs is not None:
        graph, callers = _trace_callers(model, *unshared(inputs, kwargs))
    ran = () if graph is None else graph.layers
    all_names = (_weight_name(name, module) for name, module in modules.items())
    found: dict[str, Site] = {}
    for name in dict.fromkeys((*ran, *all_names)):  # what did not run has directions all the same
        module = modules.get(_holder(name))
        if module is not None and has_units(module, name):
            site = Site(_public(name), module, channel=_channel(module))
            if graph is not None and name in ran:
                inside = isinstance(module, INSIDE_ATTENTION)
                calls = [c for c in graph.calls(name) if inside or callers.get(c.layer) is module]
                site = _traced(site, graph, calls, modules) if calls else site
            found[site.name] = _own(site)
    for name, (norm, activation) in (follows or {}).items():
        if name not in found:
            raise ValueError(f"follows names {name!r}; the layers are: {', '.join(found)}.")
        site = replace(found[name], norm=checked(norm, found[name].layer), activation=activation)
        found[name] = replace(site, calls=_calls_of_norm(site, graph, modules))
    if graph is not None:
        found = {name: replace(site, steps=_steps(site, graph)) for name, site in found.items()}
    return _chosen(found, layers)


def took_same_steps(sites: Iterable[Site], graph: Graph) -> bool:
    """Return whether a run took the steps in which the sites were found."""
    return all(site.steps == _steps(site, graph) for site in sites)


@torch.inference_mode(False)
@torch.no_grad()
def unshared(inputs: Inputs, kwargs: Mapping[str, Any] | None = None) -> Any:
    """Return a batch and its keywords with copies of all tensors: models may change what they get.

    Example:
        >>> x = torch.ones(2)
        >>> (a, b), _ = unshared((x, x))
        >>> a is b, a is x
        (True, False)
    """
    copies = WeakTensorKeyDictionary()

    def copied(t: Tensor) -> Tensor:
        if t not in copies:
            copies[t] = t.clone()
        return copies[t]

    given = [dict(each) if isinstance(each, Mapping) else each for each in (inputs, kwargs)]
    return tree_map_only(Tensor, copied, given)


def is_traced() -> bool:
    """Return whether a model is being traced: what a hook runs in there would count as steps."""
    modes = torch.overrides._get_current_function_mode_stack()
    return any(isinstance(mode, _Recorder) for mode in modes)


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside of DDP and torch.compile."""
    inner: Any = model
    while isinstance(inner, WRAPPERS) or hasattr(inner, "_orig_mod"):
        inner = inner.module if isinstance(inner, WRAPPERS) else inner._orig_mod
    return inner


def has_units(module: nn.Module, name: str = "") -> bool:
    """Return whether a module is a layer whose weight has one row for each unit.

    A subclass of torch's layers only if it computes what they do, as for conversion.
    """
    if isinstance(module, nn.MultiheadAttention):
        return name.endswith("in_proj_weight") and module.in_proj_weight is not None
    known = kind_of(module) in ("linear", "conv")
    ours = isinstance(module, GmPLayer | InputMeanLayer)
    return ours or known or is_transposed(module)


def count_units(layer: Any) -> int:
    """Return how many units a layer has."""
    if isinstance(layer, nn.MultiheadAttention):
        return 3 * layer.embed_dim
    if isinstance(layer, GmPLayer):
        return layer.weight_shape[0]
    if is_transposed(layer):
        return layer.nf
    return layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels


def is_transposed(module: nn.Module) -> bool:
    """Return whether it is transformers' Conv1D, a linear layer with weight (in, out)."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def checked(norm: nn.Module | None, layer: nn.Module) -> nn.Module | None:
    """Return a norm that somebody gives for a layer, or `Unknown` for one of a foreign kind.

    Example:
        >>> checked(nn.LocalResponseNorm(2), nn.Linear(3, 4))
        Unknown(LocalResponseNorm)
    """
    if norm is None or isinstance(norm, Unknown | nn.Identity):
        return norm if isinstance(norm, Unknown) else None
    units, positions = count_units(layer), has_positions(layer)
    ranks = range(2, 6)
    if any(feature_dim(norm, units, rank, positions) is not None for rank in ranks):
        return norm
    size = getattr(norm, "num_features", getattr(norm, "num_channels", units))
    if size != units:
        raise ValueError(f"the norm has {size} features and the layer {units} units.")
    return Unknown(type(norm).__name__)


def has_positions(layer: nn.Module) -> bool:
    """Return whether a unit of the layer has outputs at several places of one example."""
    return len(getattr(layer, "kernel_size", ())) > 0


# --- what a trace says --------------------------------------------------------------------------


def _traced(
    site: Site, graph: Graph, calls: Sequence[Call], modules: Mapping[str, nn.Module]
) -> Site:
    norms = [_norm(site, graph, call, modules) for call in calls]
    differ = any(norm is not norms[0] for norm in norms)
    return replace(
        site,
        norm=Unknown("the layer's calls have different norms") if differ else norms[0],
        activation=_activation(site, graph, calls, modules),
        through_sum=any("sum" in call.path for call in calls),
        calls=tuple(calls),
        readable=all(_keeps_units(site, graph, call) for call in calls),
    )


def _norm(
    site: Site, graph: Graph, call: Call, modules: Mapping[str, nn.Module]
) -> nn.Module | None:
    """Return the norm after one call of a layer, if what is between the two leaves units alone."""
    kinds = {OPS.get(step, step): step for step in call.path}
    for kind in ("arithmetic", "average"):
        if kind in kinds and call.activation is not None:
            return Unknown(f"{kinds[kind]} between layer and activation")
    if call.norm is None:
        return None
    node = graph.nodes[call.norm]
    norm = None if node.name is None else modules.get(node.name)
    if norm is None:
        return Unknown(node.op)
    rank = len(node.shape)
    dim = feature_dim(norm, count_units(site.layer), rank, has_positions(site.layer))
    pooled = "max" in kinds and mixes_units(norm)
    if dim is None or pooled or not in_order(graph, call, call.norm, dim):
        return Unknown(f"{type(norm).__name__} whose features are not the units")
    return norm


def _activation(
    site: Site, graph: Graph, calls: Sequence[Call], modules: Mapping[str, nn.Module]
) -> Activation | None:
    """Return what all calls of a layer are followed by, or None."""
    steps = [None if call.activation is None else graph.nodes[call.activation] for call in calls]
    step = steps[0]
    if step is None or len({s and (s.op, s.name, breaks(s)) for s in steps}) > 1:
        return None
    found = modules.get(step.name) if step.name else None
    for call in calls:
        assert call.activation is not None
        if "getitem" in call.path and not has_all(graph, call, call.activation):
            return None
        if isinstance(found, SReLU) and found.get_parameter("lower").numel() > 1:
            if not in_order(graph, call, call.activation, found.dim % len(step.shape)):
                return None
    return step if found is None else found


def _keeps_units(site: Site, graph: Graph, call: Call) -> bool:
    """Return whether the activation sees the units where the layer has put them."""
    if call.activation is None:
        return False
    dim = len(graph.nodes[call.activation].shape) + site.channel
    return dim >= 0 and in_order(graph, call, call.activation, dim)


def _trace_callers(
    model: nn.Module, inputs: Inputs, kwargs: Mapping[str, Any] | None
) -> tuple[Graph, dict[int, nn.Module | None]]:
    """Trace a model, and return also which step is the call of which layer.

    None for a function: in `F.linear(x, layer.weight.t())` the weight's rows are no units.
    """
    entered: list[nn.Module] = []
    callers: dict[int, nn.Module | None] = {}

    def visit(step: int, _: object) -> None:  # of several visits, the last one makes the step
        callers[step] = entered[-1] if entered else None
        entered.clear()

    with ExitStack() as stack:
        for module in model.modules():
            if has_units(module):
                hook = module.register_forward_pre_hook(lambda layer, _: entered.append(layer))
                stack.callback(hook.remove)
        graph = trace(model, inputs, kwargs, visit=visit)
    return graph, callers


def _calls_of_norm(
    site: Site, graph: Graph | None, modules: Mapping[str, nn.Module]
) -> tuple[Call, ...]:
    """Return a layer's calls with the steps of the norm that is given for it."""
    names = [name for name, module in modules.items() if module is site.norm]
    nodes = () if graph is None else graph.nodes
    steps = [index for index, node in enumerate(nodes) if node.name in names]
    after = ([step for step in steps if step > call.layer] for call in site.calls)
    return tuple(
        replace(call, norm=later[0] if later else None)
        for call, later in zip(site.calls, after, strict=True)
    )


def _steps(site: Site, graph: Graph) -> dict[int, tuple[str, str | None]]:
    """Return what the steps of a site's calls are in a run; without those that it has not."""
    calls = ((call.layer, call.norm, call.activation) for call in site.calls)
    steps = [step for call in calls for step in call if step is not None]
    nodes = {step: graph.nodes[step] for step in steps if step < len(graph.nodes)}
    return {step: (node.op, node.name) for step, node in nodes.items()}


def _own(site: Site) -> Site:
    """Where a layer applies its own activation, nothing is between the two."""
    if not isinstance(site.layer, GmPLayer) or site.layer.activation is None:
        return site
    activation = site.layer.activation
    return replace(site, norm=None, activation=activation, through_sum=False, readable=True)


def _channel(module: nn.Module) -> int:
    if isinstance(module, GmPLayer):
        return module.channel_dim
    size = getattr(module, "kernel_size", ())
    return -1 - len(size)


def _holder(name: str) -> str:
    """Return the name of the module that holds a layer; attention holds its projection."""
    return name.removesuffix("in_proj_weight").removesuffix(".")


def _weight_name(name: str, module: nn.Module) -> str:
    """Return a layer's name; attention's is that of its input projection."""
    plain = kind_of(module) == "attention"
    return f"{name}.in_proj_weight".lstrip(".") if plain else name


def _public(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in INNER)


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
