"""Quantiles of many stretches of one vector."""

import numpy as np
import pytest
import torch

from geoparam.analysis.tracker.quantiles import Quantiles

LEVELS = (0.0, 0.5, 0.99, 1.0)


@pytest.mark.parametrize("counts", [[1], [5], [3, 1, 64, 2, 65, 1000], [7] * 9])
def test_each_stretch_has_the_quantiles_that_numpy_finds(counts: list[int]) -> None:
    values = torch.randn(3, sum(counts), dtype=torch.float64)
    found = Quantiles(counts, LEVELS)(values)
    for layer, part in enumerate(values.split(counts, dim=1)):
        expected = np.quantile(part.numpy(), LEVELS, axis=1).T
        np.testing.assert_allclose(found[:, layer], expected, rtol=1e-12)


def test_missing_values_are_left_out() -> None:
    values = torch.randn(1, 60, dtype=torch.float64)
    values[0, ::3] = torch.nan
    values[0, 50:] = torch.nan
    found = Quantiles([50, 10], LEVELS)(values)
    np.testing.assert_allclose(found[0, 0], np.nanquantile(values[0, :50].numpy(), LEVELS))
    assert found[0, 1].isnan().all()


def test_infinite_values_count() -> None:
    assert Quantiles([3], (0.5, 1.0))(torch.tensor([[1.0, torch.inf, 2.0]])).tolist() == [
        [[2.0, torch.inf]]
    ]
