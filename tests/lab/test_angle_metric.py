"""A tracked run's products of cosines are those of the layer's angles."""

import numpy as np
import pytest
import torch
from torch import nn
from tracked_networks import TYPE, gmp, record

from geoparam.analysis.history import History
from geoparam_lab.training.images.angle_metric import AngleMetric

INPUTS = torch.zeros(2, 5, dtype=TYPE)
LATITUDES = torch.tensor(
    [
        [0.1, 1.5, 1.5, 0.2],
        [0.3, 0.1, -0.2, 0.3],
    ],
    dtype=TYPE,
)


def record_metric(model: nn.Module) -> History:
    return record(model, example_inputs=INPUTS, quantities=[AngleMetric()])


@pytest.fixture
def history() -> History:
    """What is recorded of an angular layer and of a unit vector layer."""
    angular = gmp(5, 2)
    angular.latitude.data = LATITUDES.clone()
    unit_vectors = gmp(2, 1, coordinates="intrinsic")
    return record_metric(nn.Sequential(angular, nn.ReLU(), unit_vectors))


def find_products() -> torch.Tensor:
    """Return 1, cos t1, cos t1 cos t2, ... of each unit, without the last angle."""
    first = torch.ones(2, 1, dtype=TYPE)
    others = LATITUDES[:, :-1].cos().cumprod(dim=1)
    return torch.cat([first, others], dim=1)


def test_the_smallest_product_of_cosines_is_recorded(history: History) -> None:
    expected = find_products().min()

    np.testing.assert_allclose(history["0"]["smallest_product"], expected, rtol=1e-10)


def test_the_share_of_negligible_metric_entries_is_recorded(history: History) -> None:
    metric = find_products().square()
    share = (metric < 1e-4).double().mean()

    assert share > 0
    np.testing.assert_allclose(history["0"]["negligible_metric"], share)


def test_a_layer_without_angles_has_no_products(history: History) -> None:
    assert np.isnan(history["2"]["smallest_product"]).all()


@pytest.mark.parametrize("name", ["smallest_product", "negligible_metric"])
def test_a_layer_norm_does_not_change_the_products_of_cosines(name: str) -> None:
    """It centres the directions, but the layer's angles are what they were."""
    layer = gmp(5, 4)
    plain = nn.Sequential(layer, nn.Identity(), nn.ReLU())
    normalized = nn.Sequential(layer, nn.LayerNorm(4, dtype=TYPE), nn.ReLU())

    expected = record_metric(plain)["0"][name]

    np.testing.assert_allclose(record_metric(normalized)["0"][name], expected, rtol=1e-12)
