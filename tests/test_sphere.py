"""The sphere's arithmetic: round trips, metric, angles, sampling."""

import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from geoparam import sphere

DOUBLE = {"dtype": torch.float64}


# Directions and latitudes.


@pytest.fixture
def u(n: int) -> Tensor:
    """Return directions with every pair of signs in the last two coordinates."""
    u = sphere.sample(2, 4, n)
    signs = torch.tensor([[1, 1], [1, -1], [-1, 1], [-1, -1]])
    u[..., -2:] = u[..., -2:].abs() * signs
    return u


every_size = pytest.mark.parametrize("n", [2, 13, 25088])


@every_size
def test_a_direction_has_one_latitude_less_than_coordinates(u: Tensor, n: int) -> None:
    assert sphere.to_latitude(u).shape == (2, 4, n - 1)


@every_size
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_latitudes_give_the_direction_back(
    u: Tensor, n: int, dtype: torch.dtype, bound: float
) -> None:
    latitude = sphere.to_latitude(u).to(dtype)

    error = sphere.to_unit(latitude).double() - u

    assert error.norm(dim=-1).max() < bound


def test_matches_the_papers_formula() -> None:
    theta = torch.rand(3, **DOUBLE) * math.pi
    s, c = theta.sin(), theta.cos()

    expected = torch.stack(
        [
            c[0],
            s[0] * c[1],
            s[0] * s[1] * c[2],
            s[0] * s[1] * s[2],
        ]
    )
    assert_close(sphere.to_unit(math.pi / 2 - theta), expected)


@pytest.mark.parametrize("scale", [1e-200, 1e-30, 1e200])
def test_very_short_and_long_vectors(scale: float) -> None:
    u = sphere.sample(3, 7)
    x = scale * u

    assert_close(sphere.to_latitude(x), sphere.to_latitude(u))
    assert_close(sphere.normalise(x), u)
    assert_close(sphere.length(x) / scale, torch.ones(3, **DOUBLE))


def test_a_negative_zero_behind_a_pole_is_a_zero() -> None:
    x = torch.tensor([0.0, 0.0, -0.0])

    assert not sphere.to_latitude(x).any()


def test_zero_vectors_have_finite_latitudes() -> None:
    latitude = sphere.to_latitude(torch.zeros(4, **DOUBLE))

    assert latitude.isfinite().all()


@pytest.mark.parametrize("pole", [[3.0, 0, 0, 0], [0, -1.0, 0, 0]])
def test_latitudes_of_a_pole_give_it_back(pole: list[float]) -> None:
    x = torch.tensor(pole, **DOUBLE)

    latitude = sphere.to_latitude(x)

    assert latitude.isfinite().all()
    assert_close(sphere.to_unit(latitude), sphere.normalise(x))


def test_one_coordinate_has_no_latitude() -> None:
    assert sphere.to_latitude(torch.tensor([[-2.0], [3.0]])).shape == (2, 0)


def test_without_latitudes_the_direction_is_plus_one() -> None:
    assert sphere.to_unit(torch.empty(2, 0)).tolist() == [[1.0], [1.0]]


def test_scalars_are_refused() -> None:
    with pytest.raises(ValueError, match="last dimension"):
        sphere.to_unit(torch.tensor(0.3))


def test_vectors_without_coordinates_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one coordinate"):
        sphere.to_latitude(torch.empty(2, 0))


# Metric, angles and samples.


@pytest.mark.parametrize("n", [2, 100])
def test_metric_is_diagonal_and_equals_finite_differences(n: int) -> None:
    latitude = torch.randn(n - 1, **DOUBLE)
    h = 1e-6
    steps = h * torch.eye(n - 1, **DOUBLE)

    forward = sphere.to_unit(latitude + steps)
    backward = sphere.to_unit(latitude - steps)
    tangents = (forward - backward) / (2 * h)

    expected = torch.diag(sphere.metric(latitude))
    assert_close(tangents @ tangents.T, expected, atol=1e-8, rtol=0)


@pytest.mark.parametrize("angle", [0.0, 1e-12, 1e-7, 0.3, math.pi / 2, math.pi - 1e-7, math.pi])
def test_angle_between_vectors_of_other_lengths(angle: float) -> None:
    x = torch.tensor([1.0, 0.0], **DOUBLE)
    y = torch.tensor([math.cos(angle), math.sin(angle)], **DOUBLE)

    computed = sphere.angle_between(5 * x, 1e-3 * y).item()

    assert computed == pytest.approx(angle, rel=1e-9, abs=1e-15)


def test_angle_with_a_zero_vector_is_nan() -> None:
    assert sphere.angle_between(torch.zeros(3), torch.ones(3)).isnan()


def test_samples_are_repeatable() -> None:
    first = sphere.sample(100, 3, generator=torch.Generator().manual_seed(0))
    second = sphere.sample(100, 3, generator=torch.Generator().manual_seed(0))

    assert torch.equal(first, second)


def test_samples_are_uniform() -> None:
    """In three dimensions each coordinate of a uniform direction is uniform on [-1, 1]."""
    u = sphere.sample(20000, 3, generator=torch.Generator().manual_seed(0))

    deciles = torch.quantile(u, torch.linspace(0.1, 0.9, 9, **DOUBLE), dim=0)

    expected = torch.linspace(-0.8, 0.8, 9, **DOUBLE)[:, None]
    assert_close(deciles, expected.expand(-1, 3), atol=0.03, rtol=0)
