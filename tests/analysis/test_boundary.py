"""Boundaries are where the model itself, run and hooked, says that its units switch.

The second computation is always the model's own forward pass: the pre-activation that a hook sees
must be t + scale (u^T x + lam) at every point, which fixes direction, distance and scale at once.
"""

import copy
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from boundary_checks import CLOSE, by_unit, check, pre_activation, predict, randomise, responses
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.nn.utils.parametrize import register_parametrization
from torchvision.ops import FrozenBatchNorm2d

import geoparam as gp
from geoparam import GmPConv1d, GmPConv2d, GmPConv3d, GmPLinear
from geoparam.analysis import SReLU, boundaries, layer_boundaries
from geoparam.model.norms import compute_moments

D = {"dtype": torch.float64}
UNITS, FAN_IN, CHANNELS = 6, 5, 4

LINEAR: dict[str, Callable[[], nn.Module]] = {
    "sp": lambda: nn.Linear(FAN_IN, UNITS),
    "sp without bias": lambda: nn.Linear(FAN_IN, UNITS, bias=False),
    "wn": lambda: parametrizations.weight_norm(nn.Linear(FAN_IN, UNITS)),
    "wn over inputs": lambda: parametrizations.weight_norm(nn.Linear(FAN_IN, UNITS), dim=1),
    "parametrized bias": lambda: register_parametrization(
        nn.Linear(FAN_IN, UNITS), "bias", nn.Hardtanh(-0.1, 0.2)
    ),
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
    "mbn": lambda units, rank: gp.MeanOnlyBatchNorm(units),
    "mbn without bias": lambda units, rank: gp.MeanOnlyBatchNorm(units, bias=False),
    "imn": lambda units, rank: gp.InputMeanNorm(units),
}


def sequence(layer: nn.Module, norm: Callable[[int, int], nn.Module]) -> nn.Sequential:
    rank = len(getattr(layer, "kernel_size", ()))
    return randomise(nn.Sequential(layer, norm(UNITS, rank), nn.ReLU()))


def batch_for(layer: nn.Module, examples: int = 7) -> Tensor:
    size = getattr(layer, "kernel_size", None)
    if size is None:
        return torch.randn(examples, layer.in_features, **D)
    return torch.randn(examples, layer.in_channels, *[7, 6, 5][: len(size)], **D)


@pytest.mark.parametrize(
    ("make", "norm", "statistics"),
    [
        *product([*LINEAR.values(), *CONV.values()], ["none"], ["running"]),
        *product([*LINEAR.values(), *CONV.values()], ["bn"], ["batch"]),
        *product([LINEAR["gmp, r inside"], CONV["sp"]], FIXED, ["running", "batch"]),
    ],
)
def test_boundaries_tell_the_pre_activation(make: Callable, norm: str, statistics: str) -> None:
    model = sequence(make(), FIXED[norm]).train(statistics == "batch")
    check(model, batch_for(model[0]), statistics=statistics)


OUTSIDE = {
    "linear": lambda g: GmPLinear(FAN_IN, UNITS, activation=g),
    "conv": lambda g: GmPConv2d(CHANNELS, UNITS, 3, padding=1, groups=2, activation=g),
}


@pytest.mark.parametrize("make", OUTSIDE.values(), ids=OUTSIDE)
def test_r_outside_scales_the_output_and_leaves_the_boundary(make: Callable) -> None:
    layer = randomise(make(nn.ReLU())).eval()
    assert (layer.r < 0).any() and (layer.r > 0).any()
    x = batch_for(layer)
    found = boundaries(layer, x)[""]
    z = by_unit(pre_activation(layer, x, layer.activation), layer.channel_dim).detach()
    lam = responses(found.direction, layer, x) + found.distance
    torch.testing.assert_close(lam, z, **CLOSE)
    torch.testing.assert_close(found.scale, layer.r.detach().abs(), **CLOSE)
    torch.testing.assert_close(found.location, layer.location.detach().flatten(1), **CLOSE)
    torch.testing.assert_close(layer_boundaries(layer).location, found.location, **CLOSE)


@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize("form", [True, "border"])
def test_x_is_the_centred_input_where_a_layer_normalises_its_mean(
    form: bool | str, padding: int
) -> None:
    layer = randomise(GmPConv2d(CHANNELS, UNITS, 3, padding=padding, input_norm=form)).eval()
    model, x = nn.Sequential(layer, nn.ReLU()), batch_for(layer, 3)
    found = boundaries(model, x)["0"]
    z = by_unit(pre_activation(model, x, model[1]), -3).detach()
    mean = layer.input_norm.running_mean[:, None, None]
    centred = x - mean
    if form is True and padding:  # zeros are padded to what is not centred
        layer, centred = copy.copy(layer), F.pad(x, [padding] * 4) - mean
        layer.padding = (0, 0)
    torch.testing.assert_close(predict(found, layer, centred), z, **CLOSE)


ACTIVATIONS: dict[str, tuple[Callable[[], nn.Module], list]] = {
    "relu": (nn.ReLU, [0]),
    "prelu": (lambda: nn.PReLU(UNITS), [0]),
    "relu6": (nn.ReLU6, [0, 6]),
    "hardswish": (nn.Hardswish, [-3, 3]),
    "hardtanh": (lambda: nn.Hardtanh(-0.4, 2.1), [-0.4, 2.1]),  # no float32 numbers
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


def has_boundary(layer: nn.Module, norm: nn.Module | None = None) -> list[bool]:
    found = layer_boundaries(layer, norm)
    known = found.distance.isfinite()
    for values in (found.direction.sum(dim=1), found.location.sum(dim=1), found.scale):
        assert torch.equal(values.isfinite(), known)
    return known.tolist()


def test_a_constant_unit_has_no_boundary() -> None:
    plain, norm = randomise(nn.Linear(3, 2)), randomise(nn.BatchNorm1d(2).eval())
    plain.weight.data[1] = 0
    assert has_boundary(plain) == [True, False]
    norm.weight.data[0] = 0
    assert has_boundary(plain, norm) == [False, False]
    inside = randomise(GmPLinear(3, 2))
    inside.r.data[0] = 0
    assert has_boundary(inside) == [False, True]
    outside = randomise(GmPLinear(3, 2, activation=torch.relu))
    outside.r.data[0] = 0  # its boundary is there, and its output is zero on both sides
    assert has_boundary(outside) == [True, True] and layer_boundaries(outside).scale[0] == 0


VARYING: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = {
    "ln": (LINEAR["sp"], lambda: nn.LayerNorm(UNITS)),
    "ln, gmp": (LINEAR["gmp, r inside"], lambda: nn.LayerNorm(UNITS)),
    "gn": (LINEAR["sp"], lambda: nn.GroupNorm(2, UNITS)),
    "gn over positions": (CONV["sp"], lambda: nn.GroupNorm(2, UNITS)),
    "instance": (CONV["groups"], lambda: nn.InstanceNorm2d(UNITS, affine=True)),
    "its statistics": (CONV["sp"], lambda: nn.InstanceNorm2d(UNITS, track_running_stats=True)),
    "synchronised": (CONV["sp"], lambda: nn.SyncBatchNorm(UNITS)),
    "frozen": (CONV["sp"], lambda: FrozenBatchNorm2d(UNITS)),
    "no statistics": (CONV["sp"], lambda: nn.BatchNorm2d(UNITS, track_running_stats=False)),
}


@pytest.mark.parametrize(("layer", "norm"), VARYING.values(), ids=VARYING)
def test_an_average_over_one_example_is_exact_for_it(layer: Callable, norm: Callable) -> None:
    model = randomise(nn.Sequential(layer(), norm(), nn.ReLU())).eval()
    whole_batch = isinstance(model[1], nn.modules.batchnorm._BatchNorm | gp.MeanOnlyBatchNorm)
    check(model, batch_for(model[0], 4 if whole_batch else 1))


@pytest.mark.parametrize(
    "norm", [nn.GroupNorm(2, UNITS), nn.LayerNorm(UNITS, bias=False)], ids=str
)
def test_without_beta_the_boundary_is_exact_at_any_deviation(norm: nn.Module) -> None:
    model = randomise(nn.Sequential(LINEAR["gmp, r inside"](), norm, nn.ReLU())).eval()
    if getattr(model[1], "bias", None) is not None:
        nn.init.zeros_(model[1].bias)
    x = torch.randn(50, FAN_IN, **D)
    found = boundaries(model, x)["0"]
    side = x @ found.direction.t() + found.distance
    assert torch.equal(side > 0, pre_activation(model, x, model[2]) > 0)
    at = pre_activation(model, found.location, model[2]).diagonal()
    torch.testing.assert_close(at, torch.zeros(UNITS, **D), rtol=0, atol=1e-9)
    without = layer_boundaries(model[0], model[1], nn.ReLU())  # no batch is needed
    torch.testing.assert_close(without.location, found.location, **CLOSE)
    assert without.scale.isnan().all()


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
    "norm", [nn.GroupNorm(2, UNITS), nn.InstanceNorm1d(UNITS, affine=True)], ids=str
)
def test_norms_over_positions_have_the_averages_over_examples(norm: nn.Module) -> None:
    model = randomise(nn.Sequential(nn.Conv1d(2, UNITS, 3), norm, nn.ReLU())).eval()
    x = torch.randn(8, 2, 9, **D)
    mean, deviation = each_alone(norm, model[0](x).detach())
    moments = compute_moments(norm, model[0](x))
    torch.testing.assert_close(moments.mean, mean, **CLOSE)
    torch.testing.assert_close(moments.deviation, deviation, **CLOSE)
    found = boundaries(model, x)["0"]
    gamma, beta = norm.weight.detach(), norm.bias.detach()
    rows, bias = model[0].weight.detach().flatten(1), model[0].bias.detach()
    torch.testing.assert_close(
        predict(found, model[0], x),
        gamma * (responses(rows, model[0], x) + bias - mean) / deviation + beta,
        **CLOSE,
    )


def test_batch_statistics_reach_later_layers_and_means_of_inputs() -> None:
    body = [GmPConv2d(4, 4, 3, input_norm=True), nn.BatchNorm2d(4), nn.ReLU()]
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), *body)
    model = randomise(model).train()
    x = torch.randn(5, 2, 8, 8, **D)
    found = boundaries(model, x, statistics="batch")["3"]
    given = model[:3](x)
    z = by_unit(pre_activation(model, x, model[5]), -3)
    centred = given - given.mean(dim=(0, 2, 3), keepdim=True)
    torch.testing.assert_close(predict(found, model[3], centred), z, **CLOSE)


@pytest.mark.parametrize("norm", [FrozenBatchNorm2d(4), nn.BatchNorm2d(4).eval()])
def test_a_norm_that_is_frozen_in_training_is_read_by_its_running_statistics(norm: Any) -> None:
    norm.running_mean += 1.0
    model = nn.Sequential(nn.Conv2d(2, 4, 3), norm, nn.ReLU())
    x = torch.randn(5, 2, 8, 8)
    assert model.training
    found, expected = (boundaries(model, x, statistics=s)["0"] for s in ("batch", "running"))
    assert torch.equal(found.distance, expected.distance)


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
    torch.testing.assert_close(predict(found, layer, x), layer(x).detach(), **CLOSE)
    check(model, x)


def test_spectral_norm_is_read_without_moving_it() -> None:
    layer = parametrizations.spectral_norm(nn.Linear(FAN_IN, UNITS, **D))
    model, x = nn.Sequential(layer, nn.ReLU()).train(), batch_for(layer)
    before = copy.deepcopy(layer.state_dict())
    found = boundaries(model, x)["0"]
    assert all(torch.equal(before[name], value) for name, value in layer.state_dict().items())
    assert all(module.training for module in model.modules())
    torch.testing.assert_close(predict(found, layer, x), layer.eval()(x).detach(), **CLOSE)


@pytest.mark.parametrize("converted", [False, True])
def test_a_transposed_weight_has_units_in_its_columns(converted: bool) -> None:
    library = pytest.importorskip("transformers.pytorch_utils")
    layer = randomise(library.Conv1D(UNITS, FAN_IN))
    model = nn.Sequential(layer, nn.ReLU(), nn.Linear(UNITS, 2, **D)).eval()
    x = torch.randn(4, 3, FAN_IN, **D)
    z = by_unit(pre_activation(model, x, model[1]), -1).detach()
    model = gp.convert_(model) if converted else model
    torch.testing.assert_close(predict(boundaries(model, x)["0"], nn.Identity(), x), z, **CLOSE)


@pytest.mark.parametrize("with_inputs", [False, True])
def test_attention_has_the_units_of_its_projections(with_inputs: bool) -> None:
    attention = randomise(nn.MultiheadAttention(8, 2, batch_first=True)).eval()
    x = torch.randn(2, 3, 8, **D)
    inputs = (x, x, x) if with_inputs else None
    found = boundaries(attention, inputs)
    assert list(found) == ["in_proj_weight", "out_proj"]
    rows = attention.in_proj_weight.detach()
    torch.testing.assert_close(found["in_proj_weight"].direction, F.normalize(rows), **CLOSE)
    torch.testing.assert_close(found["in_proj_weight"].scale, rows.norm(dim=1), **CLOSE)
    assert found["in_proj_weight"].distance.isnan().all()
    converted = gp.convert_(attention)
    other = boundaries(nn.ModuleDict({"a": converted}) if not with_inputs else converted, inputs)
    name = "in_proj" if with_inputs else "a.in_proj"
    torch.testing.assert_close(other[name].direction, F.normalize(rows), **CLOSE)


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(UNITS), nn.LayerNorm(UNITS)], ids=str)
@pytest.mark.parametrize("make", [LINEAR["sp"], LINEAR["gmp, r inside"]])
def test_narrow_parameters_are_computed_with_in_wide_numbers(
    make: Callable, norm: nn.Module
) -> None:
    narrow = randomise(nn.Sequential(make(), copy.deepcopy(norm))).bfloat16().eval()
    if isinstance(norm, nn.LayerNorm):
        nn.init.zeros_(narrow[1].bias)
    wide = copy.deepcopy(narrow).double()
    found, exact = (layer_boundaries(*model) for model in (narrow, wide))
    torch.testing.assert_close(found.direction, exact.direction, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.distance, exact.distance, rtol=1e-4, atol=1e-4)
