"""GeometricOptimizer in two processes: DDP and FSDP2 train to what one process does."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from processes import Processes
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from training import assert_same_state, whole

import geoparam as gp

SETTINGS = {
    "SGD": {"momentum": 0.9},
    "AdamW": {"base": torch.optim.AdamW, "lr": 1e-2, "weight_decay": 0.1},
    "turn": {"turn": 3.0, "momentum": 0.9},
    "max_turn": {"max_turn": 0.5, "momentum": 0.9},
    "angles": {"coordinates": "angles", "momentum": 0.9},
    "bounded angles": {"coordinates": "angles", "max_turn": 0.5, "momentum": 0.9},
    "Muon": {"base": torch.optim.Muon, "lr": 1e-2},
    "Muon turn": {"base": torch.optim.Muon, "lr": 1e-2, "turn": 3.0},
}
BFLOAT16 = 2e-2  # Newton-Schulz rounds to bfloat16, and sums of two halves round otherwise


def network() -> nn.Module:
    """Return a network the rows of which two processes cannot share evenly: 5, 1 and 6."""
    torch.manual_seed(1)
    layers = (nn.Conv2d(2, 5, 3), nn.Tanh(), nn.Conv2d(5, 1, 3), nn.Tanh(), nn.Flatten())
    return nn.Sequential(*layers, nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def build(model: nn.Module, name: str) -> gp.GeometricOptimizer:
    return gp.GeometricOptimizer(model, **{"lr": 0.05, **SETTINGS[name]})


def train(model: nn.Module, optimizer: Any, is_part: bool, steps: int = 4, first: int = 0) -> None:
    """Train on batches of eight, of which each process sees a half where `is_part`."""
    for step in range(first, first + steps):
        random = torch.Generator().manual_seed(step)
        x = torch.randn(8, 2, 6, 6, generator=random, dtype=torch.float64)
        y = torch.randint(3, (8,), generator=random)
        if is_part:
            x, y = (part.chunk(2)[dist.get_rank()] for part in (x, y))
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def sharded(model: nn.Module) -> nn.Module:
    for layer in model:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    return model


def tolerance(name: str) -> float:
    return BFLOAT16 if "Muon" in name else 1e-10


def equals_one_process(kind: str, name: str) -> None:
    reference, model = network(), network()
    if kind == "DDP":
        run: nn.Module = DistributedDataParallel(model)
    else:
        run = model = sharded(model)
    train(run, build(model, name), True)
    train(reference, build(reference, name), False)
    assert_same_state(model, reference, tolerance(name))
    moved = (whole(model[0].weight) - network()[0].weight).abs().max()
    assert moved > 10 * tolerance(name) or "Muon" in name


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("kind", ["DDP", "FSDP2"])
def test_two_processes_train_as_one(processes: Processes, kind: str, name: str) -> None:
    processes.run(equals_one_process, kind, name)


def resumes(name: str, folder: Path) -> None:
    model, other = sharded(network()), sharded(network())
    optimizer, resumed = build(model, name), build(other, name)
    train(model, optimizer, True)
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder)
    weights, moments = get_state_dict(other, resumed)
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=folder)
    set_state_dict(other, resumed, model_state_dict=weights, optim_state_dict=moments)
    for run, its in ((model, optimizer), (other, resumed)):
        train(run, its, True, steps=2, first=4)
    assert_same_state(other, model, tolerance=0)


@pytest.mark.parametrize("name", ["SGD", "AdamW", "turn", "angles", "Muon"])
def test_sharded_states_resume_bit_for_bit(
    processes: Processes, name: str, tmp_path: Path
) -> None:
    processes.run(resumes, name, tmp_path)


def sharding_after_building_trains_alike(name: str) -> None:
    """As Accelerate's FSDP2 does it: the groups get placeholders, then the sharded parameters."""
    reference, model = network(), network()
    optimizer = build(model, name)
    names = [group["param_names"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["params"] = [torch.empty(1) for _ in group["params"]]
    new = dict(sharded(model).named_parameters())
    for group, own in zip(optimizer.param_groups, names, strict=True):
        group["params"] = [new[one] for one in own]
    train(model, optimizer, True)
    train(reference, build(reference, name), False)
    assert_same_state(model, reference, tolerance(name))


@pytest.mark.parametrize("name", ["SGD", "turn", "angles"])
def test_the_model_may_be_sharded_after_building(processes: Processes, name: str) -> None:
    processes.run(sharding_after_building_trains_alike, name)


def zero_rows_are_seen_by_all() -> None:
    model = network()
    with torch.no_grad():
        model[0].weight[4] = 0  # a row of the second process alone
    text = str(build(sharded(model), "SGD"))
    assert "zeros has no direction" in text


def test_all_processes_choose_alike(processes: Processes) -> None:
    processes.run(zero_rows_are_seen_by_all)


def refuses_units_in_pieces(kind: str) -> None:
    if kind == "Conv1D":
        from transformers.pytorch_utils import Conv1D

        layer, x = Conv1D(4, 6), torch.randn(2, 6)
    else:
        layer, x = nn.ConvTranspose1d(6, 4, 1), torch.randn(2, 6, 1)
    model = nn.Sequential(layer, nn.Flatten(), nn.Linear(4, 2))
    fully_shard(model)
    with pytest.raises(ValueError, match="'0.weight'.* cuts its units into pieces"):
        optimizer = gp.GeometricOptimizer(model, lr=0.1)
        model(x).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("kind", ["Conv1D", "ConvTranspose1d"])
def test_units_in_pieces_are_refused(processes: Processes, kind: str) -> None:
    pytest.importorskip("transformers")
    processes.run(refuses_units_in_pieces, kind)
