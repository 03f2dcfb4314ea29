"""Heat maps: what is drawn is what was given, on the axis that was given, and nowhere else."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg

from geoparam import plots

LAYERS = [f"layer{block}.0.conv{conv}" for block in range(3) for conv in range(2)]


def values_with_gaps() -> np.ndarray:
    """Return a value per layer and record; NaN and infinity stand for units without boundary."""
    values = np.arange(60.0).reshape(6, 10) / 60
    values.flat[3::7] = np.nan
    values[2, 2] = np.inf
    values[4] = np.nan
    return values


GAPS = values_with_gaps()


def draw(values: np.ndarray, layers: Sequence[str] = LAYERS, **options: Any) -> Axes:
    return plots.layer_heatmap(values, **{"layers": layers, "label": "rotation", **options})


def render(ax: Axes) -> np.ndarray:
    """Return the pixels of an axis's figure, with red, green and blue of each."""
    canvas = FigureCanvasAgg(ax.get_figure(root=True))
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3]


# Every kind of figure.


every_figure = pytest.mark.parametrize(
    ("values", "options"),
    [
        (GAPS, {}),
        (GAPS, {"log": True}),
        (np.zeros((6, 1)), {"log": True}),
        (GAPS, {"limits": (0, 0.5)}),
        (np.full((6, 2), np.nan), {}),
    ],
    ids=["linear", "logarithmic", "at rest", "limits", "all unknown"],
)


@every_figure
def test_is_drawn_on_the_axis_that_was_passed(values: np.ndarray, options: dict) -> None:
    _, axes = plots.new_figure(1, 1, size=(6, 4))
    ax = axes[0, 0]

    assert draw(values, ax=ax, **options) is ax


@every_figure
def test_without_an_axis_a_figure_is_made_that_pyplot_does_not_hold(
    values: np.ndarray, options: dict
) -> None:
    ax = draw(values, **options)

    assert render(ax).std() > 0
    assert pyplot.get_fignums() == []


@every_figure
def test_the_axes_are_labelled(values: np.ndarray, options: dict) -> None:
    ax = draw(values, **options)
    render(ax)

    assert ax.get_xlabel()
    assert [text.get_text() for text in ax.get_yticklabels()] == LAYERS


@every_figure
def test_nothing_is_cut_off(values: np.ndarray, options: dict) -> None:
    ax = draw(values, **options)
    render(ax)
    figure = ax.get_figure(root=True)
    width, height = figure.get_size_inches()

    box = figure.get_tightbbox()

    assert box.x0 > -0.01
    assert box.y0 > -0.01
    assert box.x1 < width + 0.01
    assert box.y1 < height + 0.01


# What is drawn.


def test_the_heat_map_holds_the_values() -> None:
    image = draw(GAPS).images[0]

    shown = image.get_array()

    is_known = np.isfinite(GAPS)
    np.testing.assert_array_equal(shown.mask, ~is_known)
    np.testing.assert_array_equal(shown.compressed(), GAPS[is_known])


def test_the_colour_bar_has_the_label() -> None:
    image = draw(GAPS, label="share").images[0]

    assert image.colorbar.ax.get_ylabel() == "share"


def test_a_single_jump_is_seen_among_many_records() -> None:
    values = np.zeros((1, 10_000))
    values[0, 1234] = 90.0

    shown = draw(values, ["fc"]).images[0].get_array()

    column = 1234 * 400 // 10_000
    assert shown.shape[1] == 400
    assert shown[0, column] == shown.max() == 90


def test_columns_are_numbered_by_step() -> None:
    steps = np.array([0, 1, 2, 4, 8, 16, 32, 64])

    ax = draw(np.ones((1, 8)), ["fc"], steps=steps)

    columns = {text.get_text(): text.get_position()[0] for text in ax.get_xticklabels()}
    assert columns["0"] == 0
    assert columns["60"] == pytest.approx(6 + (60 - 32) / 32)


def test_rest_has_the_lowest_colour_of_a_logarithmic_scale() -> None:
    values = np.array([[0.0, 1.0], [np.nan, 10.0]])

    image = draw(values, ["conv1", "fc"], log=True).images[0]

    assert (image.norm.vmin, image.norm.vmax) == (1, 10)
    colours = image.cmap(image.norm(image.get_array()))
    np.testing.assert_array_equal(colours[0, 0], image.cmap(0.0))


def test_the_unknown_is_see_through_above_a_hatched_patch() -> None:
    values = np.array([[0.0, 1.0], [np.nan, 10.0]])

    image = draw(values, ["conv1", "fc"], log=True).images[0]

    colours = image.cmap(image.norm(image.get_array()))
    opacity = colours[1, 0, 3]
    assert opacity == 0
    assert image.axes.patch.get_hatch()


def resnet_layers() -> list[str]:
    names = ["conv1"]
    for block in (1, 2, 3, 4):
        for unit in range(4):
            names += [f"layer{block}.{unit}.conv{conv}" for conv in (1, 2, 3)]
    return names


def draw_resnet(**options: Any) -> list:
    """Return the layers' names as they are drawn."""
    layers = resnet_layers()
    values = np.random.default_rng(0).uniform(size=(len(layers), 20))
    ax = draw(values, layers, log=True, **options)
    render(ax)
    return ax.get_yticklabels()


def test_a_figure_of_its_own_has_room_for_all_names() -> None:
    assert [text.get_text() for text in draw_resnet()] == resnet_layers()


@pytest.mark.parametrize("size", [None, (6, 3)], ids=["own figure", "small axis"])
def test_names_of_many_layers_do_not_touch(size: tuple[float, float] | None) -> None:
    ax = None
    if size is not None:
        _, axes = plots.new_figure(1, 1, size=size)
        ax = axes[0, 0]

    boxes = [text.get_window_extent() for text in draw_resnet(ax=ax)]

    assert len(boxes) > 5
    for above, below in pairwise(boxes):
        assert below.y1 <= above.y0 + 1


# What is refused.


def test_values_of_other_layers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(6, records\).*got \(5, 4\)"):
        draw(np.ones((5, 4)))


def test_another_number_of_steps_is_refused() -> None:
    with pytest.raises(ValueError, match=r"steps must have shape \(4,\); got \(3,\)"):
        draw(np.ones((1, 4)), ["fc"], steps=np.arange(3))
