"""Exact regions: every point is in the polygon that a direct run puts it in."""

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import geoparam as gp
from geoparam.analysis import SReLU, boundaries, breaks
from geoparam_lab.regions import Regions, find_regions

UNIT = (-1, 1, -1, 1)
WINDOW = (-2.0, 2.0, -1.5, 2.5)


def mlp(*widths: int, activation: Callable[[int], nn.Module] = lambda n: nn.ReLU()) -> nn.Module:
    layers: list[nn.Module] = []
    for n, out in zip(widths, widths[1:], strict=False):
        layers += [nn.Linear(n, out), activation(out)]
        nn.init.normal_(layers[-2].bias, std=0.5)
    return nn.Sequential(*layers, nn.Linear(widths[-1], 1))


def with_norm() -> nn.Module:
    model = nn.Sequential(
        nn.Linear(2, 9),
        nn.BatchNorm1d(9),
        nn.ReLU(inplace=True),
        nn.Sequential(nn.Linear(9, 6), nn.LeakyReLU()),
        nn.Linear(6, 2),
    )
    for tensor in (model[1].running_mean, model[1].weight.data, model[1].bias.data):
        nn.init.normal_(tensor)
    return model


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1),
        nn.BatchNorm2d(3),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Conv2d(3, 2, 2),
        nn.Hardtanh(-0.1, 0.3),
        nn.Flatten(),
        nn.Linear(2, 4),
        nn.ReLU6(),
        nn.Linear(4, 2),
    )


def direct_bits(model: nn.Module, x: Tensor) -> np.ndarray:
    """Return on which sides of all boundaries the inputs are, by hooks on the activations."""
    model = copy.deepcopy(model).double().eval()
    bits: list[Tensor] = []

    def see(activation: nn.Module, args: tuple) -> None:
        dim = getattr(activation, "dim", 1)
        bits.extend(side.flatten(1) for side in breaks(activation).above(args[0], dim))

    for module in model.modules():
        if breaks(module) is not None:
            module.register_forward_pre_hook(see)
    model(x)
    return torch.cat(bits, dim=1).numpy()


def depths(polygon: np.ndarray, points: np.ndarray) -> np.ndarray:
    """Return how far inside of a convex polygon points are; negative if they are outside."""
    sides = np.roll(polygon, -1, axis=0) - polygon
    normals = np.stack([-sides[:, 1], sides[:, 0]], axis=1)
    normals /= np.linalg.norm(sides, axis=1, keepdims=True)
    return ((points[:, None] - polygon) * normals).sum(axis=2).min(axis=1)


def assert_is_exact(model: nn.Module, regions: Regions, extent: tuple = WINDOW) -> None:
    """Polygons fill the window, and random points share one if and only if they share bits."""
    a0, a1, b0, b1 = extent
    assert regions.areas.sum() == pytest.approx((a1 - a0) * (b1 - b0), rel=1e-9)
    assert (regions.areas > 0).all()

    points = np.random.default_rng(0).uniform((a0, b0), (a1, b1), size=(2000, 2))
    inside = np.stack([depths(polygon, points) for polygon in regions.polygons], axis=1)
    sure = (np.abs(inside) > 1e-9).all(axis=1)
    assert sure.mean() > 0.99 and ((inside[sure] > 0).sum(axis=1) == 1).all()

    region = inside.argmax(axis=1)[sure]
    bits = direct_bits(model, torch.from_numpy(points[sure]))
    by_region = {(number, row.tobytes()) for number, row in zip(region, bits, strict=True)}
    assert len(by_region) == len({number for number, _ in by_region})
    assert len(by_region) == len({row for _, row in by_region})


NETWORKS = {  # and the names of their segments
    "one layer": (lambda: mlp(2, 12), ["0"]),
    "three layers": (lambda: mlp(2, 8, 8, 8), ["0", "2", "4"]),
    "hardtanh": (lambda: mlp(2, 6, 5, activation=lambda n: nn.Hardtanh(-0.4, 0.3)), ["0", "2"]),
    "norm and nested": (with_norm, ["0", "3.0"]),
    "gmp": (lambda: gp.convert_(mlp(2, 8, 7)), ["0", "2"]),
}


@pytest.mark.parametrize("make, names", NETWORKS.values(), ids=NETWORKS)
def test_every_point_is_in_the_polygon_of_its_pattern(make: Callable, names: list[str]) -> None:
    model = make()
    regions = find_regions(model, WINDOW)
    assert len(regions.polygons) > 10 and list(regions.segments) == names
    assert_is_exact(model, regions)


@pytest.mark.parametrize("make", [cnn, lambda: gp.convert_(cnn())], ids=["plain", "gmp"])
def test_a_plane_through_three_images(make: Callable) -> None:
    p, q, r = torch.randn(3, 16)
    plane = nn.Linear(2, 16)
    plane.weight.data, plane.bias.data = torch.stack([q - p, r - p], dim=1), p
    model = nn.Sequential(plane, nn.Unflatten(1, (1, 4, 4)), *make())
    regions = find_regions(model, (-1.0, 2.0, -1.0, 2.0))
    assert len(regions.polygons) > 50
    assert_is_exact(model, regions, (-1.0, 2.0, -1.0, 2.0))


def test_one_layers_segments_lie_on_its_boundaries() -> None:
    model = mlp(2, 9, activation=lambda n: nn.Hardtanh(-0.5, 1.0))
    told = boundaries(model, torch.zeros(1, 2))["0"]
    along = find_regions(model, WINDOW).segments["0"] @ told.direction.numpy().T
    off = np.abs(along + told.distances.numpy()[:, None, None]).max(axis=2).min(axis=(0, 2))
    assert len(off) > 5 and off.max() < 1e-6  # the model is float32


def test_deep_boundaries_are_where_the_unit_changes_sign() -> None:
    model = mlp(2, 8, 7)
    ends = find_regions(model, WINDOW).segments["2"]
    middles = torch.from_numpy(ends.mean(axis=1))
    heights = copy.deepcopy(model).double()[:3](middles).abs()
    assert len(ends) > 10 and heights.amin(dim=1).max() < 1e-12


def test_the_model_is_left_alone() -> None:
    model = with_norm()
    before = copy.deepcopy(model.state_dict())
    find_regions(model, UNIT)
    assert model.training and next(model.parameters()).dtype == torch.float32
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())


def linear(weight: list, bias: list) -> nn.Linear:
    layer = nn.Linear(len(weight[0]), len(weight))
    layer.weight.data, layer.bias.data = torch.tensor(weight), torch.tensor(bias)
    return layer


def test_lines_through_one_point_and_lines_twice() -> None:
    rows = [[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [-2.0, -2.0], [0.0, 0.0], [0.0, 0.0]]
    model = nn.Sequential(linear(rows, [0.0, 0.0, 0.0, 0.0, 1.0, 0.0]), nn.ReLU())
    regions = find_regions(model, UNIT)
    assert len(regions.polygons) == 6 and len(regions.segments["0"]) == 4
    assert_is_exact(model, regions, UNIT)


def test_lines_along_the_windows_border_cut_nothing() -> None:
    model = nn.Sequential(linear([[1.0, 0], [0, 1.0]], [1.0, -1.0]), nn.ReLU())
    assert len(find_regions(model, UNIT).polygons) == 1


def test_a_deep_boundary_along_an_earlier_one_makes_no_sliver() -> None:
    first = linear([[1.0, 0.3], [-1.0, -0.3]], [0.1, -0.1])
    second = linear([[1.0, -1.0], [0.5, 0.0]], [0.0, 0.0])
    regions = find_regions(nn.Sequential(first, nn.ReLU(), second, nn.ReLU()), UNIT)
    assert len(regions.polygons) == 2 and len(regions.segments["2"]) == 0


@pytest.mark.parametrize("seed", range(3))
def test_small_whole_numbers_as_weights(seed: int) -> None:
    torch.manual_seed(seed)
    model = mlp(2, 5, 5, 5)
    for parameter in model.parameters():
        parameter.data = torch.randint(-1, 2, parameter.shape).float()
    assert find_regions(model, WINDOW).areas.sum() == pytest.approx(16, abs=1e-9)


@pytest.mark.parametrize("extent", [(-1e4, 1e4, -1e-3, 1e-3), (499.0, 501.0, 499.9, 500.1)])
def test_windows_that_are_thin_or_far_away(extent: tuple) -> None:
    model = mlp(2, 10, 8)
    middle = torch.tensor([extent[0] + extent[1]] * 2) / 2
    model[0].bias.data -= model[0].weight.data @ middle
    regions = find_regions(model, extent)
    area = (extent[1] - extent[0]) * (extent[3] - extent[2])
    assert len(regions.polygons) > 5
    assert regions.areas.sum() == pytest.approx(area, rel=1e-9)


class Product(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x.roll(1, dims=1)


def around(step: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(2, 6), nn.ReLU(), step, nn.Linear(6, 4), nn.ReLU())


def infinite() -> nn.Module:
    model = mlp(2, 4)
    nn.init.constant_(model[0].bias, torch.inf)
    return model


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: around(nn.GELU()), "'2' is GELU"),
        (lambda: around(nn.LayerNorm(6)), "'2' is LayerNorm"),
        (lambda: around(Product()), "'2' is Product"),
        (lambda: around(nn.Hardsigmoid()), "'2' is Hardsigmoid"),
        (lambda: around(nn.ELU()), "'2' is ELU"),
        (lambda: around(SReLU(6)), "'2' is SReLU"),
        (lambda: around(nn.BatchNorm1d(6, track_running_stats=False)), "running statistics"),
        (lambda: nn.Sequential(nn.Linear(2, 3)), "activations with breakpoints"),
        (lambda: nn.Linear(2, 3), "takes an nn.Sequential; got Linear"),
        (
            lambda: nn.Sequential(gp.GmPLinear(2, 6, activation=nn.ReLU())),
            "activation of their own",
        ),
        (infinite, "'0' are not finite"),
    ],
)
def test_what_is_not_piecewise_linear_is_refused_by_name(make: Callable, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        find_regions(make(), WINDOW)


@pytest.mark.parametrize("extent", [(1, -1, -1, 1), (-1, 1, -1, torch.inf)])
def test_what_is_no_window_is_refused(extent: tuple) -> None:
    with pytest.raises(ValueError, match="left < right"):
        find_regions(mlp(2, 3), extent)


def test_too_many_regions_are_refused() -> None:
    with pytest.raises(ValueError, match="max_regions=30"):
        find_regions(mlp(2, 12, 12), WINDOW, max_regions=30)
