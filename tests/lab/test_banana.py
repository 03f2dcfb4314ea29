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
from geoparam_lab.training.stacks.stacked import Result

SHORT: dict[str, Any] = {
    "seeds": 2,
    "epochs": 25,
    "patience": 4,
    "jobs": 1,
    "source": "generated",
}


def train(data: points.Banana, *networks: Network) -> Result:
    """Train some networks as a short run does."""
    problem = experiment.make_problem(data, SHORT["epochs"], SHORT["patience"])
    with tasks.limit_threads(1):
        result, _ = toys.train(problem, networks)
    return result


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return experiment.run(tmp_path_factory.mktemp("banana") / "run", **SHORT)


def test_without_file_and_network_points_are_generated(nowhere: None) -> None:
    assert points.load(source="auto").source == "generated"


def test_points_are_not_generated_where_a_folder_is_named(nowhere: None, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        points.load(tmp_path, "auto")


def test_the_network_is_the_papers() -> None:
    problem = experiment.make_problem(points.load(source="generated"))

    assert problem.widths == (2, 10, 1)


def test_the_schedule_is_the_papers() -> None:
    problem = experiment.make_problem(points.load(source="generated"))

    protocol = problem.protocol
    assert protocol.batch_size == 128
    assert problem.steps_per_epoch == 7
    assert protocol.epochs == 5000
    assert protocol.patience == 50
    assert protocol.stop_patience is None
    assert protocol.higher_is_better


def test_a_run_has_a_record_for_each_method_rate_and_seed(finished: Run) -> None:
    keys = [(record["method"], record["lr"], record["seed"]) for record in finished.records()]

    assert len(keys) == 4 * 2 * 2
    assert len(set(keys)) == len(keys)


def test_records_have_the_outcome_the_accuracy_and_the_largest_moves(finished: Run) -> None:
    for record in finished.records():
        assert record["source"] == "generated"
        assert record["init"] == "glorot"
        assert record["outcome"] == "finished"
        assert 0.4 < record["test_accuracy"] <= 1
        assert 0 < record["largest_rotation"] <= 180
        assert record["largest_move"] > 0


def test_gmp_turns_by_no_more_than_adams_step(finished: Run) -> None:
    """Two inputs, one angle: it moves by at most lr (1 - beta1) / sqrt(1 - beta2) in a step."""
    for record in finished.records():
        if record["method"] == "gmp":
            largest_step = record["lr"] * 0.1 / 0.001**0.5
            assert record["largest_rotation"] < np.degrees(largest_step)


def test_curves_end_with_the_accuracy_of_the_record(finished: Run) -> None:
    for record in finished.records():
        accuracy = curves_of(finished, record)["frame_accuracy"]
        assert accuracy[-1] == pytest.approx(record["test_accuracy"])


def test_curves_have_the_largest_rotation_of_the_record(finished: Run) -> None:
    for record in finished.records():
        rotation = curves_of(finished, record)["rotation"]
        assert rotation.max() == pytest.approx(record["largest_rotation"], rel=1e-5)


def test_curves_have_a_loss_of_each_epoch_and_a_rotation_of_each_step(finished: Run) -> None:
    for record in finished.records():
        curves = curves_of(finished, record)
        assert curves["steps"][-1] == record["epochs"]
        assert len(curves["loss"]) == record["epochs"]
        assert len(curves["rotation"]) == 7 * record["epochs"]


def test_the_last_scores_are_those_of_the_logits(finished: Run) -> None:
    for record in finished.records():
        curves = curves_of(finished, record)
        is_likely = curves["score"][-1] > 127  # of 255
        is_positive = curves["logits"] > 0
        assert (is_likely == is_positive).mean() > 0.99


def test_scores_are_rows_of_the_second_input(finished: Run) -> None:
    """The score at a grid point is that of the network there, first input along the columns."""
    data = points.load(source="generated")
    network = Network("gmp", 0.1, 0)
    stack = [Network("gmp", lr, seed) for lr in (0.01, 0.1) for seed in (0, 1)]
    across, up = experiment.make_grid(data)
    point = np.array([[across[7], up[40]]])

    logit = train(data, *stack).predict(point)[stack.index(network), 0]

    assert finished.curves(network.name)["logits"][40, 7] == pytest.approx(logit, rel=1e-5)


@pytest.mark.parametrize("name", ["figure3a-h", "figure3i", "figure3j-m"])
def test_figures_say_where_the_points_come_from(name: str, finished: Run) -> None:
    path = finished.folder / "figures" / f"{name}.png"

    assert path.read_bytes().startswith(b"\x89PNG")
    assert "generated points, not KEEL's" in path.with_suffix(".txt").read_text()


# --- held-out points ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def heldout(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of two networks that other points judge than the test ones."""
    options = {**SHORT, "methods": ["gmp"], "lrs": [0.1], "protocol": "heldout"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(toys, "save_figures", lambda *_: None)
        return experiment.run(tmp_path_factory.mktemp("heldout") / "run", **options)


def test_under_heldout_there_are_results_on_both_sets_of_points(heldout: Run) -> None:
    data = experiment.hold_out(points.load(source="generated"))
    result = train(data, Network("gmp", 0.1, 0), Network("gmp", 0.1, 1))
    is_right_test = (result.predict(data.x_test) > 0) == (data.y_test > 0.5)
    is_right_val = (result.predict(data.x_val) > 0) == (data.y_val > 0.5)

    for record in heldout.records():
        seed = record["seed"]
        assert record["test_accuracy"] == pytest.approx(is_right_test[seed].mean())
        assert record["val_accuracy"] == pytest.approx(is_right_val[seed].mean())


def test_a_run_keeps_its_protocol(heldout: Run) -> None:
    assert heldout.config["protocol"] == "heldout"


def test_points_are_centred_on_those_that_are_trained_on() -> None:
    data = experiment.hold_out(points.load(source="generated"))

    np.testing.assert_allclose(data.x_train.mean(0), 0, atol=1e-12)
