"""Data made from a formula: nothing to download."""

from typing import NamedTuple

import numpy as np

Array = np.ndarray


class Regression(NamedTuple):
    """Inputs of shape (points, features) and targets of shape (points,), in float64."""

    x_train: Array
    y_train: Array
    x_test: Array
    y_test: Array


def levy(x: Array) -> Array:
    r"""The Levy function of one variable, wiggles on a parabola, with its minimum 0 at x = 1.

    .. math:: f(x) = \sin^2(\pi w) + (w - 1)^2 (1 + \sin^2(2 \pi w)), \quad w = 1 + (x - 1) / 4

    Example:
        >>> levy(np.array([1.0, 5.0])).round(6).tolist()
        [0.0, 1.0]
    """
    w = 1 + (x - 1) / 4
    return np.sin(np.pi * w) ** 2 + (w - 1) ** 2 * (1 + np.sin(2 * np.pi * w) ** 2)


def levy_regression(seed: int = 0, points: int = 50, noise: float = 0.1) -> Regression:
    """Noisy Levy values at uniform points of [-10, 10], and the true ones on a grid of step 0.1.

    With seed 0 these are the very points that the papers' code draws, hence numpy's old generator.

    Example:
        >>> data = levy_regression()
        >>> data.x_train.shape, data.y_train.shape, data.x_test.shape
        ((50, 1), (50,), (201, 1))
    """
    rng = np.random.RandomState(seed)
    x = rng.uniform(-10, 10, size=points)
    y = levy(x) + rng.normal(scale=noise, size=points)
    grid = np.linspace(-10, 10, 201)
    return Regression(x[:, None], y, grid[:, None], levy(grid))
