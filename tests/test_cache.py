"""In evaluation a layer computes its weight once, until something changes it."""

import copy

import pytest
import torch
from torch import nn

import geoparam as gp
from geoparam import ops


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> list:
    """Count how often a weight is computed from latitudes."""
    calls: list = []
    compute = ops.weight

    def counted(*args: object, **kwargs: object) -> torch.Tensor:
        calls.append(args)
        return compute(*args, **kwargs)

    monkeypatch.setattr(ops, "weight", counted)
    return calls


def layer(**options: object) -> gp.GmPLinear:
    return gp.GmPLinear(6, 4, **options).eval()


X = torch.ones(2, 6)


@torch.no_grad()
def test_computed_once(count: list) -> None:
    model = layer(input_norm="bias")
    assert torch.equal(model(X), model(X)) and len(count) == 1


@pytest.mark.parametrize("mode", ["grad", "train"])
def test_not_remembered_where_it_matters(count: list, mode: str) -> None:
    model = layer().train(mode == "train")
    with torch.set_grad_enabled(mode == "grad"):
        model(X)
        model(X)
    assert len(count) == 2


@torch.no_grad()
def test_traces_neither_fill_nor_use_it(count: list) -> None:
    model = layer()
    for _ in range(2):  # with what is remembered of a call in between
        traced = torch.jit.trace(model, X)  # which traces twice, and compares
        assert torch.equal(traced(X), model(X))
    model.r.mul_(2)
    assert torch.equal(traced(X), model(X))


def step(model: gp.GmPLinear) -> None:
    with torch.enable_grad():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(X).sum().backward()
        optimizer.step()


def fused_step(model: gp.GmPLinear) -> None:
    """torch's fused optimizers do not move the version counter."""
    with torch.enable_grad():
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1, fused=True)
        model(X).sum().backward()
        optimizer.step()


CHANGES = {
    "fused optimizer step": fused_step,
    "activation": lambda model: setattr(model, "activation", torch.tanh),
    "optimizer step": step,
    "in place": lambda model: model.latitude.add_(0.1),
    "r": lambda model: model.r.mul_(2),
    "lam": lambda model: model.lam.add_(1),
    "load_state_dict": lambda model: model.load_state_dict(gp.GmPLinear(6, 4).state_dict()),
    "new parameter": lambda model: setattr(model, "r", nn.Parameter(model.r * 3)),
    "data swapped": lambda model: setattr(model.r, "data", model.r * 3),
}


@torch.no_grad()
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_changes_are_seen(change) -> None:  # noqa: ANN001
    model = layer()
    before = model(X)
    change(model)
    z = torch.nn.functional.linear(X, model.weight, model.bias)
    expected = z if model.activation is None else model.r * model.activation(z)
    torch.testing.assert_close(model(X), expected)
    assert not torch.equal(model(X), before)


@torch.no_grad()
def test_moves_and_other_types_are_seen() -> None:
    model = layer()
    model(X)
    assert model.double()(X.double()).dtype == torch.float64
    with torch.autocast("cpu", torch.bfloat16):
        assert model.float()(X).dtype == torch.bfloat16
    assert model(X).dtype == torch.float32


@torch.no_grad()
def test_functional_calls_with_fresh_tensors_are_seen() -> None:
    model = layer()
    for k in range(5):
        fresh = {name: torch.full_like(p, 0.1 * k) for name, p in model.named_parameters()}
        out = torch.func.functional_call(model, fresh, (X,))
        expected = gp.GmPLinear(6, 4)
        expected.load_state_dict(fresh)
        torch.testing.assert_close(out, expected(X))
        del fresh


@torch.no_grad()
def test_running_means_are_seen() -> None:
    model = layer(input_norm="bias")
    before = model(X)
    model.train()(X + 1)
    assert not torch.equal(model.eval()(X), before)


@torch.no_grad()
def test_copies_and_state_are_not_burdened() -> None:
    model = layer()
    model(X)
    assert set(model.state_dict()) == {"latitude", "r", "lam"}
    twin = copy.deepcopy(model)
    twin.r.mul_(2)
    torch.testing.assert_close(twin(X), 2 * model(X))


def test_inference_mode() -> None:
    model = layer()
    with torch.inference_mode():
        expected = model(X)
    with torch.no_grad():
        assert torch.equal(model(X), expected)
    model(X).sum().backward()
    assert model.r.grad is not None
