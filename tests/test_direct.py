"""Plain training calls the kernels without dispatch, and whoever looks on sees the ops."""

import warnings

import kernels
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from geoparam import GmPLinear, ops
from geoparam.ops import direct


class Recorder(TorchDispatchMode):
    """Note the names of the operations that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_plain_training_calls_the_kernels_directly() -> None:
    latitude, r, g = kernels.random_case(3, 8, torch.float32)
    assert direct.possible(latitude, r)
    w = ops.weight(latitude.requires_grad_(), r)
    assert w.grad_fn.name() == "_WeightBackward"
    assert ops.weight(latitude.detach()).grad_fn is None


def test_modes_see_the_ops() -> None:
    latitude, r, g = kernels.random_case(3, 8, torch.float32)
    latitude.requires_grad_()
    with Recorder() as recorder:
        w = ops.weight(latitude, r)
        torch.autograd.grad(w, latitude, g)
    assert "geoparam.weight.default" in recorder.names
    assert "geoparam.weight_backward.default" in recorder.names


def test_a_mode_around_the_backward_alone_sees_the_op() -> None:
    latitude, r, g = kernels.random_case(3, 8, torch.float32)
    w = ops.weight(latitude.requires_grad_(), r)
    expected = torch.autograd.grad(w, latitude, g, retain_graph=True)[0]
    with Recorder() as recorder:
        found = torch.autograd.grad(w, latitude, g)[0]
    assert torch.equal(found, expected)
    assert "geoparam.weight_backward.default" in recorder.names


def test_traced_code_computes_the_weight_anew() -> None:
    latitude, r, _ = kernels.random_case(3, 8, torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        traced = torch.jit.trace(ops.weight, (latitude, r))
    assert torch.equal(traced(2 * latitude, r), ops.weight(2 * latitude, r))


def test_saved_tensors_are_guarded_against_changes() -> None:
    latitude, r, _ = kernels.random_case(3, 8, torch.float32)
    w = ops.weight(latitude.requires_grad_(), r)
    with torch.no_grad():
        latitude.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        w.sum().backward()


def test_checkpointed_layers_recompute_the_weight() -> None:
    layer, x = GmPLinear(5, 3), torch.randn(4, 5)
    layer(x).square().sum().backward()
    expected = [p.grad.clone() for p in layer.parameters()]
    layer.zero_grad()
    checkpoint(layer, x, use_reentrant=False).square().sum().backward()
    assert all(torch.equal(p.grad, e) for p, e in zip(layer.parameters(), expected, strict=True))
