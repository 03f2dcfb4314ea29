"""Training on text with two processes is what one does."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist
from processes import Processes
from text_runs import make_settings, text

from geoparam_lab.training.network_training import Outcome
from geoparam_lab.training.text.loop import train

pytest.importorskip("accelerate")
pytestmark = pytest.mark.usefixtures("fresh_accelerate")


def trains_to_the_same(method: str, folder: Path, expected: Outcome) -> None:
    rank, count = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=count, LOCAL_WORLD_SIZE=count)
    outcome = train(make_settings(method), text(), folder)
    assert outcome.record["processes"] == 2 and expected.record["processes"] == 1
    for name, curve in outcome.curves.items():
        np.testing.assert_allclose(curve, expected.curves[name], rtol=1e-3, err_msg=name)
    dist.barrier()


@pytest.mark.parametrize("method", ["turn", "muon", "adamw"])
def test_two_train_to_what_one_does(processes: Processes, method: str, tmp_path: Path) -> None:
    expected = train(make_settings(method), text(), tmp_path / "one")
    processes.run(trains_to_the_same, method, tmp_path / "two", expected)
