"""DistributedDataParallel: two processes train to what one does with the joint batch."""

from typing import Any

import pytest
import torch
from processes import Processes
from torch.nn.parallel import DistributedDataParallel
from training import EQUAL, assert_same_state, network, synchronised, train


def trains_to_the_same(
    kind: str, coordinates: str, sizes: tuple[int, int], compiled: bool
) -> None:
    reference, model = network(kind, coordinates), synchronised(network(kind, coordinates))
    run: Any = DistributedDataParallel(model)
    train(model, sizes, run=torch.compile(run) if compiled else run)
    train(reference, batch=sum(sizes))
    assert_same_state(model, reference)


@pytest.mark.parametrize(
    ("kind", "coordinates", "sizes"),
    [("plain", "angles", EQUAL), ("absorbed", "intrinsic", EQUAL), ("anew", "angles", (5, 2))],
)
def test_trains_to_the_same(
    processes: Processes, kind: str, coordinates: str, sizes: tuple[int, int]
) -> None:
    processes.run(trains_to_the_same, kind, coordinates, sizes, False)


@pytest.mark.compile
def test_trains_to_the_same_compiled(processes: Processes) -> None:
    processes.run(trains_to_the_same, "absorbed", "angles", EQUAL, True, timeout=300)
