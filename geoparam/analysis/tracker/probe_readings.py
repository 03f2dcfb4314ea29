"""What a probe batch shows about units: which are dead, what they separate, how regions change.

One run of the model shows every layer's input and pre-activation (`probe.observe`). Statistics are
collected on the device, layer by layer, and only packed bits of the patterns are kept.
"""

from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from geoparam.analysis.partition import Collector, Patterns
from geoparam.analysis.reading.layer_sites import Site
from geoparam.analysis.reading.norms import compute_moments
from geoparam.analysis.reading.probe import (
    average_seen,
    compute_input_lengths,
    observe,
    prepare_moments,
)
from geoparam.conversion.plan import Inputs


class ProbeReadings:
    """The readings of one run on a probe batch, by layer name.

    With `batch`, norms with running statistics use those of the probe instead, as in training. If
    a branch or a router took other steps than those in which the sites were found, it is not known
    which layer showed what: `same_steps` is False, and there are no readings.

    Attributes:
        active: The share of points at which each unit is active, (units,). A point is an example,
            or a position in one.
        above: The share of points above each breakpoint, (K, units).
        lengths: The median length of a layer's inputs, one element.
        moments: Mean and deviation of norms that are not read by running statistics.
        patterns: The activation patterns; None where all activations are smooth.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Inputs,
        sites: Mapping[str, Site],
        pools: Mapping[str, Site],
        batch: bool = False,
    ) -> None:
        self._collector = Collector(inputs)
        self._active: dict[str, list[Tensor]] = defaultdict(list)
        self._above: dict[str, list[Tensor]] = defaultdict(list)
        self._lengths: dict[str, list[Tensor]] = defaultdict(list)
        self._moments = prepare_moments(sites, batch)
        see = self._see_pre_activation, self._see_input, self._see_norm
        self.same_steps = observe(model, inputs, {**sites, **pools}, *see, training=batch)
        shares_and_lengths = self._active, self._above, self._lengths
        if not self.same_steps:
            self._moments = prepare_moments(sites, batch)
            for seen in shares_and_lengths:
                seen.clear()
        self.active, self.above, self.lengths = (
            {name: torch.stack(each).mean(dim=0) for name, each in seen.items()}
            for seen in shares_and_lengths
        )
        self.moments = average_seen(sites, self._moments)
        self.patterns: Patterns | None = self._collector.patterns() if self.same_steps else None

    def _see_pre_activation(self, site: Site, z: Tensor, step: int) -> None:
        breaks = site.breaks
        self._collector(site, z, step)
        if breaks is None or not z.numel():
            return
        above = [_share(side, site.channel) for side in breaks.above(z, site.channel)]
        between = len(above) > 1 and breaks.opens and breaks.closes
        active = _share(breaks.active(z, site.channel), site.channel) if between else above[0]
        active = active if breaks.opens else 1 - active
        self._active[site.name].append(active)
        self._above[site.name].append(torch.stack(above))

    def _see_input(self, site: Site, x: Tensor, _: int) -> None:
        if x.is_floating_point() and x.numel():
            lengths = compute_input_lengths(site.layer, x).double()
            self._lengths[site.name].append(median(lengths.flatten()))

    def _see_norm(self, site: Site, z: Tensor, _: int) -> None:
        if site.name in self._moments:
            self._moments[site.name].append(compute_moments(site.norm, z))


def _share(sides: Tensor, channel: int) -> Tensor:
    """Return the share of points that are True; from counts, so that all of them are exactly 1."""
    others = [d for d in range(sides.ndim) if d != channel % sides.ndim]
    count = sides.sum(dim=others) if others else sides.long()
    return count.double() / max(1, sides.numel() // max(1, len(count)))


def median(values: Tensor) -> Tensor:
    """Return the middle value, of an even number the mean of two; any size, unlike quantile."""
    count = values.numel()
    places = ((count - 1) // 2, count // 2)
    if values.is_cuda:  # which sorts faster than it selects
        ordered = values.sort().values
        low, high = (ordered[place] for place in places)
    else:
        low, high = (values.kthvalue(place + 1).values for place in places)
    return (low + high) / 2
