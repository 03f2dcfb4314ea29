"""A stack's motion: records that are measured many at once are what they are one by one."""

import numpy as np
import pytest
import torch

from geoparam_lab.training.stacks import stack_motion
from geoparam_lab.training.stacks.stack_motion import BLOCK, Motion, Recorder

RECORDS = 2 * BLOCK + 7


def record_walk(leaves: int) -> Motion:
    """Five units of three members on a random walk; the second leaves before some record."""
    recorder, generator = Recorder(3), torch.Generator().manual_seed(0)
    normal = torch.randn(3, 5, 2, generator=generator, dtype=torch.float64)
    offset = torch.randn(3, 5, generator=generator, dtype=torch.float64)
    for record in range(RECORDS):
        members = np.arange(3) if record < leaves else np.array([0, 2])
        recorder.add(members, normal[members], offset[members])
        for tensor in (normal, offset):  # in place, as training does it
            tensor.add_(torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype) / 10)
    return recorder.motion()


@pytest.mark.parametrize("leaves", [1, 2, BLOCK, BLOCK + 1, RECORDS])
def test_a_block_is_what_its_records_are_one_by_one(
    leaves: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = record_walk(leaves)
    monkeypatch.setattr(stack_motion, "BLOCK", 1)
    for name, expected in vars(record_walk(leaves)).items():
        found = getattr(together, name)
        np.testing.assert_allclose(found, expected, rtol=1e-14)
        assert np.isnan(found[leaves - 1 :, 1]).all()
        assert np.isfinite(found[:, [0, 2]]).all() and np.isfinite(found[: leaves - 1]).all()


def test_motion_can_be_asked_for_at_any_time() -> None:
    recorder, generator = Recorder(1), torch.Generator().manual_seed(0)
    seen = []
    for _ in range(5):
        normal = torch.randn(1, 4, 3, generator=generator)
        recorder.add(np.array([0]), normal, torch.ones(1, 4))
        seen.append(recorder.motion().rotation)
    assert [len(rotation) for rotation in seen] == [0, 1, 2, 3, 4]
    np.testing.assert_array_equal(seen[2], seen[4][:2])
