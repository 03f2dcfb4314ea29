"""What a compiler makes of a max pool behind centring and r relu(z + b): fewer passes."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_rectified import LAST, assert_same, images, network, shifts, train  # noqa: F401
from torch import Tensor, nn

from geoparam import GmPConv2d, InputMeanNorm
from geoparam.ops import columns, expansion, means, pooling, rectified, shifted_op
from geoparam.pooling import MaxPool2d


@pytest.fixture
def pools(shifts: list[bool], monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:  # noqa: F811
    """Let plain torch be the kernels of pooling too; record which, and what they were given."""
    kernels = pytest.importorskip("geoparam.ops.pooling_triton")
    seen: list[tuple[str, Any]] = []

    def pool(
        x: Tensor, window: Any, scale: Tensor | None = None, *, traced: bool
    ) -> tuple[Tensor, ...]:
        seen.append(("pool", scale is not None))
        sign = torch.ones_like(x[0, :, 0, 0]) if scale is None else (scale < 0) * -2.0 + 1
        y, place, sums = pooling.pool(x * columns.along(sign, x, 1), window)
        return y * columns.along(sign, x, 1), place, sums

    def rectify(
        z: Tensor, window: Any, scale: Tensor, bias: Tensor | None, traced: bool
    ) -> tuple[Tensor, ...]:
        y, place, _ = pool(z, window, scale, traced=True)
        seen[-1] = "pool", "summed"
        return y, place, means.sums(rectified._rectified(z, bias, scale))

    def pool_backward(*given: Any, traced: bool) -> tuple[Tensor, Tensor]:
        return pooling.pool_backward(*given)

    def rectify_backward(
        grad: Tensor, place: Tensor, window: Any, z: Tensor, *rest: Any, traced: bool
    ) -> tuple[Tensor, ...]:
        shift, scale, bias = rest
        seen.append(("backward", shift is not None))
        whole = pooling.scattered(grad, place, window, tuple(z.shape[2:]))
        whole = whole if shift is None else whole + columns.along(shift, z, 1)
        return rectified._rectified_backward(whole, z, bias, scale)

    for plain in (pool, rectify, pool_backward, rectify_backward):
        monkeypatch.setattr(kernels, plain.__name__, plain)
    monkeypatch.setattr(expansion, "_served", lambda x: x.ndim == 4)
    return seen


def test_centring_moves_past_a_pool(pools: list, monkeypatch: pytest.MonkeyPatch) -> None:
    model, twin = network(), network()
    twin.load_state_dict(model.state_dict())
    twin[4] = MaxPool2d(2)
    centred, summed = rectified._expanded_centred, []
    shift = rectified._shift
    monkeypatch.setattr(
        rectified, "_shift", lambda g, s: summed.append(s.shape[2:]) or shift(g, s)
    )
    pooled = []
    monkeypatch.setattr(
        rectified, "_expanded_centred", lambda x, m: pooled.append(x.shape[2:]) or centred(x, m)
    )
    torch.compiler.reset()
    found = train(twin, torch.compile(twin, fullgraph=True, backend="aot_eager"))
    assert_same(found, train(model, model), 1e-12)
    assert set(pooled) == {(3, 3)}  # centred behind the pool
    assert summed == [(3, 3), (3, 3), (8, 8)]  # MBN's, the pool's in the place of (6, 6), IMN's
    assert list(dict.fromkeys(pools)) == [("pool", True), ("backward", True)]  # traced twice


class Twice(nn.Module):
    """A unit's result, pooled and as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.unit = GmPConv2d(3, 6, 3, activation=torch.relu)
        self.pool = MaxPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.unit(x)
        return self.pool(y).square().mean((2, 3)) + y.mean((2, 3))


def unit(*behind: nn.Module) -> nn.Module:
    return nn.Sequential(GmPConv2d(3, 6, 3, activation=torch.relu), *behind)


@pytest.mark.parametrize(
    ("make", "used"),
    [
        (lambda: unit(MaxPool2d(2)), [("pool", True), ("backward", False)]),
        (lambda: unit(MaxPool2d(3, 2, 1)), [("pool", True), ("backward", False)]),
        (lambda: unit(InputMeanNorm(6), MaxPool2d(3, 2, 1)), [("pool", True), ("backward", True)]),
        (lambda: unit(MaxPool2d(2), InputMeanNorm(6)), [("pool", True), ("backward", False)]),
        (lambda: unit(nn.Hardtanh(), MaxPool2d(2)), [("pool", False)]),
        (lambda: unit(nn.ReLU(inplace=True), MaxPool2d(2)), [("pool", False)]),
        (Twice, [("pool", True)]),
    ],
    ids=["alone", "overlapping", "centred", "then centred", "clipped", "in place", "twice"],
)
def test_rectification_moves_past_a_pool(pools: list, make: Callable, used: list) -> None:
    torch.manual_seed(0)
    model = make().double().to(memory_format=LAST)
    r = next(m for m in model.modules() if isinstance(m, GmPConv2d)).r
    with torch.no_grad():
        r[:3] = torch.tensor([-0.7, 0.4, -1.3])
    x = images()
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    steps = []
    for call in (model, compiled):
        model.zero_grad()
        y = call(x)
        y.pow(3).sum().backward()
        steps.append([y, *[p.grad for p in model.parameters()]])
    torch.testing.assert_close(steps[1], steps[0], rtol=1e-10, atol=1e-12)
    assert list(dict.fromkeys(pools)) == used  # a forward pass is traced twice


@pytest.fixture
def in_parts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let means be taken of sums in parts, by plain torch as their kernel; record how many."""
    kernels = pytest.importorskip("geoparam.ops.means_triton")
    seen: list[int] = []

    def mean(parts: Tensor, count: int, *rest: Any, traced: bool) -> Tensor:
        seen.append(len(parts))
        found, (running, batches, momentum) = parts.sum(0) / count, rest
        if running is not None:
            columns.advance((running, batches), found, momentum)
        return found

    monkeypatch.setattr(kernels, "mean_of_parts", mean)
    monkeypatch.setattr(shifted_op, "wanted", lambda stored: torch.compiler.is_compiling())
    for name in ("_PARTS", "_NUMBERS"):
        monkeypatch.setattr(means, name, 1)
    # all but the weights, whose kernels would run
    monkeypatch.setattr(expansion, "_served", lambda x: x.ndim != 2 or x.shape[1] == 6)
    return seen


def as_it_is(model: nn.Module, x: Tensor) -> Tensor:
    return model(x)


def read_twice(model: nn.Module, x: Tensor) -> Tensor:
    return model(x) + model[1].running_mean.sum()


def changed_between(model: nn.Module, x: Tensor) -> Tensor:
    y = model[1](model[0](x))
    model[1].running_mean.mul_(0.5)
    return model[2](y)


@pytest.mark.parametrize(
    ("use", "window", "track", "used"),
    [
        (as_it_is, (2,), True, "summed"),
        (as_it_is, (2,), False, "summed"),
        (as_it_is, (3, 2, 1), True, True),
        (read_twice, (2,), True, "summed"),
        (changed_between, (2,), True, True),
    ],
    ids=["tiles", "untracked", "overlapping", "read", "changed"],
)
def test_the_mean_is_gathered_by_the_pool(
    pools: list, in_parts: list[int], use: Callable, window: tuple, track: bool, used: Any
) -> None:
    torch.manual_seed(0)
    norm = InputMeanNorm(6, track_running_stats=track)
    model = unit(norm, MaxPool2d(*window)).double().to(memory_format=LAST)
    with torch.no_grad():
        model[0].r[:2] = torch.tensor([-0.7, 0.4])
    twin = copy.deepcopy(model)
    torch.compiler.reset()
    compiled = torch.compile(use, fullgraph=True, backend="aot_eager")
    steps = []
    for one, call in ((model, use), (twin, compiled)):
        torch.manual_seed(1)
        y = [call(one, images()) for _ in range(2)]
        sum(value.pow(3).sum() for value in y).backward()
        steps.append([*y, *[p.grad for p in one.parameters()], *one.buffers()])
    torch.testing.assert_close(steps[1], steps[0], rtol=1e-10, atol=1e-12)
    assert pools[0] == ("pool", used)
