"""What a compiler finds of a network's first convolution: kernels for few channels each way."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import stem_checks
import torch
import torch.nn.functional as F
from test_compiled_pools import pools, shifts  # noqa: F401
from test_expansion import KERNEL, traced
from test_rectified import images, train
from torch import Tensor, nn

from geoparam import GmPConv2d, InputMeanNorm
from geoparam.ops import columns, implementation, rectified, stem
from geoparam.pooling import MaxPool2d

LAST = torch.channels_last


@pytest.fixture
def calls(pools: list, monkeypatch: pytest.MonkeyPatch) -> list[str]:  # noqa: F811
    """Let plain torch be the kernels in the graph, in float64; record which."""
    kernels = pytest.importorskip("geoparam.ops.stem_triton")
    seen: list[str] = []

    def forward(x: Tensor, weight: Tensor, size: tuple, *sides: Any, traced: bool) -> Tensor:
        seen.append("forward")
        z = F.conv2d(x, weight, None, *sides)
        assert z.shape == size
        return z

    def backward(
        grad: Tensor, shift: Tensor | None, x: Tensor, z: Tensor, *rest: Any, traced: bool
    ) -> tuple[Tensor, ...]:
        seen.append("backward" if shift is None else "shifted")
        bias, scale, kernel, *sides = rest
        whole = grad if shift is None else grad + columns.along(shift, grad, 1)
        by_z, *sums = rectified._rectified_backward(whole, z, bias, scale)
        weight = z.new_zeros(z.shape[1], x.shape[1], *kernel)
        return stem._by_weight(by_z, x, weight, *sides), *sums

    monkeypatch.setattr(kernels, "forward", forward)
    monkeypatch.setattr(kernels, "backward", backward)
    monkeypatch.setattr(rectified, "_served", lambda x: True)
    monkeypatch.setattr(stem, "_TYPES", (torch.float64,))
    return seen


def network(*behind: nn.Module, kernel: int = 3, **options: Any) -> nn.Module:
    """Return a first convolution and what is behind it, r of both signs and 0."""
    torch.manual_seed(0)
    first = GmPConv2d(3, 6, kernel, **{"padding": 1, "activation": torch.relu, **options})
    with torch.no_grad():
        first.r[:3] = torch.tensor([-0.7, 0.0, 1.3])
    return nn.Sequential(first, *behind).double().to(memory_format=LAST)


@pytest.mark.parametrize(
    ("make", "used"),
    [
        (network, ["forward", "backward"]),
        (lambda: network(InputMeanNorm(6)), ["forward", "shifted"]),
        (lambda: network(stride=2, dilation=(1, 2), bias=False), ["forward", "backward"]),
        (lambda: network(input_norm="bias"), ["forward", "backward"]),
        (lambda: network(coordinates="intrinsic"), ["forward", "backward"]),
        (lambda: network(padding="same"), ["forward", "backward"]),
        (lambda: network(padding_mode="reflect"), []),
        (lambda: network(kernel=5), []),
        (lambda: network(groups=3), []),
        (lambda: network(activation=None), []),
        (lambda: network(activation=torch.tanh), []),
    ],
    ids=[
        "alone",
        "centred",
        "strides",
        "mean in the bias",
        "intrinsic",
        "same",
        "reflected",
        "large",
        "groups",
        "no ReLU",
        "another activation",
    ],
)
def test_training_steps_are_those_of_the_readable_form(
    calls: list[str], make: Callable, used: list[str]
) -> None:
    model = make()
    twin = copy.deepcopy(model)
    torch.compiler.reset()
    found = train(twin, torch.compile(twin, fullgraph=True, backend="aot_eager"))
    expected = train(model, model)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=1e-12, rtol=1e-10, msg=name)
    assert list(dict.fromkeys(calls)) == used  # a forward pass is traced twice


def test_a_pool_keeps_its_own_gradient(calls: list[str]) -> None:
    model = network(nn.MaxPool2d(2))
    twin = copy.deepcopy(model)
    twin[1] = MaxPool2d(2)
    torch.compiler.reset()
    found = train(twin, torch.compile(twin, backend="aot_eager"))
    expected = train(model, model)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=1e-12, rtol=1e-10, msg=name)
    assert set(calls) == {"forward"}


def test_large_images_keep_the_librarys_convolution() -> None:
    x, z = torch.empty(4, 3, 8, 8, device="meta"), torch.empty(4, 6, 8, 8, device="meta")
    assert stem._is_countable(x, z)
    assert not stem._is_countable(x.as_strided(x.shape, (8, 1, 1 << 30, 1)), z)
    assert not stem._is_countable(x, z.expand(4, 6, 8, 8).as_strided((1 << 25, 6, 8, 8), (0,) * 4))


def test_images_that_want_a_gradient_get_it(calls: list[str]) -> None:
    model, given, found = network(InputMeanNorm(6)), images(), []
    torch.compiler.reset()
    for call in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        x = given.clone().requires_grad_()
        call(x).pow(3).sum().backward()
        found.append(x.grad)
    torch.testing.assert_close(found[1], found[0])
    assert not calls


def test_images_of_another_type_are_refused(calls: list[str]) -> None:
    model = network()
    torch.compiler.reset()
    for call in (model, torch.compile(model, backend="aot_eager")):
        with pytest.raises(RuntimeError, match="type"):
            call(images().float())


def test_who_looks_at_the_result_finds_its_gradient(calls: list[str]) -> None:
    def clipped(model: nn.Module, x: Tensor) -> Tensor:
        y = model[0](x)
        y.register_hook(lambda grad: grad.clamp(-0.1, 0.1))
        return model[1](y).pow(3).sum()

    found = []
    for compiled in (False, True):
        model = network(InputMeanNorm(6))
        torch.compiler.reset()
        call = torch.compile(clipped, backend="aot_eager") if compiled else clipped
        call(model, images_of_a_seed()).backward()
        found.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(found[1], found[0], atol=1e-11, rtol=1e-10)
    assert calls[-1] == "backward"  # the shift is in what the hook returns


def images_of_a_seed() -> Tensor:
    torch.manual_seed(1)
    return images()


@pytest.mark.parametrize("bias", [True, False])
def test_the_ops_are_what_they_are_expanded_to(bias: bool) -> None:
    """Where nothing expands them, as in a subclass of tensors, they run as they are."""
    sides = (2, 1), (1, 0), (1, 1)
    x, weight = images(), torch.randn(5, 3, 2, 3, dtype=torch.float64)
    given = [weight, torch.randn(5, dtype=torch.float64), torch.randn(5, dtype=torch.float64)]
    weight, b, scale = (t.requires_grad_() for t in given)
    b = b if bias else None
    inputs = [t for t in (weight, b, scale) if t is not None]
    y = stem.convolved(x, weight, b, scale, *sides)
    plain = F.conv2d(x, weight, b, *sides).relu() * scale.view(5, 1, 1)
    torch.testing.assert_close(y, plain)
    found = torch.autograd.grad(y.pow(3).sum(), inputs, create_graph=True)
    expected = torch.autograd.grad(plain.pow(3).sum(), inputs, create_graph=True)
    torch.testing.assert_close(found, expected)
    again, once = (sum(g.pow(2).sum() for g in one) for one in (found, expected))
    torch.testing.assert_close(
        torch.autograd.grad(again, inputs), torch.autograd.grad(once, inputs)
    )


# --- the graph ----------------------------------------------------------------------------------


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the tracing believe that Triton's kernels serve a CPU."""
    pytest.importorskip("triton")
    monkeypatch.setattr(implementation, "KERNELS", "triton")
    monkeypatch.setattr(rectified, "_served", lambda x: True)


@pytest.mark.skipif(
    torch.__version__ < "2.15" and not torch.cuda.is_available(),
    reason="older compilers need a GPU to see what a kernel changes",
)
def test_compilers_see_two_kernels(on_gpu: None) -> None:
    found = traced(network(coordinates="intrinsic").bfloat16(), images().bfloat16())
    assert found.count(KERNEL) == 2
    assert not any("geoparam.stem" in name or "convolution" in name for name in found)


@pytest.mark.parametrize("dynamic", [True, False], ids=["unknown sizes", "another layout"])
def test_plain_operations_elsewhere(on_gpu: None, dynamic: bool) -> None:
    model = network(coordinates="intrinsic").bfloat16()
    x = images().bfloat16()
    if not dynamic:
        model, x = model.to(memory_format=torch.contiguous_format), x.contiguous()
    found = traced(model, x, dynamic=dynamic)
    assert KERNEL not in found and "aten.convolution.default" in found
    assert not any("geoparam.stem" in name for name in found)


# --- on a GPU -----------------------------------------------------------------------------------


@pytest.mark.gpu
@stem_checks.cases
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_kernels(case: tuple, dtype: torch.dtype) -> None:
    kernels = pytest.importorskip("geoparam.ops.stem_triton")
    stem_checks.check(kernels, case, dtype, "cuda")


@pytest.mark.gpu
def test_kernels_on_many_images() -> None:
    kernels = pytest.importorskip("geoparam.ops.stem_triton")
    case = (256, 3, 32, 31), (128, 3, 3, 3), (1, 1), (1, 1), (1, 1)
    stem_checks.check(kernels, case, torch.bfloat16, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_compiled_steps_are_as_near_as_eager_ones(dtype: torch.dtype) -> None:
    def gradients(model: nn.Module, call: Callable, x: Tensor, cast: bool) -> Tensor:
        with torch.autocast("cuda", dtype, enabled=cast):
            y = call(x)
        y.double().pow(3).mean().backward()
        return torch.cat([p.grad.double().flatten() for p in model.parameters()])

    model = network(InputMeanNorm(6)).cuda()
    x = torch.randn(64, 3, 9, 8, dtype=torch.float64).cuda().contiguous(memory_format=LAST)
    eager, compiled = copy.deepcopy(model).float(), copy.deepcopy(model).float()
    exact = gradients(model, model, x, False)
    error = (gradients(eager, eager, x.float(), True) - exact).norm()
    torch.compiler.reset()
    call = torch.compile(compiled, fullgraph=True)
    assert (gradients(compiled, call, x.float(), True) - exact).norm() < 1.5 * error
