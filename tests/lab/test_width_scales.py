"""Sizes before training: what is known of them by hand."""

import math

import pytest
import torch
from torch import nn

from geoparam_lab import methods
from geoparam_lab.experiments import width_scales


@pytest.mark.parametrize(("method", "init"), [("sp", "glorot"), ("sp", "he"), ("gmp", "sphere")])
def test_sizes_are_those_of_the_network(method: str, init: str) -> None:
    x = torch.randn(200, 8, dtype=torch.float64)
    y = x.sum(1)
    model = methods.mlp(method, (8, 32, 1), seed=3, init=init)
    hidden = (model[0] if method == "gmp" else nn.Sequential(*model[:2]))(x)
    output = model(x).squeeze(-1)
    (output - y).abs().mean().backward()
    gradient = model[-1].weight.grad
    sizes = width_scales.measure_start(methods.mlp(method, (8, 32, 1), seed=3, init=init), x, y)
    assert math.isclose(sizes["activation"], hidden.pow(2).mean().sqrt().item())
    assert math.isclose(sizes["output"], output.pow(2).mean().sqrt().item())
    assert math.isclose(sizes["gradient_output"], gradient.pow(2).mean().sqrt().item())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.01 * parameter.grad.sign()
    change = (model(x).squeeze(-1) - output).pow(2).mean().sqrt().item()
    assert math.isclose(sizes["output_change"], change)
