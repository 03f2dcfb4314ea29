"""Synchronised means: two processes compute what one does with the joint batch."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from processes import Processes, in_both
from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode

from geoparam import GmPConv2d, GmPLinear, InputMeanNorm, MeanOnlyBatchNorm, synchronise_means_

EXACT = {"atol": 1e-10, "rtol": 1e-10}
IMAGE, ROWS = (4, 5, 5), (3, 4)
FORMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "norm": (lambda: InputMeanNorm(4, momentum=None), IMAGE),
    "norm of pre-activations": (lambda: MeanOnlyBatchNorm(3), ROWS),
    "linear": (lambda: GmPLinear(4, 6, input_norm=True, activation=torch.relu), ROWS),
    "conv, padded": (lambda: GmPConv2d(4, 6, 3, padding=1, input_norm=True), IMAGE),
    "conv, bias": (lambda: GmPConv2d(4, 6, 3, padding=1, groups=2, input_norm="bias"), IMAGE),
    "network": (
        lambda: nn.Sequential(
            GmPConv2d(4, 4, 3, input_norm=True, activation=torch.relu),
            GmPConv2d(4, 2, 3, padding=1, input_norm="bias", activation=torch.relu),
            nn.Flatten(),
            MeanOnlyBatchNorm(18),
        ),
        IMAGE,
    ),
}


def own_part(x: Tensor, sizes: tuple[int, int]) -> Tensor:
    return x.split(sizes)[dist.get_rank()].clone()


@pytest.mark.parametrize("sizes", [(4, 4), (5, 2), (6, 0)], ids=str)
@pytest.mark.parametrize("form", FORMS)
@in_both
def test_equals_the_joint_batch(form: str, sizes: tuple[int, int]) -> None:
    make, shape = FORMS[form]
    joint = make().double()
    ours = synchronise_means_(copy.deepcopy(joint))
    for _ in range(2):  # the second batch shows that the first was tracked
        x = torch.randn(sum(sizes), *shape, dtype=torch.float64) + 2
        x_own, x_joint = own_part(x, sizes).requires_grad_(), x.requires_grad_()
        out, expected = ours(x_own), joint(x_joint)
        importance = torch.randn_like(expected)
        (expected.square() * importance).sum().backward()
        (out.square() * own_part(importance, sizes)).sum().backward()
        torch.testing.assert_close(out, own_part(expected, sizes), **EXACT)
        torch.testing.assert_close(x_own.grad, own_part(x_joint.grad, sizes), **EXACT)
    for parameter, reference in zip(ours.parameters(), joint.parameters(), strict=True):
        dist.all_reduce(parameter.grad)
        torch.testing.assert_close(parameter.grad, reference.grad, **EXACT)
    torch.testing.assert_close([*ours.buffers()], [*joint.buffers()], **EXACT)


@pytest.mark.parametrize("momentum", [0.1, None])
@in_both
def test_an_empty_joint_batch_changes_nothing(momentum: float | None) -> None:
    norm = synchronise_means_(InputMeanNorm(3, momentum=momentum))
    assert norm(torch.empty(0, 3)).shape == (0, 3)
    assert not norm.running_mean.any() and norm.num_batches_tracked == 0
    norm(torch.randn(4, 3) + 1)
    before = norm.running_mean.clone()
    norm(torch.empty(0, 3))
    assert torch.equal(norm.running_mean, before) and norm.num_batches_tracked == 1


@in_both
def test_only_training_communicates() -> None:
    x = torch.randn(4, 3)
    norm = synchronise_means_(InputMeanNorm(3))
    with CommDebugMode() as training:
        norm(x)
    with CommDebugMode() as evaluation:
        norm.eval()(x)
    assert training.get_total_counts() == 1 and evaluation.get_total_counts() == 0


@in_both
def test_a_group_of_one_is_local() -> None:
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    x = torch.randn(4, 3) + dist.get_rank()
    for group in groups:  # its own, and one that it does not belong to
        norm = synchronise_means_(InputMeanNorm(3), group)
        assert torch.equal(norm(x), InputMeanNorm(3)(x))


def compiles_to_the_same() -> None:
    joint = FORMS["network"][0]().double()
    ours = synchronise_means_(copy.deepcopy(joint))
    compiled = torch.compile(ours, fullgraph=True)
    x = torch.randn(7, *IMAGE, dtype=torch.float64)
    out, expected = compiled(own_part(x, (5, 2))), joint(x)
    torch.testing.assert_close(out, own_part(expected, (5, 2)), **EXACT)
    out.square().sum().backward()
    expected.square().sum().backward()
    for parameter, reference in zip(ours.parameters(), joint.parameters(), strict=True):
        dist.all_reduce(parameter.grad)
        torch.testing.assert_close(parameter.grad, reference.grad, **EXACT)


@pytest.mark.compile
def test_compiles_without_a_graph_break(processes: Processes) -> None:
    processes.run(compiles_to_the_same, timeout=300)


def test_nothing_to_synchronise() -> None:
    with pytest.raises(ValueError, match="no mean normalization"):
        synchronise_means_(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
