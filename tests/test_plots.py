"""Plots: what is drawn is what was given, on the axis that was given, and nowhere else."""

from collections.abc import Callable
from itertools import combinations

import numpy as np
import pytest
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.lines import Line2D
from matplotlib.path import Path

from geoparam import plots
from geoparam.plots import style
from geoparam_lab.methods import METHODS

X = np.linspace(-2.0, 2.0, 9)
SQUARE = np.array([[0.0, 0.0], [1.0, 0.0], [1.0, 1.0], [0.0, 1.0]])
LAYERS = [f"layer{i}.0.conv{j}" for i in range(3) for j in range(2)]

# Each figure from data with a gap: NaN and infinity where a unit has no boundary.
GAPS = np.where(np.arange(60).reshape(6, 10) % 7 == 3, np.nan, np.arange(60.0).reshape(6, 10) / 60)
GAPS[2, 2], GAPS[4] = np.inf, np.nan
FIGURES: dict[str, Callable[[Axes | None], Axes]] = {
    "unit_1d": lambda ax: plots.unit_1d(-1.0, 0.5, r=-2.0, ax=ax),
    "unit_2d": lambda ax: plots.unit_2d(np.array([0.6, -0.8]), 1.0, ax=ax),
    "displacement_curves": lambda ax: plots.displacement_curves({"sp": GAPS[2]}, ax=ax),
    "rotation_curves": lambda ax: plots.rotation_curves({"sp": GAPS[2], "rest": 0 * X}, ax=ax),
    "layer_heatmap": lambda ax: plots.layer_heatmap(GAPS, layers=LAYERS, label="share", ax=ax),
    "rotation_heatmap": lambda ax: plots.rotation_heatmap(GAPS, layers=LAYERS, ax=ax),
    "at rest": lambda ax: plots.rotation_heatmap(np.zeros((6, 1)), layers=LAYERS, ax=ax),
    "dead_units": lambda ax: plots.dead_units(GAPS, layers=LAYERS, ax=ax),
    "region_slice": lambda ax: plots.region_slice(
        [SQUARE, SQUARE[:3] + 1, np.full((3, 2), np.inf)],
        {"fc1": np.array([[[0, 0], [1, np.nan]]]), "fc2": np.zeros((0, 2, 2))},
        ax=ax,
    ),
}


def render(ax: Axes) -> np.ndarray:
    canvas = FigureCanvasAgg(ax.get_figure(root=True))
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())


def line(ax: Axes, label: str) -> Line2D:
    return next(each for each in ax.lines if each.get_label() == label)


def region(ax: Axes, label: str) -> Path:
    return next(each.get_path() for each in ax.patches if each.get_label() == label)


def legend(ax: Axes) -> list[str]:
    return [text.get_text() for text in ax.get_legend().get_texts()]


@pytest.mark.parametrize("name", FIGURES)
def test_is_drawn_on_the_given_axis_or_in_a_figure_of_its_own(name: str) -> None:
    given = plots.new_figure(1, 1, size=(6, 4))[1][0, 0]
    assert FIGURES[name](given) is given
    ax = FIGURES[name](None)
    figure = ax.get_figure(root=True)
    assert figure is not given.get_figure() and pyplot.get_fignums() == []
    assert render(ax)[..., :3].std() > 0
    named = [text.get_text() for text in ax.get_yticklabels()]
    assert ax.get_xlabel() and (ax.get_ylabel() or ax.get_title(loc="left") or named == LAYERS)
    box = figure.get_tightbbox()
    width, height = figure.get_size_inches()
    assert min(box.x0, box.y0) > -0.01, "something is cut off"
    assert box.x1 < width + 0.01 and box.y1 < height + 0.01


BAD: dict[str, tuple[Callable[[], object], str]] = {
    "unit without a direction": (lambda: plots.unit_2d(np.zeros(2), 1.0), "has no boundary"),
    "unit with three inputs": (lambda: plots.unit_2d(np.ones(3), 0.0), r"\(2,\).*got \(3,\)"),
    "a name too many": (
        lambda: plots.dead_units(np.ones((5, 4)), layers=LAYERS),
        r"\(6, records\).*got \(5, 4\)",
    ),
    "unknown method": (lambda: plots.method_style("sgd"), "one of sp, .*got 'sgd'"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_drawn_is_refused_with_rule_and_finding(name: str) -> None:
    call, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        call()


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
    found = style.curve_styles(["sp", "first", "second", "third"])
    assert [s.title for s in found] == ["SP", "first", "second", "third"]
    assert len({(s.colour, s.dash) for s in found}) == 4


@pytest.mark.parametrize("direction", [1.0, -3.0])
def test_unit_over_one_input_is_r_relu(direction: float) -> None:
    ax = plots.unit_1d(direction, 0.7, r=-1.5)
    x, z = line(ax, "unit").get_data()
    np.testing.assert_allclose(z, -1.5 * np.maximum(direction * x + 0.7, 0))
    assert np.isclose(x, -0.7 / direction, rtol=1e-12).any()  # the bend is not cut off
    np.testing.assert_allclose(line(ax, "location φ").get_xdata(), -0.7 / direction)
    np.testing.assert_allclose(line(ax, "boundary").get_xdata(), -0.7 / direction)


@pytest.mark.parametrize(
    ("angle", "lam", "length"), [(0.0, -1.0, 1.0), (2.5, 0.0, 1.0), (4.0, 0.6, 1e-3)]
)
def test_boundary_goes_through_phi_at_right_angles_between_the_shaded_sides(
    angle: float, lam: float, length: float
) -> None:
    u = np.array([np.cos(angle), np.sin(angle)])
    ax = plots.unit_2d(length * u, length * lam)
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


def test_stability_shows_every_value_in_powers_of_two() -> None:
    values = 2.0 ** np.array([0, -3, 16, 1])
    curves = {"gmp+imn": values, "sp": 2 * values}
    ax = plots.rotation_curves(curves, steps=np.array([0, 10, 20, 30]))
    thin = ax.lines[0]
    np.testing.assert_array_equal(thin.get_ydata(), values)
    np.testing.assert_array_equal(thin.get_xdata(), [0, 10, 20, 30])
    assert ax.yaxis.get_transform().base == 2
    assert legend(ax) == ["GmP+IMN", "SP"]
    assert line(ax, "SP").get_color() == plots.method_style("sp").colour


def test_bold_line_is_the_median_of_each_hundredth() -> None:
    values = np.random.default_rng(0).exponential(size=1000)
    values[:3] = np.nan
    ax = plots.displacement_curves({"sp": values})
    expected = np.nanmedian(values.reshape(100, 10), axis=1)
    np.testing.assert_allclose(line(ax, "SP").get_ydata(), expected)


def test_heat_map_holds_the_values_and_every_jump() -> None:
    ax = plots.layer_heatmap(GAPS, layers=LAYERS, label="share")
    shown = ax.images[0].get_array()
    np.testing.assert_array_equal(shown.mask, ~np.isfinite(GAPS))
    np.testing.assert_array_equal(shown.compressed(), GAPS[np.isfinite(GAPS)])
    assert ax.images[0].colorbar.ax.get_ylabel() == "share"
    values = np.zeros((1, 10_000))
    values[0, 1234] = 90.0
    shown = plots.layer_heatmap(values, layers=["fc"], label="").images[0].get_array()
    assert shown.shape[1] == 400 and shown[0, 1234 * 400 // 10_000] == shown.max() == 90


def test_columns_are_numbered_by_step() -> None:
    steps = np.array([0, 1, 2, 4, 8, 16, 32, 64])
    ax = plots.layer_heatmap(np.ones((1, 8)), layers=["fc"], label="", steps=steps)
    ticks = {text.get_text(): text.get_position()[0] for text in ax.get_xticklabels()}
    assert ticks["0"] == 0 and ticks["60"] == pytest.approx(6 + (60 - 32) / 32)


def test_rest_has_a_colour_and_the_unknown_is_hatched() -> None:
    values = np.array([[0.0, 1.0], [np.nan, 10.0]])
    image = plots.rotation_heatmap(values, layers=["conv1", "fc"]).images[0]
    colours = image.cmap(image.norm(image.get_array()))
    np.testing.assert_array_equal(colours[0, 0], image.cmap(0.0))
    assert colours[1, 0, 3] == 0  # see-through
    assert image.axes.patch.get_hatch()


RESNET = ["conv1"] + [
    f"layer{i}.{j}.conv{k}" for i in (1, 2, 3, 4) for j in range(4) for k in (1, 2, 3)
]


@pytest.mark.parametrize("size", [None, (6, 3)])
def test_names_of_many_layers_do_not_touch(size: tuple[float, float] | None) -> None:
    ax = size and plots.new_figure(1, 1, size=size)[1][0, 0]
    values = np.random.default_rng(0).uniform(size=(len(RESNET), 20))
    ax = plots.rotation_heatmap(values, layers=RESNET, ax=ax)
    render(ax)
    names = ax.get_yticklabels()
    assert size or [text.get_text() for text in names] == RESNET
    boxes = [text.get_window_extent() for text in names]
    assert len(boxes) > 5
    assert all(below.y1 <= above.y0 + 1 for above, below in zip(boxes, boxes[1:], strict=False))


def test_slice_draws_regions_and_the_boundaries_of_each_layer() -> None:
    segments = {
        "fc1": np.array([[[0.5, 0.0], [0.5, 1.0]]]),
        "fc2": np.array([[[0.0, 0.2], [0.5, 0.6]], [[0.5, 0.6], [1.0, 0.1]]]),
    }
    ax = plots.region_slice([SQUARE, 2 * SQUARE[:3]], segments)
    (fills,) = [each for each in ax.collections if isinstance(each, PolyCollection)]
    assert [len(path.vertices) - 1 for path in fills.get_paths()] == [4, 3]
    drawn = {c.get_label(): c for c in ax.collections if isinstance(c, LineCollection)}
    for name, expected in segments.items():
        np.testing.assert_array_equal(drawn[name].get_segments(), expected)
    assert not np.array_equal(drawn["fc1"].get_color(), drawn["fc2"].get_color())
    assert legend(ax) == ["fc1", "fc2"]
    assert (ax.get_xlim(), ax.get_ylim()) == ((0, 2), (0, 2))
