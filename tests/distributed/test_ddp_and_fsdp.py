"""DDP and FSDP2 train to what one process does; shards are saved and read as whole tensors."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from processes import Processes, in_both
from torch import nn
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel
from training import EQUAL, assert_same_state, network, sgd, synchronised, train, whole

import geoparam as gp
from geoparam.base_layer import GmPLayer

EXACT = {"atol": 1e-10, "rtol": 1e-10}
both_coordinates = pytest.mark.parametrize("coordinates", ["angles", "intrinsic"])


def sharded(model: nn.Module, **options: Any) -> nn.Module:
    for module in model.modules():
        if isinstance(module, GmPLayer):
            fully_shard(module, **options)
    return fully_shard(synchronised(model), **options)


@torch.no_grad()
def assert_same_output(model: nn.Module, reference: nn.Module) -> None:
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    torch.testing.assert_close(model.eval()(x), reference.eval()(x), **EXACT)
    model.train()
    reference.train()


def trains_to_the_same(
    way: str, kind: str, coordinates: str, sizes: tuple[int, int], compiled: bool = False
) -> None:
    reference, model = network(kind, coordinates), network(kind, coordinates)
    model = sharded(model) if way == "FSDP2" else synchronised(model)
    run: Any = model if way == "FSDP2" else DistributedDataParallel(model)
    optimizer = sgd(model)  # before the first forward, which leaves some parameters whole
    assert (way == "FSDP2") == all(isinstance(p, DTensor) for p in model.parameters())
    assert_same_output(model, reference)
    train(model, sizes, run=torch.compile(run) if compiled else run, optimizer=optimizer)
    train(reference, batch=sum(sizes))
    assert_same_state(model, reference)
    assert_same_output(model, reference)


@pytest.mark.parametrize(
    ("way", "kind", "coordinates", "sizes"),
    [
        ("DDP", "plain", "angles", EQUAL),
        ("DDP", "absorbed", "intrinsic", EQUAL),
        ("DDP", "anew", "angles", (5, 2)),
        ("FSDP2", "plain", "intrinsic", EQUAL),
        ("FSDP2", "absorbed", "angles", (5, 2)),
        ("FSDP2", "anew", "intrinsic", (5, 2)),
    ],
)
def test_trains_to_the_same(
    processes: Processes, way: str, kind: str, coordinates: str, sizes: tuple[int, int]
) -> None:
    processes.run(trains_to_the_same, way, kind, coordinates, sizes)


@pytest.mark.compile
@pytest.mark.parametrize("way", ["DDP", "FSDP2"])
def test_trains_to_the_same_compiled(processes: Processes, way: str) -> None:
    processes.run(trains_to_the_same, way, "absorbed", "angles", EQUAL, True, timeout=300)


@both_coordinates
@in_both
def test_shards_train_in_bfloat16(coordinates: str) -> None:
    kind = "absorbed"
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    reference = network(kind, coordinates, torch.float32)
    model = sharded(network(kind, coordinates, torch.float32), mp_policy=policy)
    losses = torch.tensor(train(model, EQUAL))
    dist.all_reduce(losses)
    torch.testing.assert_close(losses / 2, torch.tensor(train(reference)), atol=0.03, rtol=0.03)
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.float32 and whole(parameter).isfinite().all(), name
    assert_same_state(model, reference, tolerance=0.01)


@in_both
def test_unit_vectors_stay_on_the_sphere() -> None:
    model = fully_shard(gp.GmPLinear(7, 3, coordinates="intrinsic"))  # 2 rows here, 1 row there
    with torch.no_grad():
        model.unit.mul_(3)
    before = model.unit.full_tensor()
    with CommDebugMode() as communication:
        gp.retract(model)()
    assert communication.get_total_counts() == 0
    torch.testing.assert_close(model.unit.full_tensor(), before / 3)


@both_coordinates
@in_both
def test_views_are_sharded(coordinates: str) -> None:
    torch.manual_seed(0)
    plain = gp.GmPConv2d(4, 3, 3, coordinates=coordinates)  # 3 rows: one process holds 2
    torch.manual_seed(0)
    model = fully_shard(gp.GmPConv2d(4, 3, 3, coordinates=coordinates))
    for name in ("weight", "bias", "direction", "location", "theta"):
        with CommDebugMode() as communication:
            view = getattr(model, name)
        assert communication.get_total_counts() == 0, name
        torch.testing.assert_close(view.full_tensor(), getattr(plain, name), msg=name)
    model.weight.square().sum().full_tensor().backward()
    plain.weight.square().sum().backward()
    torch.testing.assert_close(model.r.grad.full_tensor(), plain.r.grad)
    model.unshard()
    torch.testing.assert_close(model.weight, plain.weight)
    assert not isinstance(model.weight, DTensor)


@in_both
def test_split_rows_are_refused() -> None:
    model = fully_shard(gp.GmPLinear(9, 4), shard_placement_fn=lambda p: Shard(p.ndim - 1))
    with pytest.raises(ValueError, match="whole rows"):
        model.weight  # noqa: B018


@both_coordinates
@in_both
def test_resumes_from_a_distributed_checkpoint(coordinates: str, tmp_path: Path) -> None:
    model, other = (sharded(network("absorbed", coordinates)) for _ in range(2))
    optimizer, resumed = sgd(model), sgd(other)
    train(model, EQUAL, optimizer=optimizer)
    weights, moments = states.get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=tmp_path)

    weights, moments = states.get_state_dict(other, resumed)
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=tmp_path)
    states.set_state_dict(other, resumed, model_state_dict=weights, optim_state_dict=moments)
    for part, its_optimizer in ((model, optimizer), (other, resumed)):
        train(part, EQUAL, optimizer=its_optimizer, steps=2)
    assert_same_state(other, model, tolerance=0)


@both_coordinates
@in_both
def test_one_process_folds(coordinates: str) -> None:
    model = sharded(network("absorbed", coordinates))
    train(model, EQUAL)
    options = states.StateDictOptions(full_state_dict=True, cpu_offload=True)
    gathered = states.get_model_state_dict(model, options=options)
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    expected = model.eval()(x)
    if dist.get_rank() == 0:
        single = network("absorbed", coordinates)
        single.load_state_dict(gathered)
        torch.testing.assert_close(gp.fold_(single).eval()(x), expected, **EXACT)
