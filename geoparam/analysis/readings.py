"""What one run of a model on a probe shows: activity of units, moments of norms, regions.

The run is in evaluation mode and leaves the model as it was. A pre-activation is seen before its
activation may overwrite it; after a residual sum, it is the sum.
"""

import warnings
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import torch
from torch import Tensor, nn

from geoparam.analysis.max_pool import MaxPool
from geoparam.analysis.patterns import Pattern, Patterns, make_pattern
from geoparam.analysis.sites import Inputs, Layers, Site, Sites, find_sites
from geoparam.model.activations import breaks
from geoparam.model.graph import Step
from geoparam.model.norms import (
    Moments,
    average_moments,
    compute_moments,
    needs_batch,
    uses_batch,
)
from geoparam.model.run import tensors_in, unwrap
from geoparam.model.trace import trace
from geoparam.storage import list_few


class Readings:
    """What one run of the probe shows, by layer name.

    If a branch or a router took other steps than those in which the sites were found, it is not
    known which layer showed what: `took_same_steps` is False, and there are no readings.

    Args:
        model: The model of the sites.
        probe: A batch as the model takes it.
        sites: Where the units are.
        batch: Whether norms use the batch's statistics, if they do so in training.

    Attributes:
        active: The share of points at which each unit is active, (units,). A point is an example,
            or a position in one.
        above: The share of points above each breakpoint, (K, units).
        moments: Mean and deviation of norms that are not read by running statistics.
        patterns: The activation patterns; None where all activations are smooth.
        left_out: Layers without a pattern: their first dimension is not that of the examples.
        examples: How many examples the probe has.
    """

    def __init__(self, model: nn.Module, probe: Inputs, sites: Sites, batch: bool = False) -> None:
        self.examples = _count_examples(probe)
        self.left_out: set[str] = set()
        self._shares = defaultdict[str, list[Tensor]](list)  # active, then above; of each call
        self._parts: dict[int, Pattern] = {}  # of each step
        self._layers = defaultdict[str, set[int]](set)  # their steps
        self._moments: dict[str, list[Moments]] = {}
        for name, site in sites.layers.items():
            if site.norm is not None and needs_batch(site.norm, model, batch):
                self._moments[name] = []

        self.took_same_steps = self._run(model, probe, sites, batch)
        if not self.took_same_steps:
            self._shares.clear()
            self._parts.clear()
            self._moments = {name: [] for name in self._moments}

        self.patterns: Patterns | None = None
        if self._parts:
            layers = {name: sorted(steps) for name, steps in self._layers.items()}
            self.patterns = Patterns(dict(sorted(self._parts.items())), layers)
        shares = {name: torch.stack(calls).mean(dim=0) for name, calls in self._shares.items()}
        self.active = {name: share[0] for name, share in shares.items()}
        self.above = {name: share[1:] for name, share in shares.items()}
        self.moments = {name: average_moments(calls) for name, calls in self._moments.items()}

    def _run(self, model: nn.Module, probe: Inputs, sites: Sites, batch: bool) -> bool:
        """Run the model; return whether it took the steps in which the sites were found."""
        batch_norms = [norm for norm in model.modules() if batch and uses_batch(norm, model)]

        def prepare(*_: object) -> None:  # in the run, which restores both
            for norm in batch_norms:
                norm.training = True
            for site in sites.layers.values():
                if site.has_own_activation and site.calls:
                    self._replace_activation(site)

        with ExitStack() as stack:
            stack.enter_context(model.register_forward_pre_hook(prepare))
            # Autocast casts the weights again: its cached ones may be older than the last step.
            stack.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
            torch.set_autocast_cache_enabled(False)
            graph = trace(model, probe, watch=self._watch(sites))
        return graph.steps(sites.steps) == list(sites.steps.values())

    def _watch(self, sites: Sites) -> dict[Step, list[Callable[[Tensor], None]]]:
        """Return by step what is to be called with its input."""
        watch = defaultdict[Step, list[Callable[[Tensor], None]]](list)
        for site in sites:
            for call in site.calls:
                if call.norm is not None and site.name in self._moments:
                    see_norm = partial(self._see_norm, site)
                    watch[sites.steps[call.norm]].append(see_norm)
                if call.activation is not None and site.is_readable:
                    see_activation = partial(self._see_activation, site, call.activation)
                    watch[sites.steps[call.activation]].append(see_activation)
        return watch

    def _replace_activation(self, site: Site) -> None:
        """Let the activation that a layer applies itself show its input, in the layer's step."""
        activation = site.activation
        steps = iter([call.layer for call in site.calls])

        def show_and_activate(z: Tensor) -> Tensor:
            self._see_activation(site, next(steps, -1), z.clone())  # it may overwrite z
            return activation(z)

        vars(site.layer)["activation"] = show_and_activate  # hides a module of that name

    def _see_activation(self, site: Site, step: int, z: Tensor) -> None:
        """Read an activation's input, which has its units in dimension `site.channel`."""
        if not z.numel():
            return
        breakpoints = breaks(site.activation)
        if breakpoints is not None:
            sides = [*breakpoints.above(z, site.channel)]
            if site.layer is not None:
                shares = breakpoints.measure_shares(z, site.channel)
                self._shares[site.name].append(shares)
        elif isinstance(site.activation, MaxPool):
            sides = [site.activation(z)]
        else:  # smooth
            return

        if self.examples is None:
            self.examples = len(z)
        if z.shape[:1] != (self.examples,):
            self.left_out.add(site.name)
            return
        self._layers[site.name].add(step)
        if step not in self._parts:
            self._parts[step] = make_pattern(sides)

    def _see_norm(self, site: Site, z: Tensor) -> None:
        self._moments[site.name].append(compute_moments(site.norm, z))


def _count_examples(inputs: Inputs) -> int | None:
    """Return the first tensor's first dimension that is not 1, or else 1; None without tensors.

    A list as the first argument, as detectors take it, has an example in each entry.
    """
    first = inputs[0] if isinstance(inputs, tuple) and inputs else None
    if isinstance(first, list):
        return len(first)
    sizes = [len(tensor) for tensor in tensors_in(inputs) if tensor.ndim]
    if not sizes:
        return None
    return next((size for size in sizes if size != 1), 1)


def patterns(model: nn.Module, inputs: Inputs, layers: Layers = None) -> Patterns:
    """Return each layer's activation pattern on a batch, in evaluation mode.

    Args:
        model: Any batch-first model; layers whose activation is smooth are left out.
        inputs: A batch as the model takes it, examples in the first dimension of its tensors.
        layers: Names, or a function of module and name; all by default.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 1, bias=False), nn.ReLU(), nn.Linear(1, 1))
        >>> _ = nn.init.ones_(model[0].weight)
        >>> regions = patterns(model, torch.tensor([[1., 1.], [-1., 0.], [2., 0.]]))
        >>> regions["0"].packed.tolist(), regions.distinct().item()
        ([[128], [0], [128]], 2)
    """
    sites = find_sites(model, inputs, layers)
    readings = Readings(unwrap(model), inputs, sites)
    if not readings.took_same_steps:
        raise ValueError(
            "the model took other steps in each of two runs on these inputs, so it is not known "
            "which layer's activations were seen: a branch or a router decides at random."
        )

    left_out = ""
    if readings.left_out:
        left_out = (
            f"no bits of {list_few(sorted(readings.left_out))}: the first dimension of every "
            f"activation must be the examples, and there it is not {readings.examples}. Models "
            "that put time first, or join or divide the batch, have no patterns there."
        )
    if readings.patterns is None:
        raise ValueError(
            left_out
            or "a pattern needs an activation with breakpoints (ReLU and its relatives, ReLU6, "
            "Hardtanh, SReLU) or a max pool after a layer that is analysed, with values for each "
            "example; none ran. Smooth activations have no regions: follow their units' "
            "directions instead."
        )
    if left_out:
        warnings.warn(left_out, stacklevel=2)
    return readings.patterns
