"""Rates: chosen by cross-validation on training points, and how much results depend on them."""

import math
from pathlib import Path

import numpy as np
import pytest

from geoparam_lab.data import banana_data
from geoparam_lab.experiments import banana, levy, toys
from geoparam_lab.experiments.experiment import ACCURACY, RMSE
from geoparam_lab.experiments.rate_tolerance import describe_tolerance, measure_tolerance
from geoparam_lab.experiments.toys import Network, Problem
from geoparam_lab.run_folder import Record, Run, select_records
from geoparam_lab.tables import tables
from geoparam_lab.training.stacks.stacked import Protocol


def regression(points: int = 30, draws: int | None = None) -> Problem:
    """|x| at random points; with `draws`, at others for each seed."""
    shape = (points, 1) if draws is None else (draws, points, 1)
    x = np.random.default_rng(0).uniform(-1, 1, shape)
    y = np.abs(x[..., 0])
    return Problem((1, 8, 1), Protocol(epochs=60), (x, y))


def targets(problem: Problem) -> np.ndarray:
    return problem.data[1]


each_number_of_draws = pytest.mark.parametrize("draws", [None, 3])


@each_number_of_draws
def test_each_point_is_left_out_once(draws: int | None) -> None:
    problem = regression(10, draws)

    left_out = [targets(problem.divide(fold, 3)[1]) for fold in range(3)]

    left_out = np.concatenate(left_out, axis=-1)
    np.testing.assert_array_equal(np.sort(left_out), np.sort(targets(problem)))


@pytest.mark.parametrize("fold", range(3))
@each_number_of_draws
def test_the_points_left_out_are_not_trained_on(draws: int | None, fold: int) -> None:
    training, left_out = regression(10, draws).divide(fold, 3)

    assert targets(training).shape[-1] + targets(left_out).shape[-1] == 10
    assert not np.isin(targets(left_out), targets(training)).any()


def test_where_a_metric_stops_training_the_points_left_out_judge() -> None:
    problem = banana.make_problem(banana_data.load(source="generated"))

    training, left_out = problem.divide(0, 4)

    assert training.evaluation is not None
    np.testing.assert_array_equal(training.evaluation[0], left_out.data[0])
    assert len(training.data[0]) == 600


def test_each_seed_takes_the_rate_with_the_lowest_error_over_the_folds() -> None:
    networks = [
        Network("gmp", 1e-9, 0),
        Network("gmp", 1e-9, 1),
        Network("gmp", 0.1, 0),
        Network("gmp", 0.1, 1),
    ]

    choices = toys.choose_rates(3, levy.find_errors, regression(), networks)

    assert [choice["chosen"] for choice in choices] == [False, False, True, True]
    assert choices[2]["cv_error"] < choices[0]["cv_error"] / 2


def test_a_rate_that_diverges_is_not_chosen() -> None:
    networks = [Network("sp", 0.1, 0), Network("sp", 1e300, 0)]

    with np.errstate(all="ignore"):
        choices = toys.choose_rates(2, levy.find_errors, regression(), networks)

    assert [choice["chosen"] for choice in choices] == [True, False]


@pytest.fixture
def cross_validated(tmp_path: Path, undrawn: None) -> Run:
    """A run of two seeds that chose their rates by two folds."""
    return levy.run(
        tmp_path,
        methods=["sp"],
        seeds=2,
        lrs=[0.01, 0.1],
        epochs=30,
        jobs=1,
        folds=2,
    )


def test_each_seed_has_one_chosen_rate(cross_validated: Run) -> None:
    chosen = select_records(cross_validated.records(), chosen=True)

    assert sorted(record["seed"] for record in chosen) == [0, 1]


def test_tables_show_the_chosen_rates(cross_validated: Run) -> None:
    table, *_ = tables.from_records(cross_validated.records(), "levy", cross_validated.config)

    chosen = select_records(cross_validated.records(), chosen=True)
    mean = np.mean([record["test_rmse"] for record in chosen])
    [row] = table.rows
    shown = row[table.columns.index("Test RMSE")]
    assert shown.startswith(f"{mean:.3f}")
    assert any("cross-validation with 2 folds" in note for note in table.notes)


def records(
    results: dict[float, list[float]], method: str = "gmp", field: str = "test_rmse"
) -> list[Record]:
    """One record for each result; results are by rate."""
    listed = []
    for lr, values in results.items():
        for value in values:
            listed.append({"method": method, "lr": lr, field: value})
    return listed


def test_the_plateau_ends_at_the_first_rate_that_is_worse() -> None:
    errors = {0.01: [1.05], 0.03: [2.0], 0.1: [1.0, 1.0, 9.0], 0.3: [1.1], 1.0: [1.11]}

    tolerance = measure_tolerance(records(errors), RMSE)["gmp"]

    assert tolerance.plateau.tolist() == [0.1, 0.3]
    assert tolerance.width == pytest.approx(3)


def test_a_result_above_twice_the_median_has_failed() -> None:
    errors = {0.01: [1.05], 0.03: [2.0], 0.1: [1.0, 1.0, 9.0], 0.3: [1.1], 1.0: [1.11]}

    tolerance = measure_tolerance(records(errors), RMSE)["gmp"]

    assert tolerance.failed == pytest.approx(1 / 7)  # 2.0 is less than twice 1.05, 9.0 is not


def test_a_result_that_diverged_has_failed_and_is_on_no_plateau() -> None:
    errors = {0.1: [1.0, 1.0], 1.0: [math.nan, math.inf]}

    tolerance = measure_tolerance(records(errors), RMSE)["gmp"]

    assert tolerance.plateau.tolist() == [0.1]
    assert tolerance.failed == 0.5


def test_all_methods_have_one_limit_of_failure() -> None:
    good = records({0.1: [0.1, 0.1, 0.1], 0.3: [0.3, 0.3]}, "gmp")  # 0.3 is no failure
    poor = records({0.1: [1.0, 1.0, 1.0, 1.0, 1.0], 1.0: [1.9, 2.1]}, "sp")

    tolerances = measure_tolerance(good + poor, RMSE)

    assert tolerances["gmp"].failed == 0
    assert tolerances["sp"].failed == pytest.approx(1 / 7)


def test_accuracies_are_judged_by_what_is_missing() -> None:
    accuracies = {0.1: [0.90], 0.3: [0.891], 1.0: [0.80]}

    tolerance = measure_tolerance(records(accuracies, field="test_accuracy"), ACCURACY)["gmp"]

    assert tolerance.plateau.tolist() == [0.1, 0.3]
    assert tolerance.failed == 0


def test_a_description_has_the_width_and_the_share_of_failures() -> None:
    errors = {0.1: [1.0], 0.3: [1.05], 1.0: [1.8]}
    tolerance = measure_tolerance(records(errors), RMSE)

    assert describe_tolerance({"Levy": tolerance}).endswith("GmP 3 (0%).")
