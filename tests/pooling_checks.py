"""What pooling must satisfy wherever it runs; expected values are torch's."""

from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from geoparam.ops import columns, pooling
from geoparam.ops.pooling import Window

LAST = torch.channels_last
SQUARES = Window(2, 2, 0)
STEM = Window(3, 2, 1)  # of ResNets
WINDOWS = [SQUARES, STEM, Window(3, 2, 0), Window(3, 1, 1), Window(2, 3, 1), Window(5, 2, 2)]
SHAPES = [(2, 3, 8, 6), (3, 70, 5, 5), (1, 1, 8, 7), (5, 16, 11, 8)]
cases = pytest.mark.parametrize("shape", SHAPES, ids=str)
windows = pytest.mark.parametrize("window", WINDOWS, ids=str)
dtypes = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str
)


def check(
    kernels: ModuleType,
    shape: tuple,
    window: Window,
    dtype: torch.dtype,
    device: str,
    layout: torch.memory_format = LAST,
) -> list[torch.Tensor]:
    """Compare with torch, and return what was found."""
    x = torch.randn(shape).to(device, dtype).contiguous(memory_format=layout).requires_grad_()
    with torch.no_grad():
        y, place, sums = kernels.pool(x, window)
    expected = F.max_pool2d(x, *window)
    assert torch.equal(y, expected) and y.is_contiguous(memory_format=layout)
    bound = 1e-12 if dtype == torch.float64 else 1e-5
    close = {"atol": bound * y.numel(), "rtol": bound}
    torch.testing.assert_close(sums.double(), y.double().sum((0, 2, 3)), **close)
    grad = torch.randn_like(y)
    of_sums = torch.randn(shape[1]).to(device, sums.dtype)
    all_found = [y, place, sums]
    for given in (None, of_sums):
        found, total = kernels.pool_backward(grad, place, given, window, shape[2:])
        check_gradient(found, x, grad if given is None else grad + given.view(-1, 1, 1), window)
        rounded = 8 * torch.finfo(dtype).eps * found.double().abs().sum((0, 2, 3))
        assert ((total.double() - found.double().sum((0, 2, 3))).abs() <= rounded + 1e-12).all()
        all_found += [found, total]
    return all_found


def check_gradient(
    found: torch.Tensor, x: torch.Tensor, grad: torch.Tensor, window: Window
) -> None:
    """Compare with torch's, which adds up in float64 here."""
    x = x.detach().double().requires_grad_()
    theirs = torch.autograd.grad(F.max_pool2d(x, *window), x, grad.double())[0].to(found.dtype)
    bound = torch.finfo(found.dtype).eps
    torch.testing.assert_close(found, theirs, rtol=2 * bound, atol=64 * bound)
    if window == SQUARES:  # others add up, to what may be nothing
        assert torch.equal(found == 0, theirs == 0)


def check_rectified(
    kernels: ModuleType, shape: tuple, window: Window, dtype: torch.dtype, device: str
) -> None:
    """Compare the pooling of s relu(z + b), r of both signs and 0, with torch in float64."""
    numbers = torch.Generator().manual_seed(0)

    def normal(*size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(size, generator=numbers).to(device, dtype)

    z = normal(*shape, dtype=dtype).contiguous(memory_format=LAST)
    scale, bias, sums = (normal(shape[1], dtype=columns.wide(z)) for _ in range(3))
    scale[: shape[1] // 3] = 0.5
    scale[shape[1] // 2 :: 3] = 0
    y, place, _ = kernels.pool(z, window, scale)
    wide = [t.double().requires_grad_() for t in (z, bias, scale)]
    expected = F.max_pool2d(_rectified(*wide), *window)
    bound = 1e-12 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(_rectified(y.double(), *wide[1:]), expected, rtol=bound, atol=bound)
    if window.tiles(*shape[2:]):
        check_sums_of_rectified(kernels, z, window, scale, bias)
    grad = normal(*y.shape, dtype=dtype).contiguous(memory_format=LAST)
    for given, of_bias in ((None, bias), (sums, bias), (sums, None)):
        whole = pooling.scattered(grad.double(), place, window, shape[2:])
        whole = whole if given is None else whole + given.double().view(-1, 1, 1)
        inputs = wide[0], *([] if of_bias is None else wide[1:2]), wide[2]
        active = _rectified(wide[0], None if of_bias is None else wide[1], wide[2])
        *theirs, by_scale = torch.autograd.grad(active, inputs, whole)
        found = kernels.rectify_backward(grad, place, window, z, given, scale, of_bias)
        rounding = 2 * torch.finfo(dtype).eps
        torch.testing.assert_close(found[0].double(), theirs[0], rtol=rounding, atol=1e-5)
        close = {"rtol": bound, "atol": 4 * rounding * y.numel()}
        torch.testing.assert_close(found[1].double(), theirs[0].sum((0, 2, 3)), **close)
        torch.testing.assert_close(found[2].double(), by_scale, **close)


def check_sums_of_rectified(
    kernels: ModuleType,
    z: torch.Tensor,
    window: Window,
    scale: torch.Tensor,
    bias: torch.Tensor,
) -> None:
    largest, places, _ = kernels.pool(z, window, scale)
    for of_bias in (bias, None):
        y, place, parts = kernels.rectify(z, window, scale, of_bias)
        assert torch.equal(y, largest) and torch.equal(place, places)
        whole = _rectified(z.double(), of_bias, scale.double())
        bound = (1e-12 if z.dtype == torch.float64 else 1e-5) * z.numel() / z.shape[1]
        torch.testing.assert_close(parts.double().sum(0), whole.sum((0, 2, 3)), rtol=0, atol=bound)
    z = z.clone()
    z[0, 0, 0, 0] = float("nan")
    assert kernels.rectify(z, window, scale, bias)[2].sum(0).isnan()[0]


def _rectified(z: torch.Tensor, bias: torch.Tensor | None, scale: torch.Tensor) -> torch.Tensor:
    z = z if bias is None else z + columns.along(bias, z, 1)
    return columns.along(scale, z, 1) * z.relu()


def check_equal_numbers_and_nan(
    kernels: ModuleType, device: str, windows: tuple[Window, ...] = (SQUARES, STEM)
) -> None:
    nan, inf = float("nan"), float("inf")
    squares = [[1, 1, 1, 1], [0, 2, 2, 1], [nan, 1, 2, 3], [3, nan, nan, 1], [-inf] * 4]
    x = torch.tensor(squares, device=device).view(5, 1, 2, 2).contiguous(memory_format=LAST)
    for window in windows:
        y, place, _ = kernels.pool(x, window)
        expected, index = F.max_pool2d(x, *window, return_indices=True)
        torch.testing.assert_close(y, expected, equal_nan=True)
        shift = window.padding
        row, column = place.long() // window.size - shift, place.long() % window.size - shift
        assert torch.equal(row * 2 + column, index)
