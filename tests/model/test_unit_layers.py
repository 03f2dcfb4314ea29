"""One table tells the optimizer, conversion and analysis where a layer's units are."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
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


@pytest.mark.parametrize("name", LAYERS)
def test_all_three_read_the_same_rows(name: str) -> None:
    model = nn.ModuleDict({"layer": LAYERS[name]()})
    by_optimizer = next(find_unit_weights(model))
    by_conversion = find_candidates(model)["layer"]
    rows = by_optimizer.layout.to_rows(by_optimizer.weight)
    assert list(find_unit_layers(model))[0] == by_optimizer.layer == by_conversion.name
    assert torch.equal(by_conversion.read()[0].flatten(1), rows)
    read = read_rows(model["layer"])
    assert torch.equal(read.rows, rows)
    assert read.terms["offset"] is by_optimizer.bias


class Scaled(nn.Module):
    """A layer of a new type, with its weight (in, out)."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(3, 5))
        self.shift = nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.matrix + self.shift


def test_a_new_type_is_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    describe = unit_layers.describe

    def describe_more(module: nn.Module, name: str = "") -> Iterator[Entry]:
        if isinstance(module, Scaled):
            yield Entry("matrix", "shift", Layout("io"), is_affine=True)
        yield from describe(module, name)

    monkeypatch.setattr(unit_layers, "describe", describe_more)
    model = nn.Sequential(Scaled(), nn.Linear(5, 1))
    layer = model[0]
    optimizer = gp.GeometricOptimizer(model, torch.optim.SGD, lr=0.1)
    assert "0.matrix" in str(optimizer)
    directions = boundaries(model)["0.matrix"].direction
    expected = nn.functional.normalize(layer.matrix.detach().t().double())
    torch.testing.assert_close(directions, expected)


def test_our_layers_describe_themselves() -> None:
    inside, outside = gp.GmPLinear(4, 6), gp.GmPLinear(4, 6, activation=torch.relu)
    assert read_rows(inside).terms == {"gain": inside.r, "offset": inside.lam}
    assert read_rows(outside).terms == {"outer": outside.r, "offset": outside.lam}
    for layer in (inside, outside):
        torch.testing.assert_close(read_rows(layer).rows, layer.direction)
    centred = gp.InputMeanLinear(4, 6)
    assert read_rows(centred).rows is centred.weight


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
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    read_rows(layer)
    for name, value in layer.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert all(module.training for module in layer.modules())
