"""Breakpoints are where the function itself bends, and SReLU is what its paper says."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from function_model import FunctionModel
from torch import Tensor, nn

from geoparam.analysis import SReLU, breaks
from geoparam.model.activations import Breaks
from geoparam.model.trace import trace

D = {"dtype": torch.float64}


def bends(function: Callable[[Tensor], Tensor]) -> list[float]:
    """Return where a function on [-8, 8] jumps, has a kink, or a jump of its second derivative."""
    h = 1 / 1024
    z = torch.arange(-8 * 1024, 8 * 1024 + 1, **D) * h
    value = function(z[:, None]).detach().flatten()
    curvature = (value[2:] - 2 * value[1:-1] + value[:-2]) / h**2
    found = z[1:-2][(curvature[1:] - curvature[:-1]).abs() > 0.1]
    apart = [
        x for x, last in zip(found, [-9.0, *found.tolist()], strict=False) if x - last > 8 * h
    ]
    return [round(x.item(), 1) + 0.0 for x in apart]


def srelu(*values: float) -> SReLU:
    names = ("lower", "upper", "lower_slope", "upper_slope")
    return SReLU(1, **dict(zip(names, values, strict=True)), **D)


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


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_breakpoints_are_where_the_function_bends(module: nn.Module) -> None:
    found = breaks(module)
    points = [] if found is None else [torch.as_tensor(point).item() for point in found.points]
    expected = bends(module)
    if isinstance(module, SReLU) and module.upper_slope == 1:
        expected.append(1.0)  # it does not bend there yet
    assert points == expected


@pytest.mark.parametrize("module", [m for m in MODULES if breaks(m) is not None], ids=str)
def test_pieces_are_straight_where_it_says_so(module: nn.Module) -> None:
    found = breaks(module)
    h = 1 / 64
    z = torch.arange(-8, 8, h, **D)
    curved = module((z + h)[:, None]) - 2 * module(z[:, None]) + module((z - h)[:, None])
    near = torch.stack(
        [(z - torch.as_tensor(point).item()).abs() <= h for point in found.points]
    ).any(0)
    assert found.linear == (curved.flatten()[~near].abs() < 1e-9).all()


@pytest.mark.parametrize(
    "module",
    [m for m in MODULES if isinstance(m, nn.ReLU | nn.Hardtanh | nn.Hardsigmoid)],
    ids=str,
)
def test_a_unit_is_active_where_its_output_can_change(module: nn.Module) -> None:
    z = torch.linspace(-7.9, 7.8, 300, **D).reshape(3, 100).requires_grad_()
    (slope,) = torch.autograd.grad(module(z).sum(), z)
    found = breaks(module)
    assert torch.equal(found.active(z, -1), slope != 0)
    sides = torch.stack([z > point for point in found.points])
    assert torch.equal(found.above(z, -1), sides)


def test_other_units_are_active_on_one_side_of_their_first_breakpoint() -> None:
    z = torch.linspace(-7.9, 7.8, 50, **D)
    assert torch.equal(Breaks((1.0,), opens=False, closes=True).active(z, -1), z < 1)
    assert torch.equal(breaks(nn.LeakyReLU()).active(z, -1), z > 0)
    assert torch.equal(breaks(nn.Hardswish()).active(z, -1), z > -3)


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
    assert call.activation is not None and breaks(graph.nodes[call.activation]) == expected


def test_a_function_has_the_breakpoints_of_its_name() -> None:
    assert breaks(torch.relu_).points == breaks(Tensor.relu).points == (0.0,)
    assert breaks(F.relu6).points == (0.0, 6.0)


@pytest.mark.parametrize("unknown", [None, lambda z: z, nn.Identity(), F.threshold, torch.clamp])
def test_what_is_not_known_has_none(unknown: Any) -> None:
    assert breaks(unknown) is None


def test_points_of_each_unit_are_along_its_channel() -> None:
    points = Breaks((torch.tensor([0.0, 10.0]), torch.tensor([1.0, 11.0])))
    z = torch.tensor([[[0.5, 2.0], [5.0, 10.5]]])  # (1, channels, positions)
    assert points.active(z, -2).tolist() == [[[True, True], [False, True]]]
    assert points.above(z, -2)[1].tolist() == [[[False, True], [False, False]]]
    assert points.above(z.transpose(1, 2), -1)[1].tolist() == [[[False, False], [True, False]]]


def by_cases(z: Tensor, lower: Tensor, upper: Tensor, below: Tensor, above: Tensor) -> Tensor:
    """The definition of Jin et al., equation 1."""
    outside = torch.where(z >= upper, upper + above * (z - upper), lower + below * (z - lower))
    return torch.where((z > lower) & (z < upper), z, outside)


def test_srelu_starts_as_a_leaky_relu() -> None:
    z = torch.randn(5, 3, **D)
    torch.testing.assert_close(SReLU(**D)(z), F.leaky_relu(z, 0.2))
    assert SReLU()(torch.zeros(())).shape == ()  # shared by all channels: any shape


@pytest.mark.parametrize(("shape", "dim"), [((2, 4), 1), ((2, 4, 3, 5), 1), ((2, 3, 4), -1)])
def test_srelu_has_its_channels_in_any_dimension(shape: tuple[int, ...], dim: int) -> None:
    module, z = SReLU(4, dim=dim, **D), torch.randn(shape, **D)
    parameters = module.lower, module.upper, module.lower_slope, module.upper_slope
    for parameter in parameters:
        nn.init.normal_(parameter)
    module.upper.data.copy_(module.lower + torch.rand(4, **D))
    expected = by_cases(z.movedim(dim, -1), *parameters)
    torch.testing.assert_close(module(z).movedim(dim, -1), expected)


def test_breakpoints_of_srelu_that_have_crossed_are_one() -> None:
    module = srelu(0.0, 1.0, 0.1, 0.5)
    with torch.no_grad():
        module.lower.fill_(2.0)
    found = breaks(module)
    assert [point.item() for point in found.points] == [2.0, 2.0]
    z = torch.tensor([[1.0], [2.0], [4.0]], **D)
    assert module(z).flatten().tolist() == pytest.approx([1.9, 2.0, 3.0])


def test_srelu_refuses_breakpoints_in_the_wrong_order() -> None:
    with pytest.raises(ValueError, match="lower <= upper; got 2.0 and 1.0"):
        SReLU(lower=2.0)
