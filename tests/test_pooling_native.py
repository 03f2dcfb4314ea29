"""The max pool in C: torch's numbers, in any number of threads, where it is taken."""

import pooling_checks
import pytest
import torch
import torch.nn.functional as F

from geoparam.ops import columns_native, implementation, pooling, pooling_native
from geoparam.pooling import MaxPool2d

LAST, FIRST = torch.channels_last, torch.contiguous_format
SQUARES = pooling_checks.SQUARES

pytestmark = pytest.mark.skipif(not pooling_native.available(), reason="needs a C compiler")


@pytest.fixture(autouse=True)
def auto(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(implementation, "KERNELS", "auto")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 8, 6), (3, 70, 2, 4), (1, 1, 64, 1024)], ids=str)
def test_numbers_and_threads(
    shape: tuple, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(columns_native, "NUMBERS_PER_THREAD", 1)
    results = []
    for threads in (1, 2, 7):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        torch.manual_seed(0)
        results.append(pooling_checks.check(pooling_native, shape, SQUARES, dtype, "cpu", FIRST))
    assert all(all(map(torch.equal, result, results[0])) for result in results)


def test_equal_numbers_and_nan() -> None:
    pooling_checks.check_equal_numbers_and_nan(pooling_native, "cpu", (SQUARES,))


def test_serves_large_squares_in_order() -> None:
    large = torch.randn(2, 8, 64, 64)
    assert pooling.worthwhile(large, SQUARES)
    assert not pooling.worthwhile(large[:1, :1], SQUARES)
    assert not pooling.worthwhile(large.contiguous(memory_format=LAST), SQUARES)
    assert not pooling.worthwhile(large.bfloat16(), SQUARES)
    assert not pooling.worthwhile(large, pooling_checks.STEM)


@pytest.mark.parametrize("size", [(64, 65), (65, 64), (64, 1026)], ids=str)
def test_odd_sizes_and_long_rows_are_torchs(size: tuple[int, int]) -> None:
    assert not pooling.worthwhile(torch.randn(2, 8, *size), SQUARES)


def test_plain_torch_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(implementation, "KERNELS", "torch")
    assert not pooling.worthwhile(torch.randn(2, 8, 64, 64), SQUARES)


def test_gradients_may_lie_in_any_way() -> None:
    x = torch.randn(2, 8, 64, 64, requires_grad=True)
    y = MaxPool2d(2)(x * 1)
    assert "MaxPool2D" not in y.grad_fn.name()
    across = torch.randn(2, 8, 32, 32)
    for grad in (across.contiguous(memory_format=LAST), across[..., :1].expand_as(y)):
        found = torch.autograd.grad(y, x, grad, retain_graph=True)[0]
        assert torch.equal(found, torch.autograd.grad(F.max_pool2d(x, 2), x, grad)[0])
