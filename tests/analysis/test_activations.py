"""Breakpoints are where the function itself bends, and SReLU is what its paper says."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from function_model import FunctionModel
from torch import Tensor, nn
from torch.testing import assert_close

from geoparam.analysis import SReLU, breaks
from geoparam.model.activations import Breaks
from geoparam.model.trace import trace

D = {"dtype": torch.float64}


def find_bends(function: Callable[[Tensor], Tensor]) -> list[float]:
    """Return where a function on [-8, 8] jumps, has a kink, or a jump of its second derivative."""
    h = 1 / 1024
    z = torch.arange(-8 * 1024, 8 * 1024 + 1, **D) * h
    value = function(z[:, None]).detach().flatten()
    curvature = value.diff().diff() / h**2  # at z[1:-1]
    has_jump = curvature.diff().abs() > 0.1
    jumps = z[1:-2][has_jump]

    # One bend makes several neighbouring jumps: keep the first of each.
    bends = []
    last = -9.0
    for jump in jumps.tolist():
        if jump - last > 8 * h:
            bends.append(round(jump, 1) + 0.0)
        last = jump
    return bends


def get_points(module: nn.Module) -> list[float]:
    """Return the breakpoints that the library knows, as numbers."""
    found = breaks(module)
    if found is None:
        return []
    return [torch.as_tensor(point).item() for point in found.points]


def srelu(lower: float, upper: float, lower_slope: float, upper_slope: float) -> SReLU:
    return SReLU(
        1, lower=lower, upper=upper, lower_slope=lower_slope, upper_slope=upper_slope, **D
    )


MODULES = [
    nn.ReLU(),
    nn.PReLU(**D),
    nn.RReLU().eval(),
    nn.ELU(0.5),
    nn.SELU(),
    nn.CELU(2.0),
    nn.ReLU6(),
    nn.Hardswish(),
    nn.Hardsigmoid(),
    nn.Hardtanh(-0.5, 3.5),
    nn.Threshold(0.5, 2.0),
    SReLU(**D),
    srelu(-1.5, 2.5, 0.1, 0.3),
    nn.GELU(),
]


BENDING = [module for module in MODULES if breaks(module) is not None]
CLOSING = [module for module in MODULES if isinstance(module, nn.Hardtanh | nn.Hardsigmoid)]


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_breakpoints_are_where_the_function_bends(module: nn.Module) -> None:
    expected = find_bends(module)
    if isinstance(module, SReLU) and module.upper_slope == 1:
        expected.append(1.0)  # it does not bend there yet

    assert get_points(module) == expected


@pytest.mark.parametrize("module", BENDING, ids=str)
def test_pieces_are_called_linear_where_the_function_is_straight(module: nn.Module) -> None:
    h = 1 / 64
    z = torch.arange(-8, 8, h, **D)[:, None]
    curvature = module(z + h) - 2 * module(z) + module(z - h)
    distances = (z - torch.tensor(get_points(module))).abs()
    is_near_a_point = (distances <= h).any(dim=1)

    is_straight = (curvature[~is_near_a_point].abs() < 1e-9).all()

    assert breaks(module).linear == is_straight


@pytest.mark.parametrize("module", [nn.ReLU(), *CLOSING], ids=str)
def test_a_unit_is_active_where_its_output_can_change(module: nn.Module) -> None:
    z = torch.linspace(-7.9, 7.8, 300, **D).reshape(3, 100).requires_grad_()

    (slope,) = torch.autograd.grad(module(z).sum(), z)

    assert torch.equal(breaks(module).active(z, -1), slope != 0)


@pytest.mark.parametrize("module", BENDING, ids=str)
def test_a_unit_has_a_side_of_each_breakpoint(module: nn.Module) -> None:
    z = torch.linspace(-7.9, 7.8, 300, **D).reshape(300, 1)

    sides = breaks(module).above(z, -1)

    expected = torch.stack([z > point for point in get_points(module)])
    assert torch.equal(sides, expected)


@pytest.mark.parametrize(
    ("found", "is_active"),
    [
        (Breaks((1.0,), opens=False, closes=True), lambda z: z < 1),
        (breaks(nn.LeakyReLU()), lambda z: z > 0),
        (breaks(nn.Hardswish()), lambda z: z > -3),
    ],
    ids=["limited from above", "LeakyReLU", "Hardswish"],
)
def test_other_units_are_active_on_one_side_of_their_first_breakpoint(
    found: Breaks, is_active: Callable[[Tensor], Tensor]
) -> None:
    z = torch.linspace(-7.9, 7.8, 50, **D)

    assert torch.equal(found.active(z, -1), is_active(z))


WRITTEN: dict[str, tuple[Callable[[Tensor], Tensor], Breaks | None]] = {
    "relu": (F.relu, Breaks((0.0,))),
    "leaky_relu": (lambda z: F.leaky_relu(z, 0.2), Breaks((0.0,))),
    "relu6": (F.relu6, Breaks((0.0, 6.0), closes=True)),
    "hardtanh": (lambda z: F.hardtanh(z, -2.0, max_val=3.0), Breaks((-2.0, 3.0), closes=True)),
    "hardtanh, as it is": (F.hardtanh, Breaks((-1.0, 1.0), closes=True)),
    "threshold": (lambda z: F.threshold(z, 0.5, 9.0), Breaks((0.5,))),
    "clamp": (lambda z: torch.clamp(z, 0, 6), Breaks((0.0, 6.0), closes=True)),
    "clamp by names": (lambda z: torch.clamp(input=z, min=0.5), Breaks((0.5,))),
    "clamp from below": (lambda z: z.clamp_(min=0.5), Breaks((0.5,))),
    "clamp from above": (lambda z: z.clamp(max=1), Breaks((1.0,), opens=False, closes=True)),
    "clamp by a tensor": (lambda z: z.clamp(min=torch.zeros(())), None),
    "gelu": (F.gelu, None),
}


@pytest.mark.parametrize(("function", "expected"), WRITTEN.values(), ids=WRITTEN)
def test_a_step_of_a_trace_has_the_breakpoints_of_its_arguments(
    function: Callable, expected: Breaks | None
) -> None:
    model = FunctionModel(lambda m, x: function(m.fc(x)), fc=nn.Linear(3, 3))
    graph = trace(model, torch.zeros(1, 3))
    (call,) = graph.calls("fc")
    assert call.activation is not None

    activation = graph.nodes[call.activation]

    assert breaks(activation) == expected


@pytest.mark.parametrize(
    ("function", "points"),
    [(torch.relu_, (0.0,)), (Tensor.relu, (0.0,)), (F.relu6, (0.0, 6.0))],
)
def test_a_function_has_the_breakpoints_of_its_name(function: Callable, points: tuple) -> None:
    assert breaks(function).points == points


@pytest.mark.parametrize("unknown", [None, lambda z: z, nn.Identity(), F.threshold, torch.clamp])
def test_an_unknown_activation_has_no_breakpoints(unknown: Any) -> None:
    assert breaks(unknown) is None


def test_breakpoints_of_each_unit_are_along_its_channel() -> None:
    lower = torch.tensor([0.0, 10.0])
    upper = torch.tensor([1.0, 11.0])
    found = Breaks((lower, upper))
    z = torch.tensor([[[0.5, 2.0], [5.0, 10.5]]])  # (1, channels, positions)

    assert torch.equal(found.active(z, -2), z > lower[:, None])
    assert torch.equal(found.above(z, -2)[1], z > upper[:, None])

    channels_last = z.transpose(1, 2)
    assert torch.equal(found.above(channels_last, -1)[1], channels_last > upper)


def srelu_by_cases(
    z: Tensor, lower: Tensor, upper: Tensor, lower_slope: Tensor, upper_slope: Tensor
) -> Tensor:
    """Return the definition of Jin et al., equation 1."""
    below = lower + lower_slope * (z - lower)
    above = upper + upper_slope * (z - upper)
    outside = torch.where(z >= upper, above, below)
    return torch.where((z > lower) & (z < upper), z, outside)


def test_srelu_starts_as_a_leaky_relu() -> None:
    z = torch.randn(5, 3, **D)

    assert_close(SReLU(**D)(z), F.leaky_relu(z, 0.2))


def test_srelu_that_all_channels_share_takes_any_shape() -> None:
    assert SReLU()(torch.zeros(())).shape == ()


@pytest.mark.parametrize(("shape", "dim"), [((2, 4), 1), ((2, 4, 3, 5), 1), ((2, 3, 4), -1)])
def test_srelu_has_its_channels_in_any_dimension(shape: tuple[int, ...], dim: int) -> None:
    module = SReLU(4, dim=dim, **D)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    module.upper.data.copy_(module.lower + torch.rand(4, **D))
    z = torch.randn(shape, **D)

    expected = srelu_by_cases(
        z.movedim(dim, -1), module.lower, module.upper, module.lower_slope, module.upper_slope
    )

    assert_close(module(z).movedim(dim, -1), expected)


def test_breakpoints_of_srelu_that_have_crossed_are_one() -> None:
    module = srelu(0.0, 1.0, lower_slope=0.1, upper_slope=0.5)
    nn.init.constant_(module.lower, 2.0)

    assert get_points(module) == [2.0, 2.0]
    z = torch.tensor([[1.0], [2.0], [4.0]], **D)
    assert module(z).flatten().tolist() == pytest.approx([1.9, 2.0, 3.0])


def test_srelu_refuses_breakpoints_in_the_wrong_order() -> None:
    with pytest.raises(ValueError, match="lower <= upper; got 2.0 and 1.0"):
        SReLU(lower=2.0)
