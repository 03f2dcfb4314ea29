"""Panels of the figures of Levy, Banana and images: what is drawn is what was given."""

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection
from matplotlib.lines import Line2D

from geoparam_lab import plots
from geoparam_lab.data.banana_data import Banana
from geoparam_lab.data.synthetic import Regression
from geoparam_lab.experiments import image_figures, toy_figures

X = np.linspace(-2.0, 2.0, 9)
SQUARE = np.array([[0.0, 0.0], [1.0, 0.0], [1.0, 1.0], [0.0, 1.0]])
LEVY = Regression(X[:, None], X, X[:, None], X)
BANANA = Banana(SQUARE, np.array([0, 1, 1, 0]), SQUARE, np.array([0, 1, 1, 0]), "")


@pytest.fixture
def ax() -> Axes:
    return plots.new_figure(1, 1, size=(6, 4))[1][0, 0]


def line(ax: Axes, label: str) -> Line2D:
    return next(each for each in ax.lines if each.get_label() == label)


def test_fit_has_a_tick_at_each_unit_in_view(ax: Axes) -> None:
    units = np.array([[0.5, np.nan, np.inf, 9.0]])
    curves = {"prediction": np.stack([X, np.where(X > 0, np.inf, X)]), "locations": units}
    toy_figures.draw_fit(ax, LEVY, curves, "red")
    (ticks,) = [each for each in ax.collections if isinstance(each, LineCollection)]
    assert [segment[0, 0] for segment in ticks.get_segments()] == [0.5]
    assert "1 of 4 in view" in ax.get_xlabel()
    np.testing.assert_array_equal(line(ax, "at start").get_ydata(), X)
    FigureCanvasAgg(ax.get_figure(root=True)).draw()


def test_locations_go_from_the_first_step_up_to_the_last(
    ax: Axes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toy_figures, "BARS", 3)
    curves = {"locations": np.arange(40.0).reshape(10, 4), "steps": 100 * np.arange(10)}
    toy_figures.draw_locations(ax, curves, (1.0, 37.0), "red")
    assert [text.get_text() for text in ax.get_yticklabels()] == ["0", "400", "900"]
    bars = [[tick[0, 0] for tick in bar.get_segments()] for bar in ax.collections]
    assert bars == [[1, 2, 3], [16, 17, 18, 19], [36, 37]]


def test_paths_are_the_locations_from_start_to_end_and_leaps_out_of_sight_are_counted(
    ax: Axes,
) -> None:
    locations = np.random.default_rng(0).uniform(-1, 1, size=(20, 4, 2))
    locations[-1, 0] = 2.0**16
    toy_figures.draw_path(ax, locations, SQUARE)
    paths = [np.transpose(each.get_data()) for each in ax.lines if len(each.get_xdata()) == 20]
    np.testing.assert_array_equal(paths, locations.swapaxes(0, 1))
    np.testing.assert_array_equal(np.ravel(line(ax, "start").get_data()), locations[0, 0])
    np.testing.assert_array_equal(np.ravel(line(ax, "end").get_data()), locations[-1, 0])
    assert "3 of 4 units end in view" in ax.get_xlabel() and ax.get_xlim()[1] == 4


def test_decision_is_drawn_where_logits_are_0_and_stars_at_the_locations(ax: Axes) -> None:
    toy_figures.draw_decision(ax, X - 0.25 + 0 * X[:, None], (X, X), BANANA)
    locations = np.array([[0.5, 0.5], [np.nan, np.nan], [np.inf, 0.0], [7.0, 0.0]])
    toy_figures.draw_stars(ax, locations, (X, X))
    (contour,) = [each for each in ax.collections if hasattr(each, "levels")]
    np.testing.assert_allclose(contour.get_paths()[0].vertices[:, 0], 0.25)
    np.testing.assert_array_equal(line(ax, "location φ").get_xydata()[0], [0.5, 0.5])
    assert "1 of 4 locations in view" in ax.get_xlabel()
    names = ["decision", "class 0", "class 1", "location φ"]
    assert ax.get_legend_handles_labels()[1] == names


def test_a_network_that_is_not_finite_decides_nothing(ax: Axes) -> None:
    toy_figures.draw_decision(ax, np.full((9, 9), np.nan), (X, X), BANANA)
    assert ax.get_legend_handles_labels()[1] == ["class 0", "class 1"]


def test_means_have_the_standard_error_over_the_seeds_that_are_there(ax: Axes) -> None:
    values = np.random.default_rng(0).normal(size=(5, 30))
    values[3:, 20:] = np.nan  # two seeds ended early
    image_figures.draw_means(ax, {"bn": values})
    left, right = values[:, :20], values[:3, 20:]
    mean = np.concatenate([left.mean(0), right.mean(0)])
    error = np.concatenate([left.std(0, ddof=1) / 5**0.5, right.std(0, ddof=1) / 3**0.5])
    x, y = line(ax, "BN").get_data()
    np.testing.assert_array_equal(x, np.arange(1, 31))
    np.testing.assert_allclose(y, mean)
    corners = ax.collections[0].get_paths()[0].vertices
    for epoch, low, high in zip(x, mean - error, mean + error, strict=True):
        at = corners[corners[:, 0] == epoch, 1]
        assert (at.min(), at.max()) == pytest.approx((low, high))
