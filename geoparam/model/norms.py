"""The one table of norms: which there are, where their features are, what they compute.

A boundary depends on what a norm subtracts and divides by. So a class that overrides its base, or
features that are not the units, must be noticed: such a norm becomes `UnknownNorm`, and boundaries
behind it have no distance.

To teach the library a new norm, add it to `find_feature_dim`, and to `compute_moments` if it has
no running statistics.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from geoparam import sphere
from geoparam.model.run import find_package
from geoparam.norm import InputMeanNorm

BatchNorm = nn.modules.batchnorm._BatchNorm
InstanceNorm = nn.modules.instancenorm._InstanceNorm
CONSTANTS = {"weight", "bias", "running_mean", "running_var"}  # buffers of a frozen BatchNorm
CHANNEL_NORMS = (BatchNorm, InstanceNorm)  # divide each channel by a scale of its own
NORMS = (*CHANNEL_NORMS, nn.LayerNorm, nn.GroupNorm)
FUNCTIONS = (
    "batch_norm",
    "layer_norm",
    "group_norm",
    "instance_norm",
    "rms_norm",
    "local_response_norm",
)
READ = ("torch", "torchvision", "timm", "geoparam")  # whose norms compute what their class says

Terms = dict[str, Tensor | float]  # coefficients of pre-activations: see analysis/boundary.py


class UnknownNorm(nn.Module):
    """Stands for what is between a layer and its activation where that is not understood."""


class Moments(NamedTuple):
    """What a norm subtracts and divides by, averaged over a batch; (out,) or one number."""

    mean: Tensor
    deviation: Tensor


def is_constant(norm: nn.Module) -> bool:
    """Return whether it is a BatchNorm whose tensors are all buffers, by whatever name."""
    return set(norm._buffers) >= CONSTANTS and not norm._parameters


def is_frozen_batch_norm(norm: nn.Module) -> bool:
    """Return whether it is FrozenBatchNorm2d, of torchvision or detectron2."""
    is_named_so = type(norm).__name__ == "FrozenBatchNorm2d" and hasattr(norm, "eps")
    return is_named_so and is_constant(norm)


def find_feature_dim(norm: Any, units: int, rank: int, positions: int) -> int | None:
    """Return the dimension of an input of `rank` in which `norm` has one feature for each unit.

    None where the norm is not understood, or its features are not units. `positions` is that of a
    convolution, or 0.
    """
    if find_package(norm) not in READ:  # a subclass may compute something else
        return None

    if type(norm).forward is nn.LayerNorm.forward:  # LayerNorm2d overrides it
        is_over_units = tuple(norm.normalized_shape) == (units,)
        return rank - 1 if is_over_units else None
    if isinstance(norm, nn.GroupNorm):
        averages_points = rank > 2 and not positions  # of a linear layer on sequences
        return 1 if norm.num_channels == units and not averages_points else None
    if isinstance(norm, BatchNorm | InstanceNorm | InputMeanNorm):
        features = norm.num_features
    elif is_frozen_batch_norm(norm):
        features = norm.running_mean.numel()
    else:
        return None
    if features != units:
        return None
    return norm.dim % rank if isinstance(norm, InputMeanNorm) else 1


def has_running(norm: nn.Module | None) -> bool:
    """Return whether it has running statistics: BatchNorm, MBN, a tracking InstanceNorm."""
    return getattr(norm, "running_mean", None) is not None


def uses_batch(norm: nn.Module, model: nn.Module) -> bool:
    """Return whether a norm with running statistics uses the batch's in the model's present mode.

    A model that evaluates is read as if all of its norms trained.
    """
    is_evaluating = model.training and not norm.training  # fine-tuning with fixed statistics
    is_frozen = getattr(norm, "frozen", False) or is_frozen_batch_norm(norm)
    return has_running(norm) and not is_evaluating and not is_frozen


def needs_batch(norm: nn.Module, model: nn.Module, batch: bool) -> bool:
    """Return whether a norm is read by a batch's statistics: with `batch`, or having no others."""
    return not has_running(norm) or (batch and uses_batch(norm, model))


def count_groups(norm: nn.Module | None, positions: int) -> int:
    """Return how many groups of units a norm centres at each point; 0 if it does not do that."""
    if isinstance(norm, nn.LayerNorm):
        return 1
    if isinstance(norm, nn.GroupNorm) and not positions:
        return norm.num_groups
    return 0


def read_norm(norm: Any, is_centred: bool, moments: Moments | None) -> Terms:
    """Return the coefficients that a norm adds; unknown statistics make distances NaN."""
    terms: Terms = {}
    if getattr(norm, "weight", None) is not None:
        terms["gamma"] = norm.weight
    if getattr(norm, "bias", None) is not None:
        terms["beta"] = norm.bias

    if moments is not None:
        terms["variance"] = moments.deviation.square()
        mean: Tensor | float = moments.mean
    elif has_running(norm):
        mean = norm.running_mean
        if getattr(norm, "running_var", None) is not None:
            terms |= {"variance": norm.running_var, "eps": norm.eps}
    else:
        terms["variance"] = mean = torch.nan
    return terms if is_centred else {**terms, "mean": mean}


def compute_moments(norm: Any, z: Tensor) -> Moments:
    """Return mean and deviation that `norm` takes from its input `z`, averaged over the batch.

    For BatchNorm and MBN they are the batch's own. GroupNorm and InstanceNorm have some for each
    image, LayerNorm for each point: these are averaged.
    """
    z = sphere.wide(z.detach())
    if isinstance(norm, UnknownNorm):
        return Moments(*z.new_full((2,), torch.nan))

    if isinstance(norm, nn.LayerNorm):
        mean, deviation = _moments_over(z, [-1], norm.eps)
        return Moments(mean.mean(), deviation.mean())

    if isinstance(norm, nn.GroupNorm | InstanceNorm):
        channels = z.shape[1]
        groups = getattr(norm, "num_groups", channels)  # InstanceNorm: each channel is one
        by_group = z.reshape(len(z), groups, -1)
        mean, deviation = _moments_over(by_group, [2], norm.eps)
        width = channels // groups
        mean = mean.mean(dim=0).repeat_interleave(width)
        return Moments(mean, deviation.mean(dim=0).repeat_interleave(width))

    channel = getattr(norm, "dim", 1) % z.ndim
    others = [d for d in range(z.ndim) if d != channel]
    mean, deviation = _moments_over(z, others, getattr(norm, "eps", 0.0))
    if isinstance(norm, InputMeanNorm):
        deviation = torch.ones_like(deviation)
    return Moments(mean, deviation)


def _moments_over(z: Tensor, dims: list[int], eps: float) -> tuple[Tensor, Tensor]:
    deviation = (z.var(dim=dims, correction=0) + eps).sqrt()
    return z.mean(dim=dims), deviation


def average_moments(calls: list[Moments]) -> Moments:
    """Return the average over the calls of a norm; NaN where none was seen."""
    if not calls:
        return Moments(*torch.full((2,), torch.nan))
    mean = torch.stack([call.mean for call in calls])
    deviation = torch.stack([call.deviation for call in calls])
    return Moments(mean.mean(dim=0), deviation.mean(dim=0))
