"""The operator equals the sphere's arithmetic, however it is called."""

import copy
import pickle
import warnings

import kernels
import pytest
import torch
from torch import Tensor
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vmap
from torch.utils._python_dispatch import TorchDispatchMode

from geoparam import GmPConv2d, GmPLinear, functional, sphere


def test_any_leading_shape_and_strides() -> None:
    latitude, r, g = kernels.random_case(6, 9, torch.float64)
    w = functional.weight(latitude, r)
    assert torch.equal(functional.weight(latitude.t().contiguous().t(), r), w)
    stacked = functional.weight(latitude.view(2, 3, 8), r.view(2, 3))
    assert torch.equal(stacked.view(6, 9), w)


def row_error(found: Tensor, w: Tensor) -> Tensor:
    return ((found.double() - w).norm(dim=1) / w.norm(dim=1)).pow(2).mean().sqrt()


@pytest.mark.parametrize("n", [576, 4608])
def test_bf16_latitudes_lose_no_more_than_bf16_weights(n: int) -> None:
    w = torch.randn(64, n, dtype=torch.float64)
    latitude, r = sphere.to_latitude(w).bfloat16(), w.norm(dim=1).float()
    found = functional.weight(latitude, r)
    assert found.dtype == torch.float32
    assert row_error(found, w) <= 1.1 * row_error(w.bfloat16(), w)


@pytest.mark.parametrize("n", [2, 27, 4608])
@pytest.mark.parametrize("kind", ["gaussian", "dominant"])
def test_bf16_row_error_stays_below_one_percent(n: int, kind: str) -> None:
    w = torch.randn(64, n, dtype=torch.float64)
    if kind == "dominant":
        w[:, n // 2] = 50
    found = functional.weight(sphere.to_latitude(w).bfloat16(), w.norm(dim=1).float())
    error = (found.double() - w).norm(dim=1) / w.norm(dim=1)
    assert error.max() < 0.008


def loss(weight):  # noqa: ANN001, ANN201
    return lambda latitude, r: torch.sin(3 * weight(latitude, r)).sum()


def reference(latitude: Tensor, r: Tensor) -> Tensor:
    return r[..., None] * sphere.to_unit(latitude)


def test_gradcheck_in_every_mode() -> None:
    latitude = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    r = torch.randn(2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        functional.weight, (latitude, r), check_forward_ad=True, check_batched_grad=True
    )
    assert torch.autograd.gradgradcheck(functional.weight, (latitude, r))
    assert torch.autograd.gradgradcheck(lambda a: functional.weight(a), (latitude,))


@pytest.mark.parametrize("transform", [grad, jacrev, jacfwd, hessian])
@pytest.mark.parametrize("batched", [False, True])
def test_torch_func(transform, batched: bool) -> None:  # noqa: ANN001
    latitude = torch.randn(4, 3, 5, dtype=torch.float64)
    r = torch.randn(4, 3, dtype=torch.float64)

    def run(weight):  # noqa: ANN001, ANN202
        call = transform(loss(weight), argnums=(0, 1))
        return vmap(call)(latitude, r) if batched else call(latitude[0], r[0])

    torch.testing.assert_close(run(functional.weight), run(reference))


def test_the_bare_op_refuses_forward_mode() -> None:
    latitude, r, _ = kernels.random_case(2, 4, torch.float64)
    with pytest.raises(RuntimeError, match="forward-mode"):
        jvp(lambda a: torch.ops.geoparam.weight(a, r), (latitude,), (latitude,))


def test_natural_is_refused_where_a_function_is_differentiated() -> None:
    latitude = torch.randn(2, 3, requires_grad=True)
    call = lambda a: functional.weight(a, natural=True).square().sum()  # noqa: E731
    with pytest.raises(RuntimeError, match="natural=False"):
        torch.autograd.grad(call(latitude), latitude, create_graph=True)
    with pytest.raises(RuntimeError, match="natural=False"):
        grad(call)(latitude)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(dtype: torch.dtype) -> None:
    latitude = torch.randn(3, 5, dtype=dtype, requires_grad=True)
    r = torch.randn(3, dtype=dtype, requires_grad=True)
    torch.library.opcheck(torch.ops.geoparam.weight, (latitude, r))
    torch.library.opcheck(torch.ops.geoparam.weight, (latitude,))
    args = (torch.randn(3, 6, dtype=dtype), latitude.detach(), r.detach(), False)
    torch.library.opcheck(torch.ops.geoparam.weight_backward, args)


def test_natural_gradient_is_the_tangent_step() -> None:
    """-lr * natural gradient moves u as the projected gradient does, to first order."""
    latitude = 0.3 * torch.randn(6, 9, dtype=torch.float64)  # metric above its bound everywhere
    assert sphere.metric(latitude).min() > 0.01
    latitude.requires_grad_()
    u = functional.weight(latitude, natural=True)
    g = torch.randn_like(u)
    step = torch.autograd.grad(u, latitude, g)[0]
    h = 1e-7
    moved = (sphere.to_unit(latitude - h * step) - u) / h
    tangent = g - (g * u).sum(dim=1, keepdim=True) * u
    torch.testing.assert_close(moved, -tangent, atol=1e-5, rtol=1e-5)


def test_functional_call_and_ensembles() -> None:
    layers = [GmPLinear(5, 3, dtype=torch.float64) for _ in range(4)]
    x = torch.randn(7, 5, dtype=torch.float64)
    params, _ = torch.func.stack_module_state(layers)
    skeleton = copy.deepcopy(layers[0]).to("meta")
    found = vmap(lambda p: functional_call(skeleton, p, (x,)))(params)
    expected = torch.stack([layer(x) for layer in layers])
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
@pytest.mark.parametrize("coordinates", ["angles", "intrinsic"])
def test_deepcopy_and_pickle(duplicate, coordinates: str) -> None:  # noqa: ANN001
    layer = GmPConv2d(2, 3, 3, coordinates=coordinates, input_norm=True, activation=torch.relu)
    x = torch.randn(2, 2, 5, 5)
    twin = duplicate(layer)
    assert torch.equal(twin(x), layer(x))
    assert {id(p) for p in twin.parameters()}.isdisjoint({id(p) for p in layer.parameters()})


def test_symbolic_trace_sees_one_op() -> None:
    layer = GmPLinear(4, 3)
    graph = torch.fx.symbolic_trace(layer)
    x = torch.randn(2, 4)
    assert torch.equal(graph(x), layer(x))
    assert sum("geoparam" in str(node.target) for node in graph.graph.nodes) == 1


def test_shapes_and_types_are_checked() -> None:
    with pytest.raises(ValueError, match="one scale per row"):
        functional.weight(torch.zeros(3, 4), torch.ones(4))
    with pytest.raises(ValueError, match="floating"):
        functional.weight(torch.zeros(3, 4, dtype=torch.long))


def test_modes_see_the_ops() -> None:
    names: list[str] = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    latitude, r, g = kernels.random_case(3, 8, torch.float32)
    latitude.requires_grad_()
    with Recorder():
        w = functional.weight(latitude, r)
        torch.autograd.grad(w, latitude, g)
    assert {"geoparam.weight.default", "geoparam.weight_backward.default"} <= set(names)


def test_traced_code_computes_the_weight_anew() -> None:
    latitude, r, _ = kernels.random_case(3, 8, torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        traced = torch.jit.trace(functional.weight, (latitude, r))
    assert torch.equal(traced(2 * latitude, r), functional.weight(2 * latitude, r))


def test_saved_tensors_are_guarded_against_changes() -> None:
    latitude, r, _ = kernels.random_case(3, 8, torch.float32)
    w = functional.weight(latitude.requires_grad_(), r)
    with torch.no_grad():
        latitude.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        w.sum().backward()
