"""Geometric Parameterization (GmP) for PyTorch."""

import importlib
from types import ModuleType

from geoparam.analysis.tracker import BoundaryTracker
from geoparam.analysis.watch import watch
from geoparam.attention import GmPMultiheadAttention
from geoparam.base_layer import GmPLayer
from geoparam.checkpoints import fold_state_dict
from geoparam.conversion import convert_, fold_, plan, verify
from geoparam.input_mean_layers import (
    InputMeanConv1d,
    InputMeanConv2d,
    InputMeanConv3d,
    InputMeanLinear,
)
from geoparam.layers import GmPConv1d, GmPConv2d, GmPConv3d, GmPLinear
from geoparam.norm import InputMeanNorm, MeanOnlyBatchNorm
from geoparam.optim import GeometricOptimizer
from geoparam.parameter_groups import param_groups
from geoparam.running_statistics import freeze_means_, recalibrate_, synchronise_means_
from geoparam.step_hooks import retract

__version__ = "0.2.0"

__all__ = [
    "BoundaryTracker",
    "GeometricOptimizer",
    "GmPConv1d",
    "GmPConv2d",
    "GmPConv3d",
    "GmPLayer",
    "GmPLinear",
    "GmPMultiheadAttention",
    "InputMeanConv1d",
    "InputMeanConv2d",
    "InputMeanConv3d",
    "InputMeanLinear",
    "InputMeanNorm",
    "MeanOnlyBatchNorm",
    "convert_",
    "fold_",
    "fold_state_dict",
    "freeze_means_",
    "param_groups",
    "plan",
    "recalibrate_",
    "retract",
    "synchronise_means_",
    "verify",
    "watch",
]


def __getattr__(name: str) -> ModuleType:
    """Import `geoparam.plots` on use: it needs matplotlib."""
    if name == "plots":
        return importlib.import_module("geoparam.plots")
    raise AttributeError(f"module 'geoparam' has no attribute {name!r}")
