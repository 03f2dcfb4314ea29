"""A layer that is also reached otherwise than by its name is refused, with or without a run."""

import functools
import itertools
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import geoparam as gp

X = torch.randn(4, 8)


class Box:
    """An object that holds a layer."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer


class Slot:
    __slots__ = ("layer",)
    __init__ = Box.__init__


def variable(layer: nn.Module) -> ContextVar:
    """An object that does not show what it holds."""
    held: ContextVar = ContextVar("layer")
    held.set(layer)
    return held


WAYS: dict[str, tuple[Callable, Callable]] = {
    "list of tuples": (lambda a: [("first", a)], lambda held, x: held[0][1](x)),
    "dict of deques": (lambda a: {"first": deque([a])}, lambda held, x: held["first"][0](x)),
    "bound method": (lambda a: a.forward, lambda held, x: held(x)),
    "closure": (lambda a: lambda x: a(x), lambda held, x: held(x)),
    "default": (lambda a: lambda x, a=a: a(x), lambda held, x: held(x)),
    "partial": (lambda a: functools.partial(F.linear, weight=a.weight), lambda held, x: held(x)),
    "list of parameters": (lambda a: [a.weight, a.bias], lambda held, x: F.linear(x, *held)),
    "its memory": (lambda a: a.weight.detach(), lambda held, x: x @ held.T),
    "dict by layer": (lambda a: {a: 1}, lambda held, x: next(iter(held))(x)),
    "object": (Box, lambda held, x: held.layer(x)),
    "slot": (Slot, lambda held, x: held.layer(x)),
    "iterator": (lambda a: itertools.repeat(a), lambda held, x: next(held)(x)),
    "generator": (lambda a: (a for _ in itertools.count()), lambda held, x: next(held)(x)),
    "cache": (lambda a: functools.lru_cache(lambda: a), lambda held, x: held()(x)),
    "unseen": (variable, lambda held, x: held.get()(x)),
    "unseen, its method": (variable, lambda held, x: held.get().forward(x)),
}


class Hidden(nn.Module):
    def __init__(self, way: str, by_name: bool = False) -> None:
        super().__init__()
        self.a, self.out = nn.Linear(8, 8), nn.Linear(8, 2)
        self.held, self.way, self.by_name = WAYS[way][0](self.a), way, by_name

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x) if self.by_name else x
        return self.out(WAYS[self.way][1](self.held, x).relu())


@pytest.mark.parametrize("way", [way for way in WAYS if "unseen" not in way])
def test_layers_held_elsewhere_are_refused_without_a_run(way: str) -> None:
    with pytest.raises(ValueError, match="'a' is also held by 'held' of 'the model'"):
        gp.convert_(Hidden(way))


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("init", [None, "sphere"])
@pytest.mark.parametrize("way", WAYS)
def test_a_run_sees_every_way(way: str, init: str | None, by_name: bool) -> None:
    model = Hidden(way, by_name)
    with pytest.raises(ValueError, match="'a' (is also held|would be converted, but)"):
        gp.convert_(model, init=init, example_inputs=X)
    assert type(model.a) is nn.Linear


def test_looking_at_a_type_is_no_use_of_an_old_layer() -> None:
    class Typed(Hidden):
        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.a(x.to(self.held.get().weight.dtype)).relu())

    model = gp.convert_(Typed("unseen"), example_inputs=X)
    assert isinstance(model.a, gp.GmPLinear)


def test_a_layer_that_does_not_run_is_named() -> None:
    class Idle(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return self[2](self[0](x))

    model = Idle(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2))
    assert "1: Linear (does not run on example_inputs)" in str(gp.plan(model, example_inputs=X))


@pytest.mark.parametrize("options", [{}, {"example_inputs": torch.randn(2, 12)}])
def test_ties_by_shared_memory_are_refused(options: dict) -> None:
    model = nn.Sequential(nn.Linear(12, 4), nn.ReLU(), nn.Linear(4, 12))
    model[2].weight = nn.Parameter(model[0].weight.data.t())
    with pytest.raises(ValueError, match="'0' shares memory with 2.weight"):
        gp.convert_(model, **options)


def test_neighbours_in_one_block_of_memory_are_no_ties() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    block = torch.randn(2, 4, 4)
    model[0].weight, model[2].weight = nn.Parameter(block[0]), nn.Parameter(block[1])
    gp.convert_(model)


@pytest.mark.parametrize("change", [gp.convert_, gp.fold_])
def test_wrapped_models_are_refused(change: Callable) -> None:
    class DistributedDataParallel(nn.Sequential):  # the real one needs processes
        pass

    layer = gp.GmPLinear if change is gp.fold_ else nn.Linear
    model = DistributedDataParallel(layer(4, 4), nn.Linear(4, 2))
    with pytest.raises(ValueError, match="wrapped in DistributedDataParallel.*then wrap it"):
        change(model)
