"""Optimizers: the geometry for a plain model, and parameter groups for converted layers.

`RowMuon` is torch.optim.Muon for weights of any rank, many matrices in one batch, and
`orthogonalise` its Newton-Schulz step.
"""

from geoparam.optim.geometric import GeometricOptimizer
from geoparam.optim.groups import param_groups
from geoparam.optim.muon import RowMuon, orthogonalise

__all__ = ["GeometricOptimizer", "RowMuon", "orthogonalise", "param_groups"]
