"""The tracker with two processes: the first records under DDP; under FSDP2 both take part."""

import copy
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from processes import Processes, in_both
from torch import nn
from torch.distributed.fsdp import fully_shard
from tracked_networks import network, train

from geoparam import BoundaryTracker

PROBE = torch.randn(6, 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
KINDS = ["sp", "bn", "ln", "gmp inside", "gmp outside", "intrinsic"]


def assert_same_history(tracker: BoundaryTracker, reference: BoundaryTracker) -> None:
    for name, layer in reference.history.items():
        for quantity, expected in layer.items():
            found = tracker.history[name][quantity]
            np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9, err_msg=quantity)


def ddp_records_in_the_first_process(kind: str, file: Path) -> None:
    model = network(kind)
    reference = copy.deepcopy(model)
    wrapped = nn.parallel.DistributedDataParallel(model)
    tracker = BoundaryTracker(wrapped, probe=PROBE, keep="full", file=file)
    train(wrapped, 3, tracker.step)
    tracker.close()
    if dist.get_rank() == 0:
        alone = BoundaryTracker(reference, probe=PROBE, keep="full")
        train(reference, 3, alone.step)
        assert_same_history(tracker, alone)
    else:
        with pytest.raises(RuntimeError, match="first one"):
            tracker.history  # noqa: B018


@pytest.mark.parametrize("kind", ["bn", "gmp inside"])
def test_ddp_records_in_the_first_process(processes: Processes, tmp_path: Path, kind: str) -> None:
    processes.run(ddp_records_in_the_first_process, kind, tmp_path / "history.npy")
    assert len(np.load(tmp_path / "history.npy")) == 3 * 3


@pytest.mark.parametrize(
    ("kind", "probe", "units"), [*product(KINDS, [False, True], [None]), ("bn", True, 3)]
)
@in_both
def test_sharded_parameters_have_the_same_history_whole_or_sampled(
    kind: str, probe: bool, units: int | None
) -> None:
    model, reference = network(kind), network(kind)
    for module in model[1:]:
        if any(True for _ in module.parameters()):
            fully_shard(module)
    fully_shard(model)  # which has the first layer's parameters
    options = {"keep": "full", "units": units}
    options |= {"probe": PROBE} if probe else {"example_inputs": PROBE}
    tracker = BoundaryTracker(model, **options)
    alone = BoundaryTracker(reference, **options)
    train(model, 3, tracker.step)
    train(reference, 3, alone.step)
    if dist.get_rank() == 0:
        assert_same_history(tracker, alone)


@in_both
def test_a_sharded_model_needs_an_example() -> None:
    model = fully_shard(network("sp"))
    with pytest.raises(ValueError, match="FSDP2"):
        BoundaryTracker(model)
