"""Run a model on a probe batch and see the inputs of its layers, norms and activations.

The run is in evaluation mode and leaves the model as it was. A pre-activation is seen before its
activation may overwrite it; after a residual sum, it is the sum.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from geoparam.analysis.reading.layer_sites import Site, took_same_steps
from geoparam.analysis.reading.norms import (
    Moments,
    average_moments,
    compute_moments,
    has_running,
    needs_batch,
)
from geoparam.base_layer import GmPLayer
from geoparam.conversion.plan import Inputs
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

    The functions are called with the site, the tensor and the number of its step: the layer's
    input, the input of the norm after it, and the activation's, units in dimension `site.channel`;
    not where there is none, or where units are elsewhere. With `training`, norms with running
    statistics use the batch's.
    """
    watched: dict[int, list[tuple[See, Site]]] = {}

    def watch(step: int | None, see: See | None, site: Site) -> None:
        if step is not None and see is not None:
            watched.setdefault(step, []).append((see, site))

    for site in sites.values():
        for call in site.calls:
            watch(call.layer, layer_input, site)
            watch(call.norm, norm_input if site.norm is not None else None, site)
            if site.readable and not site.own_activation:
                watch(call.activation, pre_activation, site)
    held: dict[int, Tensor] = {}  # the latest visit; only the next one shows that it made a step

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
        if training:
            stack.enter_context(_use_batch(model))
        for site in sites.values():
            if site.own_activation and site.calls and pre_activation is not None:
                stack.enter_context(_show_own_activation(site, pre_activation))
        stack.enter_context(_no_autocast_cache())
        graph = trace(model, inputs, visit=visit)
        show()  # a layer whose result is not returned
    return took_same_steps(sites.values(), graph)


@contextmanager
def _no_autocast_cache() -> Iterator[None]:
    """Let autocast cast the weights again: its cached ones may be older than the last step."""
    kept = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(kept)


@contextmanager
def _show_own_activation(site: Site, see: See) -> Iterator[None]:
    """Show the input of an activation that the layer itself applies, in the layer's step."""
    attributes, activation = vars(site.layer), site.activation
    assert callable(activation)
    held = "activation" in attributes  # a function; a module is in _modules, behind attributes
    steps = (call.layer for call in site.calls)

    def show_and_activate(z: Tensor) -> Tensor:
        see(site, z.clone(), next(steps, -1))  # the activation may overwrite z
        return activation(z)

    attributes["activation"] = show_and_activate
    try:
        yield
    finally:
        del attributes["activation"]
        attributes.update({"activation": activation} if held else {})


def read_moments(
    model: nn.Module, inputs: Inputs, sites: Mapping[str, Site], batch: bool = False
) -> dict[str, Moments]:
    """Run the model and return the moments of norms that are read by a batch, by layer."""
    seen = prepare_moments(sites, batch)

    def see(site: Site, z: Tensor, _: int) -> None:
        seen[site.name].append(compute_moments(site.norm, z))

    if seen:
        read = {name: sites[name] for name in seen}
        observe(model, inputs, read, norm_input=see, training=batch)
    return average_seen(sites, seen)


def prepare_moments(sites: Mapping[str, Site], batch: bool) -> dict[str, list[Moments]]:
    """Return an empty list for each layer whose norm is read by a batch."""
    return {name: [] for name, site in sites.items() if needs_batch(site.norm, batch)}


def average_seen(
    sites: Mapping[str, Site], seen: Mapping[str, Sequence[Moments]]
) -> dict[str, Moments]:
    """Return the moments of each layer's norm, averaged over its calls.

    Running statistics do not replace those of a batch: norms that have them, and did not run, get
    NaN. The other norms that did not run are left out.
    """
    return {
        name: average_moments(each)
        for name, each in seen.items()
        if each or has_running(sites[name].norm)
    }


@contextmanager
def _use_batch(model: nn.Module) -> Iterator[None]:
    """Let norms with running statistics use the batch's in a trace, which restores the norms."""

    def train_norms(*_: object) -> None:
        for module in model.modules():
            if has_running(module):
                module.training = True

    with model.register_forward_pre_hook(train_norms):
        yield


def compute_input_lengths(layer: nn.Module, x: Tensor) -> Tensor:
    """Return the length of a layer's input at each point; of each patch, for a convolution.

    If the layer subtracts the mean of its input, it is the length of the difference, with the
    mean of evaluation. With groups there is one length for each, where the channels were.
    """
    x = x.to(torch.promote_types(x.dtype, torch.float32))  # squares overflow float16
    mean = _input_mean(layer, x)
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


def _input_mean(layer: nn.Module, x: Tensor) -> Tensor | None:
    """Return the mean that the layer subtracts from its input; no running mean is updated."""
    norm = layer.input_norm if isinstance(layer, GmPLayer) else layer
    if not isinstance(norm, TrackedMean):
        return None
    mean = norm.mean(x) if norm.running_mean is None else norm.running_mean
    return mean.view(-1, *[1] * len(getattr(layer, "kernel_size", ())))
