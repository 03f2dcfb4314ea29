"""Every implementation of the weight equals float64 arithmetic: plain torch and Triton.

Triton's runs on a GPU, or in Triton's interpreter with TRITON_INTERPRET=1 (`make
test-interpreter`), where two rows of a thousand take a second: long rows are marked slow there.
"""

import importlib
import os
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import kernels
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from geoparam.kernels import weight

FLOATS = [torch.float32, torch.float64]
HALVES = [torch.bfloat16, torch.float16]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ON_TRITON = pytest.mark.interpreter if INTERPRETED else pytest.mark.gpu
SLOW_IN_INTERPRETER = pytest.mark.slow if INTERPRETED else ()

floats = pytest.mark.parametrize("dtype", FLOATS, ids=str)
lengths = pytest.mark.parametrize("n", [2, 3, 27, 129])
many_lengths = pytest.mark.parametrize(
    "n",
    [
        1100,
        pytest.param(4609, marks=SLOW_IN_INTERPRETER),
        pytest.param(25088, marks=SLOW_IN_INTERPRETER),
    ],
)


class Kernel(NamedTuple):
    """An implementation, and where its tensors are."""

    module: ModuleType
    device: str

    def draw(self, rows: int, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Return random latitudes, scales r, and the gradient of a loss by the weight."""
        return kernels.random_case(rows, n, dtype, self.device)


@pytest.fixture(params=["weight", pytest.param("weight_triton", marks=ON_TRITON)])
def kernel(request: pytest.FixtureRequest) -> Kernel:
    name = request.param
    device = "cpu"
    if name == "weight_triton":
        pytest.importorskip("triton")
        device = "cpu" if INTERPRETED else "cuda"
    return Kernel(importlib.import_module(f"geoparam.kernels.{name}"), device)


@lengths
@pytest.mark.parametrize("dtype", [*FLOATS, *HALVES], ids=str)
def test_weight_equals_float64_arithmetic(kernel: Kernel, n: int, dtype: torch.dtype) -> None:
    latitude, r, _ = kernel.draw(5, n, dtype)

    kernels.assert_weight(kernel.module, latitude, r)


@lengths
@pytest.mark.parametrize("dtype", [*FLOATS, *HALVES], ids=str)
@pytest.mark.parametrize("natural", [False, True])
def test_gradient_equals_differentiation_by_one_angle_after_the_other(
    kernel: Kernel, n: int, dtype: torch.dtype, natural: bool
) -> None:
    latitude, r, grad = kernel.draw(5, n, dtype)

    kernels.assert_gradient(kernel.module, grad, latitude, r, natural)


@many_lengths
@floats
def test_weight_of_long_rows(kernel: Kernel, n: int, dtype: torch.dtype) -> None:
    latitude, r, _ = kernel.draw(2, n, dtype)

    kernels.assert_weight(kernel.module, latitude, r)


@many_lengths
@floats
def test_gradient_of_long_rows_equals_that_of_autograd(
    kernel: Kernel, n: int, dtype: torch.dtype
) -> None:
    latitude, r, grad = kernel.draw(2, n, dtype)

    by_kernel, _ = kernel.module.backward(grad, latitude, r, False, None)

    exact = latitude.double().clone().requires_grad_()
    (expected,) = torch.autograd.grad(kernels.weight(exact, r), exact, grad.double())
    largest = expected.abs().amax(dim=1, keepdim=True)
    error = (by_kernel.double() - expected).abs() / largest
    assert error.max() < kernels.GRADIENT_BOUND[dtype]


# Poles, zeros, wound up angles and NaN.


@pytest.mark.parametrize("count", [1, 30])
@floats
def test_weight_at_poles(kernel: Kernel, count: int, dtype: torch.dtype) -> None:
    latitude, r, _ = kernel.draw(4, 40, dtype)

    kernels.assert_weight(kernel.module, kernels.with_poles(latitude, count), r)


@pytest.mark.parametrize("natural", [False, True])
@pytest.mark.parametrize("count", [1, 30])
@floats
def test_gradient_at_poles(kernel: Kernel, count: int, dtype: torch.dtype, natural: bool) -> None:
    latitude, r, grad = kernel.draw(4, 40, dtype)
    latitude = kernels.with_poles(latitude, count)

    kernels.assert_gradient(kernel.module, grad, latitude, r, natural)


@floats
def test_elements_behind_a_pole_keep_their_digits(kernel: Kernel, dtype: torch.dtype) -> None:
    latitude, r, _ = kernel.draw(2, 40, dtype)
    latitude[:, 5] = torch.pi / 2 - 1e-5
    expected = kernels.weight(latitude, r)[:, 6:]
    assert expected.abs().max() < 1e-4

    w, _ = kernel.module.forward(latitude, r, dtype)

    rtol = 10 * torch.finfo(dtype).eps
    assert_close(w.double()[:, 6:], expected, rtol=rtol, atol=1e-14)


@floats
def test_gradient_at_zero_latitudes(kernel: Kernel, dtype: torch.dtype) -> None:
    latitude, r, grad = kernel.draw(2, 12, dtype)
    latitude[0] = 0
    latitude[1, ::2] = 0

    by_kernel, _ = kernel.module.backward(grad, latitude, r, False, None)

    expected, _ = kernels.brute_force_gradient(grad, latitude, r)
    assert_close(by_kernel.double(), expected, atol=1e-5, rtol=1e-5)


@floats
def test_gradient_by_latitudes_is_zero_where_r_is_zero(kernel: Kernel, dtype: torch.dtype) -> None:
    latitude, r, grad = kernel.draw(3, 12, dtype)
    r[1] = 0

    by_kernel, _ = kernel.module.backward(grad, latitude, r, False, None)

    assert (by_kernel[1] == 0).all()
    expected, _ = kernels.brute_force_gradient(grad, latitude, r)
    assert_close(by_kernel.double(), expected, atol=1e-5, rtol=1e-5)


def test_angles_may_be_wound_up(kernel: Kernel) -> None:
    latitude, r, grad = kernel.draw(4, 30, torch.float32)
    shifts = torch.tensor([2.0, -7.0, 40.0, 1000.0], device=kernel.device)
    latitude += shifts[:, None]

    kernels.assert_weight(kernel.module, latitude, r)
    kernels.assert_gradient(kernel.module, grad, latitude, r)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nan_stays_in_its_row(kernel: Kernel, bad: float) -> None:
    latitude, r, grad = kernel.draw(6, 9, torch.float32)
    latitude[2, 4] = bad

    w, saved = kernel.module.forward(latitude, r, r.dtype)
    gradients = kernel.module.backward(grad, latitude, r, True, saved)

    others = torch.arange(6) != 2
    for result in (w, *gradients):
        assert result[2].isnan().any()
        assert result[others].isfinite().all()


# Types, shapes and memory layouts.


class Types(NamedTuple):
    """The types of a case; without r the scale of every row is one."""

    latitude: torch.dtype
    r: torch.dtype | None
    weight: torch.dtype


MIXED = [
    Types(torch.float32, torch.float64, torch.bfloat16),
    Types(torch.bfloat16, torch.float32, torch.float32),
    Types(torch.float64, torch.float32, torch.float16),
    Types(torch.bfloat16, None, torch.float64),
    Types(torch.float32, None, torch.float32),
]
mixed_types = pytest.mark.parametrize("types", MIXED, ids=lambda types: "-".join(map(str, types)))


def draw_mixed(kernel: Kernel, types: Types) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return latitudes, r or None, and a gradient of these types."""
    latitude, r, grad = kernel.draw(5, 13, torch.float64)
    scale = None if types.r is None else r.to(types.r)
    return latitude.to(types.latitude), scale, grad.to(types.weight)


@mixed_types
def test_results_have_the_types_of_what_they_belong_to(kernel: Kernel, types: Types) -> None:
    latitude, r, grad = draw_mixed(kernel, types)

    w, saved = kernel.module.forward(latitude, r, types.weight)
    by_latitude, by_r = kernel.module.backward(grad, latitude, r, False, saved)

    assert w.dtype == types.weight
    assert by_latitude.dtype == types.latitude
    assert by_r.dtype == (types.r or types.latitude)


@mixed_types
def test_results_of_mixed_types_are_as_precise_as_the_types(kernel: Kernel, types: Types) -> None:
    latitude, r, grad = draw_mixed(kernel, types)

    w, saved = kernel.module.forward(latitude, r, types.weight)
    gradients = kernel.module.backward(grad, latitude, r, False, saved)

    scale = torch.ones(5, device=kernel.device) if r is None else r
    exact_weight = kernels.weight(latitude, scale)
    exact_gradients = kernels.brute_force_gradient(grad, latitude, scale)
    computed_in = torch.float64 if types.latitude == torch.float64 else torch.float32
    exact_results = (exact_weight, *exact_gradients)
    for result, exact in zip((w, *gradients), exact_results, strict=True):
        eps = max(torch.finfo(result.dtype).eps, torch.finfo(computed_in).eps)
        error = (result.double() - exact).abs().max()
        assert error < 8 * eps * exact.abs().max()


@pytest.mark.parametrize("rows", [0, 1, 7, 65])
@pytest.mark.parametrize("n", [1, 2, 9])
def test_any_number_of_rows_and_columns(kernel: Kernel, rows: int, n: int) -> None:
    latitude, r, grad = kernel.draw(rows, n, torch.float32)

    w, saved = kernel.module.forward(latitude, r, torch.float32)
    by_latitude, by_r = kernel.module.backward(grad, latitude, r, False, saved)

    assert w.shape == (rows, n)
    assert by_latitude.shape == (rows, n - 1)
    assert by_r.shape == (rows,)
    assert_close(w.double(), kernels.weight(latitude, r), atol=1e-6, rtol=1e-6)


def shift_in_memory(x: Tensor) -> Tensor:
    """Return a copy that begins one element after an aligned address."""
    flat = torch.zeros(1 + x.numel(), dtype=x.dtype, device=x.device)
    flat[1:] = x.flatten()
    return flat[1:].view(x.shape)


def store_by_column(x: Tensor) -> Tensor:
    return x.t().contiguous().t()


@pytest.mark.parametrize(
    ("relay_latitude", "relay_grad"),
    [
        (Tensor.clone, Tensor.clone),
        (shift_in_memory, Tensor.clone),
        (Tensor.clone, store_by_column),
    ],
    ids=["repeated", "latitude off its alignment", "gradient by columns"],
)
def test_results_are_the_same_to_the_bit_in_any_memory_layout(
    kernel: Kernel,
    relay_latitude: Callable[[Tensor], Tensor],
    relay_grad: Callable[[Tensor], Tensor],
) -> None:
    latitude, r, grad = kernel.draw(6, 300, torch.float32)
    by_latitude, by_r = kernel.module.backward(grad, latitude, r, False, None)

    again = kernel.module.backward(relay_grad(grad), relay_latitude(latitude), r, False, None)

    assert torch.equal(again[0], by_latitude)
    assert torch.equal(again[1], by_r)


def test_the_weight_is_the_same_to_the_bit_in_smaller_blocks_of_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    latitude, r, _ = kernels.random_case(7, 30, torch.float32)
    w, _ = weight.forward(latitude, r, torch.float32)

    monkeypatch.setattr(weight, "_BLOCK", 2 * 30)
    in_blocks, _ = weight.forward(latitude, r, torch.float32)

    assert torch.equal(in_blocks, w)


@pytest.mark.parametrize("is_saved", [True, False])
def test_the_gradient_is_the_same_to_the_bit_in_smaller_blocks_of_rows(
    is_saved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    latitude, r, grad = kernels.random_case(7, 30, torch.float32)
    _, saved = weight.forward(latitude, r, torch.float32)
    by_latitude, by_r = weight.backward(grad, latitude, r, True, saved)

    monkeypatch.setattr(weight, "_BLOCK", 2 * 30)
    in_blocks = weight.backward(grad, latitude, r, True, saved if is_saved else None)

    assert torch.equal(in_blocks[0], by_latitude)
    assert torch.equal(in_blocks[1], by_r)
