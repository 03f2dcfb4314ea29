"""Planes through input space: coordinates and points are each other's inverse."""

import pytest
import torch

from geoparam.analysis.slices.plane import Plane, check_plane, plane_through

SHAPE = (2, 3, 3)


def test_the_plane_through_three_inputs_holds_them_in_its_window() -> None:
    p, q, r = torch.randn(3, *SHAPE)
    plane = plane_through(p, q, r)
    points = plane.coordinates(torch.stack([p, q, r]))
    assert torch.allclose(plane.at(points), torch.stack([p, q, r]).double())
    a0, a1, b0, b1 = plane.extent
    assert ((points >= [a0, b0]) & (points <= [a1, b1])).all()
    gram = torch.stack(plane.axes).flatten(1) @ torch.stack(plane.axes).flatten(1).T
    assert torch.allclose(gram, torch.eye(2, dtype=torch.float64))


def test_coordinates_in_axes_that_are_not_orthonormal() -> None:
    plane = Plane(torch.randn(SHAPE), (torch.randn(SHAPE), 5 * torch.randn(SHAPE)), (0, 1, 0, 1))
    points = torch.randn(7, 2, dtype=torch.float64)
    assert torch.allclose(torch.from_numpy(plane.coordinates(plane.at(points))), points)


def test_three_inputs_on_a_line_are_refused() -> None:
    p, q = torch.randn(2, 5)
    with pytest.raises(ValueError, match="one line"):
        plane_through(p, q, p + 3 * (q - p))
    with pytest.raises(ValueError, match="one line"):
        plane_through(p, p, q)


@pytest.mark.parametrize(
    ("origin", "axes", "extent", "message"),
    [
        (torch.zeros(3), None, (-1, 1, -1, 1), "needs `axes`"),
        (torch.zeros(3), torch.eye(2), (-1, 1, -1, 1), "shape of one input"),
        (torch.zeros(2), torch.ones(2, 2), (-1, 1, -1, 1), "two different directions"),
        (torch.full((2,), torch.nan), None, (-1, 1, -1, 1), "finite"),
        (torch.zeros(2), None, (1, -1, -1, 1), "a0 < a1"),
    ],
)
def test_what_is_no_window_is_refused(
    origin: torch.Tensor, axes: torch.Tensor | None, extent: tuple, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_plane(origin, axes, extent)
