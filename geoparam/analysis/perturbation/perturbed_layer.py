"""A layer and its norm after steps of what they store, without touching the model.

The perturbed layer is a copy in float64. Where the norm after it has no running statistics, the
model runs with the perturbed values in place of its own.
"""

from typing import NamedTuple

import torch
from torch import nn

from geoparam.analysis.boundary import Boundaries, Units, compute_boundaries, read_units
from geoparam.analysis.perturbation.steps import Steps, add_steps, copy_with
from geoparam.analysis.reading.activations import Breaks
from geoparam.analysis.reading.layer_sites import Site
from geoparam.analysis.reading.norms import Moments, needs_batch
from geoparam.analysis.reading.probe import read_moments
from geoparam.conversion.plan import Inputs


def perturb_layer(
    layer: nn.Module, steps: Steps, norm: nn.Module | None = None
) -> tuple[nn.Module, nn.Module | None]:
    """Return copies of a layer and the norm after it with steps added, in float64.

    Read them, with `layer_boundaries` for example; do not run or train them.

    Example:
        >>> layer = nn.Linear(2, 1)
        >>> _ = nn.init.constant_(layer.bias, 0.5)
        >>> other, _ = perturb_layer(layer, {"offset": torch.ones(1)})
        >>> other.bias
        tensor([1.5000], dtype=torch.float64)
    """
    values = add_steps(layer, norm, steps)
    return copy_with(layer, values[layer]), None if norm is None else copy_with(norm, values[norm])


class LayerState(NamedTuple):
    """A layer and its norm with some values, in float64, its units and their boundaries."""

    layer: nn.Module
    norm: nn.Module | None
    units: Units
    boundaries: Boundaries


@torch.no_grad()
def layer_state(
    layer: nn.Module,
    steps: Steps,
    norm: nn.Module | None,
    points: Breaks | None,
    moments: Moments | None = None,
) -> LayerState:
    """Return the state of a layer after given steps, with the norm's moments if they are known."""
    other, other_norm = perturb_layer(layer, steps, norm)
    units = read_units(other, other_norm, moments)
    return LayerState(other, other_norm, units, compute_boundaries(units, points))


def site_state(
    model: nn.Module, inputs: Inputs | None, site: Site, batch: bool, steps: Steps
) -> LayerState:
    """Return the state of a site after given steps, with its norm's moments computed again."""
    moments = None
    if inputs is not None and needs_batch(site.norm, batch):
        moments = _perturbed_moments(model, inputs, site, steps, batch)
    return layer_state(site.layer, steps, site.norm, site.breaks, moments)


@torch.no_grad()
def _perturbed_moments(
    model: nn.Module, inputs: Inputs, site: Site, steps: Steps, batch: bool
) -> Moments | None:
    """Run the model with the perturbed layer and return what the norm after it sees."""
    watched = _MomentsOf(model)
    values = add_steps(site.layer, site.norm, steps)
    replaced = {
        f"{path}.{name}": tensor
        for path, module in watched.named_modules()
        for name, tensor in values.get(module, {}).items()
    }
    before = dict(vars(site.layer))
    try:
        return torch.func.functional_call(watched, replaced, (inputs, site, batch))
    finally:
        vars(site.layer).update(before)  # the older weight_norm leaves the weight it computed


class _MomentsOf(nn.Module):
    """Runs `read_moments` as a module, so that `functional_call` can replace parameters."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Inputs, site: Site, batch: bool) -> Moments | None:
        return read_moments(self.model, inputs, {site.name: site}, batch).get(site.name)
