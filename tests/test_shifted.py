"""Weight and bias as one step: plain torch against autograd, and a GPU against plain torch."""

import copy

import pytest
import shifts
import torch
from torch import Tensor, nn

from geoparam import GmPConv2d, GmPLinear, ops
from geoparam.ops import columns, means, shifted, shifted_op


def readable(
    stored: Tensor, r: Tensor, lam: Tensor | None, total: Tensor, how: shifted.How
) -> tuple[Tensor, Tensor]:
    scale = r if how.inside else None
    module = ops if how.coordinates == "latitude" else ops.intrinsic
    weight = module.weight(stored, scale, shape=how.shape)
    shift = columns.response(weight, total / how.numbers)
    offset = 0 if lam is None else lam * r if how.inside else lam
    return weight, offset - shift


@shifts.coordinates
@pytest.mark.parametrize("case", [*shifts.SHORT, *shifts.MEDIUM], ids=str)
def test_plain_torch_is_autograds(case: shifts.Case, coordinates: str) -> None:
    how = shifts.how_of(case._replace(natural=False), coordinates, torch.float64)
    given = shifts.inputs_of(case, coordinates, torch.float64, "cpu")
    for x in given:
        if x is not None:
            x.requires_grad_()
    weight, bias = readable(*given, how)
    with torch.no_grad():
        found = shifted.forward(*given, None, how)
    torch.testing.assert_close(found, (weight, bias))
    grads = torch.randn_like(weight), torch.randn(max(case.parts, 1), case.units).double()
    expected = torch.autograd.grad(
        (weight, bias),
        [x for x in given if x is not None],
        (grads[0], grads[1].sum(0)),
        allow_unused=True,
    )
    with torch.no_grad():
        ours = shifted.backward(*grads, *given, found[0], how)
    assert (ours[1] is None) == (not case.inside) and (ours[2] is None) == (not case.has_lam)
    there = [a for a, x in zip(ours, given, strict=True) if x is not None]
    for a, b in zip(there, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b)


@shifts.coordinates
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_torch_in_other_types(dtype: torch.dtype, coordinates: str) -> None:
    for case in shifts.SHORT:
        shifts.check_forward(shifted, case, coordinates, dtype, "cpu")


@shifts.coordinates
def test_gaps_and_nan(coordinates: str) -> None:
    shifts.check_strided(shifted, coordinates, "cpu")
    shifts.check_nan(shifted, coordinates, "cpu")


# --- compiled -----------------------------------------------------------------------------------


def network(coordinates: str) -> nn.Module:
    options = {"coordinates": coordinates, "input_norm": "bias"}
    return nn.Sequential(
        GmPConv2d(3, 8, 3, padding=1, bias=False, **options),
        nn.ReLU(),
        GmPConv2d(
            8, 4, 3, groups=2, activation=torch.relu, natural=coordinates == "angles", **options
        ),
        GmPLinear(4, 4, bias=False, **options),  # along the last dimension of images
        nn.Flatten(),
        GmPLinear(64, 5, **options),
    )


def trained(model: nn.Module, layer: nn.Module, device: str, steps: int = 3) -> list[Tensor]:
    """Return outputs, and parameters and buffers after some steps, `layer` being the model."""
    generator = torch.Generator().manual_seed(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    outputs = []
    for _ in range(steps):
        x = torch.randn(4, 3, 6, 6, generator=generator).to(device)
        y = layer(x.to(memory_format=torch.channels_last).requires_grad_())
        optimizer.zero_grad()
        y.square().mean().backward()
        optimizer.step()
        outputs.append(y.detach())
    return [*outputs, *model.state_dict().values()]


def check_compiled(coordinates: str, device: str, backend: str) -> None:
    model = network(coordinates).to(device)
    twin = copy.deepcopy(model)
    torch.compiler.reset()
    compiled = torch.compile(twin, backend=backend, fullgraph=True)
    found, expected = trained(twin, compiled, device), trained(model, model, device)
    counts = [v for k, v in twin.state_dict().items() if k.endswith("num_batches_tracked")]
    assert len(counts) == 4 and all(count == 3 for count in counts)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


SUMS = {"over images": (1, 10**9), "over positions": (1, 0), "at once": (10**9, 0)}


@pytest.fixture(params=SUMS)
def sums(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How compilers add up channels."""
    parts, few = SUMS[request.param]
    monkeypatch.setattr(means, "_NUMBERS", 1)
    monkeypatch.setattr(means, "_PARTS", parts)
    monkeypatch.setattr(means, "_FEW", few)
    return request.param


@pytest.mark.parametrize("coordinates", ["angles", "intrinsic"])
def test_compilers_find_one_op(
    coordinates: str, sums: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    forward = shifted.forward
    monkeypatch.setattr(shifted_op, "wanted", lambda stored: torch.compiler.is_compiling())
    monkeypatch.setattr(shifted, "forward", lambda *a: calls.append(1) or forward(*a))
    check_compiled(coordinates, "cpu", "aot_eager")
    assert len(calls) == 12


def test_the_op_returns_none_of_its_inputs() -> None:
    weight, units = torch.randn(4, 9), torch.randn(3, 4)
    given = weight, units[0], torch.randn(4, 8), units[1], units[2], torch.randn(9), weight
    backward = torch.ops.geoparam.shifted_weight_backward
    found = backward(*[x.clone() for x in given[:6]], weight, "latitude", False, False)
    again = backward(*given, "latitude", False, False)
    torch.testing.assert_close(found, again)
    addresses = {x.untyped_storage().data_ptr() for x in given}
    assert not any(x.untyped_storage().data_ptr() in addresses for x in again if x.numel())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_mean_of_parts(dtype: torch.dtype, device: str) -> None:
    for shape in ((1, 1), (7, 33), (300, 20)):
        shifts.check_mean(torch.ops.geoparam.mean_of_parts, shape, dtype, device)
    parts = torch.randn(3, 2, dtype=torch.float64, device=device, requires_grad=True)
    mean = torch.ops.geoparam.mean_of_parts(parts, 7, None, None, 0.1)
    (grad,) = torch.autograd.grad(mean, parts, torch.tensor([7.0, 14.0]).to(mean))
    assert grad.tolist() == [[1.0, 2.0]] * 3


# --- on a GPU -----------------------------------------------------------------------------------


@pytest.mark.gpu
@shifts.dtypes
@shifts.coordinates
@pytest.mark.parametrize("case", [*shifts.SHORT, *shifts.MEDIUM, *shifts.LONG], ids=str)
def test_kernels(case: shifts.Case, coordinates: str, dtype: torch.dtype) -> None:
    shifts.check_forward(shifted, case, coordinates, dtype, "cuda")
    shifts.check_backward(shifted, case, coordinates, dtype, "cuda")


@pytest.mark.gpu
def test_mean_kernel() -> None:
    kernels = pytest.importorskip("geoparam.ops.means_triton")
    for shape in ((1, 1), (7, 33), (300, 2048)):
        shifts.check_mean(kernels.mean_of_parts, shape, torch.float32, "cuda")


@pytest.mark.gpu
@shifts.coordinates
def test_gaps_and_nan_on_a_gpu(coordinates: str) -> None:
    shifts.check_strided(shifted, coordinates, "cuda")
    shifts.check_nan(shifted, coordinates, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("coordinates", ["angles", "intrinsic"])
def test_compiled_training_follows_eager(
    coordinates: str, sums: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    check_compiled(coordinates, "cuda", "inductor")
