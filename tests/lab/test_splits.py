"""Splits and standardisation: scikit-learn's, and nothing of the test in the training."""

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from geoparam_lab.data.splits import split, stack, standardise

X = np.random.RandomState(0).randn(53, 4) * [1, 10, 100, 1e-3] + [0, 5, -50, 1]
ROWS = np.arange(53)
Y = ROWS.astype(float)  # a target is the number of its row


@pytest.mark.parametrize(("n", "seed"), [(5, 0), (101, 1), (308, 9), (11934, 0)])
def test_split_is_that_of_scikit_learn(n: int, seed: int) -> None:
    model_selection = pytest.importorskip("sklearn.model_selection")
    expected_train, expected_test = model_selection.train_test_split(
        np.arange(n), test_size=0.2, random_state=seed
    )

    train, test = split(n, seed)

    assert_array_equal(train, expected_train)
    assert_array_equal(test, expected_test)


@pytest.mark.parametrize("value", [288.0, 1e-300, 0.1])
def test_a_constant_feature_becomes_0(value: float) -> None:
    train, test = standardise(np.full((1000, 1), value), np.full((10, 1), value))

    assert not train.any()
    assert not test.any()


def test_under_paper_every_point_is_in_training_or_test() -> None:
    parts = stack(X, Y, range(3), "paper")

    rows = np.concatenate([parts.y_train, parts.y_test], axis=1)

    assert_array_equal(np.sort(rows), [ROWS, ROWS, ROWS])


def test_under_heldout_every_point_is_in_one_part() -> None:
    parts = stack(X, Y, range(3), "heldout")

    rows = np.concatenate([parts.y_train, parts.y_val, parts.y_test], axis=1)

    assert_array_equal(np.sort(rows), [ROWS, ROWS, ROWS])


@pytest.mark.parametrize("i", range(5))
def test_folds_are_those_of_scikit_learn(i: int) -> None:
    model_selection = pytest.importorskip("sklearn.model_selection")
    [train] = stack(X, Y, [2]).y_train
    folds = list(model_selection.KFold(5).split(train))
    fit, validation = folds[i]

    parts = stack(X, Y, [2], "heldout", fold=(i, 5))

    assert_array_equal(parts.y_train[0], train[fit])
    assert_array_equal(parts.y_val[0], train[validation])


@pytest.mark.parametrize("i", range(5))
def test_folds_leave_the_test_part_alone(i: int) -> None:
    parts = stack(X, Y, [2], "heldout", fold=(i, 5))

    assert_array_equal(parts.y_test, stack(X, Y, [2]).y_test)


def test_the_validation_part_of_paper_is_the_test_part() -> None:
    paper = stack(X, Y, range(3), "paper")

    assert_array_equal(paper.x_val, paper.x_test)
    assert_array_equal(paper.y_val, paper.y_test)


def test_the_validation_part_of_heldout_is_a_fifth_of_training() -> None:
    paper, heldout = stack(X, Y, range(3), "paper"), stack(X, Y, range(3), "heldout")

    assert_array_equal(heldout.y_test, paper.y_test)
    assert heldout.y_train.shape == (3, 33)
    assert heldout.y_val.shape == (3, 9)


@pytest.mark.parametrize("part", ["train", "val", "test"])
def test_inputs_are_standardised_by_the_training_part(part: str) -> None:
    parts = stack(X, Y, [4], "heldout")
    trained_on = X[parts.y_train[0].astype(int)]

    x = getattr(parts, f"x_{part}")[0]

    rows = getattr(parts, f"y_{part}")[0].astype(int)  # targets are not standardised
    expected = (X[rows] - trained_on.mean(axis=0)) / trained_on.std(axis=0)
    assert_allclose(x, expected)


def test_a_seeds_split_does_not_depend_on_the_other_seeds() -> None:
    parts = stack(X, Y, [3, 7])

    assert_array_equal(parts.x_train[1], stack(X, Y, [7]).x_train[0])
    assert (parts.y_test[0] != parts.y_test[1]).any()
