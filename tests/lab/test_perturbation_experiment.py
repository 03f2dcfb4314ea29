"""Figure 1's experiment against plain numpy geometry and the papers' numbers."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from geoparam_lab.experiments.perturbation import DELTAS, METHODS, Turns, perturb, run
from geoparam_lab.run_folder import Run

Array = np.ndarray

STEPS = (0.0, *DELTAS)
NORMS_OF_CHANNELS = ("in", "gn")  # their turns depend on the input: they have no line
WITH_A_LINE = [method for method in METHODS if method not in NORMS_OF_CHANNELS]
FIGURES = {"figure1", "figure2a-b", "figure5", "figure6"}


@pytest.fixture(scope="module")
def turns() -> dict[str, Turns]:
    return {method: perturb(method, seeds=200) for method in METHODS}


def papers_unit() -> tuple[Array, float]:
    """w and b as the papers' notebook draws them, with numpy's seed 1."""
    random = np.random.RandomState(1)
    w = random.randn(2) * 0.001
    b = random.randn() * 0.001
    return w, b


def papers_layer() -> Array:
    """100 units (w_1, w_2, b), of which the first is the papers'."""
    return np.random.RandomState(1).randn(100, 3) * 0.001


def find_largest_singular_value(rows: Array) -> float:
    """Of a matrix with two columns, by the trace and the determinant of its Gram matrix."""
    gram = rows.T @ rows
    trace, area = np.trace(gram), np.linalg.det(gram)
    return math.sqrt((trace + math.sqrt(trace**2 - 4 * area)) / 2)


def boundary_in_the_plane(method: str, delta: float) -> tuple[float, float]:
    """Angle and distance of the perturbed boundary of the papers' unit, by complex numbers."""
    w, b = papers_unit()
    z = complex(*w)
    step = complex(delta, delta)
    if method == "gmp":
        return np.angle(z) + delta, b / abs(z) + delta
    if method == "intrinsic":
        return np.angle(z / abs(z) + step), b / abs(z) + delta

    angle = np.angle(z + step)
    if method == "sp":
        return angle, (b + delta) / abs(z + step)
    if method in ("wn", "bn"):
        return angle, (b + delta) / (abs(z) + delta)
    if method == "ln":
        *w_mean, b_mean = papers_layer()[1:].mean(axis=0)
        z -= complex(*w_mean)
        return np.angle(z + step), (b - b_mean + delta) / abs(z + step)

    assert method == "sn"
    rows = papers_layer()[:, :2]
    stepped = rows.copy()
    stepped[0] += delta
    bias = b / find_largest_singular_value(rows) + delta
    return angle, bias * find_largest_singular_value(stepped) / abs(z + step)


def degrees_between(angle: float, other: float) -> float:
    difference = (other - angle + math.pi) % (2 * math.pi) - math.pi
    return abs(math.degrees(difference))


@pytest.mark.parametrize("method", WITH_A_LINE)
def test_lines_are_those_of_the_papers_unit(turns: dict[str, Turns], method: str) -> None:
    lines = turns[method]

    for i, delta in enumerate(STEPS):
        angle, distance = boundary_in_the_plane(method, delta)
        assert np.allclose(lines.directions[i], [math.cos(angle), math.sin(angle)])
        assert math.isclose(lines.lams[i], distance, rel_tol=1e-9)


@pytest.mark.parametrize("method", WITH_A_LINE)
def test_turns_are_those_of_the_papers_unit(turns: dict[str, Turns], method: str) -> None:
    start, _ = boundary_in_the_plane(method, 0.0)

    angles = [boundary_in_the_plane(method, delta)[0] for delta in DELTAS]

    expected = [degrees_between(start, angle) for angle in angles]
    assert np.allclose(turns[method].rotation, expected)


@pytest.mark.parametrize("method", WITH_A_LINE)
def test_the_papers_unit_is_one_of_the_many(turns: dict[str, Turns], method: str) -> None:
    assert np.allclose(turns[method].rotations[:, 1], turns[method].rotation)  # seed 1


@pytest.mark.parametrize("method", ["sp", "wn"])
def test_the_papers_seed_gives_the_turns_that_are_known(
    turns: dict[str, Turns], method: str
) -> None:
    assert np.allclose(turns[method].rotation, (4.1, 29.1, 59.6, 65.0), atol=0.05)


@pytest.mark.parametrize("method", ["sp", "wn"])
def test_the_papers_turns_are_those_without_the_sign_of_w_2(
    turns: dict[str, Turns], method: str
) -> None:
    theta = np.degrees(np.arccos(turns[method].directions[:, 0]))

    turn = np.abs(theta[1:] - theta[0])

    assert np.allclose(turn, (4.1, 12.2, 18.3, 23.7), atol=0.05)


@pytest.mark.parametrize("method", ["in", "gn", "sn"])
def test_in_gn_and_sn_turn_as_sp_does(turns: dict[str, Turns], method: str) -> None:
    np.testing.assert_array_equal(turns[method].rotations, turns["sp"].rotations)


@pytest.mark.parametrize("method", METHODS)
def test_a_step_as_long_as_the_weight_reverses_all_but_gmp(
    turns: dict[str, Turns], method: str
) -> None:
    """GmP turns by the step's length, (1 + delta) ||w|| radians, intrinsic by its arcsine."""
    w, _ = papers_unit()
    length = (1 + np.array(DELTAS)) * np.linalg.norm(w)

    expected = np.full(len(DELTAS), 180.0)
    if method == "gmp":
        expected = np.degrees(length)
    elif method == "intrinsic":
        expected = np.degrees(np.arcsin(length))

    np.testing.assert_allclose(turns[method].reversal, expected, rtol=1e-6)


@pytest.fixture
def points() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(200, 2, generator=generator, dtype=torch.float64)


def side_of_line(points: Tensor, lines: Turns, i: int) -> Array:
    return np.sign(points.numpy() @ lines.directions[i] + lines.lams[i])


@pytest.mark.parametrize("i", range(len(STEPS)), ids=map(str, STEPS))
@torch.no_grad()
def test_sn_turns_as_spectral_norm_itself_does(
    turns: dict[str, Turns], points: Tensor, i: int
) -> None:
    """The unit's sign in a layer of 100 changes where the line says."""
    units = torch.from_numpy(papers_layer())
    weight, bias = units[:, :2], units[:, 2]
    layer = nn.Linear(2, 100, dtype=torch.float64)
    layer.weight.copy_(weight)
    layer.bias.copy_(bias / find_largest_singular_value(weight.numpy()))
    layer.weight[0] += STEPS[i]
    layer.bias[0] += STEPS[i]

    normalized = nn.utils.parametrizations.spectral_norm(layer, n_power_iterations=500)
    z = normalized(points)[:, 0]

    np.testing.assert_array_equal(z.sign().numpy(), side_of_line(points, turns["sn"], i))


@pytest.mark.parametrize("i", range(len(STEPS)), ids=map(str, STEPS))
def test_ln_turns_as_layer_norm_itself_does(
    turns: dict[str, Turns], points: Tensor, i: int
) -> None:
    """The unit's sign in a layer of 100 changes where the line says."""
    units = torch.from_numpy(papers_layer())
    units[0] += STEPS[i]
    weight, bias = units[:, :2], units[:, 2]

    z = nn.functional.layer_norm(points @ weight.T + bias, (100,))[:, 0]

    np.testing.assert_array_equal(z.sign().numpy(), side_of_line(points, turns["ln"], i))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run(tmp_path_factory.mktemp("perturbation") / "run", seeds=50)


def test_a_run_records_every_method_and_delta(finished: Run) -> None:
    recorded = [(record["method"], record["delta"]) for record in finished.records()]

    assert recorded == [(method, delta) for method in METHODS for delta in DELTAS]


def test_no_median_is_above_its_maximum(finished: Run) -> None:
    for record in finished.records():
        assert record["rotation_median"] <= record["rotation_max"]


def test_no_unit_of_gmp_turns_by_more_than_delta(finished: Run) -> None:
    """Theorem 3.7, for the one angle, which moved by delta."""
    for record in finished.records():
        if record["method"] == "gmp":
            assert record["rotation_max"] <= math.degrees(record["delta"]) + 1e-4


def test_methods_without_a_line_have_no_figure_1(tmp_path: Path) -> None:
    short = run(tmp_path, methods=NORMS_OF_CHANNELS, seeds=2)

    drawn = {path.stem for path in (short.folder / "figures").glob("*.png")}
    assert drawn == FIGURES - {"figure1"}
    assert len(short.records()) == 8


def test_a_run_draws_its_figures(finished: Run) -> None:
    drawn = {path.stem for path in (finished.folder / "figures").glob("*.png")}

    assert drawn == FIGURES


@pytest.mark.parametrize("figure", sorted(FIGURES))
def test_a_figure_has_a_caption(finished: Run, figure: str) -> None:
    caption = (finished.folder / "figures" / f"{figure}.txt").read_text()

    assert len(caption) > 40
