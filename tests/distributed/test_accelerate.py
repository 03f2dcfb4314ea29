"""Accelerate: two processes train to what one does with the joint batch."""

import os

import pytest
import torch.distributed as dist
from processes import Processes
from training import EQUAL, assert_same_state, network, sgd, synchronised, train

pytest.importorskip("accelerate")


def trains_to_the_same(kind: str, coordinates: str) -> None:
    from accelerate import Accelerator

    rank, count = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=count, LOCAL_WORLD_SIZE=count)
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == dist.get_world_size()
    reference, model = network(kind, coordinates), synchronised(network(kind, coordinates))
    run, optimizer = accelerator.prepare(model, sgd(model))
    train(model, EQUAL, run=run, optimizer=optimizer)
    train(reference)
    assert_same_state(model, reference)


@pytest.mark.parametrize("coordinates", ["angles", "intrinsic"])
def test_trains_to_the_same(processes: Processes, coordinates: str) -> None:
    processes.run(trains_to_the_same, "absorbed", coordinates)
