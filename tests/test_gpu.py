"""Layers and the optimizer on a GPU: the numbers of the CPU, in every mode of training."""

import copy
from typing import Any

import numpy as np
import plain_models
import pytest
import torch
from broken_steps import break_at_lines, remember_values
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
    """The layer's own backward pass is as near to the truth as autograd's of the formula."""
    torch.backends.cudnn.allow_tf32 = False
    layer = gp.InputMeanConv2d(64, 32, kernel).cuda().to(memory_format=torch.channels_last)
    x = torch.randn(32, 64, 64, 64, device="cuda").to(memory_format=torch.channels_last) + 1

    def train(autocast: bool) -> list[torch.Tensor]:
        inputs = x.clone().requires_grad_()
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            z = torch.relu_(layer(inputs))
        grads = torch.autograd.grad(z.float().square().mean(), [inputs, *layer.parameters()])
        return [z.float(), *grads]

    def error(found: torch.Tensor, expected: torch.Tensor) -> float:
        return ((found - expected).abs().max() / expected.abs().max()).item()

    own, own_rounded = train(False), train(True)
    monkeypatch.setattr("geoparam.centred_map._has_own_backward", lambda *_: False)
    formula, formula_rounded = train(False), train(True)
    for found, exact in zip(own, formula, strict=True):
        assert error(found, exact) < 1e-4
    for found, other, exact in zip(own_rounded, formula_rounded, formula, strict=True):
        assert error(found, exact) < 2 * error(other, exact)


# ---- the optimizer


def start_on_gpu(kind: str, make: Any = plain_models.mlp) -> tuple[Any, Any]:
    """Return a float32 model on the GPU, or one in half precision, with an optimizer."""
    options = {**plain_models.KINDS[kind]}
    model = make(options.pop("dtype", torch.float32)).cuda()
    return model, plain_models.build(model, **options)


every_kind = pytest.mark.parametrize("kind", plain_models.KINDS)


@every_kind
@pytest.mark.parametrize("make", [plain_models.mlp, plain_models.cnn])
def test_the_optimizer_follows_the_cpu(kind: str, make: Any) -> None:
    torch.backends.cudnn.allow_tf32 = False
    model, optimizer = start_on_gpu(kind, make)
    twin = copy.deepcopy(model).cpu()
    options = {key: x for key, x in plain_models.KINDS[kind].items() if key != "dtype"}
    same = plain_models.build(twin, **options)
    for step in range(5):
        plain_models.backward(twin, step)
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            p.grad = q.grad.cuda()
        optimizer.step()
        same.step()
    is_rough = "bfloat16" in kind or kind == "Muon"
    plain_models.assert_same_weights(model.cpu(), twin, 2e-2 if is_rough else 1e-5)


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 4e-6), (torch.float64, 1e-13)])
def test_row_kernels_compute_what_plain_torch_does(dtype: torch.dtype, bound: float) -> None:
    from geoparam.kernels.rows import Rows, rows_for

    shapes = [(3, 5), (0, 4), (4, 1), (2, 1030), (300, 64), (70, 5000)]
    like = torch.empty(0, dtype=dtype, device="cuda")
    assert type(rows_for(shapes, like)) is not Rows
    results = []
    for rows in (rows_for(shapes, like), Rows(shapes, like)):
        torch.manual_seed(0)
        w, g, d, grad_d, work = (
            [torch.randn(shape).to(like) for shape in shapes] for _ in "wgdcb"
        )
        w[0][1:] = 0
        r, a, b, length = torch.randn(4, sum(count for count, _ in shapes)).to(like)
        r[2] = 0
        projected = rows.project(w, g, grad_d, length.abs() + 0.5, r)
        measured = rows.measure(w, d, projected[0], work)
        rows.combine(w, d, a, b)
        results.append([*projected, *grad_d, *measured, *d])
    torch.testing.assert_close(*results, rtol=bound, atol=10 * bound)


@every_kind
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_state_goes_on_from_a_file_on_either_device(kind: str, device: str) -> None:
    model, optimizer = start_on_gpu(kind)
    plain_models.train(model, optimizer)
    twin = copy.deepcopy(model).to(device)
    options = {key: x for key, x in plain_models.KINDS[kind].items() if key != "dtype"}
    resumed = plain_models.build(twin, **options)
    mapped_to = None if device == "cpu" else "cpu"  # each from the other's memory
    resumed.load_state_dict(plain_models.through_a_file(optimizer.state_dict(), mapped_to))

    losses = plain_models.train(model, optimizer, first=3)
    resumed_losses = plain_models.train(twin, resumed, first=3)
    torch.testing.assert_close(resumed_losses, losses, rtol=0.02, atol=0.02, check_device=False)


@pytest.mark.parametrize("kind", ["SGD", "Adam", "Muon", "turn", "bfloat16 turn"])
def test_breaking_a_step_on_a_gpu_leaves_each_weight_as_before_or_as_after(kind: str) -> None:
    model, optimizer = start_on_gpu(kind)
    plain_models.train(model, optimizer)
    restore = remember_values(model, optimizer)
    plain_models.backward(model, 3)
    break_at_lines(model, optimizer, restore, every=7)  # the CPU tries every line


@pytest.mark.parametrize("base", [torch.optim.SGD, torch.optim.Muon])
def test_a_step_keeps_no_scratch_memory(base: Any) -> None:
    first = torch.cuda.memory_allocated()
    model = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 3)).cuda()
    optimizer = plain_models.build(model, base, momentum=0.9)
    plain_models.step_with_ones(model, optimizer)
    model.zero_grad()
    tensors = [*model.parameters()]
    for state in optimizer.state.values():
        tensors += [x for x in state.values() if isinstance(x, torch.Tensor)]
    needed = sum(x.nbytes for x in tensors)
    assert torch.cuda.memory_allocated() - first < 1.2 * needed


@pytest.mark.parametrize("kind", ["SGD", "Muon", "turn", "angles", "bounded"])
def test_a_warm_step_never_waits(kind: str) -> None:
    model, optimizer = start_on_gpu(kind)
    plain_models.train(model, optimizer)
    plain_models.backward(model, 3)
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


ANGLES = {"coordinates": "angles"}


@pytest.mark.parametrize(
    "options", [{}, {"turn": 2.0}, ANGLES, {**ANGLES, "max_turn": 2.0}], ids=str
)
def test_a_captured_step_goes_on_as_an_eager_one(options: Any) -> None:
    capturable = {"base": torch.optim.Adam, "capturable": True}
    capturable["lr"] = torch.tensor(0.01, device="cuda")
    pairs = []
    for _ in range(2):
        model = plain_models.mlp(torch.float32).cuda()
        optimizer = plain_models.build(model, **capturable, **options)
        plain_models.train(model, optimizer)
        plain_models.backward(model, 3)
        pairs.append((model, optimizer))
    (model, captured), (other, eager) = pairs
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.step()
    for _ in range(3):
        graph.replay()
        eager.step()
    plain_models.assert_same_weights(model, other, 1e-6)


@pytest.mark.parametrize("kind", ["SGD", "Muon", "turn"])
def test_layers_of_zeros_grow_on_a_gpu(kind: str) -> None:
    def zeroed(dtype: torch.dtype) -> nn.Module:
        model = plain_models.mlp(dtype)
        nn.init.zeros_(model[3].weight)
        return model

    model, optimizer = start_on_gpu(kind, zeroed)
    losses = [plain_models.train(model, optimizer, 1)[0] for _ in range(40)]
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("base", [torch.optim.SGD, torch.optim.Muon])
def test_packed_layers_turn_by_the_angle_on_a_gpu(base: Any) -> None:
    model = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 3)).cuda()
    optimizer = plain_models.build(model, base, turn=2.0, max_turn=180.0, split={"0": 3})
    before = plain_models.rows(model[0]).chunk(3)
    model(torch.randn(8, 64, device="cuda")).square().mean().backward()
    optimizer.step()
    for old, new in zip(before, plain_models.rows(model[0]).chunk(3), strict=True):
        angle = plain_models.rms(plain_models.find_angles(old, new))
        assert angle == pytest.approx(2.0, rel=1e-3)
