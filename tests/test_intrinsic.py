"""The weight in intrinsic coordinates equals r d / ||d||, however it is called."""

import pytest
import torch
from torch import Tensor, nn

from geoparam import GmPLinear, coordinates, retract
from geoparam.coordinates import Intrinsic

DOUBLE = {"dtype": torch.float64}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
BOUND = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def weight(d: Tensor, r: Tensor | None = None) -> Tensor:
    return Intrinsic().decode(d, r, False, None)


def case(rows: int, n: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    d, g = torch.randn(2, rows, n, dtype=torch.float64)
    r = torch.randn(rows, dtype=torch.float64)
    return d.to(device, dtype), r.to(device, dtype), g.to(device, dtype)


def exact(d: Tensor, r: Tensor) -> Tensor:
    d = d.double()
    return r.double()[..., None] * d / d.norm(dim=-1, keepdim=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("n", [2, 27, 25088])
def test_weight_and_gradient(n: int, dtype: torch.dtype, device: str) -> None:
    d, r, g = case(3, n, dtype, device)
    d.requires_grad_(), r.requires_grad_()
    w, expected = weight(d, r), exact(d, r)
    assert w.dtype == dtype
    torch.testing.assert_close(w.double(), expected, atol=BOUND[dtype], rtol=BOUND[dtype])
    found = torch.autograd.grad(w, (d, r), g)
    wanted = torch.autograd.grad(expected, (d, r), g.double())
    for a, b in zip(found, wanted, strict=True):
        assert (a - b).abs().max() < 4 * BOUND[dtype] * g.double().norm(dim=1).max()


def test_long_rows_keep_their_digits() -> None:
    plain = nn.Linear(1_000_000, 1, bias=False)
    layer = GmPLinear.from_linear(plain, coordinates="intrinsic")
    assert (layer.weight / plain.weight - 1).abs().max() < 1e-6
    layer.retract_()
    assert abs(layer.unit.double().norm() - 1) < 1e-7


@pytest.mark.parametrize("device", DEVICES)
def test_a_zero_vector_stays_finite(device: str) -> None:
    d, r, g = case(3, 6, torch.float32, device)
    d[1] = 0
    w = weight(d.requires_grad_(), r)
    assert (w[1] == 0).all()
    assert torch.autograd.grad(w, d, g)[0].isfinite().all()


def test_intrinsic_gradient_is_tangent() -> None:
    layer = GmPLinear(9, 5, coordinates="intrinsic", **DOUBLE)
    layer(torch.randn(4, 9, **DOUBLE)).square().sum().backward()
    along = (layer.unit.grad * layer.unit).sum(dim=1)
    assert along.abs().max() < 1e-12 * layer.unit.grad.abs().max()


def test_retraction_keeps_the_function() -> None:
    model = nn.Sequential(
        GmPLinear(9, 5, coordinates="intrinsic"), GmPLinear(5, 2), nn.Linear(2, 1)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x = torch.randn(4, 9)
    model(x).square().sum().backward()
    optimizer.step()
    model[0].unit.data[2] = 0  # a zero vector stays zero
    drifted, lengths = model(x), torch.tensor([1.0, 1, 0, 1, 1])
    assert (model[0].unit.norm(dim=1) - lengths).abs().max() > 1e-4
    retract(model)()
    torch.testing.assert_close(model[0].unit.norm(dim=1), lengths)
    torch.testing.assert_close(model(x), drifted)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.float64, 1e-14)])
@pytest.mark.parametrize("n", [2, 27, 4608])
def test_torchs_kernel_gives_the_gradient_of_the_formula(
    n: int, dtype: torch.dtype, bound: float, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    d, r, g = case(8, n, dtype, device)
    d = d / d.norm(dim=1, keepdim=True)
    d[0] = 0
    d.requires_grad_(), r.requires_grad_()
    by_kernel = torch.autograd.grad(weight(d, r), (d, r), g)
    monkeypatch.setattr(coordinates, "_has_kernel", lambda *_: False)
    by_formula = torch.autograd.grad(weight(d, r), (d, r), g)

    for one, other in zip(by_kernel, by_formula, strict=True):
        assert one.isfinite().all() and one.shape == other.shape
    scale = g.norm() * r.abs().max()
    assert ((by_kernel[0] - by_formula[0])[1:].abs().max() / scale).item() <= bound
    assert ((by_kernel[1] - by_formula[1]).abs().max() / g.norm()).item() <= bound
