"""The passes over activations: plain torch against autograd, and C against plain torch."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

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
    monkeypatch.setattr(columns_native, "NUMBERS_PER_THREAD", 1)
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
@pytest.mark.parametrize("positions", [1, 7, 64, 1024, 1025, 3000])
@pytest.mark.parametrize("dtype", WIDE, ids=str)
def test_threads_do_not_change_a_bit(
    positions: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(columns_native, "NUMBERS_PER_THREAD", 1)
    x, grad = torch.randn(2, 5, 11, positions, dtype=dtype)
    bias, scale = torch.randn(2, 11, dtype=dtype)
    results = []
    for threads in (1, 2, 3, 11, 100):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        found = columns_native.rectify(x, 1, bias, scale, True, False, True)
        back = columns_native.rectify_backward(grad, x, 1, bias, scale)
        results.append((*found, *back, columns_native.sums(x, 1)))
    assert all(all(map(torch.equal, result, results[0])) for result in results)


_FORKING = """
import os, signal, sys, torch
from geoparam.ops import columns_native, native, pooling_native

torch.set_num_threads(2)
x, a = torch.randn(4, 8, 64, 256), torch.randn(8, 40000)

def results():
    y, sums = columns_native.rectify(x, 1, None, None, True, False, True)
    pooled, *_ = pooling_native.pool(x, (2, 2, 0))
    found = y, sums, pooled, native.forward(a, None, torch.float32)
    return [t.numpy().tobytes() for t in found]  # torch itself may not compare them in a child

before = results()
child = os.fork()
if child == 0:
    signal.alarm(30)  # who waits for ever must end all the same
    os._exit(0 if results() == before else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@needs_c
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_c_runs_after_a_fork() -> None:
    """The threads of before are gone then, and who waits for them waits for ever."""
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", _FORKING], timeout=60)
    assert run.returncode == 0


@needs_c
def test_c_lends_memory_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    grad, a = torch.randn(2, 2, 3, 40)
    whole, by_bias, _ = columns_native.rectify_backward(grad, a, 1, None, None)
    lent, again, _ = columns_native.rectify_backward(grad, a, 1, None, None, lent=True)
    assert torch.equal(lent, whole) and torch.equal(again, by_bias)
    smaller, *_ = columns_native.rectify_backward(grad[:1], a[:1], 1, None, None, lent=True)
    assert smaller.data_ptr() == lent.data_ptr() != whole.data_ptr()
    assert torch.equal(smaller, whole[:1]) and smaller.is_contiguous()
    precise, *_ = columns_native.rectify_backward(
        grad.double(), a.double(), 1, None, None, lent=True
    )
    assert torch.equal(precise.float(), whole)
    monkeypatch.setattr(columns_native, "MOST_LENT", 8)
    new, *_ = columns_native.rectify_backward(grad, a, 1, None, None, lent=True)
    assert torch.equal(new, whole) and new.data_ptr() != precise.data_ptr()


@needs_c
def test_each_thread_has_its_own_memory() -> None:
    grad, a = torch.randn(2, 2, 3, 40)

    def lent() -> int:
        return columns_native.rectify_backward(grad, a, 1, None, None, lent=True)[0].data_ptr()

    with ThreadPoolExecutor(1) as other:
        assert other.submit(lent).result() != lent()


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
