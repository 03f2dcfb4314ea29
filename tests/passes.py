"""What every implementation of the passes over activations must satisfy, stated once.

`kernels` is a module with the functions of `geoparam.ops.columns_triton`; `device` is where its
tensors live. Expected values are those of plain torch, in float64.
"""

from types import ModuleType

import pytest
import torch
from torch import Tensor

from geoparam.ops import columns

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
BOUND = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
LAST, FIRST = torch.channels_last, torch.contiguous_format
# shape, dimension of the channels, layout
CASES = [
    ((2, 3, 5, 4), 1, LAST),
    ((2, 3, 5, 4), 1, FIRST),
    ((3, 70, 9, 8), 1, LAST),
    ((7, 27), 1, FIRST),
    ((3, 5, 7), -1, FIRST),
    ((1, 1, 2, 2), 1, LAST),
    ((0, 4, 3, 3), 1, LAST),
]
# units, channels of a group, kernel, groups


def near(found: Tensor | None, expected: Tensor | None, dtype: torch.dtype) -> None:
    """Check numbers that were rounded to `dtype`, or that sums of such numbers gave."""
    if expected is None:
        assert found is None
        return
    assert found is not None and found.shape == expected.shape
    if expected.numel():
        scale = expected.abs().max().clamp(min=1)
        assert (found.double().cpu() - expected.cpu()).abs().max() <= BOUND[dtype] * scale


def activation(case: tuple, dtype: torch.dtype, device: str) -> Tensor:
    shape, _, layout = case
    x = torch.randn(shape).to(device, dtype)
    return x.contiguous(memory_format=layout) if len(shape) == 4 else x


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def check_rectify(kernels: ModuleType, case: tuple, dtype: torch.dtype, device: str) -> None:
    x, dim = activation(case, dtype, device), case[1]
    channels = x.shape[dim]
    bias = torch.randn(channels).to(device, dtype)
    scale = torch.randn(channels).to(device, wide(dtype))
    for b, s, relu in [
        (None, None, True),
        (bias, None, True),
        (bias, scale, True),
        (bias, None, False),
    ]:
        given = (t if t is None else t.double().cpu() for t in (b, s))
        expected, sums = columns.rectify(x.double().cpu(), dim, *given, relu=relu)
        y, found = kernels.rectify(x, dim, b, s, relu, False, True)
        near(y, expected, dtype)
        near(found, y.double().sum([d for d in range(y.ndim) if d != dim % y.ndim]), wide(dtype))
        assert y.stride() == x.stride() and found.dtype == wide(dtype)
        z = x.clone()
        assert kernels.rectify(z, dim, b, s, relu, True, False)[0] is z
        assert torch.equal(z, y)


def check_backward(kernels: ModuleType, case: tuple, dtype: torch.dtype, device: str) -> None:
    x, dim = activation(case, dtype, device), case[1]
    channels, a = x.shape[dim], x.relu()
    grad = activation(case, dtype, device)
    grad_sums, scale = torch.randn(2, channels).to(device, wide(dtype))
    for gs, s in [(None, None), (grad_sums, None), (grad_sums, scale)]:
        given = (t if t is None else t.double().cpu() for t in (gs, s))
        expected = columns.rectify_backward(grad.double().cpu(), a.double().cpu(), dim, *given)
        found = kernels.rectify_backward(grad, a, dim, gs, s)
        near(found[0], expected[0], dtype)
        others = [d for d in range(a.ndim) if d != dim % a.ndim]
        near(found[1], found[0].double().sum(others), wide(dtype))
        near(found[2], expected[2], dtype)


def check_backward_from_the_start(
    kernels: ModuleType, case: tuple, dtype: torch.dtype, device: str
) -> None:
    """Bias and ReLU are done again, from what they were applied to."""
    x, dim = activation(case, dtype, device), case[1]
    channels, grad = x.shape[dim], activation(case, dtype, device)
    grad_sums, scale, bias = torch.randn(3, channels).to(device, wide(dtype))
    for gs, s, b in [(grad_sums, scale, bias), (None, scale, bias), (grad_sums, None, bias)]:
        given = [t if t is None else t.double().cpu() for t in (gs, s, b)]
        a = columns.rectify(x.double().cpu(), dim, given[2], summed=False)[0]
        expected = columns.rectify_backward(grad.double().cpu(), a, dim, *given[:2])
        found = kernels.rectify_backward(grad, x, dim, gs, s, bias=b)
        for ours, theirs in zip(found, expected, strict=True):
            near(ours, theirs, dtype)


def check_backward_without_bias(kernels: ModuleType, device: str) -> None:
    """Triton's kernel, which compilers launch, rectifies what it is given."""
    x, grad = (activation(CASES[0], torch.float32, device) for _ in range(2))
    scale = torch.randn(3, device=device)
    found = kernels.rectify_backward(grad, x, 1, None, scale)
    expected = kernels.rectify_backward(grad, x.relu(), 1, None, scale)
    assert all(map(torch.equal, found, expected))


def check_sums(kernels: ModuleType, case: tuple, dtype: torch.dtype, device: str) -> None:
    x, dim = activation(case, dtype, device), case[1]
    others = [d for d in range(x.ndim) if d != dim % x.ndim]
    near(kernels.sums(x, dim), x.double().sum(others), wide(dtype))


def check_strided(kernels: ModuleType, device: str) -> None:
    """Gaps in memory, and a gradient that lies otherwise than the activation."""
    x = torch.randn(4, 6, 5, 5, device=device)[::2, :, 1:]
    near(kernels.sums(x, 1), x.double().sum((0, 2, 3)), torch.float32)
    y, _ = kernels.rectify(x, 1, None, None, True, False, True)
    assert torch.equal(y, x.relu())
    grad = torch.randn(1, 4, 6, 1, device=device).transpose(1, 2).expand_as(x)
    found = kernels.rectify_backward(grad, y, 1, None, None)
    assert torch.equal(found[0], torch.where(y > 0, grad, 0))


def check_strided_parameters(kernels: ModuleType, device: str) -> None:
    """One number per channel may come from anywhere: a column, or one number for all."""
    columns_of = torch.randn(4, 5, device=device)
    r, lam, mean = columns_of[:, 0], columns_of[:1, 1].expand(4), columns_of[:, 2]
    x, total = torch.randn(3, 4, device=device), columns_of[:, 3]
    expected_mean = (mean + 0.1 * (total / 7 - mean)).clone()
    expected = columns.centre(x.cpu(), 1, total.cpu(), 7, lam.cpu())
    running = mean, torch.tensor(3, device=device)
    near(kernels.centre(x, 1, total, 7, lam, running, 0.1), expected.double(), torch.float32)
    near(mean, expected_mean.double(), torch.float32)
    y, _ = kernels.rectify(x, 1, lam, r, True, False, True)
    near(y, columns.rectify(x.cpu(), 1, lam.cpu(), r.cpu())[0].double(), torch.float32)
    found = kernels.rectify_backward(x, y.abs(), 1, lam, r)
    expected = columns.rectify_backward(x.cpu(), y.abs().cpu(), 1, lam.cpu(), r.cpu())
    for a, b in zip(found, expected, strict=True):
        near(a, b.double(), torch.float32)


def check_nan(kernels: ModuleType, device: str) -> None:
    x = torch.tensor([[1.0, float("nan")], [-1.0, 2.0]], device=device)
    y, sums = kernels.rectify(x, 1, None, None, True, False, True)
    assert y[0, 1].isnan() and sums[1].isnan() and sums[0] == 1
    grad = torch.tensor([[2.0, 3.0], [4.0, 5.0]], device=device)
    found, _, _ = kernels.rectify_backward(grad, y, 1, None, None)
    assert found.tolist() == [[2, 3], [0, 5]]  # as torch's: only what is not above 0 stops it


def check_nan_from_the_start(kernels: ModuleType, device: str) -> None:
    x = torch.tensor([[1.0, float("nan")], [-1.0, 2.0]], device=device)
    grad = torch.tensor([[2.0, 3.0], [4.0, 5.0]], device=device)
    one = torch.ones(2, device=device)
    found, by_bias, by_scale = kernels.rectify_backward(grad, x, 1, None, one, bias=-0.5 * one)
    assert found.tolist() == [[2, 3], [0, 5]] and by_bias.tolist() == [2, 8]
    assert by_scale[0] == 1 and by_scale[1].isnan()


def check_centre(kernels: ModuleType, case: tuple, dtype: torch.dtype, device: str) -> None:
    x, dim = activation(case, dtype, device), case[1]
    bias, total, mean = torch.randn(3, x.shape[dim]).to(device, wide(dtype))
    for b in (bias, None):
        running, precise = (mean.clone(), torch.tensor(3, device=device)), mean.double().cpu()
        precise = precise, torch.tensor(3)
        given = x.double().cpu(), dim, total.double().cpu(), 7
        expected = columns.centre(*given, b if b is None else b.double().cpu(), precise, 0.1)
        version = running[0]._version
        near(kernels.centre(x, dim, total, 7, b, running, 0.1), expected, dtype)
        near(running[0], precise[0], wide(dtype))
        assert running[1] == 4 and running[0]._version > version
    near(kernels.centre(x, dim, total, 7, b, None, 0.0), expected, dtype)


cases = pytest.mark.parametrize("case", CASES, ids=str)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
