"""Convex polygons: cutting loses no area, and chords lie on the line."""

import numpy as np
import pytest

from geoparam.analysis.slices.polygons import Polygons, chords, join, rectangle, split


def regular(corners: int, radius: float = 1.0) -> Polygons:
    turn = 2 * np.pi * np.arange(corners) / corners
    points = radius * np.stack([np.cos(turn), np.sin(turn)], axis=1)
    return Polygons(points[None], np.array([corners]))


def heights(polygons: Polygons, normal: tuple[float, float], offset: float) -> np.ndarray:
    found = polygons.corners @ np.array(normal) + offset
    return np.where(np.abs(found) < 1e-12, 0, found)


MANY = join([regular(3), regular(4, 2.0), rectangle(-1, 2, -1, 0.5), regular(9, 0.7)])


def test_areas_and_inner_points() -> None:
    assert MANY.areas() == pytest.approx(
        [3**1.5 / 4, 8, 4.5, 9 / 2 * 0.49 * np.sin(2 * np.pi / 9)]
    )
    assert MANY.inner() == pytest.approx(np.array([[0, 0], [0, 0], [0.5, -0.25], [0, 0]]))


def test_joined_polygons_keep_their_corners() -> None:
    assert [len(corners) for corners in MANY.separate()] == [3, 4, 4, 9]


@pytest.mark.parametrize("normal", [(1.0, 0.0), (0.6, 0.8), (-0.8, 0.6)])
@pytest.mark.parametrize("offset", [0.0, 0.1, -0.3])
def test_halves_make_up_the_whole_and_lie_on_their_sides(
    normal: tuple[float, float], offset: float
) -> None:
    above, below = split(MANY, heights(MANY, normal, offset))
    assert above.areas() + below.areas() == pytest.approx(MANY.areas())
    assert (above.areas() > 0).all() and (below.areas() > 0).all()
    assert heights(above, normal, offset).min() == 0
    assert heights(below, normal, offset).max() == 0


def test_a_line_through_two_corners_adds_none() -> None:
    square = regular(4)
    above, below = split(square, heights(square, (0.0, 1.0), 0.0))
    assert above.sizes == below.sizes == [3]
    assert chords(square, heights(square, (0.0, 1.0), 0.0))[0] == pytest.approx(
        np.array([[1, 0], [-1, 0]])
    )


@pytest.mark.parametrize("offset", [0.0, 0.2])
def test_chords_lie_on_the_line_and_on_the_border(offset: float) -> None:
    ends = chords(MANY, heights(MANY, (0.6, 0.8), offset))
    assert ends @ np.array([0.6, 0.8]) == pytest.approx(-offset)
    assert (np.linalg.norm(ends[:, 0] - ends[:, 1], axis=1) > 0.5).all()
    whole, pieces = (
        MANY.areas(),
        [part.areas() for part in split(MANY, heights(MANY, (0.6, 0.8), offset))],
    )
    assert sum(pieces) == pytest.approx(whole)


def test_no_polygons_at_all() -> None:
    none = MANY.pick(np.zeros(4, dtype=bool))
    above, below = split(none, np.zeros((0, 9)))
    assert len(above.areas()) == len(below.areas()) == len(chords(none, np.zeros((0, 9)))) == 0


def test_a_polygon_cut_many_times_keeps_its_area() -> None:
    random = np.random.default_rng(0)
    pieces = rectangle(-1, 1, -1, 1)
    for _ in range(40):
        turn, offset = random.uniform(0, 2 * np.pi), random.uniform(-0.5, 0.5)
        found = heights(pieces, (np.cos(turn), np.sin(turn)), offset)
        hit = (found.max(axis=1) > 0) & (found.min(axis=1) < 0)
        pieces = join([pieces.pick(~hit), *split(pieces.pick(hit), found[hit])])
    assert len(pieces.areas()) > 300
    assert pieces.areas().sum() == pytest.approx(4, abs=1e-12)
    assert (pieces.areas() > 0).all()
