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

Extent = tuple[float, float, float, float]  # left, right, bottom, top

UNIT: Extent = (-1, 1, -1, 1)
WINDOW: Extent = (-2.0, 2.0, -1.5, 2.5)


def mlp(*widths: int, activation: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    """Hidden layers of these widths, with biases, and one output."""
    layers: list[nn.Module] = []
    for n, out in zip(widths, widths[1:], strict=False):
        layer = nn.Linear(n, out)
        nn.init.normal_(layer.bias, std=0.5)
        layers += [layer, activation()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], 1))


def mlp_with_norm() -> nn.Sequential:
    model = nn.Sequential(
        nn.Linear(2, 9),
        nn.BatchNorm1d(9),
        nn.ReLU(inplace=True),
        nn.Sequential(nn.Linear(9, 6), nn.LeakyReLU()),
        nn.Linear(6, 2),
    )
    norm = model[1]
    nn.init.normal_(norm.running_mean)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    return model


def cnn() -> nn.Sequential:
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


def area(extent: Extent) -> float:
    left, right, bottom, top = extent
    return (right - left) * (top - bottom)


def activation_patterns(model: nn.Module, x: Tensor) -> np.ndarray:
    """For each input, the sides of all boundaries that it is on, by hooks on the activations."""
    model = copy.deepcopy(model).double().eval()
    sides: list[Tensor] = []

    def record_sides(activation: nn.Module, args: tuple) -> None:
        dim = getattr(activation, "dim", 1)
        for is_above in breaks(activation).above(args[0], dim):
            sides.append(is_above.flatten(1))

    for module in model.modules():
        if breaks(module) is not None:
            module.register_forward_pre_hook(record_sides)
    model(x)
    return torch.cat(sides, dim=1).numpy()


def depths(polygon: np.ndarray, points: np.ndarray) -> np.ndarray:
    """How far inside of a convex polygon points are; negative if they are outside."""
    edges = np.roll(polygon, -1, axis=0) - polygon
    normals = np.stack([-edges[:, 1], edges[:, 0]], axis=1)
    normals /= np.linalg.norm(edges, axis=1, keepdims=True)
    distances = ((points[:, None] - polygon) * normals).sum(axis=2)
    return distances.min(axis=1)


def assert_is_exact(model: nn.Module, regions: Regions, extent: Extent = WINDOW) -> None:
    """Polygons fill the window; points share a polygon if and only if they share a pattern."""
    assert regions.areas.sum() == pytest.approx(area(extent), rel=1e-9)
    assert (regions.areas > 0).all()

    left, right, bottom, top = extent
    rng = np.random.default_rng(0)
    points = rng.uniform((left, bottom), (right, top), size=(2000, 2))
    inside = np.stack([depths(polygon, points) for polygon in regions.polygons], axis=1)

    # Rounding may put a point on an edge on either side.
    is_clear = (np.abs(inside) > 1e-9).all(axis=1)
    assert is_clear.mean() > 0.99
    points, inside = points[is_clear], inside[is_clear]
    assert ((inside > 0).sum(axis=1) == 1).all()

    polygon = inside.argmax(axis=1)
    patterns = activation_patterns(model, torch.from_numpy(points))
    pairs = {(number, row.tobytes()) for number, row in zip(polygon, patterns, strict=True)}
    assert len(pairs) == len({number for number, _ in pairs})
    assert len(pairs) == len({pattern for _, pattern in pairs})


@pytest.mark.parametrize(
    ("make", "segments"),
    [
        (lambda: mlp(2, 12), ["0"]),
        (lambda: mlp(2, 8, 8, 8), ["0", "2", "4"]),
        (lambda: mlp(2, 6, 5, activation=lambda: nn.Hardtanh(-0.4, 0.3)), ["0", "2"]),
        (mlp_with_norm, ["0", "3.0"]),
        (lambda: gp.convert_(mlp(2, 8, 7)), ["0", "2"]),
    ],
    ids=["one layer", "three layers", "hardtanh", "norm and nested", "gmp"],
)
def test_every_point_is_in_the_polygon_of_its_pattern(make: Callable, segments: list[str]) -> None:
    model = make()

    regions = find_regions(model, WINDOW)

    assert len(regions.polygons) > 10
    assert list(regions.segments) == segments
    assert_is_exact(model, regions)


@pytest.mark.parametrize("make", [cnn, lambda: gp.convert_(cnn())], ids=["plain", "gmp"])
def test_regions_of_a_plane_through_three_images_are_exact(make: Callable) -> None:
    extent = (-1.0, 2.0, -1.0, 2.0)
    p, q, r = torch.randn(3, 16)
    plane = linear(torch.stack([q - p, r - p], dim=1), p)
    model = nn.Sequential(plane, nn.Unflatten(1, (1, 4, 4)), *make())

    regions = find_regions(model, extent)

    assert len(regions.polygons) > 50
    assert_is_exact(model, regions, extent)


def test_one_layers_segments_lie_on_its_boundaries() -> None:
    model = mlp(2, 9, activation=lambda: nn.Hardtanh(-0.5, 1.0))
    boundary = boundaries(model, torch.zeros(1, 2))["0"]
    directions = boundary.direction.numpy()
    distances = boundary.distances.numpy()  # of each breakpoint

    ends = find_regions(model, WINDOW).segments["0"]

    offsets = np.abs(ends @ directions.T + distances[:, None, None])
    of_segments = offsets.max(axis=2)  # the farther end's
    nearest = of_segments.min(axis=(0, 2))
    assert len(nearest) > 5
    assert nearest.max() < 1e-6  # the model is float32


def test_deep_boundaries_are_where_the_unit_changes_sign() -> None:
    model = mlp(2, 8, 7)

    ends = find_regions(model, WINDOW).segments["2"]

    middles = torch.from_numpy(ends.mean(axis=1))
    second_layer = copy.deepcopy(model).double()[:3]
    smallest = second_layer(middles).abs().amin(dim=1)
    assert len(ends) > 10
    assert smallest.max() < 1e-12


def test_the_model_is_left_alone() -> None:
    model = mlp_with_norm()
    before = copy.deepcopy(model.state_dict())

    find_regions(model, UNIT)

    assert model.training
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0)


def linear(weight: list[list[float]] | Tensor, bias: list[float] | Tensor) -> nn.Linear:
    layer = nn.Linear(len(weight[0]), len(weight))
    layer.weight.data = torch.as_tensor(weight)
    layer.bias.data = torch.as_tensor(bias)
    return layer


def test_lines_through_one_point_and_repeated_lines_make_exact_regions() -> None:
    weight = [[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [-2.0, -2.0], [0.0, 0.0], [0.0, 0.0]]
    bias = [0.0, 0.0, 0.0, 0.0, 1.0, 0.0]
    model = nn.Sequential(linear(weight, bias), nn.ReLU())

    regions = find_regions(model, UNIT)

    assert len(regions.polygons) == 6
    assert len(regions.segments["0"]) == 4
    assert_is_exact(model, regions, UNIT)


def test_lines_along_the_windows_border_cut_nothing() -> None:
    layer = linear([[1.0, 0.0], [0.0, 1.0]], [1.0, -1.0])

    regions = find_regions(nn.Sequential(layer, nn.ReLU()), UNIT)

    assert len(regions.polygons) == 1


def test_a_deep_boundary_along_an_earlier_one_makes_no_sliver() -> None:
    first = linear([[1.0, 0.3], [-1.0, -0.3]], [0.1, -0.1])
    second = linear([[1.0, -1.0], [0.5, 0.0]], [0.0, 0.0])
    model = nn.Sequential(first, nn.ReLU(), second, nn.ReLU())

    regions = find_regions(model, UNIT)

    assert len(regions.polygons) == 2
    assert len(regions.segments["2"]) == 0


@pytest.mark.parametrize("seed", range(3))
def test_weights_of_small_whole_numbers_fill_the_window(seed: int) -> None:
    torch.manual_seed(seed)
    model = mlp(2, 5, 5, 5)
    for parameter in model.parameters():
        parameter.data = torch.randint(-1, 2, parameter.shape).float()

    regions = find_regions(model, WINDOW)

    assert regions.areas.sum() == pytest.approx(16, abs=1e-9)


@pytest.mark.parametrize(
    "extent",
    [(-1e4, 1e4, -1e-3, 1e-3), (499.0, 501.0, 499.9, 500.1)],
    ids=["thin", "far away"],
)
def test_thin_and_far_windows_are_filled(extent: Extent) -> None:
    model = mlp(2, 10, 8)
    middle = torch.tensor([extent[0] + extent[1]] * 2) / 2
    model[0].bias.data -= model[0].weight.data @ middle

    regions = find_regions(model, extent)

    assert len(regions.polygons) > 5
    assert regions.areas.sum() == pytest.approx(area(extent), rel=1e-9)


class Product(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x.roll(1, dims=1)


@pytest.mark.parametrize(
    "module",
    [
        nn.GELU(),
        nn.LayerNorm(6),
        Product(),
        nn.Hardsigmoid(),
        nn.ELU(),
        SReLU(6),
    ],
    ids=lambda module: type(module).__name__,
)
def test_modules_that_are_not_piecewise_linear_are_refused_by_name(module: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(2, 6), nn.ReLU(), module, nn.Linear(6, 4), nn.ReLU())

    with pytest.raises(ValueError, match=f"'2' is {type(module).__name__}"):
        find_regions(model, WINDOW)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            nn.Sequential(
                nn.Linear(2, 6), nn.BatchNorm1d(6, track_running_stats=False), nn.ReLU()
            ),
            "running statistics",
        ),
        (nn.Sequential(nn.Linear(2, 3)), "activations with breakpoints"),
        (nn.Linear(2, 3), "takes an nn.Sequential; got Linear"),
        (
            nn.Sequential(gp.GmPLinear(2, 6, activation=nn.ReLU())),
            "activation of their own",
        ),
        (
            nn.Sequential(linear([[1.0, 0.0]], [torch.inf]), nn.ReLU()),
            "'0' are not finite",
        ),
    ],
    ids=["batch statistics", "no activation", "no Sequential", "activation inside", "infinite"],
)
def test_models_without_exact_regions_are_refused(model: nn.Module, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_regions(model, WINDOW)


@pytest.mark.parametrize(
    "extent", [(1, -1, -1, 1), (-1, 1, -1, torch.inf)], ids=["reversed", "infinite"]
)
def test_a_window_that_is_reversed_or_infinite_is_refused(extent: Extent) -> None:
    with pytest.raises(ValueError, match="left < right"):
        find_regions(mlp(2, 3), extent)


def test_too_many_regions_are_refused() -> None:
    with pytest.raises(ValueError, match="max_regions=30"):
        find_regions(mlp(2, 12, 12), WINDOW, max_regions=30)
