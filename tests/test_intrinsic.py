"""The weight in intrinsic coordinates equals r d / ||d||, however it is called."""

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from geoparam import GmPLinear, coordinates, retract
from geoparam.coordinates import Intrinsic

DOUBLE = {"dtype": torch.float64}
BOUND = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}

every_device = pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
)


def decode(d: Tensor, r: Tensor) -> Tensor:
    return Intrinsic().decode(d, r, False, None)


def formula(d: Tensor, r: Tensor) -> Tensor:
    """Return r d / ||d|| in float64."""
    d = d.double()
    u = d / d.norm(dim=-1, keepdim=True)
    return r.double()[..., None] * u


def random_case(
    rows: int, n: int, dtype: torch.dtype, device: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Return directions, scales, and a gradient of the weight."""
    d, weight_grad = torch.randn(2, rows, n, **DOUBLE)
    r = torch.randn(rows, **DOUBLE)
    return d.to(device, dtype), r.to(device, dtype), weight_grad.to(device, dtype)


# Beside the formula.


@every_device
@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("n", [2, 27, 25088])
def test_the_weight_equals_the_formula(n: int, dtype: torch.dtype, device: str) -> None:
    d, r, _ = random_case(3, n, dtype, device)

    weight = decode(d, r)

    assert weight.dtype == dtype
    assert_close(weight.double(), formula(d, r), atol=BOUND[dtype], rtol=BOUND[dtype])


@every_device
@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("n", [2, 27, 25088])
def test_the_gradient_equals_the_formulas(n: int, dtype: torch.dtype, device: str) -> None:
    d, r, weight_grad = random_case(3, n, dtype, device)
    d.requires_grad_()
    r.requires_grad_()

    d_grad, r_grad = torch.autograd.grad(decode(d, r), (d, r), weight_grad)

    weight_grad = weight_grad.double()
    d_expected, r_expected = torch.autograd.grad(formula(d, r), (d, r), weight_grad)
    bound = 4 * BOUND[dtype] * weight_grad.norm(dim=1).max()
    assert (d_grad - d_expected).abs().max() < bound
    assert (r_grad - r_expected).abs().max() < bound


@every_device
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.float64, 1e-14)])
@pytest.mark.parametrize("n", [2, 27, 4608])
def test_torchs_kernel_gives_the_gradient_of_the_formula(
    n: int, dtype: torch.dtype, bound: float, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    d, r, weight_grad = random_case(8, n, dtype, device)
    d = d / d.norm(dim=1, keepdim=True)
    d[0] = 0
    d.requires_grad_()
    r.requires_grad_()

    d_grad, r_grad = torch.autograd.grad(decode(d, r), (d, r), weight_grad)
    monkeypatch.setattr(coordinates, "_has_kernel", lambda *_: False)
    d_expected, r_expected = torch.autograd.grad(decode(d, r), (d, r), weight_grad)

    # The zero row's gradients by d are finite, and need not be the same.
    assert d_grad.isfinite().all()
    assert d_expected.isfinite().all()
    scale = weight_grad.norm()
    d_error = (d_grad - d_expected)[1:].abs().max()
    r_error = (r_grad - r_expected).abs().max()
    assert d_error <= bound * scale * r.abs().max()
    assert r_error <= bound * scale


@every_device
def test_a_zero_vector_stays_finite(device: str) -> None:
    d, r, weight_grad = random_case(3, 6, torch.float32, device)
    d[1] = 0
    d.requires_grad_()

    weight = decode(d, r)
    [d_grad] = torch.autograd.grad(weight, d, weight_grad)

    assert (weight[1] == 0).all()
    assert d_grad.isfinite().all()


# In a layer.


@pytest.fixture
def long_rows() -> tuple[nn.Linear, GmPLinear]:
    """Return a layer with a million inputs, and the same layer in intrinsic coordinates."""
    plain = nn.Linear(1_000_000, 1, bias=False)
    return plain, GmPLinear.from_linear(plain, coordinates="intrinsic")


def test_long_rows_keep_their_digits(long_rows: tuple[nn.Linear, GmPLinear]) -> None:
    plain, layer = long_rows

    relative_error = (layer.weight / plain.weight - 1).abs()

    assert relative_error.max() < 1e-6


def test_long_rows_are_retracted_to_length_one(long_rows: tuple[nn.Linear, GmPLinear]) -> None:
    _, layer = long_rows

    layer.retract_()

    assert layer.unit.double().norm().item() == pytest.approx(1, abs=1e-7)


def test_the_gradient_is_tangent_to_the_sphere() -> None:
    layer = GmPLinear(9, 5, coordinates="intrinsic", **DOUBLE)

    layer(torch.randn(4, 9, **DOUBLE)).square().sum().backward()

    radial = (layer.unit.grad * layer.unit).sum(dim=1)
    assert radial.abs().max() < 1e-12 * layer.unit.grad.abs().max()


def test_retraction_restores_the_lengths_and_keeps_the_function() -> None:
    layer = GmPLinear(9, 5, coordinates="intrinsic")
    model = nn.Sequential(layer, GmPLinear(5, 2), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x = torch.randn(4, 9)
    model(x).square().sum().backward()
    optimizer.step()
    layer.unit.data[2] = 0  # a zero vector stays zero
    before = model(x)
    lengths = torch.tensor([1.0, 1, 0, 1, 1])
    assert (layer.unit.norm(dim=1) - lengths).abs().max() > 1e-4

    retract(model)()

    assert_close(layer.unit.norm(dim=1), lengths)
    assert_close(model(x), before)
