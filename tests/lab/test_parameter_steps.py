"""Boundaries under steps of parameters: the papers' propositions, and the bounds beside them.

What is stepped is what a layer stores, by its role:

| | direction | length | scale | offset |
| standard (SP) | w | | | b |
| weight normalization (WN) | v | l | | b |
| GmP in angles | theta, as latitude | | r | lam |
| GmP, intrinsic | d | | r | lam |

Second computations are plain numpy: directions from the papers' formula in theta, locations by
solving for the boundary's nearest point.
"""

import copy
import math
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import geoparam as gp
from geoparam import sphere
from geoparam.analysis import boundaries, layer_boundaries

Steps = dict[str, Tensor]  # what is added to a layer's parameters, by role

SIZES = (2, 3, 147, 4608)
METHODS = ("sp", "wn", "gmp", "intrinsic")
NAMES = {"weight": "direction", "bias": "offset"}
NAMES |= {f"parametrizations.weight.original{i}": ("length", "direction")[i] for i in range(2)}
NAMES |= {"latitude": "direction", "unit": "direction", "r": "scale", "lam": "offset"}
COORDINATES = {"gmp": "angles", "intrinsic": "intrinsic"}
HALF_TURN = torch.tensor(180.0).double()


def make(method: str, n: int, out: int = 4, length: float = 0.01) -> nn.Module:
    """Units with random weights of about this length, and biases."""
    layer = nn.Linear(n, out, dtype=torch.float64)
    nn.init.normal_(layer.weight, std=length / math.sqrt(n))
    nn.init.normal_(layer.bias, std=length)
    if method == "wn":
        return weight_norm(layer)
    if method in COORDINATES:
        return gp.GmPLinear.from_linear(layer, coordinates=COORDINATES[method])
    return layer


def read_stored(layer: nn.Module) -> dict[str, Tensor]:
    """The parameters that a layer stores, by role."""
    return {NAMES[name]: parameter for name, parameter in layer.named_parameters()}


class Response(NamedTuple):
    rotation: Tensor  # of each unit's boundary in degrees
    displacement: Tensor  # of its location


@torch.no_grad()
def respond(layer: nn.Module, steps: Steps) -> Response:
    """How the boundaries of a layer's units answer to steps."""
    moved = copy.deepcopy(layer).double()
    for role, step in steps.items():
        read_stored(moved)[role] += step
    old, new = layer_boundaries(layer), layer_boundaries(moved)
    return Response(
        sphere.angle_between(old.direction, new.direction).rad2deg(),
        (old.location - new.location).norm(dim=1),
    )


def make_constant_steps(layer: nn.Module, delta: float) -> Steps:
    """Figure 1's: every stored element but r's gains delta; so does theta."""
    steps = {role: torch.full_like(value, delta) for role, value in read_stored(layer).items()}
    steps.pop("scale", None)
    if "latitude" in dict(layer.named_parameters()):
        steps["direction"] *= -1  # the latitude is pi/2 - theta
    return steps


def make_reversing_steps(layer: nn.Module, delta: float) -> Steps:
    return {"direction": reverse(layer, delta)}


KINDS = {"constant": make_constant_steps, "reversing": make_reversing_steps}


def reverse(layer: nn.Module, delta: float) -> Tensor:
    """The papers' adversary (Propositions 2.3-2.5): -(1 + delta) w, of a stored w or v."""
    return -(1 + delta) * read_stored(layer)["direction"].detach().double()


@pytest.mark.parametrize("n", [2, 4608])
@pytest.mark.parametrize("method", ["sp", "wn"])
def test_the_adversary_reverses_units_under_sp_and_wn(method: str, n: int) -> None:
    layer = make(method, n).float()
    response = respond(layer, {"direction": reverse(layer, 0.01)})
    assert torch.allclose(response.rotation, HALF_TURN, atol=1e-4)


def turn_under(norm: nn.Module, layer: nn.Module, step: Tensor) -> Tensor:
    """Degrees by which a step of the stored direction turns the units before a norm."""
    moved = copy.deepcopy(layer)
    with torch.no_grad():
        read_stored(moved)["direction"].add_(step)
    old, new = (layer_boundaries(each, norm.double()) for each in (layer, moved))
    return sphere.angle_between(old.direction, new.direction).rad2deg()


@pytest.mark.parametrize("n", [2, 4608])
@pytest.mark.parametrize("method", ["sp", "wn"])
def test_the_adversary_reverses_units_under_bn(method: str, n: int) -> None:
    layer = make(method, n)
    step = reverse(layer, 0.01)
    assert torch.allclose(turn_under(nn.BatchNorm1d(4), layer, step), HALF_TURN)


@pytest.mark.parametrize("n", SIZES)
def test_the_adversary_reverses_units_under_ln_by_flipping_all_rows(n: int) -> None:
    layer = make("sp", n)
    step = reverse(layer, 0.01)
    assert torch.allclose(turn_under(nn.LayerNorm(4), layer, step), HALF_TURN)
    step[1:] = 0
    assert (turn_under(nn.LayerNorm(4), layer, step) < 179).all()


@pytest.mark.parametrize("is_adversary", [False, True])
def test_bn_on_whitened_data_answers_as_weight_normalization_does(is_adversary: bool) -> None:
    n = 9
    x = torch.randn(500, n, dtype=torch.float64) @ torch.randn(n, n, dtype=torch.float64)
    x -= x.mean(dim=0)
    root = torch.linalg.cholesky(x.t() @ x / len(x))  # of the covariance
    whitened = torch.linalg.solve_triangular(root, x.t(), upper=False).t()

    linear, norm = make("sp", n), nn.BatchNorm1d(4, eps=1e-15).double()
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    wn = weight_norm(copy.deepcopy(linear))
    with torch.no_grad():
        wn.parametrizations.weight.original0.copy_(norm.weight[:, None])
        wn.parametrizations.weight.original1.copy_(linear.weight)
        wn.bias.copy_(norm.bias)
    response = respond(wn, make_constant_steps(wn, 0.02))
    if is_adversary:
        response = respond(wn, {"direction": reverse(wn, 0.02)})

    model = nn.Sequential(linear, norm, nn.ReLU())
    old = boundaries(model, whitened, statistics="batch")["0"]
    with torch.no_grad():  # BatchNorm subtracts the layer's bias again
        if is_adversary:
            linear.weight.add_(reverse(linear, 0.02))
        else:
            linear.weight.add_(0.02)
            norm.weight.add_(0.02)
            norm.bias.add_(0.02)
    new = boundaries(model, whitened, statistics="batch")["0"]
    turn = sphere.angle_between(old.direction, new.direction).rad2deg()
    assert torch.allclose(turn, response.rotation)
    assert torch.allclose((old.location - new.location).norm(dim=1), response.displacement)


def spherical(theta: np.ndarray) -> np.ndarray:
    """u(theta) as the papers write it, one coordinate at a time."""
    u = np.ones(len(theta) + 1)
    for i, angle in enumerate(theta):
        u[i] *= np.cos(angle)
        u[i + 1 :] *= np.sin(angle)
    return u


def affine(method: str, stored: dict[str, np.ndarray], unit: int) -> tuple[np.ndarray, float]:
    """Weight and bias of a unit from its stored numbers."""
    direction, offset = stored["direction"][unit], stored["offset"][unit]
    if method == "sp":
        return direction, offset
    if method == "wn":
        return stored["length"][unit] * direction / np.linalg.norm(direction), offset
    if method == "gmp":
        direction = spherical(math.pi / 2 - direction)
    return direction / np.linalg.norm(direction), offset


def location(w: np.ndarray, b: float) -> np.ndarray:
    """The nearest point to the origin of {x : w^T x + b = 0}, by its Lagrangian's equations."""
    n = len(w)
    system = np.block([[np.eye(n), w[:, None]], [w[None], np.zeros((1, 1))]])
    return np.linalg.solve(system, np.append(np.zeros(n), -b))[:n]


def degrees_between(u: np.ndarray, v: np.ndarray) -> float:
    u, v = u / np.linalg.norm(u), v / np.linalg.norm(v)
    across = np.linalg.norm(v - (u @ v) * u)
    return math.degrees(math.atan2(across, u @ v))


@pytest.mark.parametrize("delta", [1e-4, 0.5])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [2, 9])
@pytest.mark.parametrize("method", METHODS)
def test_turns_and_moves_are_those_of_the_geometry(
    method: str, n: int, kind: str, delta: float
) -> None:
    layer = make(method, n, length=0.1)
    step = KINDS[kind](layer, delta)
    response = respond(layer, step)
    before = {role: tensor.detach().numpy() for role, tensor in read_stored(layer).items()}
    after = {role: value + step[role].numpy() for role, value in before.items() if role in step}
    after = before | after
    if method == "gmp" and kind == "constant":
        assert np.allclose(math.pi / 2 - after["direction"], layer.theta.detach() + delta)
    for unit in range(4):
        (w, b), (w_after, b_after) = (affine(method, roles, unit) for roles in (before, after))
        turn = degrees_between(w, w_after)
        move = np.linalg.norm(location(w, b) - location(w_after, b_after))
        assert np.isclose(response.rotation[unit].item(), turn, rtol=1e-7, atol=1e-9)
        assert np.isclose(response.displacement[unit].item(), move, rtol=1e-7, atol=1e-9)


def find_bound(layer: nn.Module, step: Tensor) -> Tensor:
    """The turn in degrees that no step of the direction of this length exceeds.

    For angles it is the length: the path's, which is at least the angle (Theorem 3.7). For a
    vector w it is arcsin(length / ||w||), and 180 degrees where the step is as long as w.
    """
    row = read_stored(layer)["direction"].detach().double()
    length = step.norm(dim=1)
    if "latitude" in dict(layer.named_parameters()):
        return length.rad2deg()
    share = length / row.norm(dim=1)
    return torch.where(share < 1, share.clamp(max=1).asin().rad2deg(), HALF_TURN)


@pytest.mark.parametrize("near", ["anywhere", "poles", "at a pole"])
@pytest.mark.parametrize("size", [1e-6, 0.3, 2.0])
@pytest.mark.parametrize("n", SIZES)
def test_no_step_of_angles_turns_a_unit_by_more_than_its_length(
    n: int, size: float, near: str
) -> None:
    layer = gp.GmPLinear(n, 64, dtype=torch.float64)
    if near != "anywhere":
        layer.latitude.data[:, :: max(1, n // 8)] = math.pi / 2 - 1e-3 * (near == "poles")
    step = size * sphere.sample(64, n - 1)
    response = respond(layer, {"direction": step})
    bound = find_bound(layer, step)
    assert (response.rotation <= bound * (1 + 1e-9) + 1e-9).all()


def find_worst_step(row: Tensor, size: float) -> Tensor:
    """A step of size ||row||: a triangle with its right angle at the end of the step."""
    length = row.norm(dim=1, keepdim=True)
    u = row / length
    across = sphere.sample(*row.shape)
    across = sphere.normalise(across - (across * u).sum(dim=1, keepdim=True) * u)
    return size * length * (math.sqrt(1 - size**2) * across - size * u)


@pytest.mark.parametrize("size", [1e-6, 0.9, 1.1])
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("method", ["sp", "wn", "intrinsic"])
def test_the_bound_of_vectors_holds_and_is_attained(method: str, n: int, size: float) -> None:
    layer = make(method, n, out=32)
    row = read_stored(layer)["direction"].detach()
    step = size * row.norm(dim=1, keepdim=True) * sphere.sample(32, n)
    response = respond(layer, {"direction": step})
    expected = torch.tensor(math.degrees(math.asin(size)) if size < 1 else 180.0).double()
    assert torch.allclose(find_bound(layer, step), expected)
    assert (response.rotation <= expected + 1e-5).all()
    if size < 1:
        worst = respond(layer, {"direction": find_worst_step(row, size)})
        assert torch.allclose(worst.rotation, expected)


@pytest.mark.parametrize("delta", [0.1, 3.0])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", METHODS)
def test_no_unit_turns_by_more_than_its_bound(method: str, kind: str, delta: float) -> None:
    layer = make(method, 5, 6, length=0.3)
    steps = KINDS[kind](layer, delta)
    rotation = respond(layer, steps).rotation
    assert torch.isfinite(rotation).all()
    assert (rotation <= find_bound(layer, steps["direction"]) + 1e-5).all()


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("method", COORDINATES)
def test_an_adversary_of_the_same_strength_turns_gmp_by_the_length_of_the_weight(
    method: str, n: int
) -> None:
    """Among angles the worst direction is theta_1, whose metric is 1; for a vector a tangent."""
    standard = make("sp", n)
    layer = gp.GmPLinear.from_linear(standard, coordinates=COORDINATES[method])
    length = reverse(standard, 0.1).norm(dim=1)
    if method == "gmp":
        step = torch.zeros(4, n - 1).double()
        step[:, 0] = -length
        turn = length
    else:
        unit = read_stored(layer)["direction"].detach()
        step = torch.cat(
            [find_worst_step(u[None], s.item()) for u, s in zip(unit, length, strict=True)]
        )
        turn = length.asin()
    response = respond(layer, {"direction": step})
    assert torch.allclose(step.norm(dim=1), length)
    assert torch.allclose(response.rotation, turn.rad2deg(), rtol=1e-7)
    assert torch.allclose(find_bound(layer, step), turn.rad2deg(), rtol=1e-7)


def test_an_offset_alone_moves_a_gmp_boundary_by_itself() -> None:
    response = respond(make("gmp", 9), {"offset": torch.full((4,), 0.25).double()})
    assert torch.allclose(response.displacement, torch.tensor(0.25).double())
    assert (response.rotation == 0).all()


def test_r_outside_the_activation_moves_nothing_and_inside_it_may_reverse() -> None:
    for activation, turned in ((torch.relu, 0.0), (None, 180.0)):
        layer = gp.GmPLinear(3, 2, activation=activation, dtype=torch.float64)
        response = respond(layer, {"scale": torch.tensor([-1.5, -0.5]).double()})
        assert response.rotation.tolist() == [turned, 0.0]


def test_a_flipped_length_reverses_a_unit() -> None:
    layer = make("wn", 3, length=1.0)
    value = read_stored(layer)["length"].detach()
    response = respond(layer, {"length": -2 * value})
    assert torch.allclose(response.rotation, HALF_TURN)


def test_a_unit_of_one_input_keeps_its_direction() -> None:
    layer = gp.GmPLinear(1, 4, dtype=torch.float64)
    assert (respond(layer, make_constant_steps(layer, 3.0)).rotation == 0).all()


def test_units_without_a_boundary_are_nan() -> None:
    layer = make("sp", 3)
    layer.weight.data[1] = 0
    response = respond(layer, {"direction": reverse(layer, 0.1)})
    assert response.rotation.isnan().tolist() == [False, True, False, False]
