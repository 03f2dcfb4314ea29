"""A layer and its norm as they are after steps of what they store; the model stays untouched.

Steps are added in float64 and rounded to the storage type. What is looked at is a twin of the
perturbed layer, in float64. Where the norm after it has no statistics of its own to go by, the
model runs with the perturbed values lent to it.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from geoparam.analysis.boundary import Boundaries, Parts, Statistics, made_boundaries, parts
from geoparam.analysis.reading.activations import Breaks
from geoparam.analysis.reading.layer_sites import Site
from geoparam.analysis.reading.moments import Moments, batch_moments, has_running
from geoparam.analysis.stored_parameters import Steps, moved, twin
from geoparam.conversion.plan import Inputs


def perturbed(
    layer: nn.Module, steps: Steps, norm: nn.Module | None = None
) -> tuple[nn.Module, nn.Module | None]:
    """Return twins of a layer and the norm after it with steps added, in float64.

    They are to be looked at, by `layer_boundaries` for example, and not to be run or trained.

    Example:
        >>> layer = nn.Linear(2, 1)
        >>> _ = nn.init.constant_(layer.bias, 0.5)
        >>> other, _ = perturbed(layer, {"offset": torch.ones(1)})
        >>> other.bias
        tensor([1.5000], dtype=torch.float64)
    """
    values = moved(layer, norm, steps)
    return twin(layer, values[layer]), None if norm is None else twin(norm, values[norm])


class Seen(NamedTuple):
    """A layer and its norm with given values, in float64, what they are made of, and do."""

    layer: nn.Module
    norm: nn.Module | None
    parts: Parts
    found: Boundaries


def see_layer(
    layer: nn.Module,
    steps: Steps,
    norm: nn.Module | None,
    points: Breaks | None,
    moments: Moments | None,
) -> Seen:
    """Show a layer after given steps, with the norm's moments where they are known."""
    other, other_norm = perturbed(layer, steps, norm)
    made_of = parts(other, other_norm, moments)
    return Seen(other, other_norm, made_of, made_boundaries(made_of, points))


def observer(
    model: nn.Module, inputs: Inputs | None, site: Site, statistics: Statistics
) -> Callable[[Steps], Seen]:
    """Return a function that shows a site after given steps, its norm's moments made anew."""
    kept = statistics == "running" and has_running(site.norm)
    runs = inputs is not None and any(call.norm is not None for call in site.calls)

    @torch.no_grad()
    def see(steps: Steps) -> Seen:
        moments = None
        if inputs is not None and runs and not kept:
            moments = _moments(model, inputs, site, steps, statistics == "batch")
        return see_layer(site.layer, steps, site.norm, site.breaks, moments)

    return see


def _moments(
    model: nn.Module, inputs: Inputs, site: Site, steps: Steps, training: bool
) -> Moments | None:
    """Run the model with the perturbed layer and return what the norm after it sees.

    Running statistics are lent too: torch's BatchNorm writes them without a trace.
    """
    watched = _Watched(model)
    values = moved(site.layer, site.norm, steps)
    lent = {
        f"{path}.{name}": tensor
        for path, module in watched.named_modules()
        for name, tensor in (*values.get(module, {}).items(), *_running(module))
    }
    before = dict(vars(site.layer))
    try:
        return torch.func.functional_call(watched, lent, (inputs, site, training))
    finally:
        vars(site.layer).update(before)  # the older weight_norm leaves the weight it made


def _running(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return copies of a norm's running statistics, with their names."""
    if not has_running(module):
        return []
    return [(name, t.clone()) for name, t in module._buffers.items() if t is not None]


class _Watched(nn.Module):
    """Puts `batch_moments` where `functional_call` can lend a model other parameters."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Inputs, site: Site, training: bool) -> Moments | None:
        return batch_moments(self.model, inputs, {site.name: site}, training).get(site.name)
