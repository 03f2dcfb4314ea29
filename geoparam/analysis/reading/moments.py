"""What the norms between layers and activations subtract and divide by, seen on a batch."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from geoparam import sphere
from geoparam.analysis.reading.layer_sites import Site
from geoparam.analysis.reading.norms import InstanceNorm, Unknown, is_for_images, is_rms
from geoparam.analysis.reading.probe import observe
from geoparam.conversion.plan import Inputs
from geoparam.norm import InputMeanNorm


class Moments(NamedTuple):
    """What a norm subtracts and divides by, averaged over a batch; (out,) or one number."""

    mean: Tensor
    deviation: Tensor


def has_running(norm: nn.Module | None) -> bool:
    """Return whether a norm has statistics of its own: BatchNorm, MBN, a tracking InstanceNorm."""
    return getattr(norm, "running_mean", None) is not None


def batch_moments(
    model: nn.Module, inputs: Inputs, sites: Mapping[str, Site], training: bool = False
) -> dict[str, Moments]:
    """Run the model and return the averages of what the norm after each layer sees, by layer.

    With `training`, norms that track statistics use the batch's instead; the model's state is
    afterwards as it was.
    """
    seen: dict[str, list[Moments]] = {}

    def see(site: Site, z: Tensor) -> None:
        seen.setdefault(site.name, []).append(norm_moments(site.norm, z))

    with ExitStack() as stack:
        if training:
            stack.callback(model.register_forward_pre_hook(_use_the_batch).remove)
        observe(model, inputs, sites, norm_input=see)
    return {name: average_moments(each) for name, each in seen.items()}


def _use_the_batch(model: nn.Module, _: object) -> None:
    """Let all norms take the batch's statistics, also those that no call shows, inside of layers.

    The run has lent them copies of their buffers, and puts flags back.
    """
    for module in model.modules():
        if has_running(module):
            module.training = True


def average_moments(moments: Sequence[Moments]) -> Moments:
    """Return the average over several calls of a layer."""
    return Moments(*(torch.stack(each).mean(dim=0) for each in zip(*moments, strict=True)))


def norm_moments(norm: Any, z: Tensor) -> Moments:
    """Return mean and deviation that `norm` takes from its input `z`, averaged over the batch.

    For BatchNorm and MBN they are the batch's own. GroupNorm and InstanceNorm have some for each
    image, LayerNorm and RMSNorm for each point: these are averaged.
    """
    least = torch.finfo(z.dtype).eps  # torch's RMSNorm, where none is given
    z = sphere.wide(z.detach())
    if isinstance(norm, Unknown):
        return Moments(*z.new_full((2,), torch.nan))
    if is_rms(norm):
        mean_square = z.square().mean(dim=_normalised_dims(norm))
        eps = least if norm.eps is None else norm.eps
        return Moments(z.new_zeros(()), (mean_square + eps).sqrt().mean())
    if isinstance(norm, nn.LayerNorm):
        return Moments(*(each.mean() for each in _over(z, _normalised_dims(norm), norm.eps)))
    if isinstance(norm, nn.GroupNorm):
        mean, deviation = _over(z.reshape(len(z), norm.num_groups, -1), (2,), norm.eps)
        width = norm.num_channels // norm.num_groups
        return Moments(*(t.mean(dim=0).repeat_interleave(width) for t in (mean, deviation)))
    if isinstance(norm, InstanceNorm):
        z = z[None] if z.ndim == norm._get_no_batch_dim() else z
        z = z.flatten(2)
        return Moments(*(t.mean(dim=0) for t in _over(z, (2,), norm.eps)))
    channel = getattr(norm, "dim", 1) % z.ndim
    others = tuple(d for d in range(z.ndim) if d != channel)
    mean, deviation = _over(z, others, getattr(norm, "eps", 0.0))
    centring = isinstance(norm, InputMeanNorm)
    return Moments(mean, torch.ones_like(deviation) if centring else deviation)


def _over(z: Tensor, dims: tuple[int, ...], eps: float) -> tuple[Tensor, Tensor]:
    return z.mean(dim=dims), (z.var(dim=dims, correction=0) + eps).sqrt()


def _normalised_dims(norm: Any) -> tuple[int, ...]:
    return (1,) if is_for_images(norm) else tuple(range(-len(norm.normalized_shape), 0))
