"""Max pooling in few passes: torch's numbers, and sums for those before and behind it."""

import copy
from collections.abc import Callable

import pooling_checks
import pytest
import torch
from torch import Tensor, nn

from geoparam import GmPConv2d, InputMeanNorm, fused
from geoparam.ops import columns, pooling
from geoparam.pooling import MaxPool2d

LAST = torch.channels_last
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@pytest.fixture
def on(switch: Callable, monkeypatch: pytest.MonkeyPatch) -> Callable[[bool, str], None]:
    """Switch pooling in few passes on or off, by plain torch on CPUs."""

    def turn(on: bool, device: str = "cpu") -> None:
        switch(on)
        monkeypatch.setattr(fused, "DEVICES", {device} if on else set())
        if device == "cpu":
            monkeypatch.setattr(pooling, "worthwhile", lambda x: True)

    return turn


@pooling_checks.cases
@pooling_checks.dtypes
def test_plain_torch(shape: tuple, dtype: torch.dtype) -> None:
    pooling_checks.check(pooling, shape, dtype, "cpu")
    pooling_checks.check_equal_numbers_and_nan(pooling, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [*pooling_checks.SHAPES, (64, 128, 32, 32)], ids=str)
@pooling_checks.dtypes
def test_kernels(shape: tuple, dtype: torch.dtype) -> None:
    kernels = pytest.importorskip("geoparam.ops.pooling_triton")
    pooling_checks.check(kernels, shape, dtype, "cuda")
    pooling_checks.check_equal_numbers_and_nan(kernels, "cuda")


def network() -> nn.Module:
    return nn.Sequential(
        GmPConv2d(3, 4, 3, padding=1, activation=torch.relu),
        InputMeanNorm(4),
        MaxPool2d(2),
        GmPConv2d(4, 6, 3, padding=1, activation=torch.relu, input_norm="bias"),
        MaxPool2d(2),
        InputMeanNorm(6),
    ).to(torch.float64, memory_format=LAST)


@devices
def test_training_and_second_derivatives(on: Callable, device: str) -> None:
    model = network().to(device)
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64, device=device).contiguous(memory_format=LAST)
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
    [MaxPool2d(3, 2), MaxPool2d(2, 1), MaxPool2d(2, padding=1), MaxPool2d(2, dilation=2)],
    ids=str,
)
def test_other_windows_are_torchs(on: Callable, pool: MaxPool2d) -> None:
    on(True)
    x = torch.randn(2, 3, 8, 8, requires_grad=True)
    y = pool(x * 1)
    assert torch.equal(y, nn.MaxPool2d.forward(pool, x))
    assert "MaxPool2D" in y.grad_fn.name()


def test_odd_sizes_evaluation_and_images_alone_are_torchs(on: Callable) -> None:
    on(True)
    pool = MaxPool2d(2)
    for x in (torch.randn(2, 3, 7, 8), torch.randn(3, 8, 8)):
        assert torch.equal(pool(x.requires_grad_()), nn.functional.max_pool2d(x, 2))
    y = pool.eval()(torch.randn(2, 3, 8, 8, requires_grad=True))
    assert "MaxPool2D" in y.grad_fn.name()
