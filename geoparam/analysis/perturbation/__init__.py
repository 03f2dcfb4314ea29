"""Perturbations of stored parameters: steps, the layer after them, responses and bounds."""

from geoparam.analysis.perturbation.response import Response, perturb, sweep

__all__ = ["Response", "perturb", "sweep"]
