"""Layers on a GPU: the numbers of the CPU, in every mode that training uses."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import geoparam as gp
from geoparam import GmPConv2d, GmPLinear, retract

pytestmark = pytest.mark.gpu

CASES = [("angles", False), ("angles", True), ("intrinsic", False)]


def network(coordinates: str, natural: bool) -> nn.Module:
    options = {"coordinates": coordinates, "natural": natural}
    return nn.Sequential(
        GmPConv2d(3, 16, 3, activation=torch.relu, **options),
        GmPConv2d(16, 8, 3, padding=1, stride=2, groups=2, input_norm=True, **options),
        nn.Flatten(),
        GmPLinear(72, 10, input_norm="bias", **options),
    )


def train(model: nn.Module, device: str, steps: int = 3, **to: object) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    model = model.to(device, **to)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer.register_step_post_hook(retract(model))
    for _ in range(steps):
        x = torch.randn(8, 3, 8, 8, generator=generator).to(device, **to)
        optimizer.zero_grad()
        model(x).float().square().mean().backward()
        optimizer.step()
    return [p.detach().cpu() for p in [*model.parameters(), *model.buffers()]]


@pytest.mark.parametrize(("coordinates", "natural"), CASES)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_training_follows_the_cpu(coordinates: str, natural: bool, layout) -> None:  # noqa: ANN001
    torch.backends.cudnn.allow_tf32 = False
    model = network(coordinates, natural)
    expected = train(copy.deepcopy(model), "cpu")
    found = train(model, "cuda", memory_format=layout)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("coordinates", "natural"), CASES)
def test_training_repeats_bit_for_bit(coordinates: str, natural: bool) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    model = network(coordinates, natural)
    first, second = (train(copy.deepcopy(model), "cuda") for _ in range(2))
    torch.use_deterministic_algorithms(False)
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("coordinates", "natural"), CASES)
def test_autocast_follows_float32(coordinates: str, natural: bool, dtype: torch.dtype) -> None:
    model = network(coordinates, natural).cuda()
    x = torch.randn(8, 3, 8, 8, device="cuda")
    expected = model(x)
    with torch.autocast("cuda", dtype):
        out = model(x)
        out.float().square().mean().backward()
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), expected, atol=0.05, rtol=0.05)
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(("coordinates", "natural"), CASES)
def test_compiled_training(coordinates: str, natural: bool, autocast: bool) -> None:
    model = network(coordinates, natural).cuda()
    twin = copy.deepcopy(model)
    compiled = torch.compile(twin, fullgraph=True)
    x = torch.randn(8, 3, 8, 8, device="cuda")
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        expected, out = model(x), compiled(x)
    tolerance = {"atol": 0.06, "rtol": 0.06} if autocast else {"atol": 1e-3, "rtol": 1e-3}
    torch.testing.assert_close(out, expected, **tolerance)
    expected.float().square().mean().backward()
    out.float().square().mean().backward()
    for a, b in zip(twin.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, **tolerance)


def test_cuda_graph_capture() -> None:
    layer = GmPLinear(300, 64, activation=torch.relu).cuda()
    x = torch.randn(16, 300, device="cuda")
    expected = layer(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(x)
    out.zero_()
    graph.replay()
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("norm", [None, "imn"])
@pytest.mark.parametrize("probe", [False, True], ids=["motion", "probe"])
def test_tracking_gives_what_the_cpu_gives_and_never_waits(norm: str | None, probe: bool) -> None:
    torchvision = pytest.importorskip("torchvision")
    x = torch.randn(4, 3, 64, 64)
    model = torchvision.models.resnet18().double()
    if norm:
        gp.convert_(model, norm=norm, init="glorot", example_inputs=x.double())
    given = {"probe": x.double()} if probe else {"example_inputs": x.double()}
    on_gpu = {key: value.cuda() for key, value in given.items()}
    twin = copy.deepcopy(model).cuda()
    expected = gp.BoundaryTracker(model, **given)
    tracker = gp.BoundaryTracker(twin, **on_gpu)
    for _ in range(2):
        with torch.no_grad():
            for a, b in zip(model.parameters(), twin.parameters(), strict=True):
                a.add_(0.01 * torch.randn_like(a))
                b.copy_(a)
        expected.step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            tracker.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for name, layer in expected.history.items():
        for quantity, values in layer.items():
            found = tracker.history[name][quantity]
            np.testing.assert_allclose(found, values, rtol=1e-6, atol=1e-6, err_msg=quantity)


@pytest.mark.parametrize("kernel", [1, 3])
def test_input_means_of_large_images(kernel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward pass for large tensors is as near to the truth as autograd's own."""
    torch.backends.cudnn.allow_tf32 = False
    layer = gp.InputMeanConv2d(64, 32, kernel).cuda().to(memory_format=torch.channels_last)
    x = torch.randn(32, 64, 64, 64, device="cuda").to(memory_format=torch.channels_last) + 1

    def train(large: int, autocast: bool) -> list[torch.Tensor]:
        monkeypatch.setattr("geoparam.centred_map.LARGE", large)
        inputs = x.clone().requires_grad_()
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            z = torch.relu_(layer(inputs))
        grads = torch.autograd.grad(z.float().square().mean(), [inputs, *layer.parameters()])
        return [z.float(), *grads]

    def error(found: torch.Tensor, expected: torch.Tensor) -> float:
        return ((found - expected).abs().max() / expected.abs().max()).item()

    expected, rounded = train(2**40, False), train(2**40, True)
    for own, exact in zip(train(2**22, False), expected, strict=True):
        assert error(own, exact) < 1e-4
    for own, other, exact in zip(train(2**22, True), rounded, expected, strict=True):
        assert error(own, exact) < 2 * error(other, exact)
