"""Figure 1's experiment against plain numpy geometry and the papers' numbers."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from geoparam_lab.experiments.perturbation import DELTAS, METHODS, Turns, perturb, run
from geoparam_lab.run_folder import Run


@pytest.fixture(scope="module")
def turns() -> dict[str, Turns]:
    return {method: perturb(method, seeds=200) for method in METHODS}


def papers_unit() -> tuple[np.ndarray, float]:
    """w and b as the papers' notebook draws them, from numpy's global state."""
    state = np.random.get_state()
    np.random.seed(1)
    w, b = np.random.randn(2) * 0.001, np.random.randn(1) * 0.001
    np.random.set_state(state)
    return w, b.item()


def polar(method: str, w: np.ndarray, b: float, delta: float) -> tuple[float, float]:
    """Angle and distance of the perturbed boundary in the plane, by complex numbers."""
    z, d = complex(*w), complex(delta, delta)
    if method == "ln":
        rest = np.random.RandomState(1).randn(100, 3)[1:].mean(0) * 0.001
        z, b = z - complex(*rest[:2]), b - rest[2]
    if method == "sn":
        rows = np.random.RandomState(1).randn(100, 3)[:, :2] * 0.001
        moved = rows.copy()
        moved[0] += delta
        bias = b / find_largest_singular_value(rows) + delta
        return np.angle(z + d), bias * find_largest_singular_value(moved) / abs(z + d)
    if method in ("sp", "ln"):
        return np.angle(z + d), (b + delta) / abs(z + d)
    if method in ("wn", "bn"):
        return np.angle(z + d), (b + delta) / (abs(z) + delta)
    angle = np.angle(z) + delta if method == "gmp" else np.angle(z / abs(z) + d)
    return angle, b / abs(z) + delta


def find_largest_singular_value(rows: np.ndarray) -> float:
    """Of a matrix with two columns, by the trace and the determinant of its Gram matrix."""
    gram = rows.T @ rows
    trace, area = np.trace(gram), np.linalg.det(gram)
    return math.sqrt((trace + math.sqrt(trace**2 - 4 * area)) / 2)


def find_angle(one: float, two: float) -> float:
    """Degrees between two angles."""
    return abs(math.degrees((two - one + math.pi) % (2 * math.pi) - math.pi))


@pytest.mark.parametrize("method", [m for m in METHODS if m not in ("in", "gn")])
def test_lines_are_those_of_the_papers_unit(turns: dict[str, Turns], method: str) -> None:
    w, b = papers_unit()
    lines = turns[method]
    places = [polar(method, w, b, delta) for delta in (0.0, *DELTAS)]
    for i, (angle, distance) in enumerate(places):
        assert np.allclose(lines.directions[i], [math.cos(angle), math.sin(angle)])
        assert math.isclose(lines.lams[i], distance, rel_tol=1e-9)
    assert np.allclose(lines.rotation, [find_angle(p[0], places[0][0]) for p in places[1:]])
    assert np.allclose(lines.rotations[:, 1], lines.rotation)  # seed 1 is one of the many, too


@pytest.mark.parametrize("method", ["sp", "wn"])
def test_the_papers_seed_gives_the_turns_that_are_known(
    turns: dict[str, Turns], method: str
) -> None:
    assert np.allclose(turns[method].rotation, (4.1, 29.1, 59.6, 65.0), atol=0.05)
    theta = np.degrees(np.arccos(turns[method].directions[:, 0]))  # without the sign of w_2
    assert np.allclose(np.abs(theta[1:] - theta[0]), (4.1, 12.2, 18.3, 23.7), atol=0.05)


@pytest.mark.parametrize("method", ["in", "gn", "sn"])
def test_in_gn_and_sn_turn_as_sp_does(turns: dict[str, Turns], method: str) -> None:
    np.testing.assert_array_equal(turns[method].rotations, turns["sp"].rotations)


@pytest.mark.parametrize("method", METHODS)
def test_a_step_as_long_as_the_weight_reverses_all_but_gmp(
    turns: dict[str, Turns], method: str
) -> None:
    """GmP turns by the step's length, (1 + delta) ||w|| radians, intrinsic by its arcsine."""
    w, _ = papers_unit()
    reach = (1 + np.array(DELTAS)) * np.linalg.norm(w)
    expected = {"gmp": np.degrees(reach), "intrinsic": np.degrees(np.arcsin(reach))}
    np.testing.assert_allclose(turns[method].reversal, expected.get(method, 180.0), rtol=1e-6)


@torch.no_grad()
def test_sn_turns_as_spectral_norm_itself_does(turns: dict[str, Turns]) -> None:
    """The unit's sign in a layer of 100 changes where the line says."""
    units = torch.from_numpy(0.001 * np.random.RandomState(1).randn(100, 3))
    x = torch.randn(200, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for i, delta in enumerate((0.0, *DELTAS)):
        layer = torch.nn.Linear(2, 100, dtype=torch.float64)
        layer.weight.copy_(units[:, :2])
        layer.bias.copy_(units[:, 2] / find_largest_singular_value(units[:, :2].numpy()))
        layer.weight[0] += delta
        layer.bias[0] += delta
        normed = torch.nn.utils.parametrizations.spectral_norm(layer, n_power_iterations=500)
        side = x.numpy() @ turns["sn"].directions[i] + turns["sn"].lams[i]
        assert (np.sign(normed(x)[:, 0].numpy()) == np.sign(side)).all()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run(tmp_path_factory.mktemp("perturbation") / "run", seeds=50)


def test_ln_turns_as_layer_norm_itself_does(turns: dict[str, Turns]) -> None:
    """The unit's sign in a layer of 100 changes where the line says."""
    units = torch.from_numpy(0.001 * np.random.RandomState(1).randn(100, 3))
    x = torch.randn(200, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for i, delta in enumerate((0.0, *DELTAS)):
        moved = units.clone()
        moved[0] += delta
        z = torch.nn.functional.layer_norm(x @ moved[:, :2].T + moved[:, 2], (100,))[:, 0]
        lines = turns["ln"]
        side = x.numpy() @ lines.directions[i] + lines.lams[i]
        assert (np.sign(z.numpy()) == np.sign(side)).all()


def test_a_run_records_every_method_and_delta(finished: Run) -> None:
    records = finished.records()
    expected = [(method, delta) for method in METHODS for delta in DELTAS]
    assert [(record["method"], record["delta"]) for record in records] == expected
    for record in records:
        assert record["rotation_median"] <= record["rotation_max"]
        if record["method"] == "gmp":  # theorem 3.7: one angle, which moved by delta
            assert record["rotation_max"] <= math.degrees(record["delta"]) + 1e-4


def test_methods_without_a_line_have_no_figure_1(tmp_path: Path) -> None:
    done = run(tmp_path, methods=("in", "gn"), seeds=2)
    drawn = {path.stem for path in (done.folder / "figures").glob("*.png")}
    assert drawn == {"figure2a-b", "figure5", "figure6"} and len(done.records()) == 8


def test_a_run_draws_its_figures_with_captions(finished: Run) -> None:
    names = {"figure1", "figure2a-b", "figure5", "figure6"}
    folder = finished.folder / "figures"
    assert {path.stem for path in folder.glob("*.png")} == names
    assert all(len((folder / f"{name}.txt").read_text()) > 40 for name in names)
