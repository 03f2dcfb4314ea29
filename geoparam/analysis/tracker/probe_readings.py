"""What a probe batch tells about units: which are dead, what they separate, how regions change.

One run of the model shows every layer's input and pre-activation (`probe.observe`); this collects
numbers from them on the device, layer by layer, and keeps only packed bits of the patterns.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from geoparam.analysis.partition import Collector, Patterns
from geoparam.analysis.reading.layer_sites import Site
from geoparam.analysis.reading.moments import Moments, average_moments, has_running, norm_moments
from geoparam.analysis.reading.probe import input_lengths, observe
from geoparam.conversion.plan import Inputs
from geoparam.trace import tensors_in


class Readings:
    """The numbers of one run on a probe batch.

    Attributes:
        active: The share of points at which each unit is active, (units,), by layer. A point is an
            example, or a position in one.
        above: The share of points above each breakpoint, (K, units), by layer.
        lengths: The median length of what units see, one number, by layer.
        moments: Mean and deviation of norms that have no statistics of their own, by layer.
        patterns: The activation patterns; None where all activations are smooth.
        followed: Whether the model took the steps in which the sites were found; where a branch
            or a router decided otherwise it is not known which layer showed what, and there are
            no numbers.
    """

    def __init__(self, model: nn.Module, inputs: Inputs, sites: Mapping[str, Site]) -> None:
        self._active: dict[str, list[Tensor]] = {}
        self._above: dict[str, list[Tensor]] = {}
        self._lengths: dict[str, list[Tensor]] = {}
        self._moments: dict[str, list[Moments]] = {}
        first = next(tensors_in(inputs), None)
        self._collector = Collector(None if first is None else len(first))
        calls = (self._see, self._see_input, self._see_norm)
        self.followed = observe(model, inputs, sites, *calls)
        if not self.followed:
            self._forget()
        self.active = {name: torch.stack(each).mean(dim=0) for name, each in self._active.items()}
        self.above = {name: torch.stack(each).mean(dim=0) for name, each in self._above.items()}
        self.lengths = {name: torch.stack(t).mean(dim=0) for name, t in self._lengths.items()}
        self.moments = {name: average_moments(each) for name, each in self._moments.items()}
        self.patterns: Patterns | None = None
        if len(self._collector):
            self.patterns = self._collector.patterns()

    def _forget(self) -> None:
        for seen in (self._active, self._above, self._lengths, self._moments):
            seen.clear()
        self._collector = Collector()

    def _see(self, site: Site, z: Tensor) -> None:
        breaks = site.breaks
        self._collector(site, z)
        if breaks is None or not z.numel():
            return
        above = [_share(side, site.channel) for side in breaks.above(z, site.channel)]
        between = len(above) > 1 and breaks.opens and breaks.closes
        active = _share(breaks.active(z, site.channel), site.channel) if between else above[0]
        active = active if breaks.opens else 1 - active
        self._active.setdefault(site.name, []).append(active)
        self._above.setdefault(site.name, []).append(torch.stack(above))

    def _see_input(self, site: Site, x: Tensor) -> None:
        if x.is_floating_point() and x.numel():
            lengths = input_lengths(site.layer, x).double()
            self._lengths.setdefault(site.name, []).append(median(lengths.flatten()))

    def _see_norm(self, site: Site, z: Tensor) -> None:
        if site.norm is not None and not has_running(site.norm):
            self._moments.setdefault(site.name, []).append(norm_moments(site.norm, z))


def _share(sides: Tensor, channel: int) -> Tensor:
    """Return the share of points; counted, so that all of them are exactly one."""
    others = [d for d in range(sides.ndim) if d != channel % sides.ndim]
    count = sides.sum(dim=others) if others else sides.long()
    return count.double() / max(1, sides.numel() // max(1, len(count)))


def median(values: Tensor) -> Tensor:
    """Return the middle value, of an even number the mean of two, without a limit on size."""
    count = values.numel()
    places = ((count - 1) // 2, count // 2)
    if values.is_cuda:  # which selects slower than it sorts
        ordered = values.sort().values
        low, high = (ordered[place] for place in places)
    else:
        low, high = (values.kthvalue(place + 1).values for place in places)
    return (low + high) / 2
