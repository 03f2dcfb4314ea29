"""Run a model on a batch and see the inputs of its layers, norms, activations and max pools.

The run is in evaluation mode and leaves the model as it was. A pre-activation is seen before its
activation may overwrite it; after a residual sum, it is the sum.
"""

from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import torch
from torch import Tensor, nn

from geoparam.analysis.sites import Inputs, Site, Sites
from geoparam.model.norms import (
    Moments,
    average_moments,
    compute_moments,
    needs_batch,
    uses_batch,
)
from geoparam.model.trace import Step, trace

See = Callable[[Site, int, Tensor], None]  # of a site, the number of a step, what the step reads


def observe(
    model: nn.Module,
    inputs: Inputs,
    sites: Sites,
    see_activation: See | None = None,
    see_layer: See | None = None,
    see_norm: See | None = None,
    training: bool = False,
) -> bool:
    """Run `model` and show the inputs of each layer, its norm and its activation, call by call.

    Return whether the run took the steps in which the sites were found. If a branch or a router
    decided otherwise, the tensors may have been of other layers and are of no use.

    What an activation reads has its units in dimension `site.channel`; activations with units
    elsewhere are not shown. With `training`, norms use the batch's statistics if they do so in
    training.
    """
    watch = _list_watched(sites, see_layer, see_norm, see_activation)
    norms = [norm for norm in model.modules() if training and uses_batch(norm, model)]

    def prepare(*_: object) -> None:  # in the run, which restores both
        for norm in norms:
            norm.training = True
        for site in sites:
            if see_activation is not None and site.has_own_activation and site.calls:
                _show_own_activation(site, see_activation)

    with ExitStack() as stack:
        stack.enter_context(model.register_forward_pre_hook(prepare))
        # Autocast casts the weights again: its cached ones may be older than the last step.
        stack.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
        torch.set_autocast_cache_enabled(False)
        graph = trace(model, inputs, watch=watch)
    steps = {(number, node.op, node.name) for number, node in enumerate(graph.nodes)}
    return watch.keys() <= steps


def _list_watched(
    sites: Sites, see_layer: See | None, see_norm: See | None, see_activation: See | None
) -> dict[Step, list[Callable[[Tensor], None]]]:
    """Return by step what is to be called with its input."""
    assert sites.graph is not None
    nodes = sites.graph.nodes
    watch = defaultdict[Step, list[Callable[[Tensor], None]]](list)

    def add(see: See | None, site: Site, number: int | None) -> None:
        if see is not None and number is not None:
            node = nodes[number]
            watch[number, node.op, node.name].append(partial(see, site, number))

    for site in sites:
        for call in site.calls:
            if site.layer is not None:
                add(see_layer, site, call.layer)
            if site.norm is not None:
                add(see_norm, site, call.norm)
            if site.is_readable:
                add(see_activation, site, call.activation)
    return dict(watch)


def _show_own_activation(site: Site, see: See) -> None:
    """Show the input of an activation that the layer itself applies, in the layer's step."""
    activation = site.activation
    assert callable(activation)
    steps = iter([call.layer for call in site.calls])

    def show_and_activate(z: Tensor) -> Tensor:
        see(site, next(steps, -1), z.clone())  # the activation may overwrite z
        return activation(z)

    vars(site.layer)["activation"] = show_and_activate  # hides a module of that name


def read_moments(
    model: nn.Module, inputs: Inputs, sites: Sites, batch: bool = False
) -> dict[str, Moments]:
    """Run the model and return the moments of norms that are read by a batch, by layer."""
    seen = list_normed(model, sites, batch)
    if not seen:
        return {}

    def see_norm(site: Site, _: int, z: Tensor) -> None:
        if site.name in seen:
            seen[site.name].append(compute_moments(site.norm, z))

    observe(model, inputs, sites, see_norm=see_norm, training=batch)
    return {name: average_moments(calls) for name, calls in seen.items()}


def list_normed(model: nn.Module, sites: Sites, batch: bool) -> dict[str, list[Moments]]:
    """Return an empty list for each layer whose norm is read by a batch's statistics."""
    layers = sites.layers.items()
    return {name: [] for name, site in layers if needs_batch(site.norm, model, batch)}
