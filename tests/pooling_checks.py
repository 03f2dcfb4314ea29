"""What pooling must satisfy wherever it runs; expected values are torch's."""

from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

LAST = torch.channels_last
SHAPES = [(2, 3, 4, 6), (3, 70, 2, 2), (1, 1, 8, 4), (5, 16, 10, 8)]
cases = pytest.mark.parametrize("shape", SHAPES, ids=str)
dtypes = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str
)


def check(kernels: ModuleType, shape: tuple, dtype: torch.dtype, device: str) -> None:
    x = torch.randn(shape).to(device, dtype).contiguous(memory_format=LAST).requires_grad_()
    with torch.no_grad():
        y, place, sums = kernels.pool(x)
    expected = F.max_pool2d(x, 2)
    assert torch.equal(y, expected) and y.is_contiguous(memory_format=LAST)
    bound = 1e-12 if dtype == torch.float64 else 1e-5
    close = {"atol": bound * y.numel(), "rtol": bound}
    torch.testing.assert_close(sums.double(), y.double().sum((0, 2, 3)), **close)
    grad = torch.randn_like(y)
    of_sums = torch.randn(shape[1]).to(device, sums.dtype)
    for given in (None, of_sums):
        whole = grad if given is None else (grad + given.view(-1, 1, 1)).to(dtype)
        found, total = kernels.pool_backward(grad, place, given)
        theirs = torch.autograd.grad(expected, x, whole, retain_graph=True)[0]
        torch.testing.assert_close(found, theirs)  # the interpreter rounds otherwise
        assert torch.equal(found == 0, theirs == 0)
        torch.testing.assert_close(total.double(), found.double().sum((0, 2, 3)), **close)


def check_equal_numbers_and_nan(kernels: ModuleType, device: str) -> None:
    nan, inf = float("nan"), float("inf")
    squares = [[1, 1, 1, 1], [0, 2, 2, 1], [nan, 1, 2, 3], [3, nan, nan, 1], [-inf] * 4]
    x = torch.tensor(squares, device=device).view(5, 1, 2, 2).contiguous(memory_format=LAST)
    y, place, _ = kernels.pool(x)
    expected, index = F.max_pool2d(x, 2, return_indices=True)
    torch.testing.assert_close(y, expected, equal_nan=True)
    assert torch.equal(place.long(), index)
