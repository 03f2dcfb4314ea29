"""GeometricOptimizer in two processes: DDP and FSDP2 train to what one process does."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from plain_models import mixture
from processes import in_both
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from training import assert_same_state

import geoparam as gp

TURN = {"turn": 3.0, "momentum": 0.9}
MUON = {"base": torch.optim.Muon, "turn": 3.0, "lr": 1e-2}
SPLIT = {"split": {"0": (1, 4), "5": (1, 5)}}  # one process has pieces of a part
KINDS: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9},
    "AdamW": {"base": torch.optim.AdamW, "lr": 1e-2, "weight_decay": 0.1},
    "turn": TURN,
    "angles": {"coordinates": "angles", "max_turn": 0.5, "momentum": 0.9},
    "Muon": MUON,
    "packed SGD": {"momentum": 0.9, **SPLIT},
    "packed turn": {**TURN, **SPLIT},
    "packed Muon": {**MUON, **SPLIT},
    "packed angles": {"coordinates": "angles", "momentum": 0.9, **SPLIT},
    "zeros": TURN,
}


def start(kind: str, way: str) -> tuple[Any, Any]:
    """Return a network the rows of which two processes cannot share evenly: 5, 1 and 6."""
    torch.manual_seed(1)
    images = (nn.Conv2d(2, 5, 3), nn.Tanh(), nn.Conv2d(5, 1, 3), nn.Tanh(), nn.Flatten())
    model = nn.Sequential(*images, nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    if kind == "zeros":
        nn.init.zeros_(model[5].weight)
        model[0].weight.data[1] = 0.0
    model = fully_shard(model) if way == "FSDP2" else model
    optimizer = gp.GeometricOptimizer(model, **{"lr": 0.05, **KINDS[kind]})
    if way == "FSDP2 later":  # Accelerate puts sharded parameters into the groups
        new = dict(fully_shard(model).named_parameters())
        for group in optimizer.param_groups:
            group["params"] = [new[name] for name in group["param_names"]]
    return DistributedDataParallel(model) if way == "DDP" else model, optimizer


def train(model: nn.Module, optimizer: Any, is_part: bool = True, first: int = 0) -> None:
    for step in range(first, first + 4):
        random = torch.Generator().manual_seed(step)
        x = torch.randn(8, 2, 6, 6, generator=random, dtype=torch.float64)
        y = torch.randint(3, (8,), generator=random)
        if is_part:
            x, y = (part.chunk(2)[dist.get_rank()] for part in (x, y))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["DDP", "FSDP2", "FSDP2 later"])
@in_both
def test_two_processes_train_as_one(way: str, kind: str) -> None:
    pair, (one, its) = start(kind, way), start(kind, "one process")
    train(*pair)
    if way == "FSDP2":  # goes on from the state of its shards
        weights, state = get_state_dict(*pair)
        pair = start(kind, way)
        set_state_dict(*pair, model_state_dict=weights, optim_state_dict=state)
    train(*pair, first=4)
    train(one, its, is_part=False)
    train(one, its, is_part=False, first=4)
    model = pair[0].module if way == "DDP" else pair[0]
    assert_same_state(model, one, 1e-2 if "Muon" in kind else 1e-10)  # Newton-Schulz: bfloat16


class Experts(nn.Module):
    """Experts in a stack of one's own."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(count, 4, 6, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bi,eoi->beo", x, self.w1).tanh().sum(dim=1)


@pytest.mark.parametrize("kind", ["turn", "Muon"])
@pytest.mark.parametrize("count", [4, 3])
@in_both
def test_experts_in_two_processes_train_as_in_one(count: int, kind: str) -> None:
    models = []
    for is_sharded in (True, False):
        torch.manual_seed(1)
        model = nn.Sequential(Experts(count), nn.Linear(4, 3).double())
        model = fully_shard(model) if is_sharded else model
        options = {"lr": 1e-2, "stacks": {"w1": "eoi"}, **KINDS[kind]}
        optimizer = gp.GeometricOptimizer(model, **options)
        for step in range(3):
            x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step)).double()
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        models.append(model)
    assert_same_state(*models, 1e-2 if kind == "Muon" else 1e-10)


@pytest.mark.parametrize("name", ["Mixtral", "GptOss"])
@in_both
def test_transformers_experts_in_two_processes_train_as_in_one(name: str) -> None:
    models = []
    for is_sharded in (True, False):
        model = mixture(name)
        model = fully_shard(model) if is_sharded else model
        optimizer = gp.GeometricOptimizer(model, lr=0.05, **TURN)
        for step in range(3):
            random = torch.Generator().manual_seed(step)
            tokens = torch.randint(20, (4, 6), generator=random)
            optimizer.zero_grad()
            model(tokens, labels=tokens).loss.backward()
            optimizer.step()
        models.append(model)
    assert_same_state(*models, 1e-10)


@pytest.mark.parametrize("kind", ["Conv1D", "ConvTranspose1d"])
@in_both
def test_units_in_pieces_are_refused_at_construction(kind: str) -> None:
    layer = nn.ConvTranspose1d(6, 4, 1)
    if kind == "Conv1D":
        layer = pytest.importorskip("transformers.pytorch_utils").Conv1D(4, 6)
    model = fully_shard(nn.Sequential(layer, nn.Linear(4, 2)))
    with pytest.raises(ValueError, match="'0.weight'.* cuts its units into pieces"):
        gp.GeometricOptimizer(model, lr=0.1)
