"""A tracked run's products of cosines are those of the layer's angles."""

import numpy as np
import torch
from torch import nn
from tracked_networks import TYPE, gmp, record

from geoparam_lab.training.images.angle_metric import AngleMetric


def test_angular_layers_tell_their_products_of_cosines() -> None:
    layer = gmp(5, 2)
    layer.latitude.data = torch.tensor([[0.1, 1.5, 1.5, 0.2], [0.3, 0.1, -0.2, 0.3]], dtype=TYPE)
    model = nn.Sequential(layer, nn.ReLU(), gmp(2, 1, coordinates="intrinsic"))
    inputs = torch.zeros(2, 5, dtype=TYPE)
    history = record(model, example_inputs=inputs, quantities=[AngleMetric()])

    cosines = layer.latitude.detach().cos()
    ones = torch.ones(2, 1, dtype=TYPE)
    products = torch.cat([ones, cosines.cumprod(dim=1)[:, :-1]], dim=1)
    np.testing.assert_allclose(history["0"]["smallest_product"], products.min(), rtol=1e-10)
    share = (products.square() < 1e-4).double().mean()
    np.testing.assert_allclose(history["0"]["negligible_metric"], share)
    assert share > 0
    assert np.isnan(history["2"]["smallest_product"]).all()


def test_a_layer_norm_does_not_change_the_products_of_cosines() -> None:
    """It centres the directions, but the layer's angles are what they were."""
    layer = gmp(5, 4)
    inputs = torch.zeros(2, 5, dtype=TYPE)
    products = []
    for norm in (nn.Identity(), nn.LayerNorm(4, dtype=TYPE)):
        model = nn.Sequential(layer, norm, nn.ReLU())
        history = record(model, example_inputs=inputs, quantities=[AngleMetric()])["0"]
        products.append((history["smallest_product"], history["negligible_metric"]))
    np.testing.assert_allclose(products[0], products[1], rtol=1e-12)
