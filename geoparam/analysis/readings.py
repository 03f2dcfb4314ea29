"""What one run of a probe shows of a model's layers: activity, lengths of inputs, regions."""

from collections import defaultdict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from geoparam.analysis.patterns import Collector
from geoparam.analysis.probe import list_normed, observe
from geoparam.analysis.sites import Inputs, Site, Sites
from geoparam.model.activations import breaks
from geoparam.model.norms import average_moments, compute_moments
from geoparam.model.unit_layers import count_positions
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
        self._calls = defaultdict[tuple[str, str], list[Tensor]](list)  # by reading and layer
        self._moments = list_normed(model, sites, batch)
        self._collector = Collector(examples)
        see = (self._see_activation, self._see_layer, self._see_norm)
        self.took_same_steps = observe(model, probe, sites, *see, training=batch)
        self.patterns = self._collector.patterns()
        if not self.took_same_steps:
            self.patterns = None
            self._calls.clear()
            self._moments = {name: [] for name in self._moments}
        self.active = self._average("active")
        self.above = self._average("above")
        self.lengths = self._average("lengths")
        self.moments = {name: average_moments(calls) for name, calls in self._moments.items()}

    def _see_activation(self, site: Site, step: int, z: Tensor) -> None:
        known = breaks(site.activation)
        if known is None:  # a max pool, or smooth
            self._collector.add(site, step, z, None)
            return
        above = known.above(z, site.channel)
        active = known.active(z, site.channel)
        self._collector.add(site, step, z, above)
        if site.layer is None or not z.numel():
            return
        shares = torch.stack([_share(side, site.channel) for side in (active, *above)])
        has_diverged = _share(z.isnan(), site.channel) > 0
        shares[:, has_diverged] = torch.nan
        self._calls["active", site.name].append(shares[0])
        self._calls["above", site.name].append(shares[1:])

    def _see_layer(self, site: Site, _: int, x: Tensor) -> None:
        if site.layer is not None and x.is_floating_point() and x.numel():
            lengths = compute_input_lengths(site.layer, x).double()
            self._calls["lengths", site.name].append(median(lengths.flatten()))

    def _see_norm(self, site: Site, _: int, z: Tensor) -> None:
        if site.name in self._moments:
            self._moments[site.name].append(compute_moments(site.norm, z))

    def _average(self, reading: str) -> dict[str, Tensor]:
        """Return a reading of each layer, averaged over its calls."""
        averages = {}
        for (kind, name), calls in self._calls.items():
            if kind == reading:
                averages[name] = torch.stack(calls).mean(dim=0)
        return averages


def compute_input_lengths(layer: nn.Module, x: Tensor) -> Tensor:
    """Return the length of a layer's input at each point; of each patch, for a convolution.

    If the layer subtracts the mean of its input, it is the length of the difference, with the
    mean of evaluation. With groups there is one length for each, where the channels were.
    """
    x = x.to(torch.promote_types(x.dtype, torch.float32))  # squares overflow float16
    mean = _find_input_mean(layer)
    rank = count_positions(layer)
    if not rank:
        return torch.linalg.vector_norm(x if mean is None else x - mean, dim=-1)

    conv: Any = layer
    pads_centred_input = getattr(conv, "input_norm_form", True) == "border"
    if mean is not None and pads_centred_input:
        x = x - mean
    mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
    x = F.pad(x, list(conv._reversed_padding_repeated_twice), mode=mode)
    if mean is not None and not pads_centred_input:
        x = x - mean

    # The sum of squares in each patch is a convolution with ones.
    channel = -1 - rank
    squares = x.square().unflatten(channel, (conv.groups, -1)).sum(dim=channel)
    ones = torch.ones(conv.groups, 1, *conv.kernel_size, dtype=x.dtype, device=x.device)
    convolve = (F.conv1d, F.conv2d, F.conv3d)[rank - 1]
    sums = convolve(squares, ones, None, conv.stride, 0, conv.dilation, conv.groups)
    return sums.clamp(min=0).sqrt()


def _find_input_mean(layer: nn.Module) -> Tensor | None:
    """Return the mean that the layer subtracts from its input; no running mean is updated."""
    norm = getattr(layer, "input_norm", layer)  # or the layer itself has one
    if not isinstance(norm, TrackedMean):
        return None
    return norm.running_mean.view(-1, *[1] * count_positions(layer))


def _share(sides: Tensor, channel: int) -> Tensor:
    """Return the share of points that are True; from counts, so that all of them are exactly 1."""
    channel %= sides.ndim  # a run that takes other steps may show another rank
    by_unit = sides.movedim(channel, 0).reshape(sides.shape[channel], -1)
    return by_unit.sum(dim=1).double() / by_unit.shape[1]


def median(values: Tensor) -> Tensor:
    """Return the middle value, of an even number the mean of two; any size, unlike quantile."""
    ordered = values.sort().values
    count = len(ordered)
    return (ordered[(count - 1) // 2] + ordered[count // 2]) / 2
