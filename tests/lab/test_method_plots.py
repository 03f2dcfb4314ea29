"""The papers' figures: they show the data passed in, and methods can be told apart."""

from itertools import combinations
from typing import NamedTuple

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.lines import Line2D
from matplotlib.path import Path

from geoparam_lab import plots
from geoparam_lab.methods import METHODS


@pytest.fixture
def ax() -> Axes:
    _, axes = plots.new_figure(1, 1, size=(6, 4))
    return axes[0, 0]


def find_line(ax: Axes, label: str) -> Line2D:
    [line] = [line for line in ax.lines if line.get_label() == label]
    return line


def find_region(ax: Axes, label: str) -> Path:
    [patch] = [patch for patch in ax.patches if patch.get_label() == label]
    return patch.get_path()


def test_a_unit_without_a_direction_is_refused(ax: Axes) -> None:
    with pytest.raises(ValueError, match="has no boundary"):
        plots.unit_2d(np.zeros(2), 1.0, ax=ax)


def test_an_unknown_method_is_refused() -> None:
    with pytest.raises(ValueError, match="one of sp, .*got 'sgd'"):
        plots.method_style("sgd")


@pytest.mark.parametrize("key", METHODS)
def test_key_and_title_name_the_same_style(key: str) -> None:
    style = plots.method_style(key)

    assert style.title.lower() == key
    assert plots.method_style(style.title.replace("+", " + ")) == style


def test_no_two_methods_look_alike() -> None:
    styles = [plots.method_style(key) for key in METHODS]

    assert len({(style.colour, style.dash) for style in styles}) == len(METHODS)


# What an eye makes of linear sRGB: Machado, Oliveira and Fernandes 2009, severity 1.
NORMAL = np.eye(3)
DEUTERANOPIA = np.array(
    [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.01182, 0.04294, 0.968881],
    ]
)
SRGB_TO_XYZ = np.array(
    [
        [0.4124, 0.3576, 0.1805],
        [0.2126, 0.7152, 0.0722],
        [0.0193, 0.1192, 0.9505],
    ]
)
WHITE = [0.9505, 1.0, 1.089]


def lab(colour: str, eye: np.ndarray) -> np.ndarray:
    """CIE L*a*b* of a colour as an eye sees it."""
    rgb = np.array(to_rgb(colour))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    linear = np.clip(eye @ linear, 0, 1)
    x, y, z = np.cbrt(SRGB_TO_XYZ @ linear / WHITE)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("eye", [NORMAL, DEUTERANOPIA], ids=["normal", "deuteranopia"])
def test_methods_with_the_same_dash_differ_in_colour(eye: np.ndarray) -> None:
    styles = [plots.method_style(key) for key in METHODS]

    for one, other in combinations(styles, 2):
        if one.dash == other.dash:
            distance = np.linalg.norm(lab(one.colour, eye) - lab(other.colour, eye))
            assert distance > 15, (one.title, other.title)


def test_curves_that_are_no_methods_are_told_apart() -> None:
    styles = plots.curve_styles(["sp", "first", "second", "third"])

    assert [style.title for style in styles] == ["SP", "first", "second", "third"]
    assert len({(style.colour, style.dash) for style in styles}) == 4


each_direction = pytest.mark.parametrize("direction", [1.0, -3.0])


@each_direction
def test_unit_over_one_input_is_r_relu(ax: Axes, direction: float) -> None:
    plots.unit_1d(direction, 0.7, r=-1.5, ax=ax)

    x, z = find_line(ax, "unit").get_data()
    np.testing.assert_allclose(z, -1.5 * np.maximum(direction * x + 0.7, 0))
    assert np.isclose(x, -0.7 / direction, rtol=1e-12).any()  # the bend is not cut off


@each_direction
@pytest.mark.parametrize("label", ["location φ", "boundary"])
def test_unit_over_one_input_has_its_boundary_at_phi(
    ax: Axes, direction: float, label: str
) -> None:
    plots.unit_1d(direction, 0.7, r=-1.5, ax=ax)

    np.testing.assert_allclose(find_line(ax, label).get_xdata(), -0.7 / direction)


class DrawnUnit(NamedTuple):
    """A unit over two inputs, and the axes that it was drawn on."""

    u: np.ndarray
    lam: float
    ax: Axes


@pytest.fixture(params=[(0.0, -1.0, 1.0), (2.5, 0.0, 1.0), (4.0, 0.6, 1e-3)], ids=str)
def unit(request: pytest.FixtureRequest, ax: Axes) -> DrawnUnit:
    angle, lam, length = request.param
    u = np.array([np.cos(angle), np.sin(angle)])
    plots.unit_2d(length * u, length * lam, ax=ax)
    return DrawnUnit(u, lam, ax)


def test_the_location_is_drawn_at_phi(unit: DrawnUnit) -> None:
    phi = np.ravel(find_line(unit.ax, "location φ").get_data())

    np.testing.assert_allclose(phi, -unit.lam * unit.u, atol=1e-12)
    _, right = unit.ax.get_xlim()
    assert (np.abs(phi) < right).all()


def test_the_boundary_crosses_the_window_where_the_unit_is_zero(unit: DrawnUnit) -> None:
    ends = find_line(unit.ax, "boundary").get_xydata()

    np.testing.assert_allclose(ends @ unit.u + unit.lam, 0, atol=1e-12)
    left, right = unit.ax.get_xlim()
    assert np.linalg.norm(ends[1] - ends[0]) > right - left


def test_the_active_and_the_inactive_side_are_shaded(unit: DrawnUnit) -> None:
    left, right = unit.ax.get_xlim()
    points = np.random.default_rng(0).uniform(left, right, (500, 2))
    z = points @ unit.u + unit.lam

    in_active = find_region(unit.ax, "active").contains_points(points)
    in_inactive = find_region(unit.ax, "inactive").contains_points(points)

    np.testing.assert_array_equal(in_active, z > 0)
    np.testing.assert_array_equal(in_inactive, z < 0)


def test_rotation_curves_show_the_largest_of_any_seed_at_every_step(ax: Axes) -> None:
    values = 2.0 ** np.array([0, -3, 16, 1])

    plots.rotation_curves({"sp": np.stack([values, values / 2])}, ax=ax)

    largest, *_ = ax.lines
    np.testing.assert_array_equal(largest.get_xdata(), [0, 1, 2, 3])
    np.testing.assert_array_equal(largest.get_ydata(), values)


def test_rotation_curves_are_drawn_in_powers_of_two(ax: Axes) -> None:
    plots.rotation_curves({"sp": np.ones((1, 4))}, ax=ax)

    assert ax.yaxis.get_transform().base == 2


def test_rotation_curves_have_the_style_of_their_method(ax: Axes) -> None:
    plots.rotation_curves({"gmp+imn": np.ones((2, 4)), "sp": np.ones((1, 4))}, ax=ax)

    _, labels = ax.get_legend_handles_labels()
    assert labels == ["GmP+IMN", "SP"]
    assert find_line(ax, "SP").get_color() == plots.method_style("sp").colour


def test_the_bold_line_is_the_median_of_each_hundredth(ax: Axes) -> None:
    values = np.random.default_rng(0).exponential(size=1000)
    values[:3] = np.nan

    plots.displacement_curves({"sp": np.stack([values, values])}, ax=ax)

    expected = np.nanmedian(values.reshape(100, 10), axis=1)
    np.testing.assert_allclose(find_line(ax, "SP").get_ydata(), expected)
