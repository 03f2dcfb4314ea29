"""Optimizers: the geometry for a plain model.

`RowMuon` is torch.optim.Muon for weights of any rank, many matrices in one batch, and
`orthogonalise` its Newton-Schulz step.
"""

from geoparam.optim.geometric import GeometricOptimizer
from geoparam.optim.muon import RowMuon, orthogonalise

__all__ = ["GeometricOptimizer", "RowMuon", "orthogonalise"]
