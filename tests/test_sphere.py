"""The sphere's arithmetic: round trips, metric, angles, sampling."""

import math

import pytest
import torch

from geoparam import sphere

SIZES = [2, 13, 25088]


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize("n", SIZES)
def test_round_trip(n: int, dtype: torch.dtype, bound: float) -> None:
    u = sphere.sample(2, 4, n)
    u[..., -2:] = u[..., -2:].abs() * torch.tensor([[1, 1], [1, -1], [-1, 1], [-1, -1]])
    latitude = sphere.to_latitude(u)
    assert latitude.shape == (2, 4, n - 1)
    back = sphere.to_unit(latitude.to(dtype)).double()
    assert (back - u).norm(dim=-1).max() < bound


def test_matches_the_papers_formula() -> None:
    theta = torch.rand(3, dtype=torch.float64) * math.pi
    s, c = theta.sin(), theta.cos()
    expected = torch.stack([c[0], s[0] * c[1], s[0] * s[1] * c[2], s[0] * s[1] * s[2]])
    torch.testing.assert_close(sphere.to_unit(math.pi / 2 - theta), expected)


@pytest.mark.parametrize("scale", [1e-200, 1e-30, 1e200])
def test_very_short_and_long_vectors(scale: float) -> None:
    u = sphere.sample(3, 7)
    torch.testing.assert_close(sphere.to_latitude(u * scale), sphere.to_latitude(u))
    torch.testing.assert_close(sphere.normalise(u * scale), u)
    torch.testing.assert_close(sphere.length(u * scale) / scale, torch.ones(3).double())


def test_a_negative_zero_behind_a_pole_is_a_zero() -> None:
    assert not sphere.to_latitude(torch.tensor([0.0, 0.0, -0.0])).any()


def test_zero_vectors_and_poles_are_finite() -> None:
    x = torch.tensor([[0.0, 0, 0, 0], [3.0, 0, 0, 0], [0, -1.0, 0, 0]], dtype=torch.float64)
    latitude = sphere.to_latitude(x)
    assert latitude.isfinite().all()
    torch.testing.assert_close(sphere.to_unit(latitude)[1:], sphere.normalise(x)[1:])


def test_one_coordinate_has_no_angle() -> None:
    assert sphere.to_latitude(torch.tensor([[-2.0], [3.0]])).shape == (2, 0)
    assert sphere.to_unit(torch.empty(2, 0)).tolist() == [[1.0], [1.0]]


@pytest.mark.parametrize("n", [2, 100])
def test_metric_is_diagonal_and_equals_finite_differences(n: int) -> None:
    latitude = torch.randn(n - 1, dtype=torch.float64)
    h = 1e-6
    steps = h * torch.eye(n - 1, dtype=torch.float64)
    tangents = (sphere.to_unit(latitude + steps) - sphere.to_unit(latitude - steps)) / (2 * h)
    expected = torch.diag(sphere.metric(latitude))
    torch.testing.assert_close(tangents @ tangents.T, expected, atol=1e-8, rtol=0)


@pytest.mark.parametrize("angle", [0.0, 1e-12, 1e-7, 0.3, math.pi / 2, math.pi - 1e-7, math.pi])
def test_angle_between(angle: float) -> None:
    u = torch.tensor([1.0, 0.0], dtype=torch.float64)
    v = torch.tensor([math.cos(angle), math.sin(angle)], dtype=torch.float64)
    found = sphere.angle_between(5 * u, 1e-3 * v).item()
    assert found == pytest.approx(angle, rel=1e-9, abs=1e-15)


def test_angle_with_a_zero_vector_is_nan() -> None:
    assert sphere.angle_between(torch.zeros(3), torch.ones(3)).isnan()


def test_samples_are_uniform_and_repeatable() -> None:
    u = sphere.sample(20000, 3, generator=torch.Generator().manual_seed(0))
    again = sphere.sample(20000, 3, generator=torch.Generator().manual_seed(0))
    assert torch.equal(u, again)
    # In three dimensions each coordinate of a uniform direction is uniform on [-1, 1].
    quantiles = torch.quantile(u, torch.linspace(0.1, 0.9, 9, dtype=torch.float64), dim=0)
    expected = torch.linspace(-0.8, 0.8, 9, dtype=torch.float64)[:, None].expand(-1, 3)
    torch.testing.assert_close(quantiles, expected, atol=0.03, rtol=0)


def test_scalars_and_empty_vectors_are_refused() -> None:
    with pytest.raises(ValueError, match="last dimension"):
        sphere.to_unit(torch.tensor(0.3))
    with pytest.raises(ValueError, match="at least one coordinate"):
        sphere.to_latitude(torch.empty(2, 0))
