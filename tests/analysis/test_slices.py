"""Exact regions in a plane: every point is in the polygon that a direct run puts it in."""

import copy
from collections.abc import Callable

import numpy as np
import pytest
import sliced_networks
import torch
import torch.nn.functional as F
from function_model import FunctionModel
from sliced_networks import NETWORKS, cnn, cut, locate, mlp, with_norm
from torch import Tensor, nn

import geoparam as gp
from geoparam.analysis import boundaries
from geoparam.analysis.partition import patterns
from geoparam.analysis.reading.probe import MaxPool
from geoparam.analysis.slices import slice as module
from geoparam.analysis.slices.plane import Plane, check_plane, plane_through
from geoparam.analysis.slices.slice import slice_regions
from geoparam.trace import trace

UNIT = Plane(torch.zeros(2), torch.eye(2), (-1, 1, -1, 1))


@pytest.mark.parametrize("make, names", NETWORKS.values(), ids=NETWORKS)
def test_every_point_is_in_the_polygon_of_its_pattern(make: Callable, names: list[str]) -> None:
    model = make()
    found = cut(model)
    assert found.count > 10 and list(found.segments) == names
    sliced_networks.assert_agrees_with_sampling(model, found)
    sliced_networks.assert_fills_its_window(found)


@pytest.mark.parametrize("make", [cnn, lambda: gp.convert_(cnn())], ids=["plain", "gmp"])
def test_a_plane_through_three_images(make: Callable) -> None:
    model = make()
    found = slice_regions(model, plane_through(*torch.randn(3, 1, 4, 4)))
    assert found.count > 50
    sliced_networks.assert_agrees_with_sampling(model, found)
    sliced_networks.assert_fills_its_window(found)


@pytest.mark.parametrize(
    "activation", [lambda n: nn.ReLU(), lambda n: nn.Hardtanh(-0.5, 1.0)], ids=["one", "two"]
)
def test_one_layers_segments_lie_on_its_boundaries(activation: Callable) -> None:
    model = mlp(2, 9, activation=activation)
    found = cut(model)
    told = boundaries(model, torch.zeros(1, 2))["0"]
    direction, distances = told.direction.numpy(), told.distances.numpy()
    along = found.segments["0"] @ direction.T  # of both ends, for each unit
    off = np.abs(along + distances[:, None, None]).max(axis=2).min(axis=(0, 2))
    assert len(off) > 5 and off.max() < 1e-6  # the model is float32


def test_deep_boundaries_are_where_the_unit_changes_sign() -> None:
    model = mlp(2, 8, 7)
    found = cut(model)
    ends = found.segments["2"]
    steps = np.linspace(0, 1, 7)[:, None, None]
    along = ends[:, 0] + steps * (ends[:, 1] - ends[:, 0])
    with torch.no_grad():
        z = copy.deepcopy(model).double()[:3](found.plane.at(along.reshape(-1, 2)))
    heights = z.view(7, -1, 7).abs().amax(dim=0)  # along each segment, of each unit
    assert len(ends) > 10 and heights.amin(dim=1).max() < 1e-12


def test_functions_are_activations_too() -> None:
    layers = {"a": nn.Linear(2, 6), "b": nn.Linear(6, 5)}
    model = FunctionModel(lambda m, x: F.leaky_relu_(m.b(m.a(x).clamp(0.0, 0.7)), 0.1), **layers)
    found = cut(model)
    modules = nn.Sequential(model.a, nn.Hardtanh(0.0, 0.7), model.b, nn.LeakyReLU(0.1))
    sliced_networks.assert_agrees_with_sampling(modules, found)


def test_the_model_is_left_alone() -> None:
    model = with_norm()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    slice_regions(model, UNIT)
    assert model.training and next(model.parameters()).dtype == torch.float32
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())


def test_groups_of_regions_give_the_same_as_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp(2, 8, 8)
    whole = cut(model)
    monkeypatch.setattr(module, "ELEMENTS", 500)
    parts = cut(model)
    assert np.sort(parts.areas) == pytest.approx(np.sort(whole.areas))
    assert len(parts.segments["2"]) == len(whole.segments["2"])
    sliced_networks.assert_agrees_with_sampling(model, parts)


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
    sliced_networks.assert_fills_its_window(found)
    points, region = locate(found)
    exact = copy.deepcopy(model).double().eval()
    direct = patterns(exact, found.plane.at(points)).network.packed.numpy()
    assert np.array_equal(found.patterns.network.packed.numpy()[region], direct)
    x = found.plane.at(points).requires_grad_()
    maps = torch.stack([torch.autograd.grad(exact(x)[:, k].sum(), x)[0] for k in range(3)])
    for own in np.unique(region):  # autograd's map at one point is that of all points
        local = maps[:, region == own]
        assert (local - local[:, :1]).abs().max() < 1e-12


@pytest.mark.parametrize("middle", POOLED.values(), ids=POOLED)
def test_on_a_pools_segments_two_inputs_are_highest(middle: tuple) -> None:
    model = pooled(*middle)
    found = slice_regions(model, plane_through(*torch.randn(3, 1, 4, 4)))
    (name,) = (name for name in found.segments if "max_pool" in name)
    ends = found.segments[name]
    along = found.plane.at(ends[:, 0] + 0.37 * (ends[:, 1] - ends[:, 0]))
    exact = copy.deepcopy(model).double().eval()
    (node,) = (node for node in trace(exact, along).nodes if node.kind == "max")
    before = [isinstance(m, nn.MaxPool2d | nn.AdaptiveMaxPool2d) for m in exact].index(True)
    each = MaxPool(node).windows(exact[:before](along)).flatten(1, -2)
    best = each.sort(dim=2).values.detach()  # of each window's inputs; in one, two are equal
    assert len(ends) > 5 and (best[..., -1] - best[..., -2]).amin(dim=1).max() < 1e-10


def test_an_input_that_wins_in_no_corner() -> None:
    rows = linear([[1.0, 0.0], [-1.0, 0.0], [0.0, 0.0]], [0.0, 0.0, 0.25])
    by_keyword = lambda m, x: torch.max_pool1d(input=m.a(x), kernel_size=3)  # noqa: E731
    for model in (nn.Sequential(rows, nn.MaxPool1d(3)), FunctionModel(by_keyword, a=rows)):
        found = slice_regions(model, UNIT)
        assert np.sort(found.areas) == pytest.approx([1.0, 1.5, 1.5])
        assert sorted(found.segments["max_pool1d"][:, 0, 0]) == pytest.approx([-0.25, 0.25])
        assert sorted(found.patterns["max_pool1d"].packed.flatten().tolist()) == [32, 64, 128]


def linear(weight: list, bias: list) -> nn.Linear:
    layer = nn.Linear(len(weight[0]), len(weight))
    layer.weight.data, layer.bias.data = torch.tensor(weight), torch.tensor(bias)
    return layer


def test_lines_through_one_point_and_lines_twice() -> None:
    rows = [[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [-2.0, -2.0], [0.0, 0.0], [0.0, 0.0]]
    star = linear(rows, [0.0, 0.0, 0.0, 0.0, 1.0, 0.0])
    model = nn.Sequential(star, nn.ReLU())
    found = slice_regions(model, UNIT)
    assert found.count == 6
    assert len(found.segments["0"]) == 4
    sliced_networks.assert_agrees_with_sampling(model, found)


def test_lines_along_the_windows_border_cut_nothing() -> None:
    model = nn.Sequential(linear([[1.0, 0], [0, 1.0]], [1.0, -1.0]), nn.ReLU())
    assert slice_regions(model, UNIT).count == 1


def test_a_deep_boundary_along_an_earlier_one_makes_no_sliver() -> None:
    first = linear([[1.0, 0.3], [-1.0, -0.3]], [0.1, -0.1])
    second = linear([[1.0, -1.0], [0.5, 0.0]], [0.0, 0.0])
    found = slice_regions(nn.Sequential(first, nn.ReLU(), second, nn.ReLU()), UNIT)
    assert found.count == 2 and len(found.segments["2"]) == 0


def test_a_unit_that_is_zero_but_for_rounding_is_not_above_zero() -> None:
    first = linear([[0.1, 0.7], [0.3, -0.9], [0.0, 0.0]], [5.0, 5.0, 10.0]).double()
    first.weight.data[2] = first.weight.data[:2].sum(dim=0)  # the third is the sum of the others
    second = linear([[1.0, 1.0, -1.0], [1.0, 0.0, 0.0]], [0.0, 0.0])
    found = slice_regions(nn.Sequential(first, nn.ReLU(), second, nn.ReLU()), UNIT)
    assert found.count == 1 and found.patterns["2"].packed.tolist() == [[64]]


def test_an_output_that_cancels_is_no_bend() -> None:
    cancel = lambda m, x: 1.7 * m.inner(x) - 0.8 * m.inner(x) - 0.9 * m.inner(x)  # noqa: E731
    assert cut(FunctionModel(cancel, inner=mlp(2, 6, 5))).count > 10


@pytest.mark.parametrize("seed", range(3))
def test_small_whole_numbers_as_weights(seed: int) -> None:
    torch.manual_seed(seed)
    model = mlp(2, 5, 5, 5)
    for parameter in model.parameters():
        parameter.data = torch.randint(-1, 2, parameter.shape).float()
    found = cut(model)
    sliced_networks.assert_agrees_with_sampling(model, found)
    assert found.areas.sum() == pytest.approx(16, abs=1e-9)


@pytest.mark.parametrize("extent", [(-1e4, 1e4, -1e-3, 1e-3), (499.0, 501.0, 499.9, 500.1)])
def test_windows_that_are_thin_or_far_away(extent: tuple) -> None:
    model = mlp(2, 10, 8)
    model[0].bias.data -= model[0].weight.data @ torch.tensor([extent[0] + extent[1]] * 2) / 2
    found = slice_regions(model, Plane(torch.zeros(2), torch.eye(2), extent))
    assert found.count > 5
    sliced_networks.assert_fills_its_window(found)


def bent(bend: Callable[[Tensor], Tensor]) -> nn.Module:
    function = lambda m, x: F.relu(m.b(bend(F.relu(m.a(x)))))  # noqa: E731
    return FunctionModel(function, a=nn.Linear(2, 6), b=nn.Linear(6, 4))


def around(step: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(2, 6), step, nn.Linear(6, 4), nn.ReLU())


def infinite() -> nn.Module:
    model = mlp(2, 4)
    nn.init.constant_(model[0].bias, torch.inf)
    return model


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: around(nn.GELU()), "gelu '1'"), (lambda: around(nn.ELU()), "elu '1'"),
        (lambda: around(nn.Hardsigmoid()), "hardsigmoid '1', whose slope torch rounds"),
        (lambda: around(nn.LayerNorm(6)), "layernorm '1'"),
        (lambda: around(nn.BatchNorm1d(6, track_running_stats=False)), "batchnorm1d '1'"),
        (lambda: nn.Sequential(gp.GmPLinear(2, 6, activation=torch.tanh)), "gmplinear '0'"),
        # kinks that no step shows, one of them after the last activation
        (lambda: bent(lambda x: (x - 0.5).abs()), "relu.* is bent inside of a region"),
        (lambda: bent(lambda x: x * x.roll(1, dims=1)), "relu.* is bent inside of a region"),
        (lambda: bent(lambda x: x.float().double()), "relu.* is bent inside of a region"),
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


def test_the_plane_through_three_inputs_holds_them_in_its_window() -> None:
    p, q, r = torch.randn(3, 2, 3, 3)
    plane = plane_through(p, q, r)
    points = plane.coordinates(torch.stack([p, q, r]))
    assert torch.allclose(plane.at(points), torch.stack([p, q, r]).double())
    a0, a1, b0, b1 = plane.extent
    assert ((points >= [a0, b0]) & (points <= [a1, b1])).all()
    gram = torch.stack(plane.axes).flatten(1) @ torch.stack(plane.axes).flatten(1).T
    assert torch.allclose(gram, torch.eye(2, dtype=torch.float64))


def test_coordinates_in_axes_that_are_not_orthonormal() -> None:
    origin, first, second = torch.randn(3, 2, 3, 3)
    plane = Plane(origin, (first, 5 * second), (0, 1, 0, 1))
    points = torch.randn(7, 2, dtype=torch.float64)
    assert torch.allclose(torch.from_numpy(plane.coordinates(plane.at(points))), points)


P, Q = torch.randn(2, 5, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: check_plane(UNIT._replace(origin=torch.zeros(3))), "shape of one input"),
        (lambda: check_plane(UNIT._replace(axes=torch.ones(2, 2))), "two different directions"),
        (lambda: check_plane(UNIT._replace(origin=torch.full((2,), torch.nan))), "finite"),
        (lambda: check_plane(UNIT._replace(extent=(1, -1, -1, 1))), "a0 < a1"),
        (lambda: check_plane(Plane(torch.zeros(3), torch.eye(3), UNIT.extent)), "two axes"),
        (lambda: check_plane(UNIT._replace(extent=(-1, 1))), "two axes"),
        (lambda: plane_through(P, Q, P + 3 * (Q - P)), "one line"),
        (lambda: plane_through(P, P, Q), "one line"),
        (lambda: slice_regions(mlp(2, 3), torch.zeros(2)), "needs the plane"),
        (lambda: cut(mlp(2, 12, 12), max_regions=30), "max_regions"),
    ],
)
def test_what_is_no_window_or_has_too_many_regions_is_refused(
    call: Callable, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        call()
