"""Quantiles over the segments of one vector."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from geoparam.analysis.tracker.measurement import compute_quantiles

LEVELS = (0.0, 0.5, 0.99, 1.0)


def quantiles(values: Tensor, counts: Sequence[int], levels: Sequence[float] = LEVELS) -> Tensor:
    segment = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    return compute_quantiles(values, segment, len(counts), levels)


@pytest.mark.parametrize("counts", [[1], [3, 1, 64, 2, 65, 1000]])
def test_each_segment_has_the_quantiles_that_numpy_finds(counts: list[int]) -> None:
    values = torch.randn(3, sum(counts), dtype=torch.float64)
    found = quantiles(values, counts)
    for layer, part in enumerate(values.split(counts, dim=1)):
        expected = np.quantile(part.numpy(), LEVELS, axis=1).T
        np.testing.assert_allclose(found[:, layer], expected, rtol=1e-12)


def test_missing_values_are_left_out_and_infinite_ones_count() -> None:
    values = torch.randn(1, 60, dtype=torch.float64)
    values[0, ::3] = torch.nan
    values[0, 50:] = torch.nan
    found = quantiles(values, [50, 10])
    np.testing.assert_allclose(found[0, 0], np.nanquantile(values[0, :50].numpy(), LEVELS))
    assert found[0, 1].isnan().all()
    infinite = torch.tensor([[1.0, torch.inf, 2.0]])
    assert quantiles(infinite, [3], (0.5, 1.0)).tolist() == [[[2.0, torch.inf]]]
