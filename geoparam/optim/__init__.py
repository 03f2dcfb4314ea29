"""Optimizers: the geometry for a plain model, and parameter groups for converted layers."""

from geoparam.optim.geometric import GeometricOptimizer
from geoparam.optim.groups import param_groups

__all__ = ["GeometricOptimizer", "param_groups"]
