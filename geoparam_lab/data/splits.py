"""Training, validation and test parts, drawn by seed and standardised."""

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

TEST_SHARE = 0.2
PROTOCOLS = ("paper", "heldout")


class Splits(NamedTuple):
    """Several splits of one data set, one after the other along the first axis, in float64.

    Inputs have the shape (splits, points, features), targets (splits, points). Training is judged
    on the validation part and reported on the test part.
    """

    x_train: np.ndarray
    y_train: np.ndarray
    x_val: np.ndarray
    y_val: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray


def split(n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the training and the test part of n points, 80 to 20.

    They are those of scikit-learn's ``train_test_split(test_size=0.2, random_state=seed)``, in the
    same order.
    """
    order = np.random.RandomState(seed).permutation(n)
    n_test = math.ceil(TEST_SHARE * n)
    return order[n_test:], order[:n_test]


def standardise(x_train: np.ndarray, *others: np.ndarray) -> list[np.ndarray]:
    """Shift and scale each feature to mean 0 and deviation 1 on the training part.

    A feature that is constant there carries nothing: it is shifted and not scaled.
    """
    constant = x_train.max(axis=0) == x_train.min(axis=0)  # the deviation may be 1e-16 instead
    mean = np.where(constant, x_train[0], x_train.mean(axis=0))
    deviation = np.where(constant, 1.0, x_train.std(axis=0))
    return [(x - mean) / deviation for x in (x_train, *others)]


def stack(
    x: np.ndarray,
    y: np.ndarray,
    seeds: Iterable[int] = range(10),
    protocol: str = "paper",
    fold: tuple[int, int] | None = None,
) -> Splits:
    """Split once per seed; inputs standardised on the training part, targets as they are.

    Under "paper" the validation part is the test part, as in the papers' code: whatever is chosen
    by it is chosen by the test. Under "heldout" it is a fifth of the training part, drawn with
    the same seed and left out of training and of the standardisation; the test part is the same.
    With `fold` (i, k) it is the i-th of k folds of the training part instead.
    """
    parts = [_make_parts(x, y, seed, protocol, fold) for seed in seeds]
    return Splits(*(np.stack(arrays) for arrays in zip(*parts, strict=True)))


def _make_parts(
    x: np.ndarray, y: np.ndarray, seed: int, protocol: str, fold: tuple[int, int] | None = None
) -> tuple[np.ndarray, ...]:
    train, test = split(len(x), seed)
    val = test
    if fold is not None:
        folds = np.array_split(train, fold[1])  # in random order already
        val = folds.pop(fold[0])
        train = np.concatenate(folds)
    elif protocol == "heldout":
        fit, held = split(len(train), seed)
        train, val = train[fit], train[held]
    x_train, x_val, x_test = standardise(x[train], x[val], x[test])
    return x_train, y[train], x_val, y[val], x_test, y[test]
