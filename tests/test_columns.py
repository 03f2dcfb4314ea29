"""The passes over activations: plain torch against autograd, and C against plain torch."""

import passes
import pytest
import torch
from torch import Tensor

from geoparam.ops import columns, columns_native

needs_c = pytest.mark.skipif(not columns_native.available(), reason="needs a C compiler")
WIDE = [torch.float32, torch.float64]
IN_ORDER = [
    *[case for case in passes.CASES if case[2] is passes.FIRST],
    ((3, 5, 33, 2), 1, passes.FIRST),
    ((40, 6, 300), 1, passes.FIRST),
    ((2, 1, 70000), 1, passes.FIRST),
]


@pytest.mark.parametrize("scaled", [False, True])
def test_plain_torch_is_autograds(scaled: bool) -> None:
    x, b, s, weights = (
        torch.randn(shape, dtype=torch.float64, requires_grad=True)
        for shape in ((2, 3, 4, 4), (3,), (3,), (2, 3, 4, 4))
    )
    of_sums = torch.randn(3, dtype=torch.float64)
    scale = s if scaled else None
    y = (x + b.view(3, 1, 1)).relu() * (s.view(3, 1, 1) if scaled else 1)
    found, sums = columns.rectify(x.detach(), 1, b.detach(), scale)
    torch.testing.assert_close(found, y)
    torch.testing.assert_close(sums, y.sum((0, 2, 3)))
    inputs = (x, b, s) if scaled else (x, b)
    loss = (y * weights).sum() + (y.sum((0, 2, 3)) * of_sums).sum()
    expected = torch.autograd.grad(loss, inputs)
    a = columns.rectify(x.detach(), 1, b.detach())[0]
    gradients = columns.rectify_backward(weights.detach(), a, 1, of_sums, scale)
    again = columns.rectify_backward(
        weights.detach(), x.detach(), 1, of_sums, scale, bias=b.detach()
    )
    for found in (gradients, again):
        for ours, theirs in zip(found, expected, strict=False):
            torch.testing.assert_close(ours, theirs)


@pytest.mark.gpu
@passes.cases
@passes.dtypes
def test_the_kernel_that_compilers_launch(case: tuple, dtype: torch.dtype) -> None:
    kernels = pytest.importorskip("geoparam.ops.columns_triton")
    passes.check_backward_from_the_start(kernels, case, dtype, "cuda")
    passes.check_nan_from_the_start(kernels, "cuda")
    passes.check_backward_without_bias(kernels, "cuda")


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("kernel", [(), (3, 2)], ids=["matrix", "taps"])
def test_shifted_bias_is_the_response_to_the_mean(groups: int, kernel: tuple[int, ...]) -> None:
    def response(weight: Tensor, r: Tensor, lam: Tensor, total: Tensor) -> Tensor:
        seen = (total / 5).view(groups, 1, 3, *[1] * len(kernel))
        units = (weight.view(groups, -1, *weight.shape[1:]) * seen).flatten(2).sum(2)
        return r * lam - units.flatten()

    weight, r, lam, total = (
        torch.randn(shape, dtype=torch.float64, requires_grad=True)
        for shape in ((4, 3, *kernel), (4,), (4,), (3 * groups,))
    )
    with torch.no_grad():
        found = columns.shifted_bias(weight, r, lam, total, 5)
    expected = response(weight, r, lam, total)
    torch.testing.assert_close(found, expected)
    grad, before = torch.randn(4, dtype=torch.float64), torch.randn_like(weight)
    gradients = torch.autograd.grad(expected, (weight, r, lam, total), grad)
    with torch.no_grad():
        ours = columns.shifted_bias_backward(grad, weight, before.clone(), r, lam, total, 5)
    torch.testing.assert_close(ours[0], before + gradients[0])
    for a, b in zip(ours[1:], gradients[1:], strict=True):
        torch.testing.assert_close(a, b)


@needs_c
@pytest.mark.parametrize("case", IN_ORDER, ids=str)
@pytest.mark.parametrize("dtype", WIDE, ids=str)
@pytest.mark.parametrize("threads", [1, 3])
def test_c(case: tuple, dtype: torch.dtype, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns_native, "_NUMBERS_PER_THREAD", 1)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        passes.check_rectify(columns_native, case, dtype, "cpu")
        passes.check_backward(columns_native, case, dtype, "cpu")
        passes.check_backward_from_the_start(columns_native, case, dtype, "cpu")
        passes.check_sums(columns_native, case, dtype, "cpu")
    finally:
        torch.set_num_threads(before)


@needs_c
def test_c_keeps_nan_and_counts_versions() -> None:
    passes.check_nan(columns_native, "cpu")
    x = torch.randn(2, 3, 4)
    version = x._version
    columns_native.rectify(x, 1, None, None, True, True, False)
    assert x._version > version


@needs_c
def test_c_knows_where_one_channel_lies() -> None:
    """With one channel its stride says nothing, and may be longer than the tensor."""
    x = torch.randn(3, 10, 6)[:1, :8].transpose(0, 1)
    assert x.is_contiguous() and x.stride(1) > x.numel()
    torch.testing.assert_close(columns_native.sums(x, 1), x.sum((0, 2)))


@needs_c
def test_c_writes_to_the_cpu_whatever_the_default() -> None:
    x = torch.randn(2, 3, 4, device="cpu")
    with torch.device("meta"):
        total = columns_native.sums(x, 1)
    torch.testing.assert_close(total, x.sum((0, 2)))


@needs_c
def test_c_serves_large_tensors_in_order() -> None:
    large = torch.randn(4, 16, 64, 32)
    assert columns_native.serves(large)
    assert not columns_native.serves(large[:1, :1])
    assert not columns_native.serves(large.to(memory_format=torch.channels_last))
    assert not columns_native.serves(large.bfloat16())
