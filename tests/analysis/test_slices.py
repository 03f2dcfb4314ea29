"""Exact regions in a plane: every point is in the polygon that a direct run puts it in."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from function_model import FunctionModel
from torch import Tensor, nn

import geoparam as gp
from geoparam.analysis import SReLU, boundaries, breaks
from geoparam.analysis.partition import pack, patterns
from geoparam.analysis.reading.pooling import MaxPool
from geoparam.analysis.slices import slice as module
from geoparam.analysis.slices.plane import plane_through
from geoparam.analysis.slices.slice import Slice, slice_regions
from geoparam.trace import trace

EXTENT = (-2.0, 2.0, -1.5, 2.5)
MODULES = (nn.ReLU, nn.LeakyReLU, nn.PReLU, nn.ReLU6, nn.Hardtanh, nn.RReLU, SReLU)


def mlp(*widths: int, activation: Callable[[int], nn.Module] = lambda n: nn.ReLU()) -> nn.Module:
    layers: list[nn.Module] = []
    for n, out in zip(widths, widths[1:], strict=False):
        layers += [nn.Linear(n, out), activation(out)]
        nn.init.normal_(layers[-2].bias, std=0.5)
    return nn.Sequential(*layers, nn.Linear(widths[-1], 1))


def with_norm() -> nn.Module:
    model = nn.Sequential(
        nn.Linear(2, 9), nn.BatchNorm1d(9), nn.ReLU(inplace=True), nn.Linear(9, 6, bias=False),
        nn.BatchNorm1d(6), nn.LeakyReLU(), nn.Linear(6, 2),
    )  # fmt: skip
    for norm in (model[1], model[4]):
        for tensor in (norm.running_mean, norm.weight.data, norm.bias.data):
            nn.init.normal_(tensor)
    return model


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.AvgPool2d(2),
        nn.Conv2d(3, 2, 2), SReLU(2, lower=-0.1, upper=0.3, upper_slope=0.5),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 4), nn.ReLU6(), nn.Linear(4, 2),
    )  # fmt: skip


def add_before_activation(m: nn.Module, x: Tensor) -> Tensor:
    """Run a residual network that adds in place, and then activates the sum."""
    x = m.first(m.enter(x))
    y = m.c(m.second(m.b(x)))
    y += m.short(x)
    return m.leave(m.third(y))


def add_after_activation(m: nn.Module, x: Tensor) -> Tensor:
    """Run a "pre-activation" network: an activation reads the sum, which also goes on without."""
    x = m.enter(x)
    x = x + m.b(m.first(x.clone()))
    x = x + m.c(m.second(x.clone()))
    return m.leave(m.third(x))


def residual(function: Callable) -> nn.Module:
    layers = {name: nn.Linear(5, 5) for name in ("b", "c", "short")}
    activations = {name: nn.ReLU(inplace=True) for name in ("first", "second", "third")}
    ends = {"enter": nn.Linear(2, 5), "leave": nn.Linear(5, 1)}
    return FunctionModel(function, **ends, **layers, **activations)


def twice() -> nn.Module:
    """One layer and one activation, called again and again."""
    layers = {"enter": nn.Linear(2, 5), "layer": nn.Linear(5, 5), "act": nn.LeakyReLU(0.2)}
    call = lambda m, x: m.act(m.layer(m.act(m.layer(m.act(m.enter(x))))))  # noqa: E731
    return FunctionModel(call, **layers)


def outside() -> nn.Module:
    model = nn.Sequential(
        gp.GmPLinear(2, 7, activation=nn.ReLU()),
        gp.GmPLinear(7, 6, activation=nn.Hardtanh(-0.5, 0.5), input_norm=True),
        nn.Linear(6, 1),
    )
    for layer in (model[0], model[1]):
        nn.init.normal_(layer.r)
        nn.init.normal_(layer.lam, std=0.3)
    return model


def srelu(channels: int) -> nn.Module:
    made = SReLU(channels, lower_slope=-0.5, upper_slope=0.2)
    nn.init.uniform_(made.lower, -1, 0)
    nn.init.uniform_(made.upper, 0, 1)
    return made


NETWORKS = {  # and the names of their segments
    "one layer": (lambda: mlp(2, 12), ["0"]),
    "three layers": (lambda: mlp(2, 8, 8, 8), ["0", "2", "4"]),
    "hardtanh": (lambda: mlp(2, 6, 5, activation=lambda n: nn.Hardtanh(-0.4, 0.3)), ["0", "2"]),
    "srelu": (lambda: mlp(2, 6, 5, activation=srelu), ["0", "2"]),
    "norm": (with_norm, ["0", "3"]),
    "residual": (lambda: residual(add_before_activation), ["enter", "b", "c"]),
    "pre-activation": (lambda: residual(add_after_activation), ["first", "second", "c"]),
    "one layer twice": (twice, ["enter", "layer", "layer (2)"]),
    "gmp": (lambda: gp.convert_(mlp(2, 8, 7)), ["0", "2"]),
    "gmp, r outside": (outside, ["0", "1"]),
}


def cut(model: nn.Module, **options: Any) -> Slice:
    return slice_regions(model, torch.zeros(2), **({"extent": EXTENT} | options))


def points_in(extent: tuple, n: int = 2000) -> np.ndarray:
    low, high = np.array([extent[0], extent[2]]), np.array([extent[1], extent[3]])
    return low + (high - low) * np.random.default_rng(0).uniform(size=(n, 2))


def depths(polygon: np.ndarray, points: np.ndarray) -> np.ndarray:
    """Return how far inside of a convex polygon points are; negative if they are outside."""
    sides = np.roll(polygon, -1, axis=0) - polygon
    normals = np.stack([-sides[:, 1], sides[:, 0]], axis=1)
    normals /= np.linalg.norm(sides, axis=1, keepdims=True)
    return ((points[:, None] - polygon) * normals).sum(axis=2).min(axis=1)


def direct_patterns(model: nn.Module, x: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return packed bits, and those that rounding decides: hooks on activations, and no more."""
    model = copy.deepcopy(model).double().eval()
    above: list[Tensor] = []
    unsure: list[Tensor] = []

    def see(activation: nn.Module, args: tuple) -> None:
        z = args[0].detach()
        rounding = 1e-12 * z.abs().max()
        for shift, found in ((0, above), (rounding, unsure)):
            sides = breaks(activation).above(z + shift, 1 - z.ndim)
            lower = breaks(activation).above(z - shift, 1 - z.ndim)
            bits = sides if found is above else sides ^ lower
            found.extend(pack(side.flatten(1)) for side in bits)

    for activation in model.modules():
        if isinstance(activation, MODULES):
            activation.register_forward_pre_hook(see)
    model(x)
    return torch.cat(above, dim=1).numpy(), torch.cat(unsure, dim=1).numpy()


def locate(found: Slice) -> tuple[np.ndarray, np.ndarray]:
    """Return random points, each in one polygon and not near a side, and the number of that."""
    points = points_in(found.plane.extent)
    inside = np.stack([depths(polygon, points) for polygon in found.polygons], axis=1)
    sure = (np.abs(inside) > 1e-9).all(axis=1)
    assert sure.mean() > 0.99 and ((inside[sure] > 0).sum(axis=1) == 1).all()
    return points[sure], inside.argmax(axis=1)[sure]


def assert_fills_its_window(found: Slice) -> None:
    """Areas add up, and polygons are convex and counter-clockwise."""
    a0, a1, b0, b1 = found.plane.extent
    assert found.areas.sum() == pytest.approx((a1 - a0) * (b1 - b0), rel=1e-9)
    assert (found.areas > 0).all() and found.patterns.distinct() == found.count
    for polygon in found.polygons:
        sides = np.roll(polygon, -1, axis=0) - polygon
        after = np.roll(sides, -1, axis=0)
        assert (sides[:, 0] * after[:, 1] - sides[:, 1] * after[:, 0] > -1e-12).all()


def assert_agrees_with_sampling(model: nn.Module, found: Slice) -> None:
    points, region = locate(found)
    direct, unsure = direct_patterns(model, found.plane.at(points))
    packed = found.patterns.network.packed.numpy()[region]
    assert not ((packed ^ direct) & ~unsure).any()


@pytest.mark.parametrize("make, names", NETWORKS.values(), ids=NETWORKS)
def test_every_point_is_in_the_polygon_of_its_pattern(make: Callable, names: list[str]) -> None:
    model = make()
    found = cut(model)
    assert found.count > 10 and list(found.segments) == names
    assert_agrees_with_sampling(model, found)
    assert_fills_its_window(found)


@pytest.mark.parametrize("make", [cnn, lambda: gp.convert_(cnn())], ids=["plain", "gmp"])
def test_a_plane_through_three_images(make: Callable) -> None:
    model = make()
    found = slice_regions(model, plane_through(*torch.randn(3, 1, 4, 4)))
    assert found.count > 50
    assert_agrees_with_sampling(model, found)
    assert_fills_its_window(found)


# Boundaries


@pytest.mark.parametrize(
    "activation", [lambda n: nn.ReLU(), lambda n: nn.Hardtanh(-0.5, 1.0)], ids=["one", "two"]
)
def test_one_layers_segments_lie_on_its_boundaries(activation: Callable) -> None:
    model = mlp(2, 9, activation=activation)
    found = cut(model)
    told = boundaries(model, torch.zeros(1, 2))["0"]
    direction, distances = told.direction.numpy(), told.distances.numpy()
    units = found.units["0"]
    along = np.einsum("mvd,md->mv", found.segments["0"], direction[units])
    off = np.abs(along[None] + distances[:, units, None]).max(axis=2).min(axis=0)
    assert len(units) > 5 and off.max() < 1e-6  # the model is float32


def test_lines_in_general_position_make_the_regions_of_the_formula() -> None:
    model = mlp(2, 20)
    found = cut(model)
    ends = found.segments["0"]
    (p, q), n = np.moveaxis(ends, 1, 0), len(ends)
    crossings = 0
    for i in range(n):
        for j in range(i):
            place = np.linalg.solve(np.stack([q[i] - p[i], p[j] - q[j]], axis=1), p[j] - p[i])
            crossings += bool(((place > 0) & (place < 1)).all())
    assert found.count == 1 + n + crossings


def test_deep_boundaries_are_where_the_unit_changes_sign() -> None:
    model = mlp(2, 8, 7)
    found = cut(model)
    ends, units = found.segments["2"], found.units["2"]
    steps = np.linspace(0, 1, 7)[:, None, None]
    along = ends[:, 0] + steps * (ends[:, 1] - ends[:, 0])
    with torch.no_grad():
        z = copy.deepcopy(model).double()[:3](found.plane.at(along.reshape(-1, 2)))
    heights = z.view(7, -1, 7).numpy()[:, np.arange(len(units)), units]
    assert len(units) > 10 and np.abs(heights).max() < 1e-12


def test_functions_are_activations_too() -> None:
    model = FunctionModel(
        lambda m, x: F.leaky_relu_(m.b(m.a(x).clamp(0.0, 0.7)), 0.1),
        a=nn.Linear(2, 6),
        b=nn.Linear(6, 5),
    )
    found = cut(model)
    modules = nn.Sequential(model.a, nn.Hardtanh(0.0, 0.7), model.b, nn.LeakyReLU(0.1))
    assert_agrees_with_sampling(modules, found)


def test_a_model_that_takes_more_than_a_tensor() -> None:
    inner = mlp(2, 6, 5)
    model = FunctionModel(lambda m, points, shift: {"out": m.inner(points + shift)}, inner=inner)
    inputs = lambda x: {"points": x, "shift": 0.25}  # noqa: E731
    found = cut(model, inputs=inputs)
    expected = slice_regions(inner, torch.full((2,), 0.25), extent=EXTENT)
    assert found.count == expected.count
    assert found.polygons[3] == pytest.approx(expected.polygons[3])


def test_the_model_is_left_alone() -> None:
    model = with_norm()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    slice_regions(model, torch.zeros(2))
    assert model.training and next(model.parameters()).dtype == torch.float32
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())


@pytest.mark.filterwarnings("ignore:.*weight_norm")
def test_torchs_older_weight_norm() -> None:
    model = nn.Sequential(nn.utils.weight_norm(nn.Linear(2, 6)), nn.ReLU())
    model(torch.zeros(1, 2))
    assert cut(model).count > 3


def test_groups_of_regions_give_the_same_as_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp(2, 8, 8)
    whole = cut(model)
    monkeypatch.setattr(module, "ELEMENTS", 500)
    parts = cut(model)
    assert np.sort(parts.areas) == pytest.approx(np.sort(whole.areas))
    assert len(parts.segments["2"]) == len(whole.segments["2"])
    assert_agrees_with_sampling(model, parts)


# Max pools


POOLED = {
    "after relu": (nn.ReLU(), nn.MaxPool2d(2)),
    "before relu": (nn.MaxPool2d(2), nn.ReLU()),
    "overlapping": (nn.LeakyReLU(), nn.MaxPool2d(3, 2, padding=1)),
    "centred": (nn.ReLU(), gp.InputMeanNorm(2), nn.MaxPool2d(2)),
    "adaptive": (nn.ReLU(), nn.AdaptiveMaxPool2d((2, 2))),
}


def pooled(*middle: nn.Module) -> nn.Module:
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1), *middle, nn.Conv2d(2, 3, 2), nn.ReLU(), nn.Flatten(),
        nn.Linear(3, 3),
    )  # fmt: skip
    for layer in (model[0], model[-4]):
        nn.init.normal_(layer.bias, std=0.3)
    return model


@pytest.mark.parametrize("middle", POOLED.values(), ids=POOLED)
def test_with_max_pools_polygons_are_the_regions_of_one_affine_map(middle: tuple) -> None:
    model = pooled(*middle)
    found = slice_regions(model, plane_through(*torch.randn(3, 1, 4, 4)))
    assert found.count > 30
    assert_fills_its_window(found)
    points, region = locate(found)
    exact = copy.deepcopy(model).double().eval()
    direct = patterns(exact, found.plane.at(points)).network.packed.numpy()
    assert np.array_equal(found.patterns.network.packed.numpy()[region], direct)
    for own in np.unique(region):  # autograd's map at one point is that of all points
        x = found.plane.at(points[region == own]).requires_grad_()
        local = torch.stack([torch.autograd.grad(exact(x)[:, k].sum(), x)[0] for k in range(3)])
        assert (local - local[:, :1]).abs().max() < 1e-12


@pytest.mark.parametrize("middle", POOLED.values(), ids=POOLED)
def test_on_a_pools_segments_two_inputs_are_highest(middle: tuple) -> None:
    model = pooled(*middle)
    found = slice_regions(model, plane_through(*torch.randn(3, 1, 4, 4)))
    (name,) = (name for name in found.segments if "max_pool" in name)
    ends, units = found.segments[name], found.units[name]
    along = found.plane.at(ends[:, 0] + 0.37 * (ends[:, 1] - ends[:, 0]))
    exact = copy.deepcopy(model).double().eval()
    (node,) = (node for node in trace(exact, along).nodes if node.kind == "max")
    before = [isinstance(m, nn.MaxPool2d | nn.AdaptiveMaxPool2d) for m in exact].index(True)
    each = MaxPool(node).windows(exact[:before](along)).flatten(1, -2)
    best = each[torch.arange(len(units)), torch.from_numpy(units)].sort(dim=1).values.detach()
    assert len(units) > 5 and (best[:, -1] - best[:, -2]).abs().max() < 1e-10


def test_an_input_that_wins_in_no_corner() -> None:
    rows = linear([[1.0, 0.0], [-1.0, 0.0], [0.0, 0.0]], [0.0, 0.0, 0.25])
    found = slice_regions(nn.Sequential(rows, nn.MaxPool1d(3)), torch.zeros(2))
    assert np.sort(found.areas) == pytest.approx([1.0, 1.5, 1.5])
    assert sorted(found.segments["max_pool1d"][:, 0, 0]) == pytest.approx([-0.25, 0.25])
    assert sorted(found.patterns["max_pool1d"].packed.flatten().tolist()) == [32, 64, 128]


# Degenerate networks


def linear(weight: list, bias: list) -> nn.Linear:
    layer = nn.Linear(len(weight[0]), len(weight))
    layer.weight.data, layer.bias.data = torch.tensor(weight), torch.tensor(bias)
    return layer


def test_lines_through_one_point_and_lines_twice() -> None:
    star = linear(
        [[1.0, 0], [0, 1.0], [1.0, 1.0], [-2.0, -2.0], [0.0, 0.0], [0.0, 0.0]], [0.0] * 6
    )
    star.bias.data[4] = 1.0
    model = nn.Sequential(star, nn.ReLU())
    found = slice_regions(model, torch.zeros(2), extent=(-1, 1, -1, 1))
    assert found.count == 6
    assert sorted(set(found.units["0"])) == [0, 1, 2, 3]
    assert_agrees_with_sampling(model, found)


def test_lines_along_the_windows_border_cut_nothing() -> None:
    model = nn.Sequential(linear([[1.0, 0], [0, 1.0]], [1.0, -1.0]), nn.ReLU())
    assert slice_regions(model, torch.zeros(2)).count == 1


def test_a_deep_boundary_along_an_earlier_one_makes_no_sliver() -> None:
    deep = linear([[1.0, -1.0], [0.5, 0.0]], [0.0, 0.0])
    model = nn.Sequential(
        linear([[1.0, 0.3], [-1.0, -0.3]], [0.1, -0.1]), nn.ReLU(), deep, nn.ReLU()
    )
    found = slice_regions(model, torch.zeros(2))
    assert found.count == 2 and len(found.segments["2"]) == 0


def test_a_unit_that_is_zero_but_for_rounding_is_not_above_zero() -> None:
    first = linear([[0.1, 0.7], [0.3, -0.9], [0.0, 0.0]], [5.0, 5.0, 10.0]).double()
    first.weight.data[2] = first.weight.data[:2].sum(dim=0)  # the third is the sum of the others
    second = linear([[1.0, 1.0, -1.0], [1.0, 0.0, 0.0]], [0.0, 0.0])
    found = slice_regions(nn.Sequential(first, nn.ReLU(), second, nn.ReLU()), torch.zeros(2))
    assert found.count == 1 and found.patterns["2"].packed.tolist() == [[64]]


def test_an_output_that_cancels_is_no_bend() -> None:
    def cancel(m: nn.Module, x: Tensor) -> Tensor:
        return 1.7 * m.inner(x) - 0.8 * m.inner(x) - 0.9 * m.inner(x)

    model = FunctionModel(cancel, inner=mlp(2, 6, 5))
    assert cut(model).count > 10


@pytest.mark.parametrize("seed", range(3))
def test_small_whole_numbers_as_weights(seed: int) -> None:
    torch.manual_seed(seed)
    model = mlp(2, 5, 5, 5)
    for parameter in model.parameters():
        parameter.data = torch.randint(-1, 2, parameter.shape).float()
    found = cut(model)
    assert_agrees_with_sampling(model, found)
    assert found.areas.sum() == pytest.approx(16, abs=1e-9)


@pytest.mark.parametrize("extent", [(-1e4, 1e4, -1e-3, 1e-3), (499.0, 501.0, 499.9, 500.1)])
def test_windows_that_are_thin_or_far_away(extent: tuple) -> None:
    model = mlp(2, 10, 8)
    model[0].bias.data -= model[0].weight.data @ torch.tensor([extent[0] + extent[1]] * 2) / 2
    found = slice_regions(model, torch.zeros(2), extent=extent)
    assert found.count > 5
    assert_fills_its_window(found)


# What is refused


def bent(bend: Callable[[Tensor], Tensor]) -> nn.Module:
    function = lambda m, x: F.relu(m.b(bend(F.relu(m.a(x)))))  # noqa: E731
    return FunctionModel(function, a=nn.Linear(2, 6), b=nn.Linear(6, 4))


def around(step: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(2, 6), step, nn.Linear(6, 4), nn.ReLU())


def infinite() -> nn.Module:
    model = mlp(2, 4)
    nn.init.constant_(model[0].bias, torch.inf)
    return model


def max_pool_by_keyword(m: nn.Module, x: Tensor) -> Tensor:
    return torch.max_pool1d(input=m.a(x), kernel_size=2)


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: around(nn.GELU()), "gelu '1'"), (lambda: around(nn.ELU()), "elu '1'"),
        (lambda: around(nn.LayerNorm(6)), "layernorm '1'"),
        (lambda: around(nn.BatchNorm1d(6, track_running_stats=False)), "batchnorm1d '1'"),
        (lambda: nn.Sequential(gp.GmPLinear(2, 6, activation=torch.tanh)), "gmplinear '0'"),
        (lambda: FunctionModel(max_pool_by_keyword, a=nn.Linear(2, 6)), "max_pool1d"),
        # kinks that no step shows, one of them after the last activation
        (lambda: bent(lambda x: (x - 0.5).abs()), "bent inside of a region, by .*abs"),
        (lambda: bent(lambda x: x * x.roll(1, dims=1)), "bent inside of a region, by .*mul"),
        (lambda: bent(lambda x: x.float().double()), "region, by .*does not show"),
        (lambda: FunctionModel(lambda m, x: m.a(x).square(), a=mlp(2, 5)), "output"),
        (lambda: nn.Linear(2, 3), "no step of the run is one"), (infinite, "not finite"),
        (lambda: FunctionModel(lambda m, x: F.relu(x.t())), "first dimension"),
    ],
)  # fmt: skip
def test_what_is_not_piecewise_linear_is_refused_by_name(make: Callable, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        cut(make())


def test_a_step_that_bends_nothing_in_the_window_is_allowed() -> None:
    assert cut(bent(torch.abs)).count > 2  # it comes after a ReLU


def test_too_many_regions_are_refused() -> None:
    with pytest.raises(ValueError, match="max_regions"):
        cut(mlp(2, 12, 12), max_regions=30)


def test_a_plane_can_be_given_whole() -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
    plane = plane_through(*torch.randn(3, 3))
    found = slice_regions(model, plane)
    expected = slice_regions(model, plane.origin, plane.axes, plane.extent)
    assert found.count == expected.count and found.plane.extent == plane.extent
    for more in ({"axes": plane.axes}, {"extent": plane.extent}):
        with pytest.raises(ValueError, match="has its own axes"):
            slice_regions(model, plane, **more)
