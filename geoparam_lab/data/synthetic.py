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
    """
    w = 1 + (x - 1) / 4
    return np.sin(np.pi * w) ** 2 + (w - 1) ** 2 * (1 + np.sin(2 * np.pi * w) ** 2)


def levy_regression(seed: int = 0, points: int = 50, noise: float = 0.1) -> Regression:
    """Noisy Levy values at uniform points of [-10, 10], and the true ones on a grid of step 0.1.

    With seed 0 these are the very points that the papers' code draws, hence numpy's old generator.
    """
    rng = np.random.RandomState(seed)
    x = rng.uniform(-10, 10, size=points)
    y = levy(x) + rng.normal(scale=noise, size=points)
    grid = np.linspace(-10, 10, 201)
    return Regression(x[:, None], y, grid[:, None], levy(grid))


BANANA_RADII = (0.0, 1.2, 2.2)  # a heap and two arches around it


def banana(seed: int = 0, points: int = 1000, noise: float = 0.34) -> tuple[Array, Array]:
    """Points of two classes that lie around each other as bananas do, and overlap a little.

    Class 0 is a heap and a wide arch over it, class 1 an arch between the two, each point with
    Gaussian noise: a likeness of KEEL's Banana set. No line helps, and the best rule there is gets
    90 % right, as the best classifiers do on KEEL's.

    Returns:
        Inputs (points, 2) and classes 0 and 1 (points,), in float64.
    """
    rng = np.random.RandomState(seed)
    part = rng.choice(3, size=points, p=(0.2, 0.45, 0.35))
    radius = np.take(BANANA_RADII, part)
    angle = rng.uniform(0, np.pi, size=points)
    centre = radius[:, None] * np.stack([np.cos(angle), np.sin(angle)], axis=1)
    return centre + rng.normal(scale=noise, size=(points, 2)), (part == 1).astype(np.float64)
