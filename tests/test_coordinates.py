"""Every way to store directions gives them back, and knows how far a step turns them."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from geoparam import sphere
from geoparam.coordinates import Angles, Coordinates, Intrinsic, Sign, coordinates_for

DOUBLE = {"dtype": torch.float64}

every_system = pytest.mark.parametrize(
    ("system", "n"), [(Angles(), 5), (Intrinsic(), 5), (Sign(), 1)]
)
curved_systems = pytest.mark.parametrize("system", [Angles(), Intrinsic()])


def decode(system: Coordinates, stored: Tensor, r: Tensor | None = None) -> Tensor:
    return system.decode(stored, r, False, None)


@every_system
def test_stored_rows_have_the_stated_shape(system: Coordinates, n: int) -> None:
    stored = system.encode(torch.randn(7, n, **DOUBLE))

    assert stored.shape == system.shape(7, n)


@every_system
def test_decoding_gives_the_directions_back(system: Coordinates, n: int) -> None:
    rows = torch.randn(7, n, **DOUBLE)
    stored = system.encode(rows).to(torch.float64)

    u = rows / rows.norm(dim=1, keepdim=True)
    assert_close(decode(system, stored), u)


@every_system
def test_decoding_scales_directions_by_r(system: Coordinates, n: int) -> None:
    rows = torch.randn(7, n, **DOUBLE)
    r = torch.randn(7, **DOUBLE)
    stored = system.encode(rows).to(torch.float64)

    u = rows / rows.norm(dim=1, keepdim=True)
    assert_close(decode(system, stored, r), r[:, None] * u)


@curved_systems
def test_a_zero_row_gets_the_last_axis(system: Coordinates) -> None:
    stored = system.encode(torch.zeros(1, 3))

    assert decode(system, stored).tolist() == [[0, 0, 1]]


@curved_systems
def test_theta_is_the_papers_angles(system: Coordinates) -> None:
    rows = torch.randn(4, 6, **DOUBLE)

    theta = system.theta(system.encode(rows))

    assert_close(theta, torch.pi / 2 - sphere.to_latitude(rows))


@curved_systems
def test_the_metric_tells_how_far_a_small_step_turns_a_unit(system: Coordinates) -> None:
    stored = system.encode(torch.randn(4, 6, **DOUBLE))
    step = 1e-6 * torch.randn_like(stored)
    if isinstance(system, Intrinsic):  # along the sphere
        step -= (step * stored).sum(dim=1, keepdim=True) * stored

    turned_by = sphere.angle_between(decode(system, stored), decode(system, stored + step))

    expected = (system.metric(stored) * step.square()).sum(dim=1).sqrt()
    assert_close(turned_by, expected, rtol=1e-4, atol=0)


@curved_systems
def test_retraction_keeps_the_direction(system: Coordinates) -> None:
    stored = 3 * system.encode(torch.randn(4, 6, **DOUBLE))
    u = decode(system, stored)

    system.retract_(stored)

    assert_close(decode(system, stored), u)


def test_retraction_of_intrinsic_coordinates_stores_unit_vectors() -> None:
    system = Intrinsic()
    stored = 3 * system.encode(torch.randn(4, 6, **DOUBLE))
    u = decode(system, stored)

    system.retract_(stored)

    assert_close(stored, u)


@pytest.mark.parametrize("name", ["angles", "intrinsic"])
def test_one_input_has_a_sign_whatever_the_name(name: str) -> None:
    assert isinstance(coordinates_for(name, 1), Sign)
