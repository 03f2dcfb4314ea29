"""The papers' figures: what is drawn is what was given, and methods can be told apart."""

from itertools import combinations

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
    return plots.new_figure(1, 1, size=(6, 4))[1][0, 0]


def line(ax: Axes, label: str) -> Line2D:
    return next(each for each in ax.lines if each.get_label() == label)


def region(ax: Axes, label: str) -> Path:
    return next(each.get_path() for each in ax.patches if each.get_label() == label)


def test_a_unit_without_a_direction_and_an_unknown_method_are_refused(ax: Axes) -> None:
    with pytest.raises(ValueError, match="has no boundary"):
        plots.unit_2d(np.zeros(2), 1.0, ax=ax)
    with pytest.raises(ValueError, match="one of sp, .*got 'sgd'"):
        plots.method_style("sgd")


def test_key_and_title_name_the_same_style_and_no_two_are_alike() -> None:
    styles = {key: plots.method_style(key) for key in METHODS}
    for key, found in styles.items():
        assert found.title.lower() == key
        assert plots.method_style(found.title.replace("+", " + ")) == found
    assert len({(style.colour, style.dash) for style in styles.values()}) == 18


def lab(colour: str, seen: np.ndarray) -> np.ndarray:
    """CIE L*a*b* of a colour as an eye with this matrix of linear sRGB sees it."""
    rgb = np.array(to_rgb(colour))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    linear = np.clip(seen @ linear, 0, 1)
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    x, y, z = np.cbrt(np.array(to_xyz) @ linear / [0.9505, 1.0, 1.089])
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


# Machado, Oliveira and Fernandes 2009, severity 1
EYES = {
    "normal": np.eye(3),
    "deuteranopia": np.reshape(
        [0.367322, 0.860646, -0.227968, 0.280085, 0.672501, 0.047413, -0.01182, 0.04294, 0.968881],
        (3, 3),
    ),
}


@pytest.mark.parametrize("eye", EYES)
def test_methods_with_the_same_dash_differ_in_colour_to(eye: str) -> None:
    styles = [plots.method_style(key) for key in METHODS]
    for one, other in combinations(styles, 2):
        if one.dash == other.dash:
            distance = np.linalg.norm(lab(one.colour, EYES[eye]) - lab(other.colour, EYES[eye]))
            assert distance > 15, (one.title, other.title)


def test_curves_that_are_no_methods_are_told_apart() -> None:
    found = plots.curve_styles(["sp", "first", "second", "third"])
    assert [s.title for s in found] == ["SP", "first", "second", "third"]
    assert len({(s.colour, s.dash) for s in found}) == 4


@pytest.mark.parametrize("direction", [1.0, -3.0])
def test_unit_over_one_input_is_r_relu(ax: Axes, direction: float) -> None:
    plots.unit_1d(direction, 0.7, r=-1.5, ax=ax)
    x, z = line(ax, "unit").get_data()
    np.testing.assert_allclose(z, -1.5 * np.maximum(direction * x + 0.7, 0))
    assert np.isclose(x, -0.7 / direction, rtol=1e-12).any()  # the bend is not cut off
    np.testing.assert_allclose(line(ax, "location φ").get_xdata(), -0.7 / direction)
    np.testing.assert_allclose(line(ax, "boundary").get_xdata(), -0.7 / direction)


@pytest.mark.parametrize(
    ("angle", "lam", "length"), [(0.0, -1.0, 1.0), (2.5, 0.0, 1.0), (4.0, 0.6, 1e-3)]
)
def test_boundary_goes_through_phi_at_right_angles_between_the_shaded_sides(
    ax: Axes, angle: float, lam: float, length: float
) -> None:
    u = np.array([np.cos(angle), np.sin(angle)])
    plots.unit_2d(length * u, length * lam, ax=ax)
    phi = np.ravel(line(ax, "location φ").get_data())
    np.testing.assert_allclose(phi, -lam * u, atol=1e-12)
    ends = np.transpose(line(ax, "boundary").get_data())
    np.testing.assert_allclose(ends @ u + lam, 0, atol=1e-12)
    low, high = ax.get_xlim()
    assert np.linalg.norm(ends[1] - ends[0]) > high - low
    assert (np.abs(phi) < high).all()
    points = np.random.default_rng(0).uniform(low, high, (500, 2))
    np.testing.assert_array_equal(region(ax, "active").contains_points(points), points @ u > -lam)
    np.testing.assert_array_equal(
        region(ax, "inactive").contains_points(points), points @ u < -lam
    )


def test_stability_shows_every_value_in_powers_of_two(ax: Axes) -> None:
    values = 2.0 ** np.array([0, -3, 16, 1])
    curves = {"gmp+imn": np.stack([values, values / 2]), "sp": 2 * values[None]}
    plots.rotation_curves(curves, ax=ax)
    thin = ax.lines[0]  # the largest of any seed
    np.testing.assert_array_equal(thin.get_ydata(), values)
    np.testing.assert_array_equal(thin.get_xdata(), [0, 1, 2, 3])
    assert ax.yaxis.get_transform().base == 2
    assert ax.get_legend_handles_labels()[1] == ["GmP+IMN", "SP"]
    assert line(ax, "SP").get_color() == plots.method_style("sp").colour


def test_bold_line_is_the_median_of_each_hundredth(ax: Axes) -> None:
    values = np.random.default_rng(0).exponential(size=1000)
    values[:3] = np.nan
    plots.displacement_curves({"sp": np.stack([values, values])}, ax=ax)
    expected = np.nanmedian(values.reshape(100, 10), axis=1)
    np.testing.assert_allclose(line(ax, "SP").get_ydata(), expected)
