"""Which norms are understood: what they compute, and where they have their features.

A boundary takes a norm's word for what it subtracts and divides by. So a class that overrides what
its base computes, or features that are not the units, must be noticed: a norm that is not
understood is `Unknown`, and boundaries behind it have no distance.
"""

from typing import Any

from torch import nn

from geoparam.norm import InputMeanNorm

BatchNorm = nn.modules.batchnorm._BatchNorm
InstanceNorm = nn.modules.instancenorm._InstanceNorm
READ = ("torch", "torchvision", "timm", "geoparam")  # whose norms compute what their class says


class Unknown(nn.Module):
    """Stands for what is between a layer and its activation where that is not understood.

    Example:
        >>> Unknown("mul between layer and activation")
        Unknown(mul between layer and activation)
    """

    def __init__(self, reason: str) -> None:
        super().__init__()
        self.reason = reason

    def extra_repr(self) -> str:
        return self.reason


def is_rms(norm: nn.Module) -> bool:
    """Return whether it is RMSNorm, torch's or another of that name: no mean, no offset."""
    return "rmsnorm" in type(norm).__name__.lower()


def is_for_images(norm: nn.Module) -> bool:
    """Return whether it is torchvision's or timm's LayerNorm2d, over channels in dimension 1."""
    return "2d" in type(norm).__name__.lower()


def feature_dim(norm: Any, units: int, rank: int, positions: bool) -> int | None:
    """Return the dimension of an input of `rank` in which `norm` has one feature for each unit.

    None where it is not understood, or its features are not units.

    Args:
        norm: The norm after a layer.
        units: How many units the layer has.
        rank: The number of dimensions of what the norm is given.
        positions: Whether the layer is a convolution.
    """
    if not _computes_as_its_class(norm):
        return None
    if isinstance(norm, nn.LayerNorm) or is_rms(norm):
        shape = tuple(norm.normalized_shape)  # of several dimensions, (C, H, W), units come first
        dim = 1 if is_for_images(norm) else rank - len(shape)
        return dim if shape[0] == units and not (is_rms(norm) and len(shape) > 1) else None
    if isinstance(norm, nn.GroupNorm):
        averages_points = rank > 2 and not positions  # of a linear layer on sequences
        return 1 if norm.num_channels == units and not averages_points else None
    if _count(norm) != units:
        return None
    if isinstance(norm, InstanceNorm):
        return rank - norm._get_no_batch_dim()  # one example alone has no dimension for it
    return norm.dim % rank if isinstance(norm, InputMeanNorm) else 1


def _computes_as_its_class(norm: nn.Module) -> bool:
    """Return whether its forward is one that we have read: a subclass may do something else."""
    home = type(norm).forward.__module__.partition(".")[0]
    return home in READ and "forward" not in vars(norm)


def _count(norm: Any) -> int | None:
    if isinstance(norm, BatchNorm | InstanceNorm | InputMeanNorm):
        return norm.num_features
    frozen = type(norm).__name__.startswith("FrozenBatchNorm")
    return norm.running_mean.numel() if frozen else None


def mixes_units(norm: nn.Module) -> bool:
    """Return whether it takes mean or deviation over several units at a point."""
    return isinstance(norm, nn.LayerNorm | nn.GroupNorm) or is_rms(norm)
