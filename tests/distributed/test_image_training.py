"""Training on images with two processes: what one does, under DDP; and checkpoints under FSDP2."""

import os
from pathlib import Path
from typing import Any

import image_runs
import pytest
import torch
import torch.distributed as dist
from image_runs import STEPS, Killed, die, kill_at, settings, source, weights
from processes import Processes, in_both
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from geoparam_lab.training import run_checkpoints
from geoparam_lab.training.images.loop import Training, train
from geoparam_lab.training.network_training import Outcome

pytest.importorskip("accelerate")
pytestmark = pytest.mark.usefixtures("fresh_accelerate")

CLOSE = {"atol": 2e-5, "rtol": 1e-3}


def accelerator(sharded: bool = False) -> Any:
    from accelerate import Accelerator

    rank, count = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=count, LOCAL_WORLD_SIZE=count)

    class Sharding(Accelerator):
        """Accelerate shards nothing without a GPU: this does it as Accelerate would."""

        is_fsdp2 = True

        def prepare(self, model: Any, optimizer: Any) -> Any:
            names = {parameter: name for name, parameter in model.named_parameters()}
            fully_shard(model)
            assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
            new = dict(model.named_parameters())
            for group in optimizer.param_groups:
                group["params"] = [new[names[parameter]] for parameter in group["params"]]
            return model, self.prepare_optimizer(optimizer)

    return (Sharding if sharded else Accelerator)(cpu=True, mixed_precision="no")


def assert_close_weights(folder: Path, reference: Path) -> None:
    expected = weights(reference)
    found = weights(folder)
    assert list(found) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, msg=name, **CLOSE)


def trains_to_the_same(
    options: dict[str, Any], sharded: bool, folder: Path, reference: Path, expected: Outcome
) -> None:
    outcome = train(settings(**options), source(), folder, accelerator=accelerator(sharded))
    for name, curve in image_runs.without_times(expected.curves).items():
        torch.testing.assert_close(
            torch.tensor(outcome.curves[name]), torch.tensor(curve), msg=name, **CLOSE
        )
    dist.barrier()  # the main process has written
    assert_close_weights(folder, reference)


RUNS: dict[str, dict[str, Any]] = {
    "sp": {"method": "sp"},
    "wn+mbn": {"method": "wn+mbn"},
    "gmp+imn": {"method": "gmp+imn"},
    "intrinsic+imn": {"method": "intrinsic+imn", "weight_decay": 0.1},
    "in parts": {"method": "gmp", "accumulate": 2, "schedule": "cosine"},
    "best weights": {"method": "gmp", "schedule": "plateau-top5", "patience": 1, "epochs": 4},
}


@pytest.mark.parametrize(
    ("name", "sharded"), [*((name, n % 2 == 1) for n, name in enumerate(RUNS)), ("gmp+imn", True)]
)
def test_two_train_to_what_one_does(
    processes: Processes, name: str, sharded: bool, tmp_path: Path
) -> None:
    one = tmp_path / "one"
    expected = train(settings(**RUNS[name]), source(), one)
    processes.run(trains_to_the_same, RUNS[name], sharded, tmp_path / "two", one, expected)


def goes_on(options: dict[str, Any], sharded: bool, whole: Path, parts: Path) -> None:
    both = accelerator(sharded)
    chosen, images = settings(**options), source()
    expected = train(chosen, images, whole, accelerator=both)
    is_killed(options, sharded, parts)
    outcome = train(chosen, images, parts, accelerator=both)
    dist.barrier()
    if dist.get_rank() == 0:
        image_runs.assert_same_run(outcome, expected, parts, whole)
    assert outcome.record["top1"] == expected.record["top1"]
    dist.barrier()


@pytest.mark.parametrize(("name", "sharded"), [("gmp+imn", False), ("intrinsic+imn", True)])
def test_two_go_on_as_if_nothing_had_happened(
    processes: Processes, name: str, sharded: bool, tmp_path: Path
) -> None:
    processes.run(goes_on, RUNS[name], sharded, tmp_path / "whole", tmp_path / "parts")


def is_killed(options: dict[str, Any], sharded: bool, folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Training, "train_on", kill_at(STEPS + 3, Training.train_on, die))
        both = accelerator(sharded)
        train(settings(**options), source(), folder, accelerator=both)


@pytest.mark.parametrize("sharded", [False, True], ids=["ddp", "fsdp2"])
def test_one_goes_on_with_what_two_began(
    processes: Processes, sharded: bool, tmp_path: Path
) -> None:
    options = RUNS["gmp+imn"]
    expected = train(settings(**options), source(), tmp_path / "one")
    processes.run(is_killed, options, sharded, tmp_path / "two")
    state = run_checkpoints.read(tmp_path / "two")
    assert state is not None and state["epoch"] == 1
    outcome = train(settings(**options), source(), tmp_path / "two")
    torch.testing.assert_close(
        torch.tensor(outcome.curves["train_loss"]),
        torch.tensor(expected.curves["train_loss"]),
        **CLOSE,
    )
    assert_close_weights(tmp_path / "two", tmp_path / "one")


@in_both
def test_two_refuse_odd_batches_and_notice_together_that_they_diverge(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="multiple of 4"):
        odd = settings("sp", batch_size=6, accumulate=2)
        train(odd, source(), tmp_path, accelerator=accelerator())
    outcome = train(settings("sp", lr=1e30), source(), tmp_path, accelerator=accelerator())
    assert outcome.record["outcome"] == "diverged"


@in_both
def test_means_that_are_not_synchronised_are_the_main_processes() -> None:
    both = accelerator()
    with pytest.warns(UserWarning, match="synchronises BatchNorm on GPUs alone"):
        training = Training(settings("bn"), source(), both)
    training.train_part()
    training.end_part()
    found = torch.cat([buffer.reshape(-1).float() for buffer in training.model.buffers()])
    theirs = found.clone()
    dist.broadcast(theirs, src=0)
    assert torch.equal(found, theirs)
