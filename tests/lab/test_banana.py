"""Banana classification: which points, the protocol, and what a run leaves."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from run_folders import curves_of

from geoparam_lab.data import banana_data as points
from geoparam_lab.experiments import banana as experiment
from geoparam_lab.experiments import toys
from geoparam_lab.experiments.toys import Network
from geoparam_lab.run_folder import Run
from geoparam_lab.training import tasks

SHORT: dict[str, Any] = {
    "seeds": 2, "epochs": 25, "patience": 4, "jobs": 1, "source": "generated"
}  # fmt: skip


def test_without_file_and_network_points_are_generated(nowhere: None, tmp_path: Path) -> None:
    assert points.load(source="auto").source == "generated"
    with pytest.raises(FileNotFoundError):  # a folder was named that does not have them
        points.load(tmp_path, "auto")


def train(data: points.Banana, *networks: Network) -> Any:
    problem = experiment.make_problem(data, SHORT["epochs"], SHORT["patience"])
    with tasks.limit_threads(1):
        return toys.train(problem, networks)


def test_the_network_and_its_schedule_are_the_papers() -> None:
    problem = experiment.make_problem(points.load(source="generated"))
    assert problem.widths == (2, 10, 1) and problem.steps_per_epoch == 7
    assert problem.protocol.batch_size == 128 and problem.protocol.epochs == 5000
    assert problem.protocol.patience == 50 and problem.protocol.stop_patience is None
    assert problem.protocol.higher_is_better


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return experiment.run(tmp_path_factory.mktemp("banana") / "run", **SHORT)


def test_a_run_has_a_record_for_each_method_rate_and_seed(finished: Run) -> None:
    records = finished.records()
    assert len({(r["method"], r["lr"], r["seed"]) for r in records}) == len(records) == 16
    for record in records:
        assert record["source"] == "generated" and record["outcome"] == "finished"
        assert 0.4 < record["test_accuracy"] <= 1
        assert 0 < record["largest_rotation"] <= 180
        assert record["largest_move"] > 0 and record["init"] == "glorot"


def test_gmp_turns_by_no_more_than_adams_step(finished: Run) -> None:
    """Two inputs, one angle: it moves by at most lr (1 - beta1) / sqrt(1 - beta2) in a step."""
    for record in finished.records():
        if record["method"] == "gmp":
            assert record["largest_rotation"] < np.degrees(record["lr"] * 0.1 / 0.001**0.5)


def test_records_are_of_the_best_weights_in_the_curves(finished: Run) -> None:
    for record in finished.records():
        curves = curves_of(finished, record)
        assert curves["frame_accuracy"][-1] == pytest.approx(record["test_accuracy"])
        assert curves["rotation"].max() == pytest.approx(record["largest_rotation"], rel=1e-5)
        assert curves["steps"][-1] == record["epochs"] == len(curves["loss"])
        assert len(curves["rotation"]) == 7 * record["epochs"]
        assert ((curves["score"][-1] > 127) == (curves["logits"] > 0)).mean() > 0.99


def test_scores_are_rows_of_the_second_input(finished: Run) -> None:
    """The score at a grid point is that of the network there, first input along the columns."""
    data = points.load(source="generated")
    result, _ = train(data, *(Network("gmp", lr, seed) for lr in (0.01, 0.1) for seed in (0, 1)))
    across, up = experiment.make_grid(data)
    expected = result.predict(np.array([[across[7], up[40]]]))[2, 0]
    curves = finished.curves("gmp-lr0.1-seed0")
    assert curves["logits"][40, 7] == pytest.approx(expected, rel=1e-5)


def test_figures_say_where_the_points_come_from(finished: Run) -> None:
    for name in ("figure3a-h", "figure3i", "figure3j-m"):
        path = finished.folder / "figures" / f"{name}.png"
        assert path.read_bytes().startswith(b"\x89PNG")
        assert "generated points, not KEEL's" in path.with_suffix(".txt").read_text()


def test_under_heldout_other_points_judge_than_the_test_ones(
    tmp_path: Path, undrawn: None
) -> None:
    wanted = SHORT | {"methods": ["gmp"], "lrs": [0.1], "protocol": "heldout"}
    run = experiment.run(tmp_path / "run", **wanted)
    data = experiment.hold_out(points.load(source="generated"))
    result, _ = train(data, Network("gmp", 0.1, 0), Network("gmp", 0.1, 1))
    right = (result.predict(data.x_test) > 0) == (data.y_test > 0.5)
    val = (result.predict(data.x_val) > 0) == (data.y_val > 0.5)
    for record in run.records():
        assert record["test_accuracy"] == pytest.approx(right[record["seed"]].mean())
        assert record["val_accuracy"] == pytest.approx(val[record["seed"]].mean())
    assert run.config["protocol"] == "heldout"
    np.testing.assert_allclose(data.x_train.mean(0), 0, atol=1e-12)
