"""Optimizers: the geometry for a plain model.

`RowMuon` is torch.optim.Muon for weights of any rank, many matrices in one batch, and
`orthogonalise` its Newton-Schulz step.
"""

from geoparam.kernels.newton_schulz import orthogonalise
from geoparam.optim.geometric import GeometricOptimizer
from geoparam.optim.muon import RowMuon

__all__ = ["GeometricOptimizer", "RowMuon", "orthogonalise"]
