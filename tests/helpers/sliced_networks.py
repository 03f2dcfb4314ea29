"""Small piecewise linear networks, and checks of their regions in a plane."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from function_model import FunctionModel
from torch import Tensor, nn

import geoparam as gp
from geoparam.analysis import SReLU, breaks
from geoparam.analysis.partition import pack
from geoparam.analysis.slices.plane import Plane
from geoparam.analysis.slices.slice import Slice, slice_regions

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
    return slice_regions(model, Plane(torch.zeros(2), torch.eye(2), EXTENT), **options)


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
        shifts = (0, -rounding, rounding)
        sides, lower, upper = (breaks(activation).above(z + s, 1 - z.ndim) for s in shifts)
        for bits, found in ((sides, above), (lower ^ upper, unsure)):
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
