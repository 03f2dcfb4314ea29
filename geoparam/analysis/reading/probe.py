"""Run a model on a probe batch and see the inputs of its layers, norms, activations, max pools.

The run is in evaluation mode and leaves the model as it was. A pre-activation is seen before its
activation may overwrite it; after a residual sum, it is the sum. A max pool is piecewise linear:
it returns one input of each window, and its regions end where another input wins. Of equal inputs
the first in the window's order wins.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from geoparam.analysis.reading.activations import SReLU, breaks
from geoparam.analysis.reading.layer_sites import Site, has_units, took_same_steps
from geoparam.analysis.reading.norms import Moments, compute_moments, needs_batch, uses_batch
from geoparam.base_layer import GmPLayer
from geoparam.conversion.plan import Inputs, module_name, weight_name
from geoparam.graph import Call, Graph, Node
from geoparam.norm import TrackedMean
from geoparam.trace import trace

See = Callable[[Site, Tensor, int], None]


def observe(
    model: nn.Module,
    inputs: Inputs,
    sites: Mapping[str, Site],
    pre_activation: See | None = None,
    layer_input: See | None = None,
    norm_input: See | None = None,
    training: bool = False,
) -> bool:
    """Run `model` and show the inputs of each layer, its norm and its activation, call by call.

    Return whether the run took the steps in which the sites were found. If a branch or a router
    decided otherwise, the tensors may have been of other layers and are of no use.

    Each function gets a site, a tensor and the number of its step. The tensor is the input of the
    layer, of the norm after it, or of the activation, which has its units in dimension
    `site.channel`; activations with units elsewhere are not shown. With `training`, norms use the
    batch's statistics if they do so in training.
    """
    watched = _list_watched(sites.values(), (layer_input, norm_input, pre_activation))
    held: dict[int, Tensor] = {}  # by step; a call that was no step is overwritten by the next

    def show() -> None:
        for step, tensor in held.items():
            for see, site in watched[step]:
                see(site, tensor, step)
        held.clear()

    def visit(step: int, tensors: list[Tensor]) -> None:
        if step not in held:
            show()
        if step in watched:
            held[step] = tensors[0].clone()

    with ExitStack() as stack:
        norms = [m for m in model.modules() if training and uses_batch(m, model)]
        prepare = partial(_prepare_run, norms, sites.values(), pre_activation)
        stack.enter_context(model.register_forward_pre_hook(prepare))
        # Autocast casts the weights again: its cached ones may be older than the last step.
        stack.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
        torch.set_autocast_cache_enabled(False)
        graph = trace(model, inputs, visit=visit)
        show()  # a layer whose result is not returned
    return took_same_steps(sites.values(), graph)


def _list_watched(
    sites: Iterable[Site], functions: tuple[See | None, ...]
) -> dict[int, list[tuple[See, Site]]]:
    """Return by step who sees its input; `functions` are for layer, norm and activation."""
    watched = defaultdict[int, list[tuple[See, Site]]](list)
    for site in sites:
        is_shown = site.readable and not site.own_activation
        for call in site.calls:
            norm = None if site.norm is None else call.norm
            steps = call.layer, norm, call.activation if is_shown else None
            for step, see in zip(steps, functions, strict=True):
                if step is not None and see is not None:
                    watched[step].append((see, site))
    return watched


def _prepare_run(
    norms: Iterable[nn.Module], sites: Iterable[Site], see: See | None, *_: object
) -> None:
    """Let norms use the batch, and own activations show their input; the trace restores both."""
    for norm in norms:
        norm.training = True
    for site in sites:
        if site.own_activation and site.calls and see is not None:
            _show_own_activation(site, see)


def _show_own_activation(site: Site, see: See) -> None:
    """Show the input of an activation that the layer itself applies, in the layer's step."""
    activation = site.activation
    assert callable(activation)
    steps = (call.layer for call in site.calls)

    def show_and_activate(z: Tensor) -> Tensor:
        see(site, z.clone(), next(steps, -1))  # the activation may overwrite z
        return activation(z)

    vars(site.layer)["activation"] = show_and_activate  # hides a module of that name


def read_moments(
    model: nn.Module, inputs: Inputs, sites: Mapping[str, Site], batch: bool = False
) -> dict[str, Moments]:
    """Run the model and return the moments of norms that are read by a batch, by layer."""
    reader = MomentReader(model, sites, batch)
    if reader.seen:
        read = {name: sites[name] for name in reader.seen}
        observe(model, inputs, read, norm_input=reader, training=batch)
    return reader.average()


class MomentReader:
    """Collects the moments of norms that are read by a batch: the `norm_input` of `observe`."""

    def __init__(self, model: nn.Module, sites: Mapping[str, Site], batch: bool) -> None:
        read = [name for name, site in sites.items() if needs_batch(site.norm, model, batch)]
        self.seen: dict[str, list[Moments]] = {name: [] for name in read}

    def __call__(self, site: Site, z: Tensor, _: int) -> None:
        if site.name in self.seen:
            self.seen[site.name].append(compute_moments(site.norm, z))

    def average(self, is_known: bool = True) -> dict[str, Moments]:
        """Return the moments of each norm, averaged over its calls; NaN where none is known."""
        unknown = [Moments(*torch.full((2,), torch.nan))]
        calls = {name: each if each and is_known else unknown for name, each in self.seen.items()}
        return {
            name: Moments(*(torch.stack(t).mean(dim=0) for t in zip(*each, strict=True)))
            for name, each in calls.items()
        }


def compute_input_lengths(layer: nn.Module, x: Tensor) -> Tensor:
    """Return the length of a layer's input at each point; of each patch, for a convolution.

    If the layer subtracts the mean of its input, it is the length of the difference, with the
    mean of evaluation. With groups there is one length for each, where the channels were.
    """
    x = x.to(torch.promote_types(x.dtype, torch.float32))  # squares overflow float16
    mean = _input_mean(layer)
    size = getattr(layer, "kernel_size", ())
    if not size:
        return torch.linalg.vector_norm(x if mean is None else x - mean, dim=-1)
    conv: Any = layer
    borders = getattr(conv, "input_norm_form", True) == "border"
    if mean is not None and borders:
        x = x - mean
    mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
    x = F.pad(x, list(conv._reversed_padding_repeated_twice), mode=mode)
    if mean is not None and not borders:
        x = x - mean
    squares = x.square().unflatten(-len(size) - 1, (conv.groups, -1)).sum(dim=-len(size) - 1)
    convolve = (F.conv1d, F.conv2d, F.conv3d)[len(size) - 1]
    ones = torch.ones(conv.groups, 1, *size, dtype=x.dtype, device=x.device)
    sums = convolve(squares, ones, None, conv.stride, 0, conv.dilation, conv.groups)
    return sums.clamp(min=0).sqrt()


def _input_mean(layer: nn.Module) -> Tensor | None:
    """Return the mean that the layer subtracts from its input; no running mean is updated."""
    norm = layer.input_norm if isinstance(layer, GmPLayer) else layer
    if not isinstance(norm, TrackedMean):
        return None
    return norm.running_mean.view(-1, *[1] * len(getattr(layer, "kernel_size", ())))


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
        sizes, device = x.shape[lead:], x.device
        for d in range(self.dims):
            dim = lead + 2 * d  # each dimension before has become two: outputs and places
            places = self._range(sizes, device, d)
            x = x.index_select(dim, places.flatten()).unflatten(dim, places.shape)
        places_last = [lead + 2 * d + 1 for d in range(self.dims)]
        return x.movedim(places_last, list(range(-self.dims, 0))).flatten(-self.dims)

    def __call__(self, x: Tensor) -> Tensor:
        """Return which input of each window wins, as a bool for each place."""
        each = self.windows(x)
        return each.argmax(dim=-1, keepdim=True) == torch.arange(each.shape[-1], device=x.device)

    def _find_range(self, sizes: torch.Size, device: torch.device, d: int) -> Tensor:
        """Return the places of each output in one dimension, (outputs, K)."""
        n, func = sizes[d], self.node.func
        assert func is not None
        shape = [n if k == d else 1 for k in range(self.dims)]
        probe = torch.eye(n, device="cpu").view(n, 1, *shape).expand(n, 1, *sizes).contiguous()
        pooled = func(probe, *self.node.args, **self.node.kwargs)
        pooled = pooled[0] if isinstance(pooled, tuple) else pooled  # with return_indices
        inside = pooled.movedim(2 + d, 1).flatten(2)[:, :, 0].t() > 0.5  # of each output
        size, rows = int(inside.sum(dim=1).max()), [row.nonzero()[:, 0] for row in inside]
        rows = [F.pad(row, (0, size - len(row)), value=int(row[0])) for row in rows]
        return torch.stack(rows).to(device)


def find_other_activations(
    model: nn.Module, inputs: Inputs, sites: Mapping[str, Site]
) -> dict[str, Site]:
    """Run the model and return its max pools, and the activations that no site shows, as sites.

    Each has the name of the layer before it; if there is none, that of its function. What follows
    layers outside of `sites` is left out.
    """
    graph, modules = trace(model, inputs), dict(model.named_modules())
    names = {call.layer: site.name for site in sites.values() for call in site.calls}
    shown = [site for site in sites.values() if site.readable and not site.own_activation]
    known = {call.activation for site in shown if site.breaks for call in site.calls}
    analysed, found = {site.layer for site in sites.values()}, dict[str, Site]()
    all_units = {m for n, m in modules.items() if has_units(m, weight_name(n, m))}
    are_chosen = not all_units <= analysed
    for step, node in enumerate(graph.nodes):
        activation = None if step in known else read_activation(node, modules)
        if not (isinstance(activation, MaxPool) or breaks(activation)):
            continue
        before = _layer_before(graph, step)
        layer = "" if before is None else graph.nodes[before].name or ""
        module = modules.get(module_name(layer, modules)) if layer else None
        is_free = before is None and node.kind == "max" if are_chosen else module not in all_units
        if module in analysed or is_free:
            name = names.get(-1 if before is None else before, layer or node.op)
            found[f"{step} {name}"] = make_site(name, activation, step, graph)
    return found


def read_activation(node: Node, modules: Mapping[str, nn.Module]) -> Any:
    """Return the activation that a step is: a module, a function, a max pool, or None."""
    if node.kind == "activation":
        return (None if node.name is None else modules.get(node.name)) or node
    return MaxPool(node) if node.kind == "max" and node.func is not None else None


def make_site(name: str, activation: Any, step: int, graph: Graph) -> Site:
    """Return the site of an activation in one step."""
    dim = activation.dim - len(graph.nodes[step].shape) if isinstance(activation, SReLU) else -1
    call = Call(-1, None, step, ())
    return Site(name, nn.Identity(), None, activation, dim, (call,), graph=graph)


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
