"""Every way to store directions gives them back, and knows how far a step turns them."""

import pytest
import torch

from geoparam import sphere
from geoparam.coordinates import Angles, Coordinates, Intrinsic, Sign, coordinates_for

CURVED = [Angles(), Intrinsic()]
DOUBLE = {"dtype": torch.float64}


@pytest.mark.parametrize(("system", "n"), [(Angles(), 5), (Intrinsic(), 5), (Sign(), 1)])
def test_rows_are_encoded_and_decoded(system: Coordinates, n: int) -> None:
    rows, r = torch.randn(7, n, **DOUBLE), torch.randn(7, **DOUBLE)
    stored = system.encode(rows).to(torch.float64)
    assert stored.shape == system.shape(7, n)
    u = rows / rows.norm(dim=1, keepdim=True)
    torch.testing.assert_close(system.decode(stored, None, False, None), u)
    torch.testing.assert_close(system.decode(stored, r, False, None), r[:, None] * u)


@pytest.mark.parametrize("system", CURVED)
def test_a_zero_row_gets_the_last_axis(system: Coordinates) -> None:
    stored = system.encode(torch.zeros(1, 3))
    assert system.decode(stored, None, False, None).tolist() == [[0, 0, 1]]


@pytest.mark.parametrize("system", CURVED)
def test_theta_is_the_papers_angles(system: Coordinates) -> None:
    rows = torch.randn(4, 6, **DOUBLE)
    expected = torch.pi / 2 - sphere.to_latitude(rows)
    torch.testing.assert_close(system.theta(system.encode(rows)), expected)


@pytest.mark.parametrize("system", CURVED)
def test_the_metric_tells_how_far_a_small_step_turns_a_unit(system: Coordinates) -> None:
    stored = system.encode(torch.randn(4, 6, **DOUBLE))
    step = 1e-6 * torch.randn_like(stored)
    if isinstance(system, Intrinsic):  # along the sphere
        step -= (step * stored).sum(dim=1, keepdim=True) * stored
    before, after = (system.decode(x, None, False, None) for x in (stored, stored + step))
    expected = (system.metric(stored) * step.square()).sum(dim=1).sqrt()
    torch.testing.assert_close(sphere.angle_between(before, after), expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize("system", CURVED)
def test_retraction_keeps_the_direction(system: Coordinates) -> None:
    stored = 3 * system.encode(torch.randn(4, 6, **DOUBLE))
    u = system.decode(stored, None, False, None)
    system.retract_(stored)
    torch.testing.assert_close(system.decode(stored, None, False, None), u)
    assert isinstance(system, Angles) or torch.allclose(stored, u)


def test_one_input_has_a_sign_whatever_the_name() -> None:
    assert isinstance(coordinates_for("angles", 1), Sign)
    assert isinstance(coordinates_for("intrinsic", 1), Sign)
