"""The Triton kernels in Triton's interpreter: on machines without a GPU, against float64.

The interpreter takes a second for two rows of a thousand, so `make test` sees small cases, and the
long rows (several chunks, carried products) are marked slow but for one.
"""

import importlib.util
import math

import kernels
import pytest
import torch

HAS_TRITON = importlib.util.find_spec("triton") is not None
pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
if HAS_TRITON:
    from geoparam.kernels import weight_triton as triton

SLOW = pytest.mark.slow
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("natural", [False, True])
@pytest.mark.parametrize("n", [2, 3, 27, 40, pytest.param(147, marks=SLOW)])
def test_weight_and_gradient(n: int, natural: bool, dtype: torch.dtype) -> None:
    latitude, r, g = kernels.random_case(2, n, dtype)
    kernels.assert_weight(triton, latitude, r)
    kernels.assert_gradient(triton, g, latitude, r, natural)


@pytest.mark.parametrize("count", [1, 6, 30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_poles(count: int, dtype: torch.dtype) -> None:
    latitude, r, g = kernels.random_case(2, 40, dtype)
    latitude = kernels.with_poles(latitude, count)
    kernels.assert_weight(triton, latitude, r)
    kernels.assert_gradient(triton, g, latitude, r)
    kernels.assert_gradient(triton, g, latitude, r, natural=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_behind_a_pole_keeps_its_digits(dtype: torch.dtype) -> None:
    latitude, r, _ = kernels.random_case(2, 40, dtype)
    latitude[:, 5] = math.pi / 2 - 1e-5
    expected = kernels.weight(latitude, r)[:, 6:]
    found = triton.forward(latitude, r, dtype).double()[:, 6:]
    assert expected.abs().max() < 1e-4
    torch.testing.assert_close(found, expected, rtol=10 * torch.finfo(dtype).eps, atol=1e-14)


def test_a_number_that_is_none_stays_in_its_row() -> None:
    latitude, _, g = kernels.random_case(3, 9, torch.float32)
    latitude[0, 1] = torch.nan
    for found in (
        triton.forward(latitude, None, torch.float32),
        triton.backward(g, latitude, None, False)[0],
    ):
        assert found[0].isnan().any() and found[1:].isfinite().all()


@pytest.mark.parametrize(
    ("n", "dtype"),
    [
        (1100, torch.float32),
        pytest.param(1024, torch.float32, marks=SLOW),
        pytest.param(1025, torch.float64, marks=SLOW),
        pytest.param(4609, torch.float32, marks=SLOW),
        pytest.param(25088, torch.float32, marks=SLOW),
        pytest.param(4608, torch.bfloat16, marks=SLOW),
    ],
)
def test_long_rows_carry_their_products(n: int, dtype: torch.dtype) -> None:
    latitude, r, g = kernels.random_case(1, n, dtype)
    kernels.assert_weight(triton, latitude, r)
    a = latitude.double().clone().requires_grad_()
    expected = torch.autograd.grad(kernels.weight(a, r), a, g.double())[0]
    found = triton.backward(g, latitude, r, False)[0].double()
    bound = kernels.GRADIENT_BOUND.get(dtype, kernels.HALF_BOUND)
    assert ((found - expected).abs().max() / expected.abs().max()) < bound


@SLOW
@pytest.mark.parametrize("rows", [1, 5, 129])
def test_rows_that_do_not_fill_a_program(rows: int) -> None:
    latitude, r, g = kernels.random_case(rows, 5, torch.float32)
    kernels.assert_weight(triton, latitude, r)
    kernels.assert_gradient(triton, g, latitude, r)


@pytest.mark.parametrize("n", [1, 5])
def test_without_scale_and_without_angles(n: int) -> None:
    latitude, _, g = kernels.random_case(2, n, torch.float32)
    ones = torch.ones(2)
    u = triton.forward(latitude, None, torch.float32)
    torch.testing.assert_close(u, kernels.weight(latitude, ones).float())
    found = triton.backward(g, latitude, None, False)
    expected = triton.backward(g, latitude, ones, False)
    assert all(map(torch.equal, found, expected))


def test_no_rows() -> None:
    latitude, r, g = kernels.random_case(0, 5, torch.float32)
    assert triton.forward(latitude, r, torch.float32).shape == (0, 5)
    assert triton.backward(g, latitude, r, False)[0].shape == (0, 4)


def test_output_type() -> None:
    latitude, r, _ = kernels.random_case(2, 9, torch.float32)
    assert triton.forward(latitude, r, torch.bfloat16).dtype == torch.bfloat16
