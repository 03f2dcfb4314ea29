"""The operator equals the sphere's arithmetic, however it is called."""

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import kernels
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vmap
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from geoparam import GmPConv2d, GmPLinear, functional, sphere

DOUBLE = {"dtype": torch.float64}


def reference(latitude: Tensor, r: Tensor) -> Tensor:
    return r[..., None] * sphere.to_unit(latitude)


# Values.


def test_any_strides_give_the_same_weight() -> None:
    latitude, r, _ = kernels.random_case(6, 9, torch.float64)
    strided = latitude.t().contiguous().t()

    assert torch.equal(functional.weight(strided, r), functional.weight(latitude, r))


def test_any_leading_shape_gives_the_same_weight() -> None:
    latitude, r, _ = kernels.random_case(6, 9, torch.float64)

    stacked = functional.weight(latitude.view(2, 3, 8), r.view(2, 3))

    assert torch.equal(stacked.view(6, 9), functional.weight(latitude, r))


def row_errors(weight: Tensor, exact: Tensor) -> Tensor:
    """Return the error of each row in relation to its length."""
    return (weight.double() - exact).norm(dim=1) / exact.norm(dim=1)


def weight_of_bf16_latitudes(exact: Tensor) -> Tensor:
    latitude = sphere.to_latitude(exact).bfloat16()
    r = exact.norm(dim=1).float()
    return functional.weight(latitude, r)


@pytest.mark.parametrize("n", [576, 4608])
def test_bf16_latitudes_lose_no_more_than_bf16_weights(n: int) -> None:
    exact = torch.randn(64, n, **DOUBLE)

    weight = weight_of_bf16_latitudes(exact)

    assert weight.dtype == torch.float32
    error = row_errors(weight, exact).square().mean().sqrt()
    rounding_error = row_errors(exact.bfloat16(), exact).square().mean().sqrt()
    assert error <= 1.1 * rounding_error


@pytest.mark.parametrize("n", [2, 27, 4608])
@pytest.mark.parametrize("has_dominant_column", [False, True])
def test_bf16_row_error_stays_below_one_percent(n: int, has_dominant_column: bool) -> None:
    exact = torch.randn(64, n, **DOUBLE)
    if has_dominant_column:
        exact[:, n // 2] = 50

    weight = weight_of_bf16_latitudes(exact)

    assert row_errors(weight, exact).max() < 0.008


# Derivatives.


def test_gradcheck_in_every_mode() -> None:
    latitude = torch.randn(2, 4, **DOUBLE, requires_grad=True)
    r = torch.randn(2, **DOUBLE, requires_grad=True)

    assert torch.autograd.gradcheck(
        functional.weight, (latitude, r), check_forward_ad=True, check_batched_grad=True
    )


def test_second_derivatives_with_and_without_r() -> None:
    latitude = torch.randn(2, 4, **DOUBLE, requires_grad=True)
    r = torch.randn(2, **DOUBLE, requires_grad=True)

    assert torch.autograd.gradgradcheck(functional.weight, (latitude, r))
    assert torch.autograd.gradgradcheck(lambda a: functional.weight(a), (latitude,))


@pytest.mark.parametrize("transform", [grad, jacrev, jacfwd, hessian])
@pytest.mark.parametrize("is_batched", [False, True])
def test_torch_func_gives_the_references_derivatives(
    transform: Callable, is_batched: bool
) -> None:
    latitude = torch.randn(4, 3, 5, **DOUBLE)
    r = torch.randn(4, 3, **DOUBLE)

    def differentiate(weight: Callable) -> Any:
        loss = lambda latitude, r: torch.sin(3 * weight(latitude, r)).sum()  # noqa: E731
        derivative = transform(loss, argnums=(0, 1))
        if is_batched:
            return vmap(derivative)(latitude, r)
        return derivative(latitude[0], r[0])

    assert_close(differentiate(functional.weight), differentiate(reference))


def test_the_bare_op_refuses_forward_mode() -> None:
    latitude, r, _ = kernels.random_case(2, 4, torch.float64)

    with pytest.raises(RuntimeError, match="forward-mode"):
        jvp(lambda a: torch.ops.geoparam.weight(a, r), (latitude,), (latitude,))


def natural_loss(latitude: Tensor) -> Tensor:
    return functional.weight(latitude, natural=True).square().sum()


def test_natural_is_refused_where_second_derivatives_may_follow() -> None:
    latitude = torch.randn(2, 3, requires_grad=True)

    with pytest.raises(RuntimeError, match="natural=False"):
        torch.autograd.grad(natural_loss(latitude), latitude, create_graph=True)


def test_natural_is_refused_in_torch_func() -> None:
    with pytest.raises(RuntimeError, match="natural=False"):
        grad(natural_loss)(torch.randn(2, 3))


def test_natural_gradient_is_the_tangent_step() -> None:
    """-lr * natural gradient moves u as the projected gradient does, to first order."""
    latitude = 0.3 * torch.randn(6, 9, **DOUBLE)  # metric above its bound everywhere
    assert sphere.metric(latitude).min() > 0.01
    latitude.requires_grad_()
    u = functional.weight(latitude, natural=True)
    u_grad = torch.randn_like(u)

    [natural_grad] = torch.autograd.grad(u, latitude, u_grad)

    lr = 1e-7
    velocity = (sphere.to_unit(latitude - lr * natural_grad) - u) / lr
    tangent = u_grad - (u_grad * u).sum(dim=1, keepdim=True) * u
    assert_close(velocity, -tangent, atol=1e-5, rtol=1e-5)


def test_saved_tensors_are_guarded_against_changes() -> None:
    latitude, r, _ = kernels.random_case(3, 8, torch.float32)
    weight = functional.weight(latitude.requires_grad_(), r)

    latitude.detach().add_(1)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        weight.sum().backward()


# The operator in torch's tools.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_r", [True, False])
def test_opcheck_of_the_weight(dtype: torch.dtype, has_r: bool) -> None:
    latitude = torch.randn(3, 5, dtype=dtype, requires_grad=True)
    r = torch.randn(3, dtype=dtype, requires_grad=True)

    arguments = (latitude, r) if has_r else (latitude,)
    torch.library.opcheck(torch.ops.geoparam.weight, arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck_of_the_backward_pass(dtype: torch.dtype) -> None:
    latitude = torch.randn(3, 5, dtype=dtype)
    r = torch.randn(3, dtype=dtype)
    weight_grad = torch.randn(3, 6, dtype=dtype)

    torch.library.opcheck(torch.ops.geoparam.weight_backward, (weight_grad, latitude, r, False))


def test_layers_make_an_ensemble() -> None:
    layers = [GmPLinear(5, 3, **DOUBLE) for _ in range(4)]
    stacked, _ = torch.func.stack_module_state(layers)
    skeleton = copy.deepcopy(layers[0]).to("meta")
    x = torch.randn(7, 5, **DOUBLE)

    outputs = vmap(lambda parameters: functional_call(skeleton, parameters, (x,)))(stacked)

    assert_close(outputs, torch.stack([layer(x) for layer in layers]))


def pickle_and_unpickle(layer: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(layer))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickle_and_unpickle])
@pytest.mark.parametrize("coordinates", ["angles", "intrinsic"])
def test_a_duplicate_is_the_same_function_of_other_parameters(
    duplicate: Callable, coordinates: str
) -> None:
    layer = GmPConv2d(2, 3, 3, coordinates=coordinates, input_norm=True, activation=torch.relu)
    x = torch.randn(2, 2, 5, 5)

    twin = duplicate(layer)

    assert torch.equal(twin(x), layer(x))
    assert set(twin.parameters()).isdisjoint(layer.parameters())


def test_symbolic_trace_sees_one_op() -> None:
    layer = GmPLinear(4, 3)
    x = torch.randn(2, 4)

    traced = torch.fx.symbolic_trace(layer)

    assert torch.equal(traced(x), layer(x))
    targets = [str(node.target) for node in traced.graph.nodes]
    assert sum("geoparam" in target for target in targets) == 1


def test_one_scale_per_row_is_required() -> None:
    with pytest.raises(ValueError, match="one scale per row"):
        functional.weight(torch.zeros(3, 4), torch.ones(4))


def test_latitudes_must_be_floating() -> None:
    with pytest.raises(ValueError, match="floating"):
        functional.weight(torch.zeros(3, 4, dtype=torch.long))


class Recorder(TorchDispatchMode):
    """Notes the names of the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))


def test_dispatch_modes_see_the_ops() -> None:
    latitude, r, weight_grad = kernels.random_case(3, 8, torch.float32)
    latitude.requires_grad_()

    with Recorder() as recorder:
        weight = functional.weight(latitude, r)
        torch.autograd.grad(weight, latitude, weight_grad)

    assert "geoparam.weight.default" in recorder.names
    assert "geoparam.weight_backward.default" in recorder.names


def test_traced_code_recomputes_the_weight() -> None:
    latitude, r, _ = kernels.random_case(3, 8, torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        traced = torch.jit.trace(functional.weight, (latitude, r))

    assert torch.equal(traced(2 * latitude, r), functional.weight(2 * latitude, r))
