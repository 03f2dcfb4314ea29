"""The kernels of rows, in C and in Triton, compute what the plain form does."""

import importlib.util
import os
from typing import Any

import pytest
import torch
from torch import Tensor

from geoparam.kernels import rows_native
from geoparam.kernels.rows import Plain, Rows

no_triton = os.environ.get("TRITON_INTERPRET") != "1" or not importlib.util.find_spec("triton")
KERNELS = [
    pytest.param(
        "native", marks=pytest.mark.skipif(not rows_native.available(), reason="no C compiler")
    ),
    pytest.param(
        "triton",
        marks=[
            pytest.mark.interpreter,
            pytest.mark.skipif(no_triton, reason="needs TRITON_INTERPRET=1"),
        ],
    ),
]
SHAPES = [(3, 5), (0, 4), (4, 1), (2, 1030), (1, 17)]
TOLERANCES = {
    torch.float32: {"rtol": 2e-6, "atol": 2e-6},
    torch.float64: {"rtol": 1e-14, "atol": 1e-14},
}
every_kernel = pytest.mark.parametrize("kernels", KERNELS)
every_type = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)


def forms(kernels: str, dtype: torch.dtype) -> tuple[Rows, Rows]:
    """Return the plain rows and those of a kernel."""
    plain, fast = (Rows(SHAPES, torch.empty(0, dtype=dtype)) for _ in range(2))
    plain.kernels = Plain
    if kernels == "native":
        fast.kernels = rows_native.Calls(fast)
    else:
        from geoparam.kernels import rows_triton

        fast.kernels = rows_triton.Launches(fast)
    return plain, fast


def matrices(dtype: torch.dtype) -> list[Tensor]:
    """Return random matrices, one of which has a zero row."""
    found = [torch.randn(shape, dtype=dtype) for shape in SHAPES]
    found[0][1] = 0
    return found


def per_row(dtype: torch.dtype) -> Tensor:
    return torch.randn(sum(count for count, _ in SHAPES), dtype=dtype)


def copies(tensors: list[Tensor]) -> list[Tensor]:
    return [x.clone() for x in tensors]


def assert_equal(found: Any, expected: Any, dtype: torch.dtype) -> None:
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, **TOLERANCES[dtype])


def enter(rows: Rows, w: Any, g: Any, v: Any, length: Tensor, sign: Tensor) -> list[Tensor]:
    """Return r, slope, peak, stretch, and dL/dv of each matrix."""
    found = [sign.clone(), *(torch.full_like(sign, torch.nan) for _ in range(3))]
    by_v = [torch.full_like(x, torch.nan) for x in w]
    rows.enter(w, g, by_v, v, length, *found)
    return [*found, *by_v]


@every_kernel
@every_type
@pytest.mark.parametrize("target", ["in place", "apart", "none"])
def test_enter(kernels: str, dtype: torch.dtype, target: str) -> None:
    w, g, sign = matrices(dtype), matrices(dtype), per_row(dtype)
    g[2][1] = 0
    length = per_row(dtype).abs() + 0.5
    results = []
    for rows in forms(kernels, dtype):
        own, apart = copies(w), copies(w)
        v = {"in place": own, "apart": apart, "none": None}[target]
        results.append([*enter(rows, own, g, v, length, sign), *own, *apart])
    assert_equal(results[1], results[0], dtype)
    r = results[1][0]
    assert r[1] == 0 and torch.equal(r.sign(), torch.where(r == 0, 0, sign.sign()))
    assert results[1][2].tolist().count(0) == 2  # the peaks of the two rows without gradient


@every_kernel
@every_type
def test_leave_measure_and_rotate(kernels: str, dtype: torch.dtype) -> None:
    w, v, r = matrices(dtype), matrices(dtype), per_row(dtype)
    a, b, c = (per_row(dtype) for _ in range(3))
    r[1] = 0
    results = []
    for rows in forms(kernels, dtype):
        left, turned = copies(v), copies(w)
        rows.leave(left, r)
        rows.rotate(turned, v, c, a, b)
        results.append([*left, *rows.measure(w, v, c, r), *turned])
    assert_equal(results[1], results[0], dtype)


@every_kernel
@every_type
def test_what_nobody_has_stepped_is_measured_as_zero(kernels: str, dtype: torch.dtype) -> None:
    """v is written as c w; then v - c w is 0 to the bit, though it is rounded."""
    w, g, length = matrices(dtype), matrices(dtype), per_row(dtype).abs() + 0.3
    for rows in forms(kernels, dtype):
        v, before = copies(w), copies(w)
        r, _, _, stretch, *_ = enter(rows, w, g, v, length, per_row(dtype))
        along, across = rows.measure(w, v, stretch, r)
        assert not along.any() and not across.any()
        ones = torch.ones_like(along)
        rows.rotate(w, v, stretch, ones, 1e3 * ones)
        assert all(torch.equal(x, y) for x, y in zip(w, before, strict=True))


@every_kernel
def test_nan_stays_in_its_row(kernels: str) -> None:
    _, rows = forms(kernels, torch.float32)
    w, g = matrices(torch.float32), matrices(torch.float32)
    g[3][0, 1029] = torch.nan
    ones = torch.ones(rows.total)
    _, slope, _, _, *by_v = enter(rows, w, g, None, ones, ones)
    assert slope.isnan().nonzero().flatten().tolist() == [7]
    assert by_v[3].isnan().any(dim=1).tolist() == [True, False]
    assert not any(by_v[i].isnan().any() for i in (0, 2, 4))


def test_matrices_without_rows_need_no_kernel() -> None:
    rows = Rows([(0, 3)], torch.empty(0))
    w, none = [torch.empty(0, 3)], torch.empty(0)
    assert enter(rows, w, w, w, none, none)[0].shape == (0,)
    rows.leave(w, none)
