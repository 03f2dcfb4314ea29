"""Max pooling in few passes: torch's numbers, and sums for those before and behind it."""

import copy
from collections.abc import Callable

import numpy as np
import pooling_checks
import pytest
import torch
import torch.nn.functional as F
from test_expansion import KERNEL, traced
from torch import Tensor, nn

import geoparam as gp
from geoparam import GmPConv2d, InputMeanNorm, fused
from geoparam.ops import columns, columns_native, expansion, pooling, rectified
from geoparam.ops.pooling import Window
from geoparam.pooling import MaxPool2d

LAST, FIRST = torch.channels_last, torch.contiguous_format
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@pytest.fixture
def on(switch: Callable, monkeypatch: pytest.MonkeyPatch) -> Callable[[bool, str], None]:
    """Switch pooling in few passes on or off, by plain torch on CPUs."""

    def turn(on: bool, device: str = "cpu") -> None:
        switch(on)
        monkeypatch.setattr(fused, "DEVICES", {device} if on else set())
        if device == "cpu":
            monkeypatch.setattr(pooling, "worthwhile", lambda x, window: True)

    return turn


@pooling_checks.windows
@pooling_checks.cases
@pooling_checks.dtypes
def test_plain_torch(shape: tuple, window: Window, dtype: torch.dtype) -> None:
    pooling_checks.check(pooling, shape, window, dtype, "cpu")


def test_equal_numbers_and_nan() -> None:
    pooling_checks.check_equal_numbers_and_nan(pooling, "cpu")


@pytest.mark.gpu
@pooling_checks.windows
@pytest.mark.parametrize("shape", [(5, 16, 11, 8), (64, 128, 33, 32)], ids=str)
def test_kernels(shape: tuple, window: Window) -> None:
    kernels = pytest.importorskip("geoparam.ops.pooling_triton")
    pooling_checks.check(kernels, shape, window, torch.float32, "cuda")


@pytest.mark.gpu
@pooling_checks.dtypes
def test_types_of_kernels(dtype: torch.dtype) -> None:
    kernels = pytest.importorskip("geoparam.ops.pooling_triton")
    for window in (pooling_checks.SQUARES, pooling_checks.STEM):
        pooling_checks.check(kernels, (3, 70, 5, 5), window, dtype, "cuda")
    pooling_checks.check_equal_numbers_and_nan(kernels, "cuda")


@pytest.mark.gpu
@pooling_checks.dtypes
@pytest.mark.parametrize("shape", [(5, 16, 11, 8), (64, 128, 33, 32), (33, 70, 12, 8)], ids=str)
def test_rectified_and_pooled(shape: tuple, dtype: torch.dtype) -> None:
    kernels = pytest.importorskip("geoparam.ops.pooling_triton")
    for window in (pooling_checks.SQUARES, pooling_checks.STEM):
        pooling_checks.check_rectified(kernels, shape, window, dtype, "cuda")


def network() -> nn.Module:
    return nn.Sequential(
        GmPConv2d(3, 4, 3, padding=1, activation=torch.relu),
        InputMeanNorm(4),
        MaxPool2d(2),
        GmPConv2d(4, 6, 3, padding=1, activation=torch.relu, input_norm="bias"),
        MaxPool2d(3, 2, 1),
        InputMeanNorm(6),
    ).to(torch.float64, memory_format=LAST)


@pytest.mark.parametrize("layout", [LAST, FIRST], ids=["last", "first"])
@devices
def test_training_and_second_derivatives(
    on: Callable, device: str, layout: torch.memory_format, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(columns_native, "SMALLEST", 0)  # with FIRST, by C where it is there
    model = network().to(device, memory_format=layout)
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64, device=device)
    x = x.contiguous(memory_format=layout)
    found: list[list[Tensor]] = []
    for few in (False, True):
        on(few, device)
        twin = copy.deepcopy(model)
        y = twin(x.requires_grad_())
        y.pow(3).sum().backward()
        (slope,) = torch.autograd.grad(twin(x).pow(3).sum(), x, create_graph=True)
        curved = torch.autograd.grad(slope.square().sum(), list(twin.parameters()))
        found.append([y, x.grad, slope, *curved, *[p.grad for p in twin.parameters()]])
        found[-1] += list(twin.buffers())
        x.grad = None
    torch.testing.assert_close(found[1], found[0], atol=1e-12, rtol=1e-9)


def test_centring_before_a_pool_sums_no_gradient(
    on: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(True)
    model = network()[:3]
    y = model(torch.randn(2, 3, 8, 8, dtype=torch.float64).contiguous(memory_format=LAST))
    summed, sums = [], columns.sums

    def recorded(x: Tensor, dim: int) -> Tensor:
        summed.append(x.shape)
        return sums(x, dim)

    monkeypatch.setattr(columns, "sums", recorded)
    monkeypatch.setattr(
        columns, "rectify_backward", lambda grad, a, *_, **__: (grad, *[a[0, :, 0, 0]] * 2)
    )
    y.pow(3).sum().backward()
    assert summed == [y.shape]  # the pool's own, of a quarter of the numbers


@pytest.mark.parametrize(
    "pool",
    [
        MaxPool2d((2, 3)),
        MaxPool2d(2, (2, 1)),
        MaxPool2d(2, dilation=2),
        MaxPool2d(3, 2, ceil_mode=True),
        MaxPool2d(7, 2),
    ],
    ids=str,
)
def test_other_windows_are_torchs(on: Callable, pool: MaxPool2d) -> None:
    on(True)
    x = torch.randn(2, 3, 8, 8, requires_grad=True)
    y = pool(x * 1)
    assert torch.equal(y, nn.MaxPool2d.forward(pool, x))
    assert "MaxPool2D" in y.grad_fn.name()


@pytest.mark.parametrize(
    "pool", [MaxPool2d(2), MaxPool2d((3, 3), (2, 2), 1), MaxPool2d(3)], ids=str
)
def test_windows_are_ours(on: Callable, pool: MaxPool2d) -> None:
    on(True)
    x = torch.randn(2, 3, 7, 8, requires_grad=True)
    y = pool(x * 1)
    assert torch.equal(y, nn.MaxPool2d.forward(pool, x))
    assert "MaxPool2D" not in y.grad_fn.name()


def test_evaluation_and_images_alone_are_torchs(on: Callable) -> None:
    on(True)
    pool = MaxPool2d(2)
    x = torch.randn(3, 8, 8)
    assert torch.equal(pool(x.requires_grad_()), nn.functional.max_pool2d(x, 2))
    y = pool.eval()(torch.randn(2, 3, 8, 8, requires_grad=True))
    assert "MaxPool2D" in y.grad_fn.name()


def test_windows_too_large_are_torchs_error(on: Callable) -> None:
    on(True)
    for pool, side in ((MaxPool2d(3), 2), (MaxPool2d(2, padding=2), 8)):
        with pytest.raises(RuntimeError):
            pool(torch.randn(1, 1, side, side, requires_grad=True))


@pytest.mark.parametrize("pool", [MaxPool2d(2), MaxPool2d(3, 2, 1)], ids=str)
def test_batched_gradients(on: Callable, pool: MaxPool2d, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns_native, "SMALLEST", 0)
    on(True)
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian
    found = jacobian(lambda x: pool(x * 1).pow(2), x, vectorize=True)
    assert torch.equal(found, jacobian(lambda x: nn.MaxPool2d.forward(pool, x).pow(2), x))


def test_gradients_of_all_kinds(on: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing at all, numbers whose sign is a bit beside them, and without versions."""
    monkeypatch.setattr(columns_native, "SMALLEST", 0)
    on(True)
    x = torch.randn(2, 3, 4, 4, requires_grad=True)
    y, sums = MaxPool2d(2)(torch._neg_view(x * 1)), MaxPool2d(2)(fused.ReLU()(x * 1))
    assert torch.equal(y, F.max_pool2d(-x, 2))
    nothing, given = torch._efficientzerotensor(y.shape), torch.randn(y.shape)
    assert torch.autograd.grad(sums, x, nothing, retain_graph=True)[0].count_nonzero() == 0
    negative = torch.autograd.grad(sums, x, torch._neg_view(given), retain_graph=True)[0]
    expected = torch.autograd.grad(F.max_pool2d(x.relu(), 2), x, given)[0]
    with torch.inference_mode():
        found = torch.autograd.grad(sums, x, given)[0]
    assert torch.equal(found, expected) and torch.equal(negative, -expected)


@pytest.mark.parametrize(
    "pool", [MaxPool2d(2, stride=()), MaxPool2d(np.int64(2)), MaxPool2d((2,))], ids=str
)
def test_what_only_torch_understands(on: Callable, pool: MaxPool2d) -> None:
    on(True)
    x = torch.randn(2, 3, 4, 4, requires_grad=True)
    assert torch.equal(pool(x * 1), F.max_pool2d(x, 2))


def test_export_of_any_number_of_images(on: Callable) -> None:
    on(True)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), MaxPool2d(2))
    shapes = ({0: torch.export.Dim("images")},)
    program = torch.export.export(model, (torch.randn(4, 3, 8, 8),), dynamic_shapes=shapes)
    x = torch.randn(7, 3, 8, 8)
    torch.testing.assert_close(program.module()(x), model(x))


def test_symbolic_tracing(on: Callable) -> None:
    on(True)
    pool, x = MaxPool2d(2), torch.randn(2, 3, 4, 4)
    tracer = torch.fx.Tracer()
    tracer.is_leaf_module = lambda *_: False
    traced = torch.fx.GraphModule(pool, tracer.trace(pool))
    assert torch.equal(traced(x), pool(x))


# --- compiled -----------------------------------------------------------------------------------


def compiled_pool(x: Tensor) -> Tensor:
    return MaxPool2d(3, 2, 1)(x.contiguous(memory_format=LAST) * 1)


def test_compilers_find_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(rectified, "_served", lambda x: True)
    monkeypatch.setattr(expansion, "_served", lambda x: True)
    found = traced(compiled_pool, torch.randn(2, 3, 6, 7, requires_grad=True))
    assert found.count(KERNEL) == 2  # one each way
    assert not any("geoparam" in target for target in found)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_by_the_op(dynamic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rectified, "_served", lambda x: True)
    check_compiled("cpu", "aot_eager", dynamic)


@pytest.mark.gpu
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_on_a_gpu(dynamic: bool) -> None:
    check_compiled("cuda", "inductor", dynamic)


def check_compiled(device: str, backend: str, dynamic: bool) -> None:
    torch.compiler.reset()
    run = torch.compile(compiled_pool, backend=backend, dynamic=dynamic, fullgraph=True)
    for size in (7, 10):
        x = torch.randn(2, 3, 6, size, device=device, requires_grad=True)
        for pool in (run, nn.MaxPool2d(3, 2, 1)):
            x.grad = None
            y = pool(x)
            y.pow(3).sum().backward()
            if pool is run:
                found = y, x.grad
        torch.testing.assert_close(found, (y, x.grad))


# --- conversion ---------------------------------------------------------------------------------


def test_pools_before_a_mean_are_ours_and_come_back() -> None:
    layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    layers += [nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(4, 2))
    gp.convert_(model, norm="imn", example_inputs=torch.randn(4, 3, 10, 10))
    assert [type(model[3]), type(model[7])] == [MaxPool2d, nn.MaxPool2d]
    gp.fold_(model)
    assert type(model[3]) is nn.MaxPool2d and model[3].padding == 1
