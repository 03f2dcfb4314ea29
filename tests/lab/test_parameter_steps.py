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
from collections.abc import Callable
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
COORDINATES = {"gmp": "angles", "intrinsic": "intrinsic"}
ROLES = {
    "weight": "direction",
    "parametrizations.weight.original0": "length",
    "parametrizations.weight.original1": "direction",
    "latitude": "direction",
    "unit": "direction",
    "r": "scale",
    "bias": "offset",
    "lam": "offset",
}
HALF_TURN = torch.tensor(180.0).double()


def make_layer(method: str, n: int, out: int = 4, length: float = 0.01) -> nn.Module:
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
    return {ROLES[name]: parameter for name, parameter in layer.named_parameters()}


def stored_direction(layer: nn.Module) -> Tensor:
    return read_stored(layer)["direction"].detach().double()


def has_angles(layer: nn.Module) -> bool:
    return "latitude" in dict(layer.named_parameters())


class Response(NamedTuple):
    rotation: Tensor  # of each unit's boundary in degrees
    displacement: Tensor  # of its location


@torch.no_grad()
def respond(layer: nn.Module, steps: Steps) -> Response:
    """How the boundaries of a layer's units answer to steps."""
    stepped = copy.deepcopy(layer).double()
    parameters = read_stored(stepped)
    for role, step in steps.items():
        parameters[role] += step

    old, new = layer_boundaries(layer), layer_boundaries(stepped)
    return Response(
        sphere.angle_between(old.direction, new.direction).rad2deg(),
        (old.location - new.location).norm(dim=1),
    )


def make_constant_steps(layer: nn.Module, delta: float) -> Steps:
    """Figure 1's: every stored element but r's gains delta; so does theta."""
    steps = {role: torch.full_like(value, delta) for role, value in read_stored(layer).items()}
    steps.pop("scale", None)
    if has_angles(layer):
        steps["direction"] *= -1  # the latitude is pi/2 - theta
    return steps


def make_reversing_steps(layer: nn.Module, delta: float) -> Steps:
    return {"direction": reverse(layer, delta)}


MAKE_STEPS = {"constant": make_constant_steps, "reversing": make_reversing_steps}


def reverse(layer: nn.Module, delta: float) -> Tensor:
    """The papers' adversary (Propositions 2.3-2.5): -(1 + delta) w, of a stored w or v."""
    return -(1 + delta) * stored_direction(layer)


@pytest.mark.parametrize("n", [2, 4608])
@pytest.mark.parametrize("method", ["sp", "wn"])
def test_the_adversary_reverses_units_under_sp_and_wn(method: str, n: int) -> None:
    layer = make_layer(method, n).float()

    response = respond(layer, {"direction": reverse(layer, 0.01)})

    assert torch.allclose(response.rotation, HALF_TURN, atol=1e-4)


@torch.no_grad()
def turn_under(norm: nn.Module, layer: nn.Module, step: Tensor) -> Tensor:
    """Degrees by which a step of the stored direction turns the units before a norm."""
    norm = norm.double()
    stepped = copy.deepcopy(layer)
    read_stored(stepped)["direction"].add_(step)

    old, new = layer_boundaries(layer, norm), layer_boundaries(stepped, norm)
    return sphere.angle_between(old.direction, new.direction).rad2deg()


@pytest.mark.parametrize("n", [2, 4608])
@pytest.mark.parametrize("method", ["sp", "wn"])
def test_the_adversary_reverses_units_under_bn(method: str, n: int) -> None:
    layer = make_layer(method, n)

    turn = turn_under(nn.BatchNorm1d(4), layer, reverse(layer, 0.01))

    assert torch.allclose(turn, HALF_TURN)


@pytest.mark.parametrize("n", SIZES)
def test_the_adversary_reverses_units_under_ln_by_flipping_all_rows(n: int) -> None:
    layer = make_layer("sp", n)

    turn = turn_under(nn.LayerNorm(4), layer, reverse(layer, 0.01))

    assert torch.allclose(turn, HALF_TURN)


@pytest.mark.parametrize("n", SIZES)
def test_flipping_one_row_reverses_no_unit_under_ln(n: int) -> None:
    layer = make_layer("sp", n)
    step = reverse(layer, 0.01)
    step[1:] = 0

    turn = turn_under(nn.LayerNorm(4), layer, step)

    assert (turn < 179).all()


def whiten(x: Tensor) -> Tensor:
    """Inputs with mean zero and the identity as their covariance."""
    x = x - x.mean(dim=0)
    covariance = x.t() @ x / len(x)
    root = torch.linalg.cholesky(covariance)
    return torch.linalg.solve_triangular(root, x.t(), upper=False).t()


@torch.no_grad()
def as_weight_norm(linear: nn.Linear, norm: nn.BatchNorm1d) -> nn.Module:
    """The weight-normalized layer equal to the two on whitened inputs."""
    layer = weight_norm(copy.deepcopy(linear))
    layer.parametrizations.weight.original0.copy_(norm.weight[:, None])
    layer.parametrizations.weight.original1.copy_(linear.weight)
    layer.bias.copy_(norm.bias)
    return layer


@pytest.mark.parametrize("kind", MAKE_STEPS)
def test_bn_on_whitened_data_answers_as_weight_normalization_does(kind: str) -> None:
    n = 9
    inputs = torch.randn(500, n, dtype=torch.float64) @ torch.randn(n, n, dtype=torch.float64)
    inputs = whiten(inputs)
    linear = make_layer("sp", n)
    norm = nn.BatchNorm1d(4, eps=1e-15).double()
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    wn = as_weight_norm(linear, norm)
    steps = MAKE_STEPS[kind](wn, 0.02)

    model = nn.Sequential(linear, norm, nn.ReLU())
    old = boundaries(model, inputs, statistics="batch")["0"]
    with torch.no_grad():
        linear.weight += steps["direction"]
        if kind == "constant":  # BatchNorm subtracts the layer's bias again
            norm.weight += 0.02
            norm.bias += 0.02
    new = boundaries(model, inputs, statistics="batch")["0"]

    expected = respond(wn, steps)
    turn = sphere.angle_between(old.direction, new.direction).rad2deg()
    assert torch.allclose(turn, expected.rotation)
    move = (old.location - new.location).norm(dim=1)
    assert torch.allclose(move, expected.displacement)


def spherical(theta: np.ndarray) -> np.ndarray:
    """u(theta) as the papers write it, one coordinate at a time."""
    u = np.ones(len(theta) + 1)
    for i, angle in enumerate(theta):
        u[i] *= np.cos(angle)
        u[i + 1 :] *= np.sin(angle)
    return u


def affine(method: str, stored: dict[str, np.ndarray], unit: int) -> tuple[np.ndarray, float]:
    """Weight and bias of a unit from what its layer stores."""
    direction = stored["direction"][unit]
    offset = stored["offset"][unit]
    if method == "sp":
        return direction, offset
    if method == "gmp":
        return spherical(math.pi / 2 - direction), offset

    weight = direction / np.linalg.norm(direction)
    if method == "wn":
        weight *= stored["length"][unit]
    return weight, offset


def location(w: np.ndarray, b: float) -> np.ndarray:
    """The nearest point to the origin of {x : w^T x + b = 0}, by its Lagrangian's equations."""
    n = len(w)
    system = np.zeros((n + 1, n + 1))
    system[:n, :n] = np.eye(n)
    system[:n, n] = w
    system[n, :n] = w
    right_side = np.append(np.zeros(n), -b)
    return np.linalg.solve(system, right_side)[:n]


def degrees_between(u: np.ndarray, v: np.ndarray) -> float:
    u = u / np.linalg.norm(u)
    v = v / np.linalg.norm(v)
    along = u @ v
    across = np.linalg.norm(v - along * u)
    return math.degrees(math.atan2(across, along))


@pytest.mark.parametrize("delta", [1e-4, 0.5])
@pytest.mark.parametrize("kind", MAKE_STEPS)
@pytest.mark.parametrize("n", [2, 9])
@pytest.mark.parametrize("method", METHODS)
def test_turns_and_moves_are_those_of_the_geometry(
    method: str, n: int, kind: str, delta: float
) -> None:
    layer = make_layer(method, n, length=0.1)
    steps = MAKE_STEPS[kind](layer, delta)

    response = respond(layer, steps)

    before = {role: tensor.detach().numpy() for role, tensor in read_stored(layer).items()}
    after = dict(before)
    for role, step in steps.items():
        after[role] = before[role] + step.numpy()
    for unit in range(4):
        w, b = affine(method, before, unit)
        w_after, b_after = affine(method, after, unit)
        turn = degrees_between(w, w_after)
        move = np.linalg.norm(location(w, b) - location(w_after, b_after))
        assert np.isclose(response.rotation[unit].item(), turn, rtol=1e-7, atol=1e-9)
        assert np.isclose(response.displacement[unit].item(), move, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("delta", [1e-4, 0.5])
@pytest.mark.parametrize("n", [2, 9])
def test_constant_steps_add_delta_to_theta(n: int, delta: float) -> None:
    layer = make_layer("gmp", n, length=0.1)
    theta = layer.theta.detach()

    steps = make_constant_steps(layer, delta)

    latitude = stored_direction(layer) + steps["direction"]
    assert torch.allclose(math.pi / 2 - latitude, theta + delta)


def find_bound(layer: nn.Module, step: Tensor) -> Tensor:
    """The turn in degrees that no step of the direction of this length exceeds.

    For angles it is the length: the path's, which is at least the angle (Theorem 3.7). For a
    vector w it is arcsin(length / ||w||), and 180 degrees where the step is as long as w.
    """
    length = step.norm(dim=1)
    if has_angles(layer):
        return length.rad2deg()

    ratio = length / stored_direction(layer).norm(dim=1)
    turn = ratio.clamp(max=1).asin().rad2deg()
    return torch.where(ratio < 1, turn, HALF_TURN)


@pytest.mark.parametrize("distance", [None, 1e-3, 0.0], ids=["anywhere", "poles", "at a pole"])
@pytest.mark.parametrize("size", [1e-6, 0.3, 2.0])
@pytest.mark.parametrize("n", SIZES)
def test_no_step_of_angles_turns_a_unit_by_more_than_its_length(
    n: int, size: float, distance: float | None
) -> None:
    layer = gp.GmPLinear(n, 64, dtype=torch.float64)
    if distance is not None:
        layer.latitude.data[:, :: max(1, n // 8)] = math.pi / 2 - distance
    step = size * sphere.sample(64, n - 1)

    rotation = respond(layer, {"direction": step}).rotation

    bound = find_bound(layer, step)
    assert (rotation <= bound * (1 + 1e-9) + 1e-9).all()


def find_worst_step(row: Tensor, size: float) -> Tensor:
    """A step of size ||row||: a triangle with its right angle at the end of the step."""
    length = row.norm(dim=1, keepdim=True)
    u = row / length
    across = sphere.sample(*row.shape)
    across -= (across * u).sum(dim=1, keepdim=True) * u
    across = sphere.normalise(across)
    return size * length * (math.sqrt(1 - size**2) * across - size * u)


@pytest.mark.parametrize(
    ("size", "degrees"),
    [(1e-6, math.degrees(math.asin(1e-6))), (0.9, math.degrees(math.asin(0.9))), (1.1, 180.0)],
    ids=["1e-6", "0.9", "1.1"],
)
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("method", ["sp", "wn", "intrinsic"])
def test_the_bound_of_vectors_holds(method: str, n: int, size: float, degrees: float) -> None:
    layer = make_layer(method, n, out=32)
    length = stored_direction(layer).norm(dim=1, keepdim=True)
    step = size * length * sphere.sample(32, n)

    rotation = respond(layer, {"direction": step}).rotation

    bound = find_bound(layer, step)
    assert torch.allclose(bound, torch.tensor(degrees).double())
    assert (rotation <= bound + 1e-5).all()


@pytest.mark.parametrize("size", [1e-6, 0.9])
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("method", ["sp", "wn", "intrinsic"])
def test_the_bound_of_vectors_is_attained(method: str, n: int, size: float) -> None:
    layer = make_layer(method, n, out=32)
    step = find_worst_step(stored_direction(layer), size)

    rotation = respond(layer, {"direction": step}).rotation

    expected = torch.tensor(math.degrees(math.asin(size))).double()
    assert torch.allclose(rotation, expected)


@pytest.mark.parametrize("delta", [0.1, 3.0])
@pytest.mark.parametrize("kind", MAKE_STEPS)
@pytest.mark.parametrize("method", METHODS)
def test_no_unit_turns_by_more_than_its_bound(method: str, kind: str, delta: float) -> None:
    layer = make_layer(method, 5, 6, length=0.3)
    steps = MAKE_STEPS[kind](layer, delta)

    rotation = respond(layer, steps).rotation

    assert torch.isfinite(rotation).all()
    bound = find_bound(layer, steps["direction"])
    assert (rotation <= bound + 1e-5).all()


@pytest.mark.parametrize("n", SIZES)
def test_the_adversarys_step_turns_angles_by_the_length_of_the_weight(n: int) -> None:
    """The worst direction is theta_1, whose metric is 1."""
    standard = make_layer("sp", n)
    length = reverse(standard, 0.1).norm(dim=1)
    layer = gp.GmPLinear.from_linear(standard, coordinates="angles")
    step = torch.zeros(4, n - 1).double()
    step[:, 0] = -length

    rotation = respond(layer, {"direction": step}).rotation

    assert torch.allclose(rotation, length.rad2deg(), rtol=1e-7)
    assert torch.allclose(find_bound(layer, step), length.rad2deg(), rtol=1e-7)


@pytest.mark.parametrize("n", SIZES)
def test_the_adversarys_step_turns_a_unit_vector_by_the_arcsine_of_its_length(n: int) -> None:
    """The worst direction is a tangent at the end of the step."""
    standard = make_layer("sp", n)
    length = reverse(standard, 0.1).norm(dim=1)
    layer = gp.GmPLinear.from_linear(standard, coordinates="intrinsic")
    worst_steps = [
        find_worst_step(unit[None], size.item())
        for unit, size in zip(stored_direction(layer), length, strict=True)
    ]
    step = torch.cat(worst_steps)

    rotation = respond(layer, {"direction": step}).rotation

    expected = length.asin().rad2deg()
    assert torch.allclose(step.norm(dim=1), length)
    assert torch.allclose(rotation, expected, rtol=1e-7)
    assert torch.allclose(find_bound(layer, step), expected, rtol=1e-7)


def test_an_offset_alone_moves_a_gmp_boundary_by_itself() -> None:
    step = torch.full((4,), 0.25).double()

    response = respond(make_layer("gmp", 9), {"offset": step})

    assert torch.allclose(response.displacement, step)
    assert (response.rotation == 0).all()


@pytest.mark.parametrize(
    ("activation", "turn"), [(torch.relu, 0.0), (None, 180.0)], ids=["outside", "inside"]
)
def test_a_negative_r_reverses_a_unit_only_inside_the_activation(
    activation: Callable[[Tensor], Tensor] | None, turn: float
) -> None:
    layer = gp.GmPLinear(3, 2, activation=activation, dtype=torch.float64)
    step = torch.tensor([-1.5, -0.5]).double()

    response = respond(layer, {"scale": step})

    assert response.rotation.tolist() == [turn, 0.0]


def test_a_flipped_length_reverses_a_unit() -> None:
    layer = make_layer("wn", 3, length=1.0)
    length = read_stored(layer)["length"].detach()

    response = respond(layer, {"length": -2 * length})

    assert torch.allclose(response.rotation, HALF_TURN)


def test_a_unit_of_one_input_keeps_its_direction() -> None:
    layer = gp.GmPLinear(1, 4, dtype=torch.float64)

    response = respond(layer, make_constant_steps(layer, 3.0))

    assert (response.rotation == 0).all()


def test_units_without_a_boundary_are_nan() -> None:
    layer = make_layer("sp", 3)
    layer.weight.data[1] = 0

    response = respond(layer, {"direction": reverse(layer, 0.1)})

    assert response.rotation.isnan().tolist() == [False, True, False, False]
