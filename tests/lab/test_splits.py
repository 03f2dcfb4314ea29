"""Splits and standardisation: scikit-learn's, and nothing of the test in the training."""

import numpy as np
import pytest

from geoparam_lab.data.splits import split, stack, standardise

X = np.random.RandomState(0).randn(53, 4) * [1, 10, 100, 1e-3] + [0, 5, -50, 1]
Y = np.arange(53.0)


@pytest.mark.parametrize(("n", "seed"), [(5, 0), (101, 1), (308, 9), (11934, 0)])
def test_split_is_that_of_scikit_learn(n: int, seed: int) -> None:
    train_test_split = pytest.importorskip("sklearn.model_selection").train_test_split
    expected = train_test_split(np.arange(n), test_size=0.2, random_state=seed)
    for indices, reference in zip(split(n, seed), expected, strict=True):
        np.testing.assert_array_equal(indices, reference)


@pytest.mark.parametrize("value", [288.0, 1e-300, 0.1])
def test_a_constant_feature_becomes_0(value: float) -> None:
    train, test = standardise(np.full((1000, 1), value), np.full((10, 1), value))
    assert not train.any() and not test.any()


@pytest.mark.parametrize("protocol", ["paper", "heldout"])
def test_every_point_is_in_one_part(protocol: str) -> None:
    parts = stack(X, Y, range(3), protocol)
    for k in range(3):
        targets = [parts.y_train[k], parts.y_test[k]]
        if protocol == "heldout":
            targets.append(parts.y_val[k])
        np.testing.assert_array_equal(np.sort(np.concatenate(targets)), Y)


def test_folds_are_those_of_scikit_learn_and_leave_the_test_alone() -> None:
    kfold = pytest.importorskip("sklearn.model_selection").KFold(5)
    [train], paper = stack(X, Y, [2]).y_train, stack(X, Y, [2])
    for i, (fit, held) in enumerate(kfold.split(train)):
        parts = stack(X, Y, [2], "heldout", fold=(i, 5))
        np.testing.assert_array_equal(parts.y_train[0], train[fit])
        np.testing.assert_array_equal(parts.y_val[0], train[held])
        np.testing.assert_array_equal(parts.y_test, paper.y_test)


def test_protocols_differ_in_the_validation_part_alone() -> None:
    paper, heldout = stack(X, Y, range(3)), stack(X, Y, range(3), "heldout")
    np.testing.assert_array_equal(paper.x_val, paper.x_test)
    np.testing.assert_array_equal(paper.y_val, paper.y_test)
    np.testing.assert_array_equal(paper.y_test, heldout.y_test)
    assert heldout.y_train.shape == (3, 33) and heldout.y_val.shape == (3, 9)


def test_inputs_are_standardised_by_what_is_trained_on_and_targets_are_raw() -> None:
    parts = stack(X, Y, [4], "heldout")
    index = parts.y_train[0].astype(int)
    mean, deviation = X[index].mean(axis=0), X[index].std(axis=0)
    for x, y in zip(parts[::2], parts[1::2], strict=True):
        np.testing.assert_allclose(x[0], (X[y[0].astype(int)] - mean) / deviation)


def test_each_seed_gives_its_own_split_whatever_the_others() -> None:
    parts = stack(X, Y, [3, 7])
    np.testing.assert_array_equal(parts.x_train[1], stack(X, Y, [7]).x_train[0])
    assert (parts.y_test[0] != parts.y_test[1]).any()
