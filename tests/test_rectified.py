"""What a compiler finds of a layer with its own ReLU: plain operations, and one pass backward."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_expansion import KERNEL, traced
from torch import Tensor, nn

from geoparam import GmPConv2d, InputMeanNorm, MeanOnlyBatchNorm
from geoparam.ops import columns, implementation, rectified, shifted_op
from geoparam.pooling import MaxPool2d

LAST = torch.channels_last


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the tracing believe that Triton's kernels serve a CPU."""
    pytest.importorskip("triton")
    monkeypatch.setattr(implementation, "KERNELS", "triton")
    monkeypatch.setattr(rectified, "_served", lambda x: True)


@pytest.fixture
def shifts(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Let plain torch be the kernel in the graph; record whether it was given a shift."""
    kernels = pytest.importorskip("geoparam.ops.columns_triton")
    seen: list[bool] = []

    def plain(
        grad: Tensor, z: Tensor, dim: int, shift: Tensor | None, scale: Tensor, **rest: Any
    ) -> tuple[Tensor, ...]:
        seen.append(shift is not None)
        a = z if rest["bias"] is None else z + columns.along(rest["bias"], z, dim)
        a = a.relu()
        whole = grad if shift is None else grad + columns.along(shift, grad, dim)
        others = (0, 2, 3)
        grad_z = torch.where(a <= 0, 0, whole * columns.along(scale, z, dim)).to(z.dtype)
        return grad_z, grad_z.sum(others), (whole * a).sum(others)

    monkeypatch.setattr(kernels, "rectify_backward", plain)
    monkeypatch.setattr(rectified, "_served", lambda x: True)
    return seen


def network() -> nn.Module:
    """Return layers with their own ReLU and mean normalization, r of both signs and 0."""
    model = nn.Sequential(
        GmPConv2d(3, 4, 3, padding=1, activation=torch.relu),
        InputMeanNorm(4),
        GmPConv2d(4, 6, 3, activation=nn.ReLU(), bias=False),
        InputMeanNorm(6),
        nn.MaxPool2d(2),
        GmPConv2d(6, 4, 3, padding=1, activation=torch.relu, input_norm="bias"),
        MeanOnlyBatchNorm(4),
        GmPConv2d(4, 2, 1, activation=torch.tanh, input_norm=True),
    ).double()
    with torch.no_grad():
        for layer in (model[0], model[2], model[5]):
            layer.r[:3] = torch.tensor([-0.7, 0.0, 1.3])
        model[2].r[1] = 0.4  # before the pool 0 would make ties, which compilers break otherwise
    return model.to(memory_format=LAST)


def images(count: int = 4) -> Tensor:
    return torch.randn(count, 3, 8, 8, dtype=torch.float64).contiguous(memory_format=LAST)


def train(model: nn.Module, call: Callable, steps: int = 3) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    device, dtype = model[0].r.device, model[0].r.dtype
    losses = []
    for _ in range(steps):
        x = torch.randn(4, 3, 8, 8, generator=generator, dtype=torch.float64)
        loss = call(x.to(device, dtype).contiguous(memory_format=LAST)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return {**model.state_dict(), "losses": torch.stack(losses)}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], bound: float) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=bound, rtol=100 * bound, msg=name)


def test_training_steps_are_those_of_the_readable_form(shifts: list[bool]) -> None:
    model, twin = network(), network()
    twin.load_state_dict(model.state_dict())
    torch.compiler.reset()
    found = train(twin, torch.compile(twin, fullgraph=True, backend="aot_eager"))
    assert_same(found, train(model, model), 1e-12)
    # backward: MBN's, behind the pool IMN's, IMN's
    assert shifts == [True, True, True]


def penalty(model: nn.Module, x: Tensor) -> Tensor:
    """Return a loss that asks for second derivatives, within what is compiled."""
    (slope,) = torch.autograd.grad(model(x).pow(3).sum(), x, create_graph=True)
    return slope.pow(3).sum()


@pytest.mark.skipif(
    not hasattr(torch._dynamo.config, "trace_autograd_ops"), reason="needs a newer torch"
)
@pytest.mark.parametrize("number", [0, 1, 2, 5], ids=["ReLU", "IMN", "pool", "mean in the bias"])
def test_second_derivatives(
    number: int, shifts: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shifted_op, "wanted", lambda stored: torch.compiler.is_compiling())
    smooth = nn.Sequential(nn.Conv2d(3, 6, 3), nn.Tanh()).double()
    steps = {1: InputMeanNorm(6), 2: MaxPool2d(3, 2, 1)}
    own = network()[number]
    model = nn.Sequential(smooth, steps[number]) if number in steps else own
    model = nn.Sequential(smooth, own) if number == 5 else model
    torch.compiler.reset()
    given, found = images(), []
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        for call in (penalty, torch.compile(penalty, backend="aot_eager", fullgraph=True)):
            model.zero_grad()
            x = given.clone().requires_grad_()
            call(model, x).backward()
            found.append([x.grad, *[p.grad.clone() for p in model.parameters()]])
    torch.testing.assert_close(found[1], found[0])


def used_twice(first: nn.Module, norm: nn.Module, x: Tensor) -> Tensor:
    y = first(x)
    return (norm(y) * y).sum()


def used_past_the_mean(first: nn.Module, norm: nn.Module, x: Tensor) -> Tensor:
    y = first(x)
    return norm(y).pow(3).sum() + norm.running_mean.sum()


def with_a_hook(first: nn.Module, norm: nn.Module, x: Tensor) -> Tensor:
    y = first(x)
    y.register_hook(lambda grad: grad.clamp(-0.1, 0.1))
    return norm(y).pow(3).sum()


def with_a_hook_in_place(first: nn.Module, norm: nn.Module, x: Tensor) -> Tensor:
    y = first(x)
    y.register_hook(lambda grad: grad.mul_(2))
    return norm(y).pow(3).sum()


def with_a_hook_behind(first: nn.Module, norm: nn.Module, x: Tensor) -> Tensor:
    y = norm(first(x))
    y.register_hook(lambda grad: grad * 2)
    return y.pow(3).sum()


def without_a_norm(first: nn.Module, norm: nn.Module, x: Tensor) -> Tensor:
    return first(x).pow(3).sum()


@pytest.mark.parametrize(
    ("use", "apart"),
    [
        (used_twice, False),
        (used_past_the_mean, True),
        (with_a_hook, False),
        (with_a_hook_in_place, False),
        (with_a_hook_behind, True),
        (without_a_norm, False),
    ],
)
def test_a_gradient_is_whole_for_who_looks(shifts: list[bool], use: Callable, apart: bool) -> None:
    found = []
    for compiled in (False, True):
        torch.manual_seed(1)
        first = GmPConv2d(3, 4, 3, padding=1, activation=torch.relu).double()
        norm = InputMeanNorm(4).double()
        torch.compiler.reset()
        call = torch.compile(use, backend="aot_eager") if compiled else use
        call(first, norm, images()).backward()
        found.append([p.grad for p in first.parameters()])
    torch.testing.assert_close(found[1], found[0], atol=1e-11, rtol=1e-10)
    assert shifts == [apart]


# --- the graph ----------------------------------------------------------------------------------


def pair() -> nn.Module:
    layer = GmPConv2d(3, 4, 3, padding=1, activation=torch.relu, coordinates="intrinsic")
    return nn.Sequential(layer, InputMeanNorm(4)).to(memory_format=LAST)


@pytest.mark.skipif(
    torch.__version__ < "2.15" and not torch.cuda.is_available(),
    reason="older compilers need a GPU to see what a kernel changes",
)
def test_compilers_see_one_kernel(on_gpu: None) -> None:
    found = traced(pair(), images().float())
    assert found.count(KERNEL) == 1
    assert not any("geoparam.rectified" in name or "geoparam.centred" in name for name in found)


@pytest.mark.parametrize("dynamic", [True, False], ids=["unknown sizes", "another layout"])
def test_plain_operations_elsewhere(on_gpu: None, dynamic: bool) -> None:
    x = images().float() if dynamic else images().float().contiguous()
    found = traced(pair(), x, dynamic=dynamic)
    assert KERNEL not in found
    assert not any("geoparam.rectified" in name or "geoparam.centred" in name for name in found)


def test_numbers_of_unknown_sizes(shifts: list[bool]) -> None:
    found = []
    model = pair().double()
    for compiled in (False, True):
        twin = copy.deepcopy(model)
        torch.compiler.reset()
        call = torch.compile(twin, backend="aot_eager", dynamic=True) if compiled else twin
        torch.manual_seed(2)
        for count in (4, 5):
            call(images(count)).pow(3).sum().backward()
        found.append([p.grad for p in twin.parameters()] + list(twin.buffers()))
    torch.testing.assert_close(found[1], found[0])
    assert not shifts


def test_export_keeps_plain_operations(on_gpu: None) -> None:
    program = torch.export.export(pair().train(), (images().float(),))
    names = [str(node.target) for node in program.graph.nodes]
    assert not any("geoparam.rectified" in name or "geoparam.centred" in name for name in names)


def test_torch_func_sees_plain_operations(shifts: list[bool]) -> None:
    layer = pair()[0]

    def loss(r: Tensor, x: Tensor) -> Tensor:
        return torch.func.functional_call(layer, {"r": r}, (x[None],)).square().sum()

    each = torch.vmap(torch.func.grad(loss), (None, 0))
    inputs = layer.r.detach(), images().float()
    torch.compiler.reset()
    found = torch.compile(each, backend="aot_eager")(*inputs)
    torch.testing.assert_close(found, each(*inputs))


@pytest.mark.parametrize("bias", [True, False])
def test_the_ops_are_what_they_are_expanded_to(bias: bool) -> None:
    """Where nothing expands them, as in a subclass of tensors, they run as they are."""
    z = torch.randn(2, 3, 4, 4, dtype=torch.float64, requires_grad=True)
    b, s = torch.randn(2, 3, dtype=torch.float64).requires_grad_()
    offset = b.detach().requires_grad_() if bias else None
    scale = s.detach().requires_grad_()
    y = rectified.rectified(z, offset, scale)
    y = rectified.centred(y, y.mean((0, 2, 3)).detach())
    a = (z if offset is None else z + offset.view(3, 1, 1)).relu() * scale.view(3, 1, 1)
    expected = a - a.mean((0, 2, 3), keepdim=True)
    torch.testing.assert_close(y, expected)
    inputs = [t for t in (z, offset, scale) if t is not None]
    found = torch.autograd.grad(y.pow(3).sum(), inputs)
    torch.testing.assert_close(found, torch.autograd.grad(expected.pow(3).sum(), inputs))


# --- on a GPU -----------------------------------------------------------------------------------


@pytest.mark.gpu
def test_compiled_steps_follow_eager_ones() -> None:
    model = network().cuda()
    twin = copy.deepcopy(model)
    torch.compiler.reset()
    found = train(twin, torch.compile(twin, fullgraph=True), 5)
    assert_same(found, train(model, model, 5), 1e-9)


@pytest.mark.gpu
def test_compiled_bfloat16_is_as_near_as_eager() -> None:
    def gradient(model: nn.Module, call: Callable, dtype: torch.dtype, cast: bool) -> Tensor:
        torch.manual_seed(4)
        x = torch.randn(64, 3, 8, 8).to("cuda", dtype).contiguous(memory_format=LAST)
        with torch.autocast("cuda", torch.bfloat16, enabled=cast):
            y = call(x)
        y.double().square().mean().backward()
        return torch.cat([p.grad.double().flatten() for p in model.parameters()])

    model = network().cuda()
    exact = gradient(model, model, torch.float64, False)
    eager, compiled = copy.deepcopy(model).float(), copy.deepcopy(model).float()
    eager.zero_grad()
    compiled.zero_grad()
    torch.compiler.reset()
    error = (gradient(eager, eager, torch.float32, True) - exact).norm()
    call = torch.compile(compiled, fullgraph=True)
    assert (gradient(compiled, call, torch.float32, True) - exact).norm() < 1.5 * error


@pytest.mark.gpu
def test_a_compiled_layer_launches_the_kernel() -> None:
    pytest.importorskip("triton")
    from torch._inductor.utils import run_fw_bw_and_get_code

    torch.compiler.reset()
    model = pair().cuda()
    x = images().float().cuda()
    _, codes = run_fw_bw_and_get_code(lambda: torch.compile(model, fullgraph=True)(x))
    assert "_backward_kernel" in codes[1] and "geoparam.rectified" not in "".join(codes)
