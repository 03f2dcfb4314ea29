"""Perturbations of stored parameters: steps, the layer after them, responses and bounds."""
