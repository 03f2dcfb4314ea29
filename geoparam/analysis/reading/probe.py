"""Watch a model run on a probe batch: what its layers are given, and what their activations are.

The run is in evaluation mode and leaves the model as it was. A pre-activation is seen before its
activation may overwrite it; where a sum comes between, it is what the activation gets.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from geoparam.analysis.reading.layer_sites import Site, took_same_steps, unshared
from geoparam.base_layer import GmPLayer
from geoparam.conversion.plan import Inputs
from geoparam.norm import TrackedMean
from geoparam.trace import trace

See = Callable[[Site, Tensor], None]


def observe(
    model: nn.Module,
    inputs: Inputs,
    sites: Mapping[str, Site],
    pre_activation: See | None = None,
    layer_input: See | None = None,
    norm_input: See | None = None,
) -> bool:
    """Run `model` and show, call by call, what each layer and its activation are given.

    Return whether it took the steps in which the sites were found. If not, since a branch or a
    router decided otherwise, what was shown may have been of other layers: it is of no use.

    Args:
        model: The model in which the sites were found with `find_sites(model, inputs)`.
        inputs: A batch with the structure of the one they were found with.
        sites: The layers to watch.
        pre_activation: Called with the site and the tensor that its activation gets, units in
            dimension `site.channel`. Not called where there is none, or where units are elsewhere.
        layer_input: Called with the site and the layer's input.
        norm_input: Called with the site and what the norm after its layer gets.

    Example:
        >>> from geoparam.analysis.reading.sites import find_sites
        >>> model, x = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), torch.ones(5, 3)
        >>> observe(model, x, find_sites(model, x), lambda site, z: print(site.name, *z.shape))
        0 5 4
        True
    """
    watched: dict[int, list[Callable[[Tensor], None]]] = {}

    def watch(step: int | None, see: See | None, site: Site) -> None:
        if step is not None and see is not None:
            watched.setdefault(step, []).append(partial(see, site))

    for site in sites.values():
        for call in site.calls:
            watch(call.layer, layer_input, site)
            watch(call.norm, norm_input if site.norm is not None else None, site)
            if site.readable and not site.own_activation:
                watch(call.activation, pre_activation, site)
    held: dict[int, Tensor] = {}  # the last call, which only the next one shows to be a step

    def show() -> None:
        for step, tensor in held.items():
            for see in watched[step]:
                see(tensor)
        held.clear()

    def visit(step: int, tensors: list[Tensor]) -> None:
        if step not in held:
            show()
        if step in watched:
            held[step] = tensors[0].clone()

    with ExitStack() as stack:
        for site in sites.values():
            if site.own_activation and site.calls and pre_activation is not None:
                stack.enter_context(_shown_inside(site, pre_activation))
        stack.enter_context(_casting_anew())
        given, _ = unshared(inputs)
        graph = trace(model, given, visit=visit)
        show()  # a layer whose result is not returned
    return took_same_steps(sites.values(), graph)


@contextmanager
def _casting_anew() -> Iterator[None]:
    """Let autocast cast weights as they are: those it keeps are from before the optimizer's step.

    It keeps them until its outermost context is left, which may be around a whole training step.
    """
    kept = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(kept)


@contextmanager
def _shown_inside(site: Site, see: See) -> Iterator[None]:
    """Show what a layer gives to an activation of its own, which leaves no step."""
    attributes, activation = vars(site.layer), site.activation
    assert callable(activation)
    held = "activation" in attributes  # a module is elsewhere; what is here stands before it

    def shown(z: Tensor) -> Tensor:
        see(site, z.clone())  # for who keeps it: the activation may overwrite z
        return activation(z)

    attributes["activation"] = shown
    try:
        yield
    finally:
        del attributes["activation"]
        attributes.update({"activation": activation} if held else {})


def input_lengths(layer: nn.Module, x: Tensor) -> Tensor:
    """Return the length of what units see of `x`, at each point: of a patch, for a convolution.

    Where the layer subtracts the mean of its input, as it does in evaluation, it is the length of
    what is left. With groups there is one length for each, where the channels were.

    Example:
        >>> input_lengths(nn.Conv1d(1, 2, 2), torch.tensor([[[3., 4., 0.]]]))
        tensor([[[5., 4.]]])
    """
    x = x.to(torch.promote_types(x.dtype, torch.float32))  # squares leave float16
    mean = _input_mean(layer, x)
    size = getattr(layer, "kernel_size", ())
    if not size:
        return torch.linalg.vector_norm(x if mean is None else x - mean, dim=-1)
    conv: Any = layer
    borders = getattr(conv, "input_norm_form", True) == "border"
    if mean is not None and borders:
        x = x - mean
    mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
    x = F.pad(x, _pads(conv), mode=mode)
    if mean is not None and not borders:
        x = x - mean
    squares = x.square().unflatten(-len(size) - 1, (conv.groups, -1)).sum(dim=-len(size) - 1)
    convolve = (F.conv1d, F.conv2d, F.conv3d)[len(size) - 1]
    ones = torch.ones(conv.groups, 1, *size, dtype=x.dtype, device=x.device)
    sums = convolve(squares, ones, None, conv.stride, 0, conv.dilation, conv.groups)
    return sums.clamp(min=0).sqrt()


def _input_mean(layer: nn.Module, x: Tensor) -> Tensor | None:
    """Return what the layer subtracts from its input; nothing is tracked, in training neither."""
    norm = layer.input_norm if isinstance(layer, GmPLayer) else layer
    if not isinstance(norm, TrackedMean):
        return None
    mean = norm.mean(x) if norm.running_mean is None else norm.running_mean
    return mean.view(-1, *[1] * len(getattr(layer, "kernel_size", ())))


def _pads(conv: Any) -> list[int]:
    """Return the padding of each side, last dimension first, as `F.pad` takes it."""
    return list(conv._reversed_padding_repeated_twice)
