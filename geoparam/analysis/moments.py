"""What the norms between layers and activations subtract and divide by, seen on a batch."""

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from geoparam.analysis.sites import Site
from geoparam.norm import InputMeanNorm
from geoparam.plan import Inputs
from geoparam.trace import trace


class Moments(NamedTuple):
    """What a norm subtracts and divides by, averaged over a batch; (out,) or one number."""

    mean: Tensor
    deviation: Tensor


def has_running(norm: nn.Module | None) -> bool:
    """Return whether a norm has statistics of its own: BatchNorm, MBN, a tracking InstanceNorm."""
    return getattr(norm, "running_mean", None) is not None


def is_rms(norm: nn.Module) -> bool:
    """Return whether it is RMSNorm, torch's or another of that name: no mean, no offset."""
    return "rmsnorm" in type(norm).__name__.lower()


def batch_moments(
    model: nn.Module, inputs: Inputs, sites: Mapping[str, Site], training: bool = False
) -> dict[str, Moments]:
    """Run the model and return the averages of what the norm after each layer sees, by layer.

    With `training`, norms that track statistics use the batch's instead; the model's state is
    afterwards as it was.
    """
    steps = {
        call.norm: (name, site.norm)
        for name, site in sites.items()
        for call in site.calls
        if call.norm is not None and site.norm is not None
    }
    seen: dict[int, Moments] = {}

    def visit(step: int, tensors: list[Tensor]) -> None:
        if step in steps:
            seen[step] = norm_moments(steps[step][1], tensors[0])

    with ExitStack() as stack:
        for module in model.modules() if training else ():
            if has_running(module):
                stack.callback(module.register_forward_pre_hook(_use_the_batch).remove)
        trace(model, inputs, visit=visit)
    found: dict[str, list[Moments]] = {}
    for step, moments in seen.items():
        found.setdefault(steps[step][0], []).append(moments)
    return {name: _average(each) for name, each in found.items()}


def _use_the_batch(module: nn.Module, _: object) -> None:
    module.training = True  # the run puts flags and statistics back


def _average(moments: list[Moments]) -> Moments:
    return Moments(*(torch.stack(each).mean(dim=0) for each in zip(*moments, strict=True)))


def norm_moments(norm: Any, z: Tensor) -> Moments:
    """Return mean and deviation that `norm` takes from its input `z`, averaged over the batch.

    For BatchNorm and MBN they are the batch's own. GroupNorm and InstanceNorm have some for each
    image, LayerNorm and RMSNorm for each point: these are averaged.
    """
    z = z.detach().double()
    zero = z.new_zeros(())
    if is_rms(norm):
        eps = getattr(norm, "eps", None) or getattr(norm, "variance_epsilon", None) or 0.0
        return Moments(zero, (z.square().mean(dim=-1) + eps).sqrt().mean())
    if isinstance(norm, nn.LayerNorm):
        return Moments(*(each.mean() for each in _over(z, _normalised_dims(norm, z), norm.eps)))
    if isinstance(norm, nn.GroupNorm):
        mean, deviation = _over(z.reshape(len(z), norm.num_groups, -1), (2,), norm.eps)
        width = norm.num_channels // norm.num_groups
        return Moments(*(t.mean(dim=0).repeat_interleave(width) for t in (mean, deviation)))
    if isinstance(norm, nn.modules.instancenorm._InstanceNorm):
        z = z.reshape(*z.shape[:2], -1)
        return Moments(*(t.mean(dim=0) for t in _over(z, (2,), norm.eps)))
    channel = getattr(norm, "dim", 1) % z.ndim
    others = tuple(d for d in range(z.ndim) if d != channel)
    mean, deviation = _over(z, others, getattr(norm, "eps", 0.0))
    centring = isinstance(norm, InputMeanNorm)
    return Moments(mean, torch.ones_like(deviation) if centring else deviation)


def _over(z: Tensor, dims: tuple[int, ...], eps: float) -> tuple[Tensor, Tensor]:
    return z.mean(dim=dims), (z.var(dim=dims, correction=0) + eps).sqrt()


def _normalised_dims(norm: nn.LayerNorm, z: Tensor) -> tuple[int, ...]:
    """Return what LayerNorm averages over; the 2d forms of torchvision and timm have dim 1."""
    if type(norm).__name__.lower().endswith("2d"):
        return (1,)
    return tuple(range(-len(norm.normalized_shape), 0))
