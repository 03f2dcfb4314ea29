"""A layer that is also reached otherwise than by its name is refused, with or without a run."""

import functools
import itertools
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

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


class SlotBox:
    """An object that holds a layer, and has no dictionary."""

    __slots__ = ("layer",)

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer


def put_in_variable(layer: nn.Module) -> ContextVar:
    """Return an object that does not show what it holds."""
    variable: ContextVar = ContextVar("layer")
    variable.set(layer)
    return variable


# How a model may hold a layer, and how its forward pass then uses it.
HOLDERS: dict[str, tuple[Callable, Callable]] = {
    "list of tuples": (
        lambda layer: [("first", layer)],
        lambda holder, x: holder[0][1](x),
    ),
    "dict of deques": (
        lambda layer: {"first": deque([layer])},
        lambda holder, x: holder["first"][0](x),
    ),
    "bound method": (
        lambda layer: layer.forward,
        lambda method, x: method(x),
    ),
    "closure": (
        lambda layer: lambda x: layer(x),
        lambda function, x: function(x),
    ),
    "default": (
        lambda layer: lambda x, layer=layer: layer(x),
        lambda function, x: function(x),
    ),
    "partial": (
        lambda layer: functools.partial(F.linear, weight=layer.weight),
        lambda function, x: function(x),
    ),
    "list of parameters": (
        lambda layer: [layer.weight, layer.bias],
        lambda parameters, x: F.linear(x, *parameters),
    ),
    "its memory": (
        lambda layer: layer.weight.detach(),
        lambda weight, x: x @ weight.T,
    ),
    "dict by layer": (
        lambda layer: {layer: 1},
        lambda holder, x: next(iter(holder))(x),
    ),
    "object": (Box, lambda box, x: box.layer(x)),
    "slot": (SlotBox, lambda box, x: box.layer(x)),
    "iterator": (
        lambda layer: itertools.repeat(layer),
        lambda iterator, x: next(iterator)(x),
    ),
    "generator": (
        lambda layer: (layer for _ in itertools.count()),
        lambda generator, x: next(generator)(x),
    ),
    "cache": (
        lambda layer: functools.lru_cache(lambda: layer),
        lambda function, x: function()(x),
    ),
    "unseen": (
        put_in_variable,
        lambda variable, x: variable.get()(x),
    ),
    "unseen, its method": (
        put_in_variable,
        lambda variable, x: variable.get().forward(x),
    ),
}


class Hidden(nn.Module):
    """A model that reaches its first layer through a holder, and perhaps by its name too."""

    def __init__(self, kind: str, by_name: bool = False) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.out = nn.Linear(8, 2)
        hold, self.use = HOLDERS[kind]
        self.held = hold(self.a)
        self.by_name = by_name

    def forward(self, x: Tensor) -> Tensor:
        if self.by_name:
            x = self.a(x)
        return self.out(self.use(self.held, x).relu())


@pytest.mark.parametrize("kind", [kind for kind in HOLDERS if "unseen" not in kind])
def test_layers_held_elsewhere_are_refused_without_a_run(kind: str) -> None:
    with pytest.raises(ValueError, match="'a' is also held by 'held' of 'the model'"):
        gp.convert_(Hidden(kind))


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("init", [None, "sphere"])
@pytest.mark.parametrize("kind", HOLDERS)
def test_with_a_run_no_holder_is_missed(kind: str, init: str | None, by_name: bool) -> None:
    model = Hidden(kind, by_name)

    with pytest.raises(ValueError, match="'a' (is also held|would be converted, but)"):
        gp.convert_(model, init=init, example_inputs=X)
    assert type(model.a) is nn.Linear


class ReadsType(nn.Module):
    """A model that reads a layer's number type through a holder."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.out = nn.Linear(8, 2)
        self.variable = put_in_variable(self.a)

    def forward(self, x: Tensor) -> Tensor:
        dtype = self.variable.get().weight.dtype
        return self.out(self.a(x.to(dtype)).relu())


def test_reading_a_layers_type_is_no_use_of_the_layer() -> None:
    model = gp.convert_(ReadsType(), example_inputs=X)

    assert isinstance(model.a, gp.GmPLinear)


class Idle(nn.Sequential):
    """A model whose second layer does not run."""

    def forward(self, x: Tensor) -> Tensor:
        return self[2](self[0](x))


def test_a_layer_that_does_not_run_is_named() -> None:
    model = Idle(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2))

    plan = gp.plan(model, example_inputs=X)
    assert "1: Linear (does not run on example_inputs)" in str(plan)


@pytest.mark.parametrize("options", [{}, {"example_inputs": torch.randn(2, 12)}])
def test_ties_by_shared_memory_are_refused(options: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Linear(12, 4), nn.ReLU(), nn.Linear(4, 12))
    model[2].weight = nn.Parameter(model[0].weight.data.t())

    with pytest.raises(ValueError, match="'0' shares memory with 2.weight"):
        gp.convert_(model, **options)


def test_neighbours_in_one_block_of_memory_are_no_ties() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    first, second = torch.randn(2, 4, 4)
    model[0].weight = nn.Parameter(first)
    model[2].weight = nn.Parameter(second)

    gp.convert_(model)

    assert isinstance(model[0], gp.GmPLinear)


class DistributedDataParallel(nn.Sequential):
    """Named as torch's, which needs processes."""


@pytest.mark.parametrize(
    ("change", "layer"),
    [(gp.convert_, nn.Linear(4, 4)), (gp.fold_, gp.GmPLinear(4, 4))],
    ids=["convert", "fold"],
)
def test_wrapped_models_are_refused(change: Callable, layer: nn.Module) -> None:
    model = DistributedDataParallel(layer, nn.Linear(4, 2))

    with pytest.raises(ValueError, match="wrapped in DistributedDataParallel.*then wrap it"):
        change(model)
