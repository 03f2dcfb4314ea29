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
from geoparam_lab.run_folder import Record
from geoparam_lab.tables import tables
from geoparam_lab.training.stacks.stacked import Protocol


def regression(points: int = 30, draws: int = 0) -> Problem:
    random = np.random.default_rng(0)
    x = random.uniform(-1, 1, (draws, points, 1) if draws else (points, 1))
    return Problem((1, 8, 1), Protocol(epochs=60), (x, np.abs(x[..., 0])))


@pytest.mark.parametrize("draws", [0, 3])
def test_each_point_is_left_out_once(draws: int) -> None:
    problem = regression(10, draws)
    divided = [problem.divide(fold, 3) for fold in range(3)]
    left_out = np.concatenate([held.data[1] for _, held in divided], axis=-1)
    np.testing.assert_array_equal(np.sort(left_out), np.sort(problem.data[1]))
    for part, held in divided:
        assert part.data[0].shape[-2] + held.data[0].shape[-2] == 10
        assert not np.isin(held.data[1], part.data[1]).any()


def test_where_a_metric_stops_training_the_points_left_out_judge() -> None:
    data = banana_data.load(source="generated")
    part, held = banana.make_problem(data).divide(0, 4)
    assert part.evaluation is not None
    np.testing.assert_array_equal(part.evaluation[0], held.data[0])
    assert len(part.data[0]) == 600


def test_each_seed_takes_the_rate_with_the_lowest_error_over_the_folds() -> None:
    networks = [Network("gmp", lr, seed) for lr in (1e-9, 0.1) for seed in range(2)]
    found = toys.choose_rates(3, levy.find_errors, regression(), networks)
    assert [each["chosen"] for each in found] == [False, False, True, True]
    still, learned = found[0]["cv_error"], found[2]["cv_error"]
    assert learned < still / 2


def test_a_rate_that_diverges_is_not_chosen() -> None:
    networks = [Network("sp", lr, 0) for lr in (0.1, 1e300)]
    with np.errstate(all="ignore"):
        found = toys.choose_rates(2, levy.find_errors, regression(), networks)
    assert [each["chosen"] for each in found] == [True, False]


def test_tables_show_the_chosen_rates(tmp_path: Path, undrawn: None) -> None:
    options = {"methods": ["sp"], "seeds": 2, "lrs": [0.01, 0.1], "epochs": 30, "jobs": 1}
    run = levy.run(tmp_path, folds=2, **options)
    chosen = [record for record in run.records() if record["chosen"]]
    assert sorted(record["seed"] for record in chosen) == [0, 1]
    [table, *_] = tables.from_records(run.records(), "levy", run.config)
    mean = np.mean([record["test_rmse"] for record in chosen])
    [row] = table.rows
    assert row[table.columns.index("Test RMSE")].startswith(f"{mean:.3f}")
    assert any("cross-validation with 2 folds" in note for note in table.notes)


def records(errors: dict[float, list[float]], field: str = "test_rmse") -> list[Record]:
    return [{"method": "gmp", "lr": lr, field: e} for lr, own in errors.items() for e in own]


def test_the_plateau_ends_at_the_first_rate_that_is_worse() -> None:
    errors = {0.01: [1.05], 0.03: [2.0], 0.1: [1.0, 1.0, 9.0], 0.3: [1.1], 1.0: [1.11]}
    found = measure_tolerance(records(errors), RMSE)["gmp"]
    assert found.plateau.tolist() == [0.1, 0.3] and found.width == pytest.approx(3)
    assert found.failed == pytest.approx(1 / 7)  # 2.0 is less than twice the median, 1.05


def test_what_diverged_has_failed_and_is_on_no_plateau() -> None:
    errors = {0.1: [1.0, 1.0], 1.0: [math.nan, math.inf]}
    found = measure_tolerance(records(errors), RMSE)["gmp"]
    assert found.plateau.tolist() == [0.1] and found.failed == 0.5


def test_one_bar_serves_all_methods() -> None:
    good = records({0.1: [0.1] * 3, 0.3: [0.3] * 2})  # three times its best is no failure
    poor = [r | {"method": "sp"} for r in records({0.1: [1.0] * 5, 1.0: [1.9, 2.1]})]
    found = measure_tolerance(good + poor, RMSE)
    assert found["gmp"].failed == 0 and found["sp"].failed == pytest.approx(1 / 7)


def test_accuracies_are_judged_by_what_is_missing() -> None:
    errors = {0.1: [0.90], 0.3: [0.891], 1.0: [0.80]}
    found = measure_tolerance(records(errors, "test_accuracy"), ACCURACY)["gmp"]
    assert found.plateau.tolist() == [0.1, 0.3] and found.failed == 0
    said = describe_tolerance({"Banana": {"gmp": found}})
    assert said.endswith("GmP 3 (0%).")
