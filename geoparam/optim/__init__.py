"""Optimizers: the geometry for a plain model, and parameter groups for converted layers.

`RowMuon` is torch.optim.Muon for weights of any rank, many matrices in one batch, and
`orthogonalise` its Newton-Schulz step. `AngleRate` is the type of `param_groups`' `angle_lr`.
"""

from geoparam.optim.geometric import GeometricOptimizer
from geoparam.optim.groups import AngleRate, param_groups
from geoparam.optim.muon import RowMuon, orthogonalise

__all__ = ["AngleRate", "GeometricOptimizer", "RowMuon", "orthogonalise", "param_groups"]
