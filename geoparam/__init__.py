"""Geometric Parameterization (GmP) for PyTorch."""

from geoparam.layers import GmPConv1d, GmPConv2d, GmPConv3d, GmPLinear
from geoparam.norm import InputMeanNorm, MeanOnlyBatchNorm
from geoparam.optim import param_groups
from geoparam.unit import retract

__version__ = "0.1.0"

__all__ = [
    "GmPConv1d",
    "GmPConv2d",
    "GmPConv3d",
    "GmPLinear",
    "InputMeanNorm",
    "MeanOnlyBatchNorm",
    "param_groups",
    "retract",
]
