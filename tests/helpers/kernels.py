"""What every implementation of the operator must satisfy, stated once.

An implementation is a module with `forward` and `backward`; `device` is where its tensors live.
Expected values are computed in float64 from the latitudes as they are stored.
"""

import math
from types import ModuleType

import torch
from torch import Tensor

from geoparam import sphere

WEIGHT_BOUND = {torch.float64: 1e-12, torch.float32: 1e-6}
GRADIENT_BOUND = {torch.float64: 1e-12, torch.float32: 1e-5}
HALF_BOUND = 8e-3  # of the largest gradient: bfloat16 results are rounded to 1/256


def weight(latitude: Tensor, r: Tensor) -> Tensor:
    return r.double()[:, None] * sphere.to_unit(latitude.double())


def brute_force_gradient(
    grad: Tensor, latitude: Tensor, r: Tensor, natural: bool = False
) -> tuple[Tensor, Tensor]:
    """Differentiate r u by one angle after the other: sin -> cos and cos -> -sin in its place."""
    a, g = latitude.double(), grad.double()
    columns = []
    for k in range(a.shape[1]):
        sin, cos = a.sin(), a.cos()
        sin[:, k], cos[:, k] = a[:, k].cos(), -a[:, k].sin()
        p = torch.ones(a.shape[0], 1, dtype=torch.float64, device=a.device)
        p = torch.cat([p, cos], dim=1).cumprod(dim=1)
        du = torch.cat([sin * p[:, :-1], p[:, -1:]], dim=1)
        du[:, :k] = 0
        columns.append((g * du).sum(dim=1) * r.double())
    change = torch.stack(columns, dim=1)
    if natural:
        change = change / sphere.metric(a).clamp(min=0.01)
    return change, (g * sphere.to_unit(a)).sum(dim=1)


def random_case(
    rows: int, n: int, dtype: torch.dtype, device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor]:
    """Return latitudes of Gaussian rows, scales of both signs, and a gradient."""
    latitude = sphere.to_latitude(torch.randn(rows, n, dtype=torch.float64))
    r, grad = torch.randn(rows, dtype=torch.float64), torch.randn(rows, n, dtype=torch.float64)
    return latitude.to(device, dtype), r.to(device, dtype), grad.to(device, dtype)


def with_poles(latitude: Tensor, count: int) -> Tensor:
    """Put `count` latitudes in a row, from the third on, on the float nearest to +-pi/2."""
    latitude = latitude.clone()
    latitude[0, 2 : 2 + count] = math.pi / 2
    latitude[-1, 2 : 2 + count] = -math.pi / 2
    return latitude


def assert_weight(module: ModuleType, latitude: Tensor, r: Tensor) -> None:
    out = torch.promote_types(latitude.dtype, torch.float32)
    found = module.forward(latitude, r, out)[0].double()
    expected = weight(latitude, r)
    error = (found - expected).norm(dim=1) / expected.norm(dim=1)
    assert error.max() < WEIGHT_BOUND[out]


def assert_gradient(
    module: ModuleType, grad: Tensor, latitude: Tensor, r: Tensor, natural: bool = False
) -> None:
    _, saved = module.forward(latitude, r, r.dtype)
    found = module.backward(grad, latitude, r, natural, saved)
    expected = brute_force_gradient(grad, latitude, r, natural)
    bound = GRADIENT_BOUND.get(latitude.dtype, HALF_BOUND)
    assert found[0].dtype == latitude.dtype and found[1].dtype == r.dtype
    largest = expected[0].abs().amax(dim=1, keepdim=True)
    assert ((found[0].double() - expected[0]).abs() / largest).max() < bound
    scale = grad.double().norm(dim=1)
    assert ((found[1].double() - expected[1]).abs() / scale).max() < bound
