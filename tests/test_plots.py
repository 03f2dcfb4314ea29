"""Heat maps: what is drawn is what was given, on the axis that was given, and nowhere else."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg

from geoparam import plots

LAYERS = [f"layer{i}.0.conv{j}" for i in range(3) for j in range(2)]

# Each figure from data with gaps: NaN and infinity where a unit has no boundary.
GAPS = np.where(np.arange(60).reshape(6, 10) % 7 == 3, np.nan, np.arange(60.0).reshape(6, 10) / 60)
GAPS[2, 2], GAPS[4] = np.inf, np.nan


def draw(values: np.ndarray, layers: Sequence[str], **options: Any) -> Axes:
    return plots.layer_heatmap(values, layers=layers, label="rotation", **options)


FIGURES: dict[str, Callable[[Axes | None], Axes]] = {
    "linear": lambda ax: draw(GAPS, LAYERS, ax=ax),
    "logarithmic": lambda ax: draw(GAPS, LAYERS, log=True, ax=ax),
    "at rest": lambda ax: draw(np.zeros((6, 1)), LAYERS, log=True, ax=ax),
    "limits": lambda ax: draw(GAPS, LAYERS, limits=(0, 0.5), ax=ax),
    "all unknown": lambda ax: draw(np.full((6, 2), np.nan), LAYERS, ax=ax),
}


def render(ax: Axes) -> np.ndarray:
    canvas = FigureCanvasAgg(ax.get_figure(root=True))
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())


@pytest.mark.parametrize("name", FIGURES)
def test_is_drawn_on_the_given_axis_or_in_a_figure_of_its_own(name: str) -> None:
    given = plots.new_figure(1, 1, size=(6, 4))[1][0, 0]
    assert FIGURES[name](given) is given
    ax = FIGURES[name](None)
    figure = ax.get_figure(root=True)
    assert figure is not given.get_figure() and pyplot.get_fignums() == []
    assert render(ax)[..., :3].std() > 0
    assert ax.get_xlabel() and [text.get_text() for text in ax.get_yticklabels()] == LAYERS
    box = figure.get_tightbbox()
    width, height = figure.get_size_inches()
    assert min(box.x0, box.y0) > -0.01, "something is cut off"
    assert box.x1 < width + 0.01 and box.y1 < height + 0.01


def test_values_of_other_layers_or_steps_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(6, records\).*got \(5, 4\)"):
        draw(np.ones((5, 4)), LAYERS)
    with pytest.raises(ValueError, match=r"steps must have shape \(4,\); got \(3,\)"):
        plots.layer_heatmap(np.ones((1, 4)), layers=["fc"], label="", steps=np.arange(3))


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
    image = draw(values, ["conv1", "fc"], log=True).images[0]
    assert (image.norm.vmin, image.norm.vmax) == (1, 10)
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
    ax = draw(values, RESNET, log=True, ax=ax)
    render(ax)
    names = ax.get_yticklabels()
    assert size or [text.get_text() for text in names] == RESNET
    boxes = [text.get_window_extent() for text in names]
    assert len(boxes) > 5
    assert all(below.y1 <= above.y0 + 1 for above, below in zip(boxes, boxes[1:], strict=False))
