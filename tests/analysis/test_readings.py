"""Lengths of what a unit gets, patch by patch; what else a probe sees is in test_patterns.py."""

import pytest
import torch
import torch.nn.functional as F
from boundary_checks import patches
from torch import nn

from geoparam import GmPConv1d, GmPConv2d, GmPConv3d, GmPLinear
from geoparam.analysis.readings import compute_input_lengths

D = {"dtype": torch.float64}
OPTIONS = [
    {},
    {"padding": "same", "kernel_size": 4, "dilation": 2},
    {"dilation": 2, "padding": 2, "stride": 3},
    {"groups": 2, "padding": 1},
    {"padding": 1, "padding_mode": "circular", "stride": 2},
]
CONVS = {1: (nn.Conv1d, GmPConv1d), 2: (nn.Conv2d, GmPConv2d), 3: (nn.Conv3d, GmPConv3d)}


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("ours", [False, True])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_lengths_are_those_of_the_patches(rank: int, ours: bool, options: dict) -> None:
    layer = CONVS[rank][ours](4, 8, **{"kernel_size": 3, **options}, **D)
    x = torch.randn(2, 4, *[9, 8, 7][:rank], **D)
    found = compute_input_lengths(layer, x)
    assert found.shape == (2, layer.groups, *layer(x).shape[2:])
    torch.testing.assert_close(found.movedim(1, 0).flatten(1), patches(layer, x).norm(dim=-1))
    torch.testing.assert_close(compute_input_lengths(layer, x[0]), found[0])


def test_lengths_of_a_linear_layers_input_are_those_of_its_rows() -> None:
    layer, x = GmPLinear(5, 4, **D), torch.randn(2, 3, 5, **D)
    torch.testing.assert_close(compute_input_lengths(layer, x), x.norm(dim=-1))


@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize("form", [True, "border"])
def test_lengths_are_of_what_is_left_without_the_mean(form: bool | str, padding: int) -> None:
    layer = GmPConv2d(4, 6, 3, padding=padding, input_norm=form, **D)
    layer.input_norm.running_mean.normal_()
    x, mean = torch.randn(2, 4, 7, 6, **D), layer.input_norm.running_mean[:, None, None]
    if form is True:  # zeros are padded, and then the mean goes
        seen = F.pad(x, [padding] * 4) - mean
    else:
        seen = F.pad(x - mean, [padding] * 4)
    expected = patches(nn.Conv2d(4, 6, 3), seen).norm(dim=-1).flatten()
    torch.testing.assert_close(compute_input_lengths(layer.eval(), x).flatten(), expected)
    torch.testing.assert_close(compute_input_lengths(layer.train(), x).flatten(), expected)
    assert layer.input_norm.num_batches_tracked == 0


def test_lengths_of_narrow_numbers_are_computed_in_wide_ones() -> None:
    layer, x = nn.Conv2d(64, 4, 3).half(), 300 * torch.randn(1, 64, 4, 4).half()
    found = compute_input_lengths(layer, x)
    assert found.dtype == torch.float32 and found.isfinite().all()
    expected = patches(layer, x.double()).norm(dim=-1).flatten().float()
    torch.testing.assert_close(found.flatten(), expected)
