"""Every implementation of the weight equals float64 arithmetic: plain torch and Triton.

Triton's runs on a GPU, or in Triton's interpreter with TRITON_INTERPRET=1 (`make
test-interpreter`), where two rows of a thousand take a second: long rows are marked slow there.
"""

import importlib
import os
from types import ModuleType
from typing import NamedTuple

import kernels
import pytest
import torch
from torch import Tensor

from geoparam.kernels import weight

FLOATS = [torch.float32, torch.float64]
HALVES = [torch.bfloat16, torch.float16]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
IMPLEMENTATIONS = [
    "weight",
    pytest.param(
        "weight_triton", marks=pytest.mark.interpreter if INTERPRETED else pytest.mark.gpu
    ),
]
SLOW = pytest.mark.slow if INTERPRETED else ()


class Kernel(NamedTuple):
    module: ModuleType
    device: str

    def case(self, rows: int, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        return kernels.random_case(rows, n, dtype, self.device)


@pytest.fixture(params=IMPLEMENTATIONS)
def kernel(request: pytest.FixtureRequest) -> Kernel:
    name = request.param
    on_gpu = name == "weight_triton" and not INTERPRETED
    if name == "weight_triton":
        pytest.importorskip("triton")
    return Kernel(importlib.import_module(f"geoparam.kernels.{name}"), "cuda" if on_gpu else "cpu")


@pytest.mark.parametrize("natural", [False, True])
@pytest.mark.parametrize("dtype", [*FLOATS, *HALVES], ids=str)
@pytest.mark.parametrize("n", [2, 3, 27, 129])
def test_weight_and_gradient(kernel: Kernel, n: int, dtype: torch.dtype, natural: bool) -> None:
    latitude, r, g = kernel.case(5, n, dtype)
    kernels.assert_weight(kernel.module, latitude, r)
    kernels.assert_gradient(kernel.module, g, latitude, r, natural)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("n", [1100, *(pytest.param(n, marks=SLOW) for n in (4609, 25088))])
def test_long_rows(kernel: Kernel, n: int, dtype: torch.dtype) -> None:
    latitude, r, g = kernel.case(2, n, dtype)
    kernels.assert_weight(kernel.module, latitude, r)
    a = latitude.double().clone().requires_grad_()
    expected = torch.autograd.grad(kernels.weight(a, r), a, g.double())[0]
    found = kernel.module.backward(g, latitude, r, False, None)[0].double()
    largest = expected.abs().amax(dim=1, keepdim=True)
    assert ((found - expected).abs() / largest).max() < kernels.GRADIENT_BOUND[dtype]


@pytest.mark.parametrize("count", [1, 30])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_poles(kernel: Kernel, count: int, dtype: torch.dtype) -> None:
    latitude, r, g = kernel.case(4, 40, dtype)
    latitude = kernels.with_poles(latitude, count)
    kernels.assert_weight(kernel.module, latitude, r)
    for natural in (False, True):
        kernels.assert_gradient(kernel.module, g, latitude, r, natural)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_what_is_behind_a_pole_keeps_its_digits(kernel: Kernel, dtype: torch.dtype) -> None:
    latitude, r, _ = kernel.case(2, 40, dtype)
    latitude[:, 5] = torch.pi / 2 - 1e-5
    expected = kernels.weight(latitude, r)[:, 6:]
    found = kernel.module.forward(latitude, r, dtype)[0].double()[:, 6:]
    assert expected.abs().max() < 1e-4
    torch.testing.assert_close(found, expected, rtol=10 * torch.finfo(dtype).eps, atol=1e-14)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_zero_latitudes_and_zero_scale(kernel: Kernel, dtype: torch.dtype) -> None:
    latitude, r, g = kernel.case(3, 12, dtype)
    latitude[0], r[1], latitude[2, ::2] = 0, 0, 0
    found, _ = kernel.module.backward(g, latitude, r, False, None)
    expected, _ = kernels.brute_force_gradient(g, latitude, r)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)
    assert (found[1] == 0).all()


def test_wound_up_angles(kernel: Kernel) -> None:
    latitude, r, g = kernel.case(4, 30, torch.float32)
    latitude += torch.tensor([2.0, -7.0, 40.0, 1000.0], device=kernel.device)[:, None]
    kernels.assert_weight(kernel.module, latitude, r)
    kernels.assert_gradient(kernel.module, g, latitude, r)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nan_stays_in_its_row(kernel: Kernel, bad: float) -> None:
    latitude, r, g = kernel.case(6, 9, torch.float32)
    latitude[2, 4] = bad
    others = torch.arange(6) != 2
    w, saved = kernel.module.forward(latitude, r, r.dtype)
    change, change_r = kernel.module.backward(g, latitude, r, True, saved)
    assert all(x[2].isnan().any() and x[others].isfinite().all() for x in (w, change, change_r))


@pytest.mark.parametrize(
    ("latitude_type", "r_type", "weight_type"),
    [
        (torch.float32, torch.float64, torch.bfloat16),
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.float64, torch.float32, torch.float16),
        (torch.bfloat16, None, torch.float64),
        (torch.float32, None, torch.float32),
    ],
    ids=str,
)
def test_mixed_types(
    kernel: Kernel,
    latitude_type: torch.dtype,
    r_type: torch.dtype | None,
    weight_type: torch.dtype,
) -> None:
    latitude, r, g = kernel.case(5, 13, torch.float64)
    latitude, g = latitude.to(latitude_type), g.to(weight_type)
    scale = None if r_type is None else r.to(r_type)
    ones = torch.ones(5, device=kernel.device) if scale is None else scale
    w, saved = kernel.module.forward(latitude, scale, weight_type)
    changes = kernel.module.backward(g, latitude, scale, False, saved)
    types = [weight_type, latitude_type, r_type or latitude_type]
    assert [x.dtype for x in (w, *changes)] == types
    expected = (kernels.weight(latitude, ones), *kernels.brute_force_gradient(g, latitude, ones))
    narrow = latitude_type != torch.float64
    for found, precise in zip((w, *changes), expected, strict=True):
        eps = max(torch.finfo(found.dtype).eps, torch.finfo(torch.float32).eps if narrow else 0)
        assert (found.double() - precise).abs().max() < 8 * eps * precise.abs().max()


@pytest.mark.parametrize("rows", [0, 1, 7, 65])
@pytest.mark.parametrize("n", [1, 2, 9])
def test_any_number_of_rows_and_columns(kernel: Kernel, rows: int, n: int) -> None:
    latitude, r, g = kernel.case(rows, n, torch.float32)
    w, saved = kernel.module.forward(latitude, r, torch.float32)
    change, change_r = kernel.module.backward(g, latitude, r, False, saved)
    assert w.shape == (rows, n) and change.shape == (rows, n - 1) and change_r.shape == (rows,)
    torch.testing.assert_close(w.double(), kernels.weight(latitude, r), atol=1e-6, rtol=1e-6)


def test_repeats_bit_for_bit_wherever_its_input_lies(kernel: Kernel) -> None:
    latitude, r, g = kernel.case(6, 300, torch.float32)
    expected = kernel.module.backward(g, latitude, r, False, None)
    flat = torch.zeros(1 + latitude.numel(), device=kernel.device)
    flat[1:] = latitude.flatten()
    off_its_alignment = flat[1:].view(latitude.shape)
    strided = g.t().contiguous().t()
    for a, b in ((latitude, g), (off_its_alignment, g), (latitude, strided)):
        assert all(map(torch.equal, kernel.module.backward(b, a, r, False, None), expected))


def test_blocks_of_rows_do_not_change_a_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    latitude, r, g = kernels.random_case(7, 30, torch.float32)
    w, saved = weight.forward(latitude, r, torch.float32)
    changes = weight.backward(g, latitude, r, True, saved)
    monkeypatch.setattr(weight, "_BLOCK", 2 * 30)
    assert torch.equal(weight.forward(latitude, r, torch.float32)[0], w)
    for given in (saved, None):
        assert all(map(torch.equal, weight.backward(g, latitude, r, True, given), changes))
