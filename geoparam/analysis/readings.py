"""What one run of a probe shows of a model's layers: activity, lengths of inputs, regions."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from geoparam.analysis.activations import breaks
from geoparam.analysis.norms import average_moments, compute_moments
from geoparam.analysis.patterns import Collector
from geoparam.analysis.probe import list_normed, observe
from geoparam.analysis.sites import Inputs, Site, Sites
from geoparam.base_layer import GmPLayer
from geoparam.norm import TrackedMean


class Readings:
    """What one run of the probe shows, by layer name.

    If a branch or a router took other steps than those in which the sites were found, it is not
    known which layer showed what: `took_same_steps` is False, and there are no readings.

    Attributes:
        active: The share of points at which each unit is active, (units,). A point is an example,
            or a position in one.
        above: The share of points above each breakpoint, (K, units).
        lengths: The median length of a layer's inputs, one element.
        moments: Mean and deviation of norms that are not read by running statistics.
        patterns: The activation patterns; None where all activations are smooth.
    """

    def __init__(
        self, model: nn.Module, probe: Inputs, sites: Sites, examples: int | None, batch: bool
    ) -> None:
        self._active = defaultdict[str, list[Tensor]](list)  # of each call
        self._above = defaultdict[str, list[Tensor]](list)
        self._lengths = defaultdict[str, list[Tensor]](list)
        self._moments = list_normed(model, sites, batch)
        self._collector = Collector(examples)
        see = (self._see_activation, self._see_layer, self._see_norm)
        self.took_same_steps = observe(model, probe, sites, *see, training=batch)
        if not self.took_same_steps:
            for seen in (self._active, self._above, self._lengths):
                seen.clear()
            self._moments = {name: [] for name in self._moments}
        self.active = _average(self._active)
        self.above = _average(self._above)
        self.lengths = _average(self._lengths)
        self.moments = {name: average_moments(calls) for name, calls in self._moments.items()}
        self.patterns = self._collector.patterns() if self.took_same_steps else None

    def _see_activation(self, site: Site, step: int, z: Tensor) -> None:
        known = breaks(site.activation)
        if known is None:  # a max pool, or smooth
            self._collector.add(site, step, z, None)
            return
        above, active = known.above(z, site.channel), known.active(z, site.channel)
        self._collector.add(site, step, z, above)
        if site.layer is not None and z.numel():
            sides = torch.cat([active[None], above])
            shares = torch.stack([_share(side, site.channel) for side in sides])
            shares[:, _share(z.isnan(), site.channel) > 0] = torch.nan  # a unit that has diverged
            self._active[site.name].append(shares[0])
            self._above[site.name].append(shares[1:])

    def _see_layer(self, site: Site, _: int, x: Tensor) -> None:
        if site.layer is not None and x.is_floating_point() and x.numel():
            lengths = compute_input_lengths(site.layer, x).double()
            self._lengths[site.name].append(median(lengths.flatten()))

    def _see_norm(self, site: Site, _: int, z: Tensor) -> None:
        if site.name in self._moments:
            self._moments[site.name].append(compute_moments(site.norm, z))


def compute_input_lengths(layer: nn.Module, x: Tensor) -> Tensor:
    """Return the length of a layer's input at each point; of each patch, for a convolution.

    If the layer subtracts the mean of its input, it is the length of the difference, with the
    mean of evaluation. With groups there is one length for each, where the channels were.
    """
    x = x.to(torch.promote_types(x.dtype, torch.float32))  # squares overflow float16
    mean = _find_input_mean(layer)
    size = getattr(layer, "kernel_size", ())
    if not size:
        return torch.linalg.vector_norm(x if mean is None else x - mean, dim=-1)
    conv: Any = layer
    pads_centred = getattr(conv, "input_norm_form", True) == "border"
    if mean is not None and pads_centred:
        x = x - mean
    mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
    x = F.pad(x, list(conv._reversed_padding_repeated_twice), mode=mode)
    if mean is not None and not pads_centred:
        x = x - mean

    # The sum of squares in each patch is a convolution with ones.
    squares = x.square().unflatten(-len(size) - 1, (conv.groups, -1)).sum(dim=-len(size) - 1)
    convolve = (F.conv1d, F.conv2d, F.conv3d)[len(size) - 1]
    ones = torch.ones(conv.groups, 1, *size, dtype=x.dtype, device=x.device)
    sums = convolve(squares, ones, None, conv.stride, 0, conv.dilation, conv.groups)
    return sums.clamp(min=0).sqrt()


def _find_input_mean(layer: nn.Module) -> Tensor | None:
    """Return the mean that the layer subtracts from its input; no running mean is updated."""
    norm = layer.input_norm if isinstance(layer, GmPLayer) else layer
    if not isinstance(norm, TrackedMean):
        return None
    return norm.running_mean.view(-1, *[1] * len(getattr(layer, "kernel_size", ())))


def _average(calls: Mapping[str, list[Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack(values).mean(dim=0) for name, values in calls.items()}


def _share(sides: Tensor, channel: int) -> Tensor:
    """Return the share of points that are True; from counts, so that all of them are exactly 1."""
    others = [d for d in range(sides.ndim) if d != channel % sides.ndim]
    count = sides.sum(dim=others) if others else sides.long()
    return count.double() / max(1, sides.numel() // max(1, len(count)))


def median(values: Tensor) -> Tensor:
    """Return the middle value, of an even number the mean of two; any size, unlike quantile."""
    count = values.numel()
    ordered = values.sort().values
    return (ordered[(count - 1) // 2] + ordered[count // 2]) / 2
