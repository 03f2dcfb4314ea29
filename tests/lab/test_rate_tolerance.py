"""Tolerance of the rate: plateaus and failures, by hand."""

import math

import pytest

from geoparam_lab.experiments.experiment import ACCURACY, RMSE
from geoparam_lab.experiments.rate_tolerance import describe_tolerance, measure_tolerance
from geoparam_lab.run_folder import Record


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
