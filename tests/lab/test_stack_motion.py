"""A stack's motion: records that are measured many at once are what they are one by one."""

import numpy as np
import pytest
import torch

from geoparam_lab.training.stacks import stack_motion
from geoparam_lab.training.stacks.stack_motion import BLOCK, Motion, Recorder

RECORDS = 2 * BLOCK + 7


def recorded(leaves: int, full: bool = True) -> Motion:
    """Five units of three members on a random walk; the second leaves before some record."""
    recorder, generator = Recorder(3, full), torch.Generator().manual_seed(0)
    normal = torch.randn(3, 5, 2, generator=generator, dtype=torch.float64)
    offset = torch.randn(3, 5, generator=generator, dtype=torch.float64)
    for record in range(RECORDS):
        members = np.arange(3) if record < leaves else np.array([0, 2])
        recorder.add(members, normal[members], offset[members])
        for tensor in (normal, offset):  # in place, as training does it
            tensor.add_(torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype) / 10)
    return recorder.motion()


each_end = pytest.mark.parametrize("leaves", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, RECORDS])


@each_end
def test_a_block_is_what_its_records_are_one_by_one(
    leaves: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = recorded(leaves)
    monkeypatch.setattr(stack_motion, "BLOCK", 1)
    for name, expected in vars(recorded(leaves)).items():
        np.testing.assert_allclose(getattr(together, name), expected, rtol=1e-14)


@each_end
def test_moves_are_those_between_the_places(leaves: int) -> None:
    found = recorded(leaves)
    assert found.location.shape == (RECORDS, 3, 5, 2)
    moves = np.linalg.norm(np.diff(found.location, axis=0), axis=-1).max(-1)
    np.testing.assert_allclose(found.displacement, moves, rtol=1e-12)
    assert np.isnan(found.displacement[leaves - 1 :, 1]).all()
    assert np.isfinite(found.displacement[: leaves - 1]).all()
    assert np.isfinite(found.rotation[:, [0, 2]]).all()


def test_motion_can_be_asked_for_on_the_way() -> None:
    recorder, generator = Recorder(1, full=False), torch.Generator().manual_seed(0)
    seen = []
    for _ in range(5):
        normal = torch.randn(1, 4, 3, generator=generator)
        recorder.add(np.array([0]), normal, torch.ones(1, 4))
        seen.append(recorder.motion().rotation)
    assert [len(rotation) for rotation in seen] == [0, 1, 2, 3, 4]
    np.testing.assert_array_equal(seen[2], seen[4][:2])
