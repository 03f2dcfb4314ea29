"""Panels of the figures of Levy, Banana and images: they show the data passed in."""

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
CLASSES = np.array([0, 1, 1, 0])
LEVY = Regression(X[:, None], X, X[:, None], X)
BANANA = Banana(SQUARE, CLASSES, SQUARE, CLASSES, "")


@pytest.fixture
def ax() -> Axes:
    _, axes = plots.new_figure(1, 1, size=(6, 4))
    return axes[0, 0]


def find_line(ax: Axes, label: str) -> Line2D:
    [line] = [line for line in ax.lines if line.get_label() == label]
    return line


def tick_positions(ticks: LineCollection) -> list[float]:
    return [segment[0, 0] for segment in ticks.get_segments()]


def legend_labels(ax: Axes) -> list[str]:
    _, labels = ax.get_legend_handles_labels()
    return labels


@pytest.fixture
def fit(ax: Axes) -> Axes:
    """A fit that becomes infinite, with one unit in view."""
    prediction = np.stack([X, np.where(X > 0, np.inf, X)])
    locations = np.array([[0.5, np.nan, np.inf, 9.0]])
    toy_figures.draw_fit(ax, LEVY, {"prediction": prediction, "locations": locations}, "red")
    return ax


def test_fit_has_a_tick_at_each_unit_in_view(fit: Axes) -> None:
    [ticks] = [each for each in fit.collections if isinstance(each, LineCollection)]

    assert tick_positions(ticks) == [0.5]
    assert "1 of 4 in view" in fit.get_xlabel()


def test_fit_has_the_prediction_at_start(fit: Axes) -> None:
    np.testing.assert_array_equal(find_line(fit, "at start").get_ydata(), X)


def test_fit_with_infinite_predictions_can_be_drawn(fit: Axes) -> None:
    FigureCanvasAgg(fit.get_figure(root=True)).draw()


def test_locations_go_from_the_first_step_up_to_the_last(
    ax: Axes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toy_figures, "BARS", 3)
    locations = np.arange(40.0).reshape(10, 4)
    steps = 100 * np.arange(10)

    toy_figures.draw_locations(ax, {"locations": locations, "steps": steps}, (1.0, 37.0), "red")

    labels = [text.get_text() for text in ax.get_yticklabels()]
    assert labels == ["0", "400", "900"]
    first, middle, last = ax.collections
    assert tick_positions(first) == [1, 2, 3]
    assert tick_positions(middle) == [16, 17, 18, 19]
    assert tick_positions(last) == [36, 37]


@pytest.fixture
def locations() -> np.ndarray:
    """Paths (20, 4, 2) of four units, of which the first ends out of view."""
    locations = np.random.default_rng(0).uniform(-1, 1, size=(20, 4, 2))
    locations[-1, 0] = 2.0**16
    return locations


def test_paths_are_the_locations_from_start_to_end(ax: Axes, locations: np.ndarray) -> None:
    toy_figures.draw_path(ax, locations, SQUARE)

    lines = [line.get_xydata() for line in ax.lines]
    paths = [line for line in lines if len(line) == 20]
    np.testing.assert_array_equal(np.stack(paths, axis=1), locations)
    np.testing.assert_array_equal(find_line(ax, "start").get_xydata(), locations[:1, 0])
    np.testing.assert_array_equal(find_line(ax, "end").get_xydata(), locations[-1:, 0])


def test_paths_that_end_out_of_view_are_counted(ax: Axes, locations: np.ndarray) -> None:
    toy_figures.draw_path(ax, locations, SQUARE)

    assert "3 of 4 units end in view" in ax.get_xlabel()
    assert ax.get_xlim()[1] == 4


def test_the_decision_is_drawn_where_logits_are_0(ax: Axes) -> None:
    logits = np.tile(X - 0.25, (9, 1))

    toy_figures.draw_decision(ax, logits, (X, X), BANANA)

    [contour] = [each for each in ax.collections if hasattr(each, "levels")]
    [path] = contour.get_paths()
    np.testing.assert_allclose(path.vertices[:, 0], 0.25)
    assert legend_labels(ax) == ["decision", "class 0", "class 1"]


def test_stars_are_drawn_at_the_locations_in_view(ax: Axes) -> None:
    locations = np.array([[0.5, 0.5], [np.nan, np.nan], [np.inf, 0.0], [7.0, 0.0]])

    toy_figures.draw_stars(ax, locations, (X, X))

    stars = find_line(ax, "location φ").get_xydata()
    np.testing.assert_array_equal(stars[0], [0.5, 0.5])
    assert "1 of 4 locations in view" in ax.get_xlabel()


def test_a_network_that_is_not_finite_decides_nothing(ax: Axes) -> None:
    toy_figures.draw_decision(ax, np.full((9, 9), np.nan), (X, X), BANANA)

    assert legend_labels(ax) == ["class 0", "class 1"]


@pytest.fixture
def values() -> np.ndarray:
    """Five seeds of 30 epochs, of which two ended after 20."""
    values = np.random.default_rng(0).normal(size=(5, 30))
    values[3:, 20:] = np.nan
    return values


def test_means_are_over_the_seeds_that_are_there(ax: Axes, values: np.ndarray) -> None:
    image_figures.draw_means(ax, {"bn": values})

    epochs, mean = find_line(ax, "BN").get_data()
    np.testing.assert_array_equal(epochs, np.arange(1, 31))
    np.testing.assert_allclose(mean[:20], values[:, :20].mean(axis=0))
    np.testing.assert_allclose(mean[20:], values[:3, 20:].mean(axis=0))


def test_means_have_the_standard_error_over_the_seeds_that_are_there(
    ax: Axes, values: np.ndarray
) -> None:
    image_figures.draw_means(ax, {"bn": values})

    [outline] = ax.collections[0].get_paths()
    for epoch in range(1, 31):
        seeds = 5 if epoch <= 20 else 3
        values_there = values[:seeds, epoch - 1]
        mean, error = values_there.mean(), values_there.std(ddof=1) / seeds**0.5
        heights = outline.vertices[outline.vertices[:, 0] == epoch, 1]
        assert heights.min() == pytest.approx(mean - error)
        assert heights.max() == pytest.approx(mean + error)
