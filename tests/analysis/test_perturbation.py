"""Boundaries under perturbed parameters: the papers' propositions, and the bounds beside them.

Second computations are plain numpy: directions from the papers' formula in theta, locations by
solving for the boundary's nearest point, batch normalization by normalising samples.
"""

import copy
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

import geoparam as gp
from geoparam import sphere
from geoparam.analysis.boundary import boundaries
from geoparam.analysis.parameter_steps import KINDS, add_steps, make_steps, read_stored
from geoparam.analysis.perturbation import Response, perturb, respond

SIZES = (2, 3, 147, 4608)
METHODS = ("sp", "wn", "gmp", "intrinsic")
COORDINATES = {"gmp": "angles", "intrinsic": "intrinsic"}


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


def norm_of(name: str) -> list[nn.Module]:
    """A norm of six units with random parameters, if it is named."""
    if not name:
        return []
    kinds = {"bn": nn.BatchNorm1d, "ln": nn.LayerNorm, "mbn": gp.MeanOnlyBatchNorm}
    norm = kinds[name](6)
    for key, tensor in norm.state_dict().items():
        if key in ("weight", "bias", "running_mean"):
            nn.init.normal_(tensor)
    return [norm]


def network(name: str) -> nn.Module:
    """Two hidden layers and an output layer in float64, with a norm or without."""
    method, _, norm = name.partition("+")
    blocks = [[make(method, n, 6, length=0.3), *norm_of(norm), nn.ReLU()] for n in (5, 6)]
    return nn.Sequential(*blocks[0], *blocks[1], nn.Linear(6, 1)).double()


NETWORKS = [m + norm for m in METHODS for norm in ("", "+bn", "+ln")] + ["wn+mbn"]


@pytest.mark.parametrize("n", [2, 4608])
@pytest.mark.parametrize("method", ["sp", "wn"])
@pytest.mark.parametrize("norm", [None, nn.BatchNorm1d(4)], ids=["", "bn"])
def test_the_adversary_reverses_units_under_sp_wn_and_bn(
    method: str, n: int, norm: nn.Module | None
) -> None:
    layer = make(method, n).float()
    response = respond(layer, make_steps(layer, "adversarial", 0.01, norm=norm), norm)
    assert torch.allclose(response.rotation, torch.full((4,), 180.0).double(), atol=1e-4)
    assert (response.bound == 180).all()


@pytest.mark.parametrize("n", SIZES)
def test_the_adversary_reverses_units_under_ln_by_flipping_all_rows(n: int) -> None:
    layer, norm = make("sp", n), nn.LayerNorm(4)
    step = make_steps(layer, "adversarial", 0.01, norm=norm)
    assert torch.allclose(respond(layer, step, norm).rotation, torch.tensor(180.0).double())
    step["direction"][1:] = 0
    assert (respond(layer, step, norm).rotation < 179).all()


@pytest.mark.parametrize("n", [2, 147])
def test_the_adversary_reverses_units_under_bn_with_the_batchs_statistics(n: int) -> None:
    model = nn.Sequential(make("sp", n), nn.BatchNorm1d(4, eps=1e-15), nn.ReLU()).double()
    nn.init.normal_(model[1].bias)
    x = torch.randn(300, n, dtype=torch.float64) @ torch.randn(n, n, dtype=torch.float64)
    x -= x.mean(dim=0)
    found = perturb(model, x, "adversarial", 0.3, statistics="batch")["0"]
    assert torch.allclose(found.rotation, torch.tensor(180.0).double())
    w, deviation = model[0].weight, (x @ model[0].weight.t()).std(dim=0, correction=0)
    distance = model[1].bias * deviation / w.norm(dim=1)  # of gamma w^T x / ||w||_Sigma + beta
    assert torch.allclose(found.displacement, 2 * distance.abs())


@pytest.mark.parametrize("kind", ["constant", "adversarial"])
def test_bn_on_whitened_data_answers_as_weight_normalization_does(kind: str) -> None:
    rng, n = np.random.default_rng(9), 9
    x = rng.normal(size=(500, n)) @ rng.normal(size=(n, n))
    x -= x.mean(axis=0)
    root = np.linalg.cholesky(x.T @ x / len(x))  # of the covariance
    whitened = torch.from_numpy(np.linalg.solve(root, x.T).T.copy())
    linear, norm = make("sp", n), nn.BatchNorm1d(4, eps=1e-15).double()
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    wn = weight_norm(copy.deepcopy(linear))
    with torch.no_grad():
        wn.parametrizations.weight.original0.copy_(norm.weight[:, None])
        wn.parametrizations.weight.original1.copy_(linear.weight)
        wn.bias.copy_(norm.bias)
    models = nn.Sequential(linear, norm, nn.ReLU()), nn.Sequential(wn, nn.ReLU())
    one, two = (perturb(m, whitened, kind, 0.02, statistics="batch")["0"] for m in models)
    for name in ("rotation", "displacements", "bound"):
        assert torch.allclose(getattr(one, name), getattr(two, name)), name


def spherical(theta: np.ndarray) -> np.ndarray:
    """u(theta) as the papers write it, one coordinate at a time."""
    u = np.ones(len(theta) + 1)
    for i, angle in enumerate(theta):
        u[i] *= np.cos(angle)
        u[i + 1 :] *= np.sin(angle)
    return u


def affine(method: str, held: dict[str, np.ndarray], unit: int) -> tuple[np.ndarray, float]:
    """Weight and bias of a unit from its stored numbers."""
    direction, offset = held["direction"][unit], held["offset"][unit]
    if method == "sp":
        return direction, offset
    if method == "wn":
        return held["length"][unit] * direction / np.linalg.norm(direction), offset
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
    step = make_steps(layer, kind, delta)
    response = respond(layer, step)
    before = {role: tensor.numpy() for role, tensor in read_stored(layer).items()}
    after = {
        role: value + step[role].numpy() if role in step else value
        for role, value in before.items()
    }
    if method == "gmp" and kind == "constant":
        assert np.allclose(math.pi / 2 - after["direction"], layer.theta.detach() + delta)
    for unit in range(4):
        (w, b), (w_after, b_after) = (affine(method, held, unit) for held in (before, after))
        turn = degrees_between(w, w_after)
        move = np.linalg.norm(location(w, b) - location(w_after, b_after))
        assert np.isclose(response.rotation[unit].item(), turn, rtol=1e-7, atol=1e-9)
        assert np.isclose(response.displacement[unit].item(), move, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("statistics", ["running", "batch"])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_perturbed_layer_is_the_layer_with_perturbed_parameters(
    name: str, statistics: str
) -> None:
    model, x = network(name), torch.randn(40, 5, dtype=torch.float64)
    response = perturb(model, x, "constant", 0.03, statistics=statistics)["0"]
    other = copy.deepcopy(model)
    with torch.no_grad():  # all that the first layer and its norm store, but r
        for name, parameter in other[:2].named_parameters():
            if name != "0.r":
                parameter += -0.03 if name == "0.latitude" else 0.03
    old, new = (boundaries(m, x, statistics=statistics)["0"] for m in (model, other))
    turn = sphere.angle_between(old.direction, new.direction).rad2deg()
    move = (old.location - new.location).norm(dim=1)
    assert torch.allclose(response.rotation, turn, atol=1e-9)
    assert torch.allclose(response.displacement, move, atol=1e-9)


def assert_bounded(response: Response) -> None:
    """In degrees; what rounding adds to an angle of 180 degrees is below 1e-5."""
    assert torch.isfinite(response.rotation).all()
    assert (response.rotation <= response.bound + 1e-5).all()


@pytest.mark.parametrize("near", ["anywhere", "poles", "at a pole"])
@pytest.mark.parametrize("size", [1e-6, 0.3, 2.0])
@pytest.mark.parametrize("n", SIZES)
def test_no_step_of_angles_turns_a_unit_by_more_than_its_length(
    n: int, size: float, near: str
) -> None:
    layer = gp.GmPLinear(n, 64, dtype=torch.float64)
    with torch.no_grad():
        if near != "anywhere":
            layer.latitude[:, :: max(1, n // 8)] = math.pi / 2 - 1e-3 * (near == "poles")
    step = size * sphere.sample(64, n - 1)
    response = respond(layer, {"direction": step})
    length = torch.linalg.vector_norm(step, dim=1)
    assert torch.allclose(response.bound, length.rad2deg(), rtol=1e-6, atol=1e-12)
    assert (response.rotation <= response.bound * (1 + 1e-9) + 1e-9).all()


@pytest.mark.parametrize("size", [1e-6, 0.9, 1.1])
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("method", ["sp", "wn", "intrinsic"])
def test_the_bound_of_vectors_holds_and_is_attained(method: str, n: int, size: float) -> None:
    layer = make(method, n, out=32)
    row = read_stored(layer)["direction"]
    length = row.norm(dim=1, keepdim=True)
    response = respond(layer, {"direction": size * length * sphere.sample(32, n)})
    expected = math.degrees(math.asin(size)) if size < 1 else 180.0
    assert torch.allclose(response.bound, torch.tensor(expected).double())
    assert_bounded(response)
    if size < 1:  # a triangle with its right angle at the end of the step
        u = row / length
        across = sphere.sample(32, n)
        across = sphere.normalise(across - (across * u).sum(dim=1, keepdim=True) * u)
        worst = size * length * (math.sqrt(1 - size**2) * across - size * u)
        response = respond(layer, {"direction": worst})
        assert torch.allclose(response.rotation, torch.tensor(expected).double())


@pytest.mark.parametrize("statistics", ["running", "batch"])
@pytest.mark.parametrize("delta", [0.1, 3.0])
@pytest.mark.parametrize("name", NETWORKS)
def test_no_unit_of_a_network_turns_by_more_than_its_bound(
    name: str, delta: float, statistics: str
) -> None:
    model, x = network(name), torch.randn(8, 5, dtype=torch.float64)
    for kind in KINDS:
        for response in perturb(model, x, kind, delta, statistics=statistics).values():
            assert_bounded(response)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("method", COORDINATES)
def test_an_adversary_of_the_same_strength_turns_gmp_by_the_length_of_the_weight(
    method: str, n: int
) -> None:
    standard = make("sp", n)
    layer = gp.GmPLinear.from_linear(standard, coordinates=COORDINATES[method])
    step = make_steps(layer, "adversarial", 0.1)
    length = make_steps(standard, "adversarial", 0.1)["direction"].norm(dim=1)
    assert torch.allclose(step["direction"].norm(dim=1), length)
    response = respond(layer, step)
    turn = length if method == "gmp" else length.asin()
    assert torch.allclose(response.rotation, turn.rad2deg(), rtol=1e-7)
    assert torch.allclose(response.bound, turn.rad2deg(), rtol=1e-7)


def test_an_offset_alone_moves_a_gmp_boundary_by_itself() -> None:
    layer = make("gmp", 9)
    response = respond(layer, {"offset": torch.full((4,), 0.25).double()})
    assert torch.allclose(response.displacement, torch.tensor(0.25).double())
    assert (response.rotation == 0).all() and (response.bound == 0).all()


def test_r_outside_the_activation_moves_nothing_and_inside_it_may_reverse() -> None:
    for activation, turned in ((torch.relu, 0.0), (None, 180.0)):
        layer = gp.GmPLinear(3, 2, activation=activation, dtype=torch.float64)
        response = respond(layer, {"scale": torch.tensor([-1.5, -0.5]).double()})
        assert response.rotation.tolist() == [turned, 0.0]
        assert response.bound.tolist() == [turned, 0.0]


@pytest.mark.parametrize("role", ["length", "gamma"])
def test_a_flipped_length_or_gamma_reverses_a_unit(role: str) -> None:
    layer, norm = make("wn", 3, length=1.0), nn.BatchNorm1d(4)
    value = read_stored(layer, norm)[role]
    response = respond(layer, {role: -2 * value}, norm)
    assert torch.allclose(response.rotation, torch.tensor(180.0).double())
    assert (response.bound == 180).all()


@pytest.mark.parametrize("delta", [0.01, 3.0])
@pytest.mark.parametrize(
    "build",
    [
        lambda: pytest.importorskip("transformers.pytorch_utils").Conv1D(3, 4),
        lambda: gp.GmPLinear(1, 4, dtype=torch.float64),
        lambda: nn.MultiheadAttention(4, 2, dtype=torch.float64),
    ],
    ids="transposed one-input attention".split(),
)
def test_bounds_hold_for_less_common_layers(build: Callable, delta: float) -> None:
    layer = build()
    for kind in KINDS:
        assert_bounded(respond(layer, make_steps(layer, kind, delta)))


def test_both_breakpoints_of_relu6_are_followed() -> None:
    layer = make("sp", 3, length=1.0)
    step = make_steps(layer, "constant", 0.1)
    response = respond(layer, step, activation=nn.ReLU6())
    assert response.displacements.shape == (2, 4)
    for row, point in zip(response.displacements, (0.0, 6.0), strict=True):
        for unit in range(4):
            w, b = layer.weight[unit].detach().numpy(), layer.bias[unit].item()
            one, two = location(w, b - point), location(w + 0.1, b + 0.1 - point)
            assert math.isclose(row[unit].item(), np.linalg.norm(one - two), rel_tol=1e-9)


def test_units_without_a_boundary_are_nan() -> None:
    model = nn.Sequential(make("sp", 3), nn.BatchNorm1d(4).double(), nn.ReLU())
    with torch.no_grad():
        model[1].weight[0] = 0
        model[0].weight[1] = 0
    x = torch.randn(5, 3, dtype=torch.float64)
    response = perturb(model, x, "adversarial", 0.1)["0"]
    assert response.rotation.isnan().tolist() == [True, True, False, False]
    assert response.bound.isnan().tolist() == [True, True, False, False]


def fingerprint(model: nn.Module) -> list[tuple]:
    """Names, identities, versions and bytes of all tensors; flags of all modules."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    made = [
        (name, id(t), t._version, t.detach().numpy().tobytes(), t.grad is None)
        for name, t in tensors
    ]
    return [*made, *((name, module.training) for name, module in model.named_modules())]


@pytest.mark.parametrize("name", ["sp", "wn+mbn", "gmp+bn", "intrinsic+ln"])
def test_the_model_is_afterwards_what_it_was(name: str) -> None:
    model, x = network(name).train(), torch.randn(8, 5, dtype=torch.float64)
    before, state = fingerprint(model), torch.get_rng_state()
    generator = torch.Generator().manual_seed(0)
    for kind in KINDS:
        perturb(model, x, kind, 0.1, statistics="batch", generator=generator)
    assert fingerprint(model) == before
    assert torch.equal(torch.get_rng_state(), state)


def test_a_whole_resnet_is_perturbed() -> None:
    vision = pytest.importorskip("torchvision.models.resnet")
    model, x = vision.ResNet(vision.BasicBlock, [1, 1, 1, 1]), torch.zeros(1, 3, 32, 32)
    for kind, least in (("constant", 0), ("adversarial", 179.99)):
        found = perturb(model, x, kind, 0.01)
        assert len(found) == 13
        assert all(least < each.rotation.max() <= each.bound.max() for each in found.values())
    geometric = perturb(gp.convert_(model), x, "adversarial", 0.01)
    assert all(each.rotation.max() < 120 for name, each in geometric.items() if name != "fc")


def test_a_step_is_rounded_to_what_the_parameter_can_hold() -> None:
    layer = nn.Linear(1, 1)
    nn.init.ones_(layer.weight)
    tiny = {"direction": torch.full((1, 1), 1e-9, dtype=torch.float64)}
    assert add_steps(layer, None, tiny)[layer, "weight"].item() == 1.0


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda layer: perturb(layer, kind="uniform"),
            "a kind is one of constant, gaussian, adversarial; got 'uniform'",
        ),
        (lambda layer: perturb(layer, kind="adversarial", delta=0.0), "needs delta > 0"),
        (
            lambda layer: respond(layer, {"length": torch.ones(3)}),
            r"roles direction, offset; got steps of \['length'\]",
        ),
        (lambda layer: perturb(weight_norm(layer, dim=1)), "Leave it out by `layers`"),
        (lambda layer: perturb(spectral_norm(layer, dim=1)), "Leave it out by `layers`"),
    ],
)
def test_what_cannot_be_answered_says_why(call: Callable, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call(nn.Linear(3, 3))


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_the_older_weight_norm_answers_as_the_newer_one() -> None:
    x, found = torch.randn(8, 5), []
    for wrap in (nn.utils.weight_norm, weight_norm):
        torch.manual_seed(0)
        model = nn.Sequential(wrap(nn.Linear(5, 6)), nn.BatchNorm1d(6), nn.ReLU())
        before = model[0].weight.clone()
        found.append(perturb(model, x, "constant", 0.1, statistics="batch")["0"])
        assert torch.equal(model[0].weight, before)
    for name in ("rotation", "displacements", "bound"):
        assert torch.allclose(*(getattr(each, name) for each in found)), name
