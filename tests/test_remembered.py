"""Nothing is remembered of a layer's parameters, unless it is asked for."""

import copy
import threading

import pytest
import torch
from torch import nn
from torch.func import functional_call

import geoparam as gp
from geoparam import base_layer

X = torch.randn(4, 6)


def model(coordinates: str = "angles") -> nn.Module:
    layers = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5), nn.Linear(5, 2))
    return gp.convert_(layers, coordinates=coordinates).eval()


@pytest.fixture
def weights_made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count how often a layer computes its weight."""
    made, compute = [0], base_layer.GmPLayer._weight

    def counted(self: base_layer.GmPLayer, *args: object) -> torch.Tensor:
        made[0] += 1
        return compute(self, *args)

    monkeypatch.setattr(base_layer.GmPLayer, "_weight", counted)
    return made


@pytest.mark.parametrize("coordinates", ["angles", "intrinsic"])
def test_weights_are_computed_once_inside_and_each_time_outside(
    coordinates: str, weights_made: list[int]
) -> None:
    net = model(coordinates)
    weights_made[0] = 0
    with torch.no_grad():
        expected = net(X)
        assert weights_made == [2]
        with gp.remembered(net) as same:
            assert same is net
            assert all(torch.equal(net(X), expected) for _ in range(3))
            assert weights_made == [4]
        net(X)
    assert weights_made == [6]


def test_gradients_are_right_inside() -> None:
    net = model()
    net(X).square().sum().backward()
    expected = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    with gp.remembered(net):
        net(X).square().sum().backward()
    assert all(map(torch.equal, [p.grad for p in net.parameters()], expected))


@torch.no_grad()
def test_other_parameters_and_types_are_not_those_remembered() -> None:
    net = model()
    others = {name: 2 * p for name, p in net.named_parameters()}
    expected = functional_call(net, others, (X,))
    with gp.remembered(net):
        torch.testing.assert_close(functional_call(net, others, (X,)), expected)
        with torch.autocast("cpu", torch.bfloat16):
            assert net[0](X).dtype == torch.bfloat16


@torch.no_grad()
def test_contexts_nest_and_copies_remember_nothing(weights_made: list[int]) -> None:
    net = model()
    with gp.remembered(net):
        with gp.remembered(net[0]):
            pass
        weights_made[0] = 0
        net(X)
        assert weights_made == [0]
        twin = copy.deepcopy(net)
        for p in twin.parameters():
            p.mul_(2)
        assert not torch.equal(twin(X), net(X))
    assert all(m._remembered.value is None for m in (net[0], twin[0]))


def test_threads_share_a_model() -> None:
    net, wrong = model(), []
    expected = net(X).detach()

    def evaluate(index: int) -> None:
        for _ in range(100):
            with torch.set_grad_enabled(index == 0), gp.remembered(net):
                if not torch.allclose(net(X).detach(), expected, atol=1e-6):
                    wrong.append(index)

    threads = [threading.Thread(target=evaluate, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and net[0]._remembered.users == 0
