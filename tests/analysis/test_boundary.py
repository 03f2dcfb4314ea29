"""Boundaries are where the model itself, run and hooked, says that its units switch.

The second computation is always the model's own forward pass: the pre-activation that a hook sees
must be t + scale (u^T x + lam) at every point, which fixes direction, distance and scale at once.
"""

import copy
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from function_model import FunctionModel
from patches import by_unit, patches, responses
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from geoparam import (
    GmPConv1d,
    GmPConv2d,
    GmPConv3d,
    GmPLinear,
    InputMeanNorm,
    MeanOnlyBatchNorm,
    convert_,
)
from geoparam.analysis import Boundaries, SReLU, boundaries, layer_boundaries
from geoparam.analysis.reading.layer_sites import find_sites, unwrap
from geoparam.analysis.reading.norms import UnknownNorm, norm_moments
from geoparam.attention import GmPMultiheadAttention
from geoparam.base_layer import GmPLayer

D = {"dtype": torch.float64}
CLOSE = {"rtol": 1e-9, "atol": 1e-9}
UNITS, FAN_IN, CHANNELS = 6, 5, 4


def randomised(model: nn.Module) -> nn.Module:
    """Draw every parameter and statistic, of both signs where there is one, and return it."""
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith("running_var"):
                tensor.uniform_(0.5, 2)
            elif tensor.is_floating_point() and not name.endswith("sign"):
                tensor.normal_()
    for module in model.modules():
        if isinstance(module, GmPLayer):
            module.retract_()
    return model.double()


def pre_activation(model: nn.Module, x: Tensor, activation: nn.Module) -> Tensor:
    """Return what the activation is given when `model` runs on `x`."""
    seen: list[Tensor] = []
    with activation.register_forward_pre_hook(lambda _, args: seen.append(args[0].clone())):
        model(x)
    return seen[0]


def told(found: Boundaries, layer: nn.Module, x: Tensor, point: float = 0.0) -> Tensor:
    """Return the pre-activation (points, units) that the first boundary tells of inputs `x`."""
    lam = responses(found.direction, patches(layer, x)) + found.distance
    return point + found.scale * lam


def check(model: nn.Sequential, x: Tensor, **options: Any) -> Boundaries:
    """Check the first layer of layer, norm, activation against the model in its present mode."""
    layer, activation = model[0], model[-1]
    found = boundaries(model, x, **options)["0"]
    z = by_unit(pre_activation(model, x, activation), -1 - len(getattr(layer, "kernel_size", ())))
    torch.testing.assert_close(told(found, layer, x), z.detach(), **CLOSE)
    return found


# --- what is exact: every parameterization under every norm with fixed statistics ----------------

LINEAR: dict[str, Callable[[], nn.Module]] = {
    "sp": lambda: nn.Linear(FAN_IN, UNITS),
    "sp without bias": lambda: nn.Linear(FAN_IN, UNITS, bias=False),
    "wn": lambda: parametrizations.weight_norm(nn.Linear(FAN_IN, UNITS)),
    "wn over inputs": lambda: parametrizations.weight_norm(nn.Linear(FAN_IN, UNITS), dim=1),
    "gmp, r inside": lambda: GmPLinear(FAN_IN, UNITS),
    "gmp, intrinsic": lambda: GmPLinear(FAN_IN, UNITS, coordinates="intrinsic"),
    "one input": lambda: nn.Linear(1, UNITS),
    "gmp, one input": lambda: GmPLinear(1, UNITS),
}
CONV: dict[str, Callable[[], nn.Module]] = {
    "sp": lambda: nn.Conv2d(CHANNELS, UNITS, 3, padding=1),
    "stride": lambda: nn.Conv2d(CHANNELS, UNITS, (3, 2), stride=(2, 1), padding=(0, 1)),
    "groups": lambda: nn.Conv2d(CHANNELS, UNITS, 2, groups=2, dilation=2, padding="same"),
    "circular": lambda: nn.Conv2d(CHANNELS, UNITS, 3, padding=1, padding_mode="circular"),
    "wn": lambda: parametrizations.weight_norm(nn.Conv2d(CHANNELS, UNITS, 3)),
    "gmp": lambda: GmPConv2d(CHANNELS, UNITS, 3, padding=1),
    "gmp, groups": lambda: GmPConv2d(CHANNELS, UNITS, 3, groups=2, stride=2),
    "gmp 1d": lambda: GmPConv1d(CHANNELS, UNITS, 3, stride=2),
    "gmp 3d": lambda: GmPConv3d(CHANNELS, UNITS, (1, 2, 3), padding=1),
}
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
FIXED: dict[str, Callable[[int, int], nn.Module]] = {
    "none": lambda units, rank: nn.Identity(),
    "bn": lambda units, rank: BATCH_NORMS[max(rank - 1, 0)](units),
    "bn without gamma": lambda units, rank: BATCH_NORMS[max(rank - 1, 0)](units, affine=False),
    "mbn": lambda units, rank: MeanOnlyBatchNorm(units),
    "mbn without bias": lambda units, rank: MeanOnlyBatchNorm(units, bias=False),
    "imn": lambda units, rank: InputMeanNorm(units),
}


def units_of(layer: nn.Module) -> int:
    return getattr(layer, "out_features", None) or layer.out_channels


def sequence(layer: nn.Module, norm: Callable[[int, int], nn.Module]) -> nn.Sequential:
    rank = len(getattr(layer, "kernel_size", ()))
    return randomised(nn.Sequential(layer, norm(units_of(layer), rank), nn.ReLU()))


def batch_for(layer: nn.Module, examples: int = 7) -> Tensor:
    size = getattr(layer, "kernel_size", None)
    if size is None:
        return torch.randn(examples, layer.in_features, **D)
    return torch.randn(examples, layer.in_channels, *[7, 6, 5][: len(size)], **D)


@pytest.mark.parametrize(("norm", "statistics"), [("none", "running"), ("bn", "batch")])
@pytest.mark.parametrize("make", [*LINEAR.values(), *CONV.values()], ids=[*LINEAR, *CONV])
def test_boundaries_of_every_layer_tell_the_pre_activation(
    make: Callable, norm: str, statistics: str
) -> None:
    model = sequence(make(), FIXED[norm]).train(statistics == "batch")
    check(model, batch_for(model[0], 7), statistics=statistics)


@pytest.mark.parametrize("statistics", ["running", "batch"])
@pytest.mark.parametrize("norm", FIXED.values(), ids=FIXED)
@pytest.mark.parametrize("make", [LINEAR["gmp, r inside"], CONV["sp"]], ids=["linear", "conv"])
def test_boundaries_under_every_norm_tell_the_pre_activation(
    make: Callable, norm: Callable, statistics: str
) -> None:
    model = sequence(make(), norm).train(statistics == "batch")
    check(model, batch_for(model[0], 7), statistics=statistics)


def frozen(units: int) -> nn.Module:
    return pytest.importorskip("torchvision.ops").FrozenBatchNorm2d(units)


@pytest.mark.parametrize(
    "norm",
    [nn.SyncBatchNorm, frozen, lambda units: nn.InstanceNorm2d(units, track_running_stats=True)],
    ids=["synchronised", "frozen", "instance"],
)
def test_other_norms_with_running_statistics_are_exact(norm: Callable) -> None:
    model = randomised(nn.Sequential(CONV["sp"](), norm(UNITS), nn.ReLU())).eval()
    check(model, batch_for(model[0], 3))


OUTSIDE = {
    "linear": lambda g: GmPLinear(FAN_IN, UNITS, activation=g),
    "conv": lambda g: GmPConv2d(CHANNELS, UNITS, 3, padding=1, groups=2, activation=g),
}


@pytest.mark.parametrize("make", OUTSIDE.values(), ids=OUTSIDE)
def test_r_outside_scales_the_output_and_leaves_the_boundary(make: Callable) -> None:
    layer = randomised(make(nn.ReLU())).eval()
    assert (layer.r < 0).any() and (layer.r > 0).any()
    x = batch_for(layer)
    found = boundaries(layer, x)[""]
    z = by_unit(pre_activation(layer, x, layer.activation), layer.channel_dim).detach()
    lam = responses(found.direction, patches(layer, x)) + found.distance
    torch.testing.assert_close(lam, z, **CLOSE)
    torch.testing.assert_close(found.scale, layer.r.detach().abs(), **CLOSE)
    torch.testing.assert_close(found.location, layer.location.detach().flatten(1), **CLOSE)
    torch.testing.assert_close(layer_boundaries(layer).location, found.location, **CLOSE)


def test_the_norm_after_a_layer_with_its_own_activation_is_not_between_them() -> None:
    layer = randomised(GmPLinear(FAN_IN, UNITS, activation=nn.ReLU()))
    model = nn.Sequential(layer, nn.BatchNorm1d(UNITS, **D), nn.Tanh())
    found = boundaries(model, batch_for(layer))["0"]
    torch.testing.assert_close(found.distance, layer.lam.detach(), **CLOSE)


@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize("form", [True, "border"])
def test_x_is_the_centred_input_where_a_layer_normalises_its_mean(
    form: bool | str, padding: int
) -> None:
    layer = randomised(GmPConv2d(CHANNELS, UNITS, 3, padding=padding, input_norm=form)).eval()
    model, x = nn.Sequential(layer, nn.ReLU()), batch_for(layer, 3)
    found = boundaries(model, x)["0"]
    z = by_unit(pre_activation(model, x, model[1]), -3).detach()
    mean = layer.input_norm.running_mean[:, None, None]
    centred = x - mean
    if form is True and padding:  # zeros are padded to what is not centred
        layer, centred = copy.copy(layer), F.pad(x, [padding] * 4) - mean
        layer.padding = (0, 0)
    torch.testing.assert_close(told(found, layer, centred), z, **CLOSE)


# --- activations and their breakpoints -----------------------------------------------------------

ACTIVATIONS: dict[str, tuple[Callable[[], nn.Module], list]] = {
    "relu": (nn.ReLU, [0]),
    "prelu": (lambda: nn.PReLU(UNITS), [0]),
    "relu6": (nn.ReLU6, [0, 6]),
    "hardswish": (nn.Hardswish, [-3, 3]),
    "hardtanh": (lambda: nn.Hardtanh(-0.5, 2.0), [-0.5, 2.0]),
    "srelu of each unit": (lambda: SReLU(UNITS), [[0, 1, 2, 3, 4, 5], [1, 3, 2, 4, 5, 6]]),
}


@pytest.mark.parametrize("norm", ["none", "bn"])
@pytest.mark.parametrize(("make", "points"), ACTIVATIONS.values(), ids=ACTIVATIONS)
def test_the_pre_activation_at_each_location_is_the_breakpoint(
    make: Callable, points: list, norm: str
) -> None:
    model = sequence(nn.Linear(FAN_IN, UNITS), FIXED[norm]).eval()
    model[2] = make().double()
    expected = torch.tensor(points, **D).reshape(len(points), -1).expand(-1, UNITS)
    if isinstance(model[2], SReLU) and model[2].lower.numel() > 1:
        model[2].lower.data.copy_(expected[0]), model[2].upper.data.copy_(expected[1])
    found = boundaries(model, torch.zeros(1, FAN_IN, **D))["0"]
    assert found.distances.shape == (len(points), UNITS)
    assert found.locations.shape == (len(points), UNITS, FAN_IN)
    for locations, height in zip(found.locations, expected, strict=True):
        at = pre_activation(model, locations, model[2]).diagonal()
        torch.testing.assert_close(at, height, **CLOSE)
    torch.testing.assert_close(found.location, found.locations[0])


@pytest.mark.parametrize(
    ("layer", "norm"),
    [
        ("sp", nn.Identity()),
        ("wn", nn.BatchNorm1d(UNITS)),
        ("gmp, r inside", nn.LayerNorm(UNITS, bias=False)),
    ],
    ids=["sp", "wn bn", "gmp ln"],
)
def test_the_direction_points_to_the_active_side(layer: str, norm: nn.Module) -> None:
    model = randomised(nn.Sequential(LINEAR[layer](), norm, nn.ReLU())).eval()
    found = boundaries(model, batch_for(model[0]))["0"]
    on, off = (
        model(found.location + side * 0.01 * found.direction).diagonal() for side in (1, -1)
    )
    assert (on > 0).all() and (off == 0).all()


@pytest.mark.parametrize("activation", [None, nn.ReLU()], ids=["inside", "outside"])
@pytest.mark.parametrize("norm", ["none", "bn"])
def test_the_scale_is_the_slope_of_the_output(norm: str, activation: nn.Module | None) -> None:
    layer = GmPLinear(FAN_IN, UNITS, activation=activation)
    model = sequence(layer, FIXED[norm if activation is None else "none"]).eval()
    if activation is not None:
        model = nn.Sequential(layer)
    found = boundaries(model, batch_for(layer))["0"]
    near, far = (model(found.location + t * found.direction).diagonal() for t in (0.5, 1.5))
    torch.testing.assert_close((far - near).abs().detach(), found.scale, **CLOSE)


def test_a_constant_unit_has_no_boundary() -> None:
    def undefined(layer: nn.Module, norm: nn.Module | None = None) -> list[bool]:
        found = layer_boundaries(layer, norm)
        missing = [t.isnan() for t in (found.direction, found.location, found.distance[:, None])]
        assert all((m.all(dim=1) == m.any(dim=1)).all() for m in missing)
        assert all(torch.equal(missing[0].any(1), m.any(1)) for m in missing)
        assert torch.equal(found.scale.isnan(), found.distance.isnan())
        return found.distance.isnan().tolist()

    plain, normed, inside, outside = (
        randomised(m)
        for m in (
            nn.Linear(3, 2),
            nn.BatchNorm1d(2).eval(),
            GmPLinear(3, 2),
            GmPLinear(3, 2, activation=torch.relu),
        )
    )
    assert undefined(plain) == [False, False]
    plain.weight.data[1] = 0
    assert undefined(plain) == [False, True]
    normed.weight.data[0] = 0
    assert undefined(plain, normed) == [True, True]
    inside.r.data[0] = 0
    assert undefined(inside) == [True, False]
    outside.r.data[0] = 0  # its boundary is there, and its output is zero on both sides
    assert undefined(outside) == [False, False] and layer_boundaries(outside).scale[0] == 0


def test_a_unit_under_layer_norm_is_constant_where_all_units_are_alike() -> None:
    layer = nn.Linear(3, 4, **D)
    layer.weight.data[:] = torch.tensor([0.5, -2.0, 1.0])
    assert layer_boundaries(layer, nn.LayerNorm(4, **D)).distance.isnan().all()
    assert layer_boundaries(nn.Linear(3, 4), nn.GroupNorm(4, 4)).distance.isnan().all()


# --- norms whose statistics differ from point to point -------------------------------------------

VARYING: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = {
    "ln": (lambda: nn.Linear(FAN_IN, UNITS), lambda: nn.LayerNorm(UNITS)),
    "ln, gmp": (LINEAR["gmp, r inside"], lambda: nn.LayerNorm(UNITS)),
    "rms": (LINEAR["sp"], lambda: nn.RMSNorm(UNITS)),
    "gn": (LINEAR["sp"], lambda: nn.GroupNorm(2, UNITS)),
    "gn over positions": (CONV["sp"], lambda: nn.GroupNorm(2, UNITS)),
    "instance": (CONV["groups"], lambda: nn.InstanceNorm2d(UNITS, affine=True)),
    "bn without statistics": (
        CONV["sp"],
        lambda: nn.BatchNorm2d(UNITS, track_running_stats=False),
    ),
    "mbn without statistics": (
        LINEAR["wn"],
        lambda: MeanOnlyBatchNorm(UNITS, track_running_stats=False),
    ),
}


@pytest.mark.parametrize(("layer", "norm"), VARYING.values(), ids=VARYING)
def test_an_average_over_one_example_is_exact_for_it(layer: Callable, norm: Callable) -> None:
    model = randomised(nn.Sequential(layer(), norm(), nn.ReLU())).eval()
    one = isinstance(model[1], nn.modules.batchnorm._BatchNorm) or hasattr(model[1], "momentum")
    check(model, batch_for(model[0], 4 if one and not _is_instance(model[1]) else 1))


def _is_instance(norm: nn.Module) -> bool:
    return isinstance(norm, nn.modules.instancenorm._InstanceNorm)


@pytest.mark.parametrize(
    "norm",
    [
        nn.GroupNorm(2, UNITS),
        nn.RMSNorm(UNITS),
        nn.LayerNorm(UNITS, bias=False),
    ],
    ids=str,
)
def test_without_beta_the_boundary_is_exact_at_any_deviation(norm: nn.Module) -> None:
    model = randomised(nn.Sequential(LINEAR["gmp, r inside"](), norm, nn.ReLU())).eval()
    if getattr(model[1], "bias", None) is not None:
        nn.init.zeros_(model[1].bias)
    x = torch.randn(50, FAN_IN, **D)
    found = boundaries(model, x)["0"]
    side = x @ found.direction.t() + found.distance
    assert torch.equal(side > 0, pre_activation(model, x, model[2]) > 0)
    at = pre_activation(model, found.location, model[2]).diagonal()
    torch.testing.assert_close(at, torch.zeros(UNITS, **D), rtol=0, atol=1e-9)
    without = boundaries(model, follows={"0": (model[1], nn.ReLU())})["0"]  # no batch is needed
    torch.testing.assert_close(without.location, found.location, **CLOSE)
    assert without.scale.isnan().all()


def test_with_beta_layer_norm_needs_a_batch() -> None:
    model = randomised(nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.ReLU()))
    assert layer_boundaries(model[0], model[1]).distance.isnan().all()
    assert boundaries(model, torch.randn(5, 3, **D))["0"].distance.isfinite().all()


def each_alone(norm: nn.Module, z: Tensor) -> tuple[Tensor, Tensor]:
    """Return the averages of mean and deviation, from what the norm makes of each example."""
    plain = copy.deepcopy(norm)
    for name in ("weight", "bias"):
        if getattr(plain, name, None) is not None:
            nn.init.constant_(getattr(plain, name), float(name == "weight"))
    means, deviations = [], []
    for example in z:  # y = (z - mean) / deviation at two positions of each unit
        y = plain(example[None])[0].detach()
        deviation = (example[:, 1] - example[:, 0]) / (y[:, 1] - y[:, 0])
        deviations.append(deviation)
        means.append(example[:, 0] - deviation * y[:, 0])
    return torch.stack(means).mean(0), torch.stack(deviations).mean(0)


@pytest.mark.parametrize(
    "norm",
    [nn.GroupNorm(2, UNITS), nn.InstanceNorm1d(UNITS, affine=True)],
    ids=str,
)
def test_norms_over_positions_have_the_averages_over_examples(norm: nn.Module) -> None:
    model = randomised(nn.Sequential(nn.Conv1d(2, UNITS, 3), norm, nn.ReLU())).eval()
    x = torch.randn(8, 2, 9, **D)
    mean, deviation = each_alone(norm, model[0](x).detach())
    moments = norm_moments(norm, model[0](x))
    torch.testing.assert_close(moments.mean, mean, **CLOSE)
    torch.testing.assert_close(moments.deviation, deviation, **CLOSE)
    found = boundaries(model, x)["0"]
    gamma, beta = norm.weight.detach(), norm.bias.detach()
    rows, bias = model[0].weight.detach().flatten(1), model[0].bias.detach()
    torch.testing.assert_close(
        told(found, model[0], x),
        gamma * (responses(rows, patches(model[0], x)) + bias - mean) / deviation + beta,
        **CLOSE,
    )


@pytest.mark.parametrize("norm", [nn.LayerNorm(UNITS), nn.RMSNorm(UNITS)], ids=str)
def test_the_deviation_of_layer_norm_is_the_average_over_points(norm: nn.Module) -> None:
    model = randomised(nn.Sequential(nn.Linear(FAN_IN, UNITS), norm, nn.ReLU()))
    x = torch.randn(4, 3, FAN_IN, **D)
    z = model[0](x).detach().flatten(0, 1)
    if isinstance(norm, nn.LayerNorm):
        deviations = [(row.var(correction=0) + norm.eps).sqrt() for row in z]
    else:
        deviations = [row.square().mean().sqrt() for row in z]
    torch.testing.assert_close(
        norm_moments(norm, z).deviation, sum(deviations) / len(z), rtol=1e-9, atol=0
    )


def test_layer_norm_over_positions_too_is_an_average() -> None:
    model = randomised(nn.Sequential(nn.Conv1d(2, UNITS, 3), nn.LayerNorm([UNITS, 7]), nn.ReLU()))
    gamma, beta = torch.randn(2, UNITS, 1, **D).expand(2, UNITS, 7)
    model[1].weight.data.copy_(gamma), model[1].bias.data.copy_(beta)
    check(model, torch.randn(1, 2, 9, **D))


def test_batch_norm_is_weight_normalization_in_the_norm_of_the_data() -> None:
    model = randomised(nn.Sequential(nn.Linear(FAN_IN, UNITS), nn.BatchNorm1d(UNITS), nn.ReLU()))
    model[1].eps = 1e-30
    x = torch.randn(40, FAN_IN, **D) @ torch.randn(FAN_IN, FAN_IN, **D)
    covariance = torch.cov(x.t(), correction=0)
    w, gamma, beta = (p.detach() for p in (model[0].weight, model[1].weight, model[1].bias))
    length = torch.einsum("ui,ij,uj->u", w, covariance, w).sqrt()
    expected = gamma * ((x - x.mean(0)) @ w.t()) / length + beta
    found = boundaries(model, x, statistics="batch")["0"]
    torch.testing.assert_close(told(found, model[0], x), expected, **CLOSE)


def test_batch_statistics_reach_later_layers_and_means_of_inputs() -> None:
    body = [GmPConv2d(4, 4, 3, input_norm=True), nn.BatchNorm2d(4), nn.ReLU()]
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), *body)
    model = randomised(model).train()
    x = torch.randn(5, 2, 8, 8, **D)
    found = boundaries(model, x, statistics="batch")["3"]
    given = model[:3](x)
    z = by_unit(pre_activation(model, x, model[5]), -3)
    centred = given - given.mean(dim=(0, 2, 3), keepdim=True)
    torch.testing.assert_close(told(found, model[3], centred), z, **CLOSE)


# --- other ways to hold a weight -----------------------------------------------------------------


def old(function: Callable, *args: Any, **kwargs: Any) -> nn.Module:
    return function(nn.Linear(FAN_IN, UNITS), *args, **kwargs)


HOOKED = {
    "weight_norm": lambda: old(nn.utils.weight_norm),
    "weight_norm over inputs": lambda: old(nn.utils.weight_norm, dim=1),
    "spectral_norm": lambda: old(nn.utils.spectral_norm),
    "pruning": lambda: old(prune.l1_unstructured, "weight", 0.5),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("make", HOOKED.values(), ids=HOOKED)
def test_a_weight_that_a_hook_makes_is_the_one_of_the_next_call(make: Callable) -> None:
    layer = make().double()
    model = nn.Sequential(layer, nn.ReLU()).eval()
    x = batch_for(layer)
    model(x)
    with torch.no_grad():
        for parameter in layer.parameters():  # the attribute is now what the last call had
            parameter.mul_(1.5).add_(0.1)
    buffers = copy.deepcopy(dict(layer.named_buffers()))
    found = layer_boundaries(layer)
    assert all(torch.equal(value, buffers[name]) for name, value in layer.named_buffers())
    torch.testing.assert_close(told(found, layer, x), layer(x).detach(), **CLOSE)
    check(model, x)


def test_spectral_norm_is_read_without_moving_it() -> None:
    layer = parametrizations.spectral_norm(nn.Linear(FAN_IN, UNITS, **D))
    model, x = nn.Sequential(layer, nn.ReLU()).train(), batch_for(layer)
    before = copy.deepcopy(layer.state_dict())
    found = boundaries(model, x)["0"]
    assert all(torch.equal(before[name], value) for name, value in layer.state_dict().items())
    assert all(module.training for module in model.modules())
    torch.testing.assert_close(told(found, layer, x), layer.eval()(x).detach(), **CLOSE)


@pytest.mark.parametrize("converted", [False, True])
def test_a_transposed_weight_has_units_in_its_columns(converted: bool) -> None:
    library = pytest.importorskip("transformers.pytorch_utils")
    layer = randomised(library.Conv1D(UNITS, FAN_IN))
    model = nn.Sequential(layer, nn.ReLU(), nn.Linear(UNITS, 2, **D)).eval()
    x = torch.randn(4, 3, FAN_IN, **D)
    z = by_unit(pre_activation(model, x, model[1]), -1).detach()
    model = convert_(model) if converted else model
    torch.testing.assert_close(told(boundaries(model, x)["0"], nn.Identity(), x), z, **CLOSE)


@pytest.mark.parametrize("with_inputs", [False, True])
def test_attention_has_the_units_of_its_projections(with_inputs: bool) -> None:
    attention = randomised(nn.MultiheadAttention(8, 2, batch_first=True)).eval()
    x = torch.randn(2, 3, 8, **D)
    inputs = (x, x, x) if with_inputs else None
    found = boundaries(attention, inputs)
    assert list(found) == ["in_proj_weight", "out_proj"]
    rows = attention.in_proj_weight.detach()
    torch.testing.assert_close(found["in_proj_weight"].direction, F.normalize(rows), **CLOSE)
    torch.testing.assert_close(found["in_proj_weight"].scale, rows.norm(dim=1), **CLOSE)
    assert found["in_proj_weight"].distance.isnan().all()
    converted = GmPMultiheadAttention.from_attention(attention)
    other = boundaries(nn.ModuleDict({"a": converted}) if not with_inputs else converted, inputs)
    name = "in_proj" if with_inputs else "a.in_proj"
    torch.testing.assert_close(other[name].direction, F.normalize(rows), **CLOSE)


def test_attention_with_separate_projections_has_only_its_output() -> None:
    attention = nn.MultiheadAttention(8, 2, kdim=4, vdim=6)
    assert list(boundaries(attention)) == ["out_proj"]


# --- what follows a layer, in the ways that people write it --------------------------------------


def fc(units: int = UNITS) -> nn.Linear:
    return nn.Linear(FAN_IN, units)


def bn(units: int = UNITS) -> nn.BatchNorm1d:
    return nn.BatchNorm1d(units)


SEQUENCE = torch.linspace(-2, 2, 2 * 3 * FAN_IN, **D).sin().reshape(2, 3, FAN_IN)
ROWS = torch.linspace(-2, 2, 7 * FAN_IN, **D).sin().reshape(7, FAN_IN)

# forward up to the pre-activation, with units in the last dimension; the whole forward; members; x
UNDERSTOOD: dict[str, tuple[Callable, Callable, dict, Tensor]] = {
    "module": (
        lambda m, x: m.norm(m.fc(x)),
        lambda m, x: m.act(m.norm(m.fc(x))),
        {"fc": fc(), "norm": bn(), "act": nn.ReLU()},
        ROWS,
    ),
    "function": (lambda m, x: m.fc(x), lambda m, x: F.relu(m.fc(x)), {"fc": fc()}, ROWS),
    "method in place": (
        lambda m, x: m.norm(m.fc(x)),
        lambda m, x: m.norm(m.fc(x)).relu_(),
        {"fc": fc(), "norm": bn()},
        ROWS,
    ),
    "dropout and identity between": (
        lambda m, x: m.norm(m.fc(x)),
        lambda m, x: F.relu(m.drop(m.norm(m.drop(nn.Identity()(m.fc(x)))))),
        {"fc": fc(), "norm": nn.Sequential(bn(), nn.Dropout()), "drop": nn.Dropout()},
        ROWS,
    ),
    "batch norm of a sequence": (
        lambda m, x: m.norm(m.fc(x).transpose(1, 2)).transpose(1, 2),
        lambda m, x: F.relu(m.norm(m.fc(x).transpose(1, 2)).transpose(1, 2)),
        {"fc": fc(), "norm": bn()},
        SEQUENCE,
    ),
    "heads after the norm": (
        lambda m, x: m.norm(m.fc(x)),
        lambda m, x: F.relu(m.norm(m.fc(x)).view(7, 2, 3).transpose(0, 1)),
        {"fc": fc(), "norm": bn()},
        ROWS,
    ),
    "called twice with one norm": (
        lambda m, x: m.norm(m.fc(x)),
        lambda m, x: F.relu(m.norm(m.fc(x))) + F.relu(m.norm(m.fc(2 * x))),
        {"fc": fc(), "norm": bn()},
        ROWS,
    ),
    "norm shared by two layers": (
        lambda m, x: m.norm(m.fc(x)),
        lambda m, x: F.relu(m.norm(m.fc(x))) + F.relu(m.norm(m.other(x))),
        {"fc": fc(), "norm": bn(), "other": fc()},
        ROWS,
    ),
    "tied decoder": (
        lambda m, x: m.fc(x),
        lambda m, x: F.relu(F.linear(F.relu(m.fc(x)), m.fc.weight.t())),
        {"fc": fc()},
        ROWS,
    ),
    "residual sum": (
        lambda m, x: m.norm(m.fc(x)),
        lambda m, x: F.relu(m.norm(m.fc(x)) + m.other(x)),
        {"fc": fc(), "norm": bn(), "other": fc()},
        ROWS,
    ),
}


@pytest.mark.parametrize(("pre", "forward", "members", "x"), UNDERSTOOD.values(), ids=UNDERSTOOD)
def test_what_follows_is_found_as_it_is_written(
    pre: Callable, forward: Callable, members: dict, x: Tensor
) -> None:
    model = randomised(FunctionModel(forward, **copy.deepcopy(members))).eval()
    found = boundaries(model, x)["fc"]
    z = pre(model, x).detach().reshape(-1, UNITS)
    torch.testing.assert_close(told(found, model.fc, x), z, **CLOSE)


class Half(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, 0.5 * self.weight, self.bias)


class LayerNorm(nn.Module):
    """As in nanoGPT: the name of torch's, and no subclass of it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(UNITS)), nn.Parameter(torch.zeros(UNITS))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (UNITS,), self.weight, self.bias)


class Doubling(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x) + 1


def patched() -> nn.Module:
    norm = bn()
    norm.forward = torch.exp
    return norm


NOT_UNDERSTOOD: dict[str, tuple[Callable, dict, Tensor]] = {
    "constant added": (lambda m, x: F.relu(m.fc(x) + 1), {}, ROWS),
    "scaled": (lambda m, x: F.relu(m.norm(m.fc(x)) * -0.5), {"norm": bn()}, ROWS),
    "layer norm without module": (
        lambda m, x: F.relu(F.layer_norm(m.fc(x), (UNITS,))),
        {},
        ROWS,
    ),
    "foreign layer norm": (lambda m, x: F.relu(m.norm(m.fc(x))), {"norm": LayerNorm()}, ROWS),
    "subclass of batch norm": (
        lambda m, x: F.relu(m.norm(m.fc(x))),
        {"norm": Doubling(UNITS)},
        ROWS,
    ),
    "patched batch norm": (lambda m, x: F.relu(m.norm(m.fc(x))), {"norm": patched()}, ROWS),
    "batch norm over as many positions": (
        lambda m, x: F.relu(m.norm(m.fc(x))),
        {"norm": bn()},
        SEQUENCE.repeat(1, 2, 1),
    ),
    "layer norm of heads": (
        lambda m, x: F.relu(m.norm(m.fc(x).view(-1, 2, 3))),
        {"norm": nn.LayerNorm(3)},
        ROWS,
    ),
    "group norm over a sequence": (
        lambda m, x: F.relu(m.norm(m.fc(x).transpose(1, 2))),
        {"norm": nn.GroupNorm(2, UNITS)},
        SEQUENCE,
    ),
    "units in another order": (
        lambda m, x: F.relu(m.norm(m.fc(x)[:, [5, 4, 3, 2, 1, 0]])),
        {"norm": bn()},
        ROWS,
    ),
    "some units": (lambda m, x: F.relu(m.fc(x)[:, :4]), {}, ROWS),
    "calls with different norms": (
        lambda m, x: F.relu(m.norm(m.fc(x))) + F.relu(m.other(m.fc(x))),
        {"norm": bn(), "other": bn()},
        ROWS,
    ),
    "calls with different limits": (
        lambda m, x: m.fc(x).clamp(0, 1) + m.fc(x).clamp(0, 2),
        {},
        ROWS,
    ),
    "two norms": (lambda m, x: F.relu(m.norm(m.norm(m.fc(x)))), {"norm": bn()}, ROWS),
    "average of points": (lambda m, x: F.relu(m.fc(x).mean(1)), {}, SEQUENCE),
    "layer norm of the largest": (
        lambda m, x: F.relu(m.norm(F.max_pool1d(m.fc(x).transpose(1, 2), 3).transpose(1, 2))),
        {"norm": nn.LayerNorm(UNITS)},
        SEQUENCE,
    ),
    "weight without its bias": (lambda m, x: F.relu(F.linear(x, m.fc.weight)), {}, ROWS),
    "per-channel limits elsewhere": (
        lambda m, x: m.act(m.fc(x)),
        {"act": SReLU(UNITS)},
        SEQUENCE.repeat(1, 2, 1),
    ),
    "smooth": (lambda m, x: F.gelu(m.fc(x)), {}, ROWS),
}


@pytest.mark.parametrize(("forward", "members", "x"), NOT_UNDERSTOOD.values(), ids=NOT_UNDERSTOOD)
def test_what_is_not_understood_has_no_distance(
    forward: Callable, members: dict, x: Tensor
) -> None:
    model = randomised(FunctionModel(forward, fc=fc(), **copy.deepcopy(members))).eval()
    found = boundaries(model, x, statistics="batch")["fc"]
    assert found.distance.isnan().all() and found.location.isnan().all()
    rows = F.normalize(model.fc.weight.detach())
    sign = (found.direction * rows).sum(dim=1, keepdim=True)
    torch.testing.assert_close(found.direction, sign * rows, **CLOSE)


def test_a_layer_that_computes_something_else_is_left_out() -> None:
    model = nn.Sequential(Half(3, 4), nn.ReLU(), nn.Linear(4, 2))
    assert list(boundaries(model, torch.zeros(1, 3))) == ["2"]
    with pytest.raises(ValueError, match="Half has no units"):
        layer_boundaries(Half(3, 4))


def test_a_norm_before_a_layer_is_not_after_it() -> None:
    """Pre-activation residual blocks: norm, ReLU, layer, sum."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        x = x + m.second(F.relu(m.norm2(m.first(F.relu(m.norm1(x))))))
        return F.relu(m.norm3(x))

    norms = {f"norm{i}": bn(FAN_IN) for i in (1, 2, 3)}
    model = FunctionModel(forward, first=fc(FAN_IN), second=fc(FAN_IN), **norms)
    sites = find_sites(randomised(model), ROWS)
    assert sites["first"].norm is model.norm2 and sites["first"].breaks is not None
    assert sites["second"].norm is None and sites["second"].breaks is None


def test_units_behind_a_flattened_image_of_one_pixel_are_found() -> None:
    model = nn.Sequential(nn.Conv2d(2, UNITS, 3), nn.Flatten(), nn.BatchNorm1d(UNITS), nn.ReLU())
    x = torch.randn(5, 2, 3, 3, **D)
    model = randomised(model).eval()
    found = boundaries(model, x)["0"]
    torch.testing.assert_close(told(found, model[0], x), model[:3](x).detach(), **CLOSE)


@pytest.mark.parametrize("library", ["torchvision.models.convnext", "timm.layers"])
def test_layer_norm_of_channels_is_found_in_both_layouts(library: str) -> None:
    norm2d = pytest.importorskip(library).LayerNorm2d(UNITS)
    x = torch.randn(1, 2, 4, 4, **D)
    first = randomised(nn.Sequential(nn.Conv2d(2, UNITS, 3), norm2d, nn.ReLU()))
    last = nn.LayerNorm(UNITS, eps=norm2d.eps, **D)
    last.load_state_dict(norm2d.state_dict())
    second = FunctionModel(
        lambda m, x: F.relu(m.norm(m.fc(x).permute(0, 2, 3, 1))), fc=first[0], norm=last
    )
    one, two = boundaries(first, x)["0"], boundaries(second, x)["fc"]
    torch.testing.assert_close(one.location, two.location, **CLOSE)
    deviation = (first[0](x).var(dim=1, correction=0) + norm2d.eps).sqrt().reshape(-1, 1)
    z = by_unit(pre_activation(first, x, first[2]), -3)
    at_the_average = (z - norm2d.bias) * deviation / deviation.mean() + norm2d.bias
    torch.testing.assert_close(told(one, first[0], x), at_the_average.detach(), **CLOSE)


def test_one_example_without_a_batch_is_normalised_alike() -> None:
    model = randomised(nn.Sequential(nn.Conv1d(2, UNITS, 3), nn.InstanceNorm1d(UNITS), nn.ReLU()))
    x = torch.randn(1, 2, 9, **D)
    z = by_unit(pre_activation(model, x, model[2]), -2).detach()
    torch.testing.assert_close(told(boundaries(model, x[0])["0"], model[0], x), z, **CLOSE)


# --- given instead of found ----------------------------------------------------------------------


def test_what_follows_can_be_given() -> None:
    model = randomised(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU6())).eval()
    found = boundaries(model, torch.zeros(1, 3, **D))["0"]
    given = boundaries(model, follows={"0": (model[1], nn.ReLU6())})["0"]
    alone = layer_boundaries(model[0], model[1], nn.ReLU6())
    for other in (given, alone):
        torch.testing.assert_close(other.locations, found.locations, **CLOSE)
    function = boundaries(model, follows={"0": (model[1], F.relu6)})["0"]
    torch.testing.assert_close(function.locations, found.locations, **CLOSE)
    for nothing in (None, nn.Identity()):
        follows = {"0": (nothing, torch.relu)}
        without = boundaries(model, torch.zeros(1, 3, **D), follows=follows)["0"]
        torch.testing.assert_close(without.location, layer_boundaries(model[0]).location, **CLOSE)


def test_a_given_norm_takes_its_own_steps_statistics() -> None:
    """The trace finds none: what the layer makes is read twice."""
    model = FunctionModel(lambda m, x: (y := m.fc(x)) + F.relu(m.norm(y)), fc=fc(), norm=bn())
    model = randomised(model).train()
    assert find_sites(model, ROWS)["fc"].norm is None
    follows = {"fc": (model.norm, torch.relu)}
    found = boundaries(model, ROWS, statistics="batch", follows=follows)["fc"]
    torch.testing.assert_close(
        told(found, model.fc, ROWS), model.norm(model.fc(ROWS)).detach(), **CLOSE
    )


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_statistics_of_a_batch_are_not_replaced_by_running_ones(device: str) -> None:
    model, stranger = nn.Sequential(nn.Linear(3, 4), nn.ReLU()).to(device), nn.BatchNorm1d(4)
    follows, x = {"0": (stranger, nn.ReLU())}, torch.zeros(2, 3, device=device)
    found = boundaries(model, x, statistics="batch", follows=follows)["0"]
    assert found.distance.device.type == device
    assert device == "meta" or found.distance.isnan().all()


def test_relu_is_assumed_where_one_layer_is_given_alone() -> None:
    layer = nn.Linear(3, 4)
    assert torch.equal(
        layer_boundaries(layer).distance, layer_boundaries(layer, None, nn.ReLU()).distance
    )
    elu = GmPLinear(3, 4, activation=nn.GELU())
    assert layer_boundaries(elu).distance.isnan().all()
    assert isinstance(find_sites(nn.Sequential(elu))["0"].activation, nn.GELU)


def test_layers_are_chosen_by_name_or_function() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Conv1d(4, 4, 1), nn.Linear(4, 2))
    assert list(boundaries(model)) == ["0", "2", "3"]
    assert list(boundaries(model, layers=["3", "0"])) == ["3", "0"]
    assert list(boundaries(model, layers="2")) == ["2"]
    assert list(boundaries(model, layers=lambda m, name: isinstance(m, nn.Conv1d))) == ["2"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layers": ["9"]}, "no layers .'9'.; the model has: 0, 1"),
        ({"layers": lambda module, name: False}, "no layer to look at"),
        ({"follows": {"9": (None, None)}}, "follows names '9'; the layers are: 0, 1"),
        ({"follows": {"0": (nn.BatchNorm1d(3), None)}}, "norm has 3 features and the layer 4"),
        ({"statistics": "mean"}, "'running' or 'batch'; got 'mean'"),
        ({"statistics": "batch"}, "needs `inputs`"),
    ],
)
def test_what_cannot_be_answered_says_why(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        boundaries(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), **arguments)


@pytest.mark.parametrize("layer", [nn.Embedding(3, 4), nn.ConvTranspose2d(2, 3, 3), nn.ReLU()])
def test_what_has_no_units_is_refused(layer: nn.Module) -> None:
    with pytest.raises(ValueError, match="has no units"):
        layer_boundaries(layer)
    with pytest.raises(ValueError, match="no layer to look at"):
        boundaries(nn.Sequential(layer))


# --- whole models --------------------------------------------------------------------------------


def check_model(model: nn.Module, x: Tensor) -> dict[str, Boundaries]:
    """Check every layer with distances: what its norm puts out is what its boundary tells."""
    model = randomised(model).eval()
    given: dict[nn.Module, Tensor] = {}
    made: dict[nn.Module, Tensor] = {}

    def hook(module: nn.Module, args: tuple, result: Any) -> None:
        if isinstance(result, Tensor):
            given[module], made[module] = args[0].clone(), result.clone()

    handles = [module.register_forward_hook(hook) for module in model.modules()]
    with torch.no_grad():
        model(x)
    for handle in handles:
        handle.remove()
    found, sites = boundaries(model, x), find_sites(model, x)
    for name, one in found.items():
        site = sites[name]
        if one.distance.isfinite().all():
            z = by_unit(made[site.norm or site.layer], site.channel)
            expected = told(one, site.layer, given[site.layer], site.breaks.points[0])
            if site.norm is not None and site.activation in site.norm.children():
                expected = site.activation(expected)
            torch.testing.assert_close(expected, z, rtol=1e-8, atol=1e-9 * z.abs().max().item())
    return found


@pytest.fixture
def vision() -> ModuleType:
    return pytest.importorskip("torchvision.models")


def counted(found: dict[str, Boundaries]) -> tuple[int, int]:
    """Return how many layers have distances, and how many none."""
    known = sum(one.distance.isfinite().all().item() for one in found.values())
    return known, len(found) - known


@pytest.mark.parametrize("converted", [False, True])
def test_every_convolution_of_a_resnet_has_boundaries(vision: ModuleType, converted: bool) -> None:
    model = vision.resnet.ResNet(vision.resnet.BasicBlock, [1, 1, 1, 1], width_per_group=64)
    x = torch.randn(1, 3, 32, 32, **D)
    model = convert_(model) if converted else model
    assert counted(check_model(model, x)) == (12, 1)


def test_mobilenet_has_two_breakpoints_where_it_has_hardswish(vision: ModuleType) -> None:
    found = check_model(vision.mobilenet_v3_small(num_classes=3), torch.randn(1, 3, 32, 32, **D))
    assert counted(found) == (42, 12)
    assert len(found["features.0.0"].distances) == 2
    assert len(found["features.1.block.0.0"].distances) == 1


def test_vit_has_directions_and_no_distances(vision: ModuleType) -> None:
    size = {"image_size": 32, "patch_size": 16, "hidden_dim": 16, "mlp_dim": 32}
    model = vision.VisionTransformer(**size, num_layers=2, num_heads=2)
    found = check_model(model, torch.randn(1, 3, 32, 32, **D))
    assert counted(found) == (0, 10)
    rows = model.get_parameter("encoder.layers.encoder_layer_0.mlp.0.weight").detach()
    direction = found["encoder.layers.encoder_layer_0.mlp.0"].direction
    torch.testing.assert_close(direction, F.normalize(rows), **CLOSE)


def test_norms_of_timm_carry_their_activation() -> None:
    timm = pytest.importorskip("timm")
    model = timm.create_model("mobilenetv4_conv_small", num_classes=3)
    known, _ = counted(check_model(model, torch.randn(1, 3, 32, 32, **D)))
    assert known > 10


def test_relu_of_a_transformers_model_is_found() -> None:
    library = pytest.importorskip("transformers")
    config = library.OPTConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, ffn_dim=32, num_attention_heads=2
    )
    model = randomised(library.OPTModel(config)).eval()
    ids = torch.randint(2, 50, (2, 5))
    found = boundaries(model, {"input_ids": ids, "use_cache": False})
    known = [name for name, one in found.items() if one.distance.isfinite().all()]
    assert known == ["decoder.layers.0.fc1"]
    layer = model.get_submodule(known[0])
    torch.testing.assert_close(found[known[0]].location, layer_boundaries(layer).location)


def test_a_converted_model_with_removed_norms_has_the_same_function_and_boundaries() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4),
        nn.ReLU(), nn.Flatten(), nn.Linear(64, 2),
    )  # fmt: skip
    model = randomised(model).eval()
    x = torch.randn(3, 3, 8, 8, **D)
    before = boundaries(model, x)
    after = boundaries(convert_(model, norm="imn", example_inputs=x), x)
    for part in ("direction", "scale", "distance"):
        torch.testing.assert_close(getattr(after["0"], part), getattr(before["0"], part), **CLOSE)
    mean = model[3].input_norm.running_mean.repeat_interleave(9)
    moved = before["3"].distance + before["3"].direction @ mean
    torch.testing.assert_close(after["3"].distance, moved, **CLOSE)


# --- surroundings --------------------------------------------------------------------------------


def test_model_and_random_state_are_left_alone() -> None:
    layer = GmPConv2d(4, 4, 3, input_norm=True)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(), layer, nn.ReLU())
    model.train()
    model[1].eval()
    before = copy.deepcopy(model.state_dict())
    flags = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    boundaries(model, torch.randn(2, 3, 8, 8), statistics="batch")
    state = torch.get_rng_state()
    boundaries(model, torch.ones(2, 3, 8, 8), statistics="batch")
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert [module.training for module in model.modules()] == flags
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_results_are_float64_and_need_no_gradient() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU())
    found = boundaries(model, torch.zeros(1, 3))["0"]
    for tensor in (found.direction, found.scale, found.distances, found.locations):
        assert tensor.dtype == torch.float64 and not tensor.requires_grad


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(UNITS), nn.LayerNorm(UNITS)], ids=str)
@pytest.mark.parametrize("make", [LINEAR["sp"], LINEAR["gmp, r inside"]])
def test_narrow_parameters_are_computed_with_in_wide_numbers(
    make: Callable, norm: nn.Module
) -> None:
    narrow = randomised(nn.Sequential(make(), copy.deepcopy(norm))).bfloat16().eval()
    if isinstance(norm, nn.LayerNorm):
        nn.init.zeros_(narrow[1].bias)
    wide = copy.deepcopy(narrow).double()
    found, exact = (layer_boundaries(*model) for model in (narrow, wide))
    torch.testing.assert_close(found.direction, exact.direction, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.distance, exact.distance, rtol=1e-4, atol=1e-4)


def test_frozen_and_inference_parameters_are_read() -> None:
    x = torch.randn(4, 3)
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.ReLU()).requires_grad_(False)
    expected = boundaries(model, x)["0"].location
    with torch.inference_mode():
        assert torch.equal(boundaries(model, x)["0"].location, expected)


def test_nothing_is_computed_on_the_meta_device(vision: ModuleType) -> None:
    with torch.device("meta"):
        model = vision.resnet18()
        found = boundaries(model, torch.zeros(1, 3, 64, 64))
        transposed = FunctionModel(
            lambda m, x: F.relu(m.norm(m.fc(x).transpose(1, 2))), fc=fc(), norm=bn()
        )
        assert find_sites(transposed, torch.zeros(2, 3, FAN_IN))["fc"].norm is transposed.norm
    assert found["conv1"].locations.shape == (1, 64, 147) and found["conv1"].scale.is_meta


@pytest.mark.gpu
@pytest.mark.parametrize("statistics", ["running", "batch"])
def test_the_gpu_gives_what_the_cpu_gives(statistics: str) -> None:
    body = [nn.Conv2d(3, UNITS, 3), nn.BatchNorm2d(UNITS), SReLU(UNITS)]
    model = randomised(nn.Sequential(*body, nn.Flatten(), GmPLinear(UNITS * 36, 4), nn.ReLU()))
    x = torch.randn(4, 3, 8, 8, **D)
    expected = boundaries(model, x, statistics=statistics)
    found = boundaries(model.cuda(), x.cuda(), statistics=statistics)
    for name, one in expected.items():
        torch.testing.assert_close(found[name].locations.cpu(), one.locations, **CLOSE)
        assert found[name].locations.is_cuda


def test_names_are_plain_in_compiled_and_wrapped_models() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))

    x, plain = torch.zeros(2, 3), make()
    names = list(boundaries(plain, x))
    assert list(boundaries(torch.compile(plain), x)) == names
    assert unwrap(nn.DataParallel(torch.compile(plain))) is plain
    assert list(boundaries(nn.DataParallel(plain), x)) == names
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        assert list(boundaries(nn.parallel.DistributedDataParallel(plain), x)) == names
    finally:
        torch.distributed.destroy_process_group()
    part = make()
    part[0], part[1] = torch.compile(part[0]), torch.compile(part[1])
    found = find_sites(part, x)
    assert list(found) == names and isinstance(found["0"].norm, nn.BatchNorm1d)


def test_inputs_may_be_keywords_or_hold_a_mapping() -> None:
    model = FunctionModel(lambda m, batch, scale=1.0: F.relu(m.fc(batch["x"] * scale)), fc=fc())
    x = torch.zeros(1, FAN_IN)
    for inputs in (({"x": x},), {"batch": {"x": x}, "scale": 2.0}):
        assert boundaries(model, inputs)["fc"].distance.isfinite().all()


def test_a_layer_that_did_not_run_has_directions() -> None:
    model = FunctionModel(lambda m, x: F.relu(m.fc(x)), fc=fc(), spare=fc())
    found = boundaries(model, torch.zeros(1, FAN_IN))
    assert list(found) == ["fc", "spare"]
    assert found["spare"].direction.isfinite().all() and found["spare"].distance.isnan().all()


def test_a_tied_layer_is_one_and_tied_weights_are_two() -> None:
    one = fc(FAN_IN)
    assert list(boundaries(nn.Sequential(one, nn.ReLU(), one), torch.zeros(1, FAN_IN))) == ["0"]
    two = nn.Sequential(fc(FAN_IN), nn.ReLU(), fc(FAN_IN), nn.BatchNorm1d(FAN_IN), nn.ReLU())
    two[2].weight = two[0].weight
    found = boundaries(randomised(two), torch.zeros(1, FAN_IN, **D))
    assert list(found) == ["0", "2"]
    assert torch.equal(found["0"].direction.abs(), found["2"].direction.abs())


def test_the_reason_is_told_where_something_is_not_understood() -> None:
    model = FunctionModel(lambda m, x: F.relu(m.fc(x) * 2), fc=fc())
    norm = find_sites(model, torch.zeros(1, FAN_IN))["fc"].norm
    assert isinstance(norm, UnknownNorm) and "mul" in repr(norm)


def test_lengths_beyond_the_range_of_squares_have_directions() -> None:
    layer = nn.Linear(3, 2, **D)
    layer.weight.data = torch.tensor([[1e-200, 0.0, 0.0], [3e200, 4e200, 0.0]], **D)
    layer.bias.data = torch.tensor([2e-200, -5e200], **D)
    found = layer_boundaries(layer)
    torch.testing.assert_close(found.distance, torch.tensor([2.0, -1.0], **D))
    torch.testing.assert_close(found.location[1], torch.tensor([0.6, 0.8, 0.0], **D))
    assert math.isfinite(found.scale.sum())
