"""One table tells the optimizer, conversion and analysis where a layer's units are."""

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.testing import assert_close
from transformers.pytorch_utils import Conv1D

import geoparam as gp
from geoparam.analysis import boundaries
from geoparam.conversion.plan import find_candidates
from geoparam.model import unit_layers
from geoparam.model.unit_layers import (
    Entry,
    Layout,
    count_units,
    find_unit_layers,
    find_unit_weights,
    read_rows,
)

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(4, 6),
    "convolution": lambda: nn.Conv2d(4, 6, 3, groups=2),
    "Conv1D": lambda: Conv1D(6, 4),
    "attention": lambda: nn.MultiheadAttention(4, 2),
}


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
def test_optimizer_conversion_and_analysis_read_the_same_rows(
    make: Callable[[], nn.Module],
) -> None:
    model = nn.ModuleDict({"layer": make()})

    by_optimizer = next(find_unit_weights(model))
    by_conversion = find_candidates(model)["layer"]
    by_analysis = read_rows(model["layer"])

    rows = by_optimizer.layout.to_rows(by_optimizer.weight)
    assert torch.equal(by_conversion.read()[0].flatten(1), rows)
    assert torch.equal(by_analysis.rows, rows)
    assert by_analysis.terms["offset"] is by_optimizer.bias


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
def test_optimizer_conversion_and_analysis_name_a_layer_alike(
    make: Callable[[], nn.Module],
) -> None:
    model = nn.ModuleDict({"layer": make()})

    name = next(find_unit_weights(model)).layer

    assert find_candidates(model)["layer"].name == name
    assert list(find_unit_layers(model))[0] == name


class Scaled(nn.Module):
    """A layer of a new type, with its weight (in, out)."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(3, 5))
        self.shift = nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.matrix + self.shift


@pytest.fixture
def model_of_a_new_type(monkeypatch: pytest.MonkeyPatch) -> nn.Sequential:
    """Describe Scaled by one entry, and return a model with such a layer."""
    describe = unit_layers.describe

    def describe_more(module: nn.Module, name: str = "") -> Iterator[Entry]:
        if isinstance(module, Scaled):
            yield Entry("matrix", "shift", Layout("io"), is_affine=True)
        yield from describe(module, name)

    monkeypatch.setattr(unit_layers, "describe", describe_more)
    return nn.Sequential(Scaled(), nn.Linear(5, 1))


def test_the_optimizer_knows_a_new_type_by_one_entry(model_of_a_new_type: nn.Sequential) -> None:
    optimizer = gp.GeometricOptimizer(model_of_a_new_type, torch.optim.SGD, lr=0.1)

    assert "0.matrix" in str(optimizer)


def test_analysis_knows_a_new_type_by_one_entry(model_of_a_new_type: nn.Sequential) -> None:
    matrix = model_of_a_new_type[0].matrix

    directions = boundaries(model_of_a_new_type)["0.matrix"].direction

    expected = nn.functional.normalize(matrix.detach().t().double())
    assert_close(directions, expected)


def test_a_layer_with_r_inside_reads_it_as_the_gain() -> None:
    layer = gp.GmPLinear(4, 6)

    unit_rows = read_rows(layer)

    assert unit_rows.terms == {"gain": layer.r, "offset": layer.lam}
    assert_close(unit_rows.rows, layer.direction)


def test_a_layer_with_r_outside_reads_it_as_the_outer_factor() -> None:
    layer = gp.GmPLinear(4, 6, activation=torch.relu)

    unit_rows = read_rows(layer)

    assert unit_rows.terms == {"outer": layer.r, "offset": layer.lam}
    assert_close(unit_rows.rows, layer.direction)


def test_an_input_mean_layer_reads_its_weight() -> None:
    layer = gp.InputMeanLinear(4, 6)

    assert read_rows(layer).rows is layer.weight


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize(
    "module",
    [Doubled(4, 6), nn.ConvTranspose2d(4, 6, 3), nn.BatchNorm1d(6), nn.Embedding(4, 6)],
    ids=lambda module: type(module).__name__,
)
def test_other_modules_have_no_units_that_can_be_read(module: nn.Module) -> None:
    assert count_units(module) == 0


def test_reading_takes_no_step_of_a_power_iteration() -> None:
    layer = spectral_norm(nn.Linear(4, 6)).train()
    before = copy.deepcopy(layer.state_dict())

    read_rows(layer)

    assert_close(layer.state_dict(), before, rtol=0, atol=0)
    assert all(module.training for module in layer.modules())
