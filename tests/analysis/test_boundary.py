"""Boundaries are where the model itself, run and hooked, says that its units switch.

The second computation is always the model's own forward pass: the pre-activation that a hook sees
must be t + scale (u^T x + lam) at every point, which fixes direction, distance and scale at once.
"""

import copy
from collections.abc import Callable
from itertools import product

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


def batch_norm(units: int, rank: int, affine: bool = True) -> nn.Module:
    """Return the BatchNorm for a layer with `rank` dimensions of positions."""
    if rank == 3:
        return nn.BatchNorm3d(units, affine=affine)
    if rank == 2:
        return nn.BatchNorm2d(units, affine=affine)
    return nn.BatchNorm1d(units, affine=affine)


# Norms with statistics that are the same for all examples.
FIXED: dict[str, Callable[[int, int], nn.Module]] = {
    "none": lambda units, rank: nn.Identity(),
    "bn": batch_norm,
    "bn without gamma": lambda units, rank: batch_norm(units, rank, affine=False),
    "mbn": lambda units, rank: gp.MeanOnlyBatchNorm(units),
    "mbn without bias": lambda units, rank: gp.MeanOnlyBatchNorm(units, bias=False),
    "imn": lambda units, rank: gp.InputMeanNorm(units),
}


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, **CLOSE)


def randomised(*modules: nn.Module) -> nn.Sequential:
    """Return modules in sequence, with random parameters, in evaluation mode."""
    return randomise(nn.Sequential(*modules)).eval()


def make_network(layer: nn.Module, norm: str) -> nn.Sequential:
    """Return layer, norm and ReLU with random parameters, in evaluation mode."""
    rank = len(getattr(layer, "kernel_size", ()))
    return randomised(layer, FIXED[norm](UNITS, rank), nn.ReLU())


def draw_batch(layer: nn.Module, examples: int = 7) -> Tensor:
    """Return random inputs of the layer's shape."""
    if not hasattr(layer, "kernel_size"):
        return torch.randn(examples, layer.in_features, **D)
    sizes = [7, 6, 5][: len(layer.kernel_size)]
    return torch.randn(examples, layer.in_channels, *sizes, **D)


LAYERS = [*LINEAR.values(), *CONV.values()]
WITH_EVERY_NORM = [LINEAR["gmp, r inside"], CONV["sp"]]


@pytest.mark.parametrize(
    ("make", "norm", "statistics"),
    [
        *product(LAYERS, ["none"], ["running"]),
        *product(LAYERS, ["bn"], ["batch"]),
        *product(WITH_EVERY_NORM, FIXED, ["running", "batch"]),
    ],
)
def test_boundaries_predict_the_pre_activation(make: Callable, norm: str, statistics: str) -> None:
    model = make_network(make(), norm).train(statistics == "batch")
    x = draw_batch(model[0])

    check(model, x, statistics=statistics)


OUTSIDE = {
    "linear": lambda: GmPLinear(FAN_IN, UNITS, activation=nn.ReLU()),
    "conv": lambda: GmPConv2d(CHANNELS, UNITS, 3, padding=1, groups=2, activation=nn.ReLU()),
}


@pytest.mark.parametrize("make", OUTSIDE.values(), ids=OUTSIDE)
def test_r_outside_scales_the_output_and_leaves_the_boundary(make: Callable) -> None:
    layer = randomise(make()).eval()
    x = draw_batch(layer)
    assert (layer.r < 0).any()
    assert (layer.r > 0).any()

    boundary = boundaries(layer, x)[""]

    z = by_unit(pre_activation(layer, x, layer.activation), layer.channel_dim).detach()
    assert_close(responses(boundary.direction, layer, x) + boundary.distance, z)
    assert_close(boundary.scale, layer.r.detach().abs())
    assert_close(boundary.location, layer.location.detach().flatten(1))
    assert_close(layer_boundaries(layer).location, boundary.location)


@pytest.mark.parametrize(("form", "padding"), [(True, 0), ("border", 0), ("border", 1)])
def test_x_is_the_centred_input_where_a_layer_normalises_its_mean(
    form: bool | str, padding: int
) -> None:
    layer = randomise(GmPConv2d(CHANNELS, UNITS, 3, padding=padding, input_norm=form)).eval()
    model = nn.Sequential(layer, nn.ReLU())
    x = draw_batch(layer, examples=3)

    boundary = boundaries(model, x)["0"]

    z = by_unit(pre_activation(model, x, model[1]), -3).detach()
    mean = layer.input_norm.running_mean[:, None, None]
    assert_close(predict(boundary, layer, x - mean), z)


def test_zeros_are_padded_before_centring_where_the_input_norm_has_the_plain_form() -> None:
    layer = randomise(GmPConv2d(CHANNELS, UNITS, 3, padding=1, input_norm=True)).eval()
    model = nn.Sequential(layer, nn.ReLU())
    x = draw_batch(layer, examples=3)

    boundary = boundaries(model, x)["0"]

    z = by_unit(pre_activation(model, x, model[1]), -3).detach()
    mean = layer.input_norm.running_mean[:, None, None]
    centred = F.pad(x, [1, 1, 1, 1]) - mean
    unpadded = nn.Conv2d(CHANNELS, UNITS, 3)
    assert_close(predict(boundary, unpadded, centred), z)


# Breakpoints of activations.


def srelu_of_each_unit() -> SReLU:
    """Return an SReLU whose units have different breakpoints."""
    activation = SReLU(UNITS)
    activation.lower.data = torch.tensor([0.0, 1, 2, 3, 4, 5])
    activation.upper.data = torch.tensor([1.0, 3, 2, 4, 5, 6])
    return activation


ACTIVATIONS: dict[str, tuple[Callable[[], nn.Module], list]] = {
    "relu": (nn.ReLU, [0]),
    "prelu": (lambda: nn.PReLU(UNITS), [0]),
    "relu6": (nn.ReLU6, [0, 6]),
    "hardswish": (nn.Hardswish, [-3, 3]),
    "hardtanh": (lambda: nn.Hardtanh(-0.4, 2.1), [-0.4, 2.1]),  # no float32 numbers
    "srelu of each unit": (srelu_of_each_unit, [[0, 1, 2, 3, 4, 5], [1, 3, 2, 4, 5, 6]]),
}


@pytest.mark.parametrize("norm", ["none", "bn"])
@pytest.mark.parametrize(("make", "points"), ACTIVATIONS.values(), ids=ACTIVATIONS)
def test_the_pre_activation_at_each_location_is_the_breakpoint(
    make: Callable, points: list, norm: str
) -> None:
    model = make_network(nn.Linear(FAN_IN, UNITS), norm)
    model[2] = make().double()
    expected = torch.tensor(points, **D).reshape(len(points), -1).expand(-1, UNITS)

    boundary = boundaries(model, torch.zeros(1, FAN_IN, **D))["0"]

    assert boundary.distances.shape == (len(points), UNITS)
    assert boundary.locations.shape == (len(points), UNITS, FAN_IN)
    assert_close(boundary.location, boundary.locations[0])
    at_locations = [
        pre_activation(model, locations, model[2]).diagonal() for locations in boundary.locations
    ]
    assert_close(torch.stack(at_locations), expected)


# Units without a boundary.


def has_boundary(layer: nn.Module, norm: nn.Module | None = None) -> list[bool]:
    """Return which units have a boundary; all that describes the others must be NaN."""
    boundary = layer_boundaries(layer, norm)
    is_known = boundary.distance.isfinite()
    assert torch.equal(boundary.direction.sum(dim=1).isfinite(), is_known)
    assert torch.equal(boundary.location.sum(dim=1).isfinite(), is_known)
    assert torch.equal(boundary.scale.isfinite(), is_known)
    return is_known.tolist()


def test_a_row_of_zeros_has_no_boundary() -> None:
    layer = randomise(nn.Linear(3, 2))
    layer.weight.data[1] = 0

    assert has_boundary(layer) == [True, False]


def test_a_unit_with_zero_gamma_has_no_boundary() -> None:
    layer = randomise(nn.Linear(3, 2))
    norm = randomise(nn.BatchNorm1d(2).eval())
    norm.weight.data[0] = 0

    assert has_boundary(layer, norm) == [False, True]


def test_a_unit_with_zero_r_inside_has_no_boundary() -> None:
    layer = randomise(GmPLinear(3, 2))
    layer.r.data[0] = 0

    assert has_boundary(layer) == [False, True]


def test_a_unit_with_zero_r_outside_has_a_boundary_and_no_scale() -> None:
    """Its output is zero on both sides."""
    layer = randomise(GmPLinear(3, 2, activation=torch.relu))
    layer.r.data[0] = 0

    assert has_boundary(layer) == [True, True]
    assert layer_boundaries(layer).scale[0] == 0


# Norms with statistics of each example, or of the batch. With each, the number of examples that
# have the same statistics: one, or any.

VARYING: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module], int]] = {
    "ln": (LINEAR["sp"], lambda: nn.LayerNorm(UNITS), 1),
    "ln, gmp": (LINEAR["gmp, r inside"], lambda: nn.LayerNorm(UNITS), 1),
    "gn": (LINEAR["sp"], lambda: nn.GroupNorm(2, UNITS), 1),
    "gn over positions": (CONV["sp"], lambda: nn.GroupNorm(2, UNITS), 1),
    "instance": (CONV["groups"], lambda: nn.InstanceNorm2d(UNITS, affine=True), 1),
    "its statistics": (
        CONV["sp"],
        lambda: nn.InstanceNorm2d(UNITS, track_running_stats=True),
        4,
    ),
    "synchronised": (CONV["sp"], lambda: nn.SyncBatchNorm(UNITS), 4),
    "frozen": (CONV["sp"], lambda: FrozenBatchNorm2d(UNITS), 4),
    "no statistics": (CONV["sp"], lambda: nn.BatchNorm2d(UNITS, track_running_stats=False), 4),
}


@pytest.mark.parametrize(("layer", "norm", "examples"), VARYING.values(), ids=VARYING)
def test_boundaries_are_exact_for_examples_with_the_same_statistics(
    layer: Callable, norm: Callable, examples: int
) -> None:
    model = randomised(layer(), norm(), nn.ReLU())

    check(model, draw_batch(model[0], examples))


NORMS_OF_UNITS = [nn.GroupNorm(2, UNITS), nn.LayerNorm(UNITS, bias=False)]


def make_without_beta(norm: nn.Module) -> nn.Sequential:
    """Return a layer with the norm, whose beta is zero, and ReLU."""
    model = randomised(LINEAR["gmp, r inside"](), norm, nn.ReLU())
    if model[1].bias is not None:
        nn.init.zeros_(model[1].bias)
    return model


@pytest.mark.parametrize("norm", NORMS_OF_UNITS, ids=str)
def test_without_beta_the_boundary_is_exact_at_any_deviation(norm: nn.Module) -> None:
    model = make_without_beta(norm)
    x = torch.randn(50, FAN_IN, **D)

    boundary = boundaries(model, x)["0"]

    side = x @ boundary.direction.t() + boundary.distance
    assert torch.equal(side > 0, pre_activation(model, x, model[2]) > 0)
    at_locations = pre_activation(model, boundary.location, model[2]).diagonal()
    assert_close(at_locations, torch.zeros(UNITS, **D))


@pytest.mark.parametrize("norm", NORMS_OF_UNITS, ids=str)
def test_without_beta_the_boundary_needs_no_batch(norm: nn.Module) -> None:
    model = make_without_beta(norm)
    with_batch = boundaries(model, torch.randn(50, FAN_IN, **D))["0"]

    without_batch = layer_boundaries(model[0], model[1], nn.ReLU())

    assert_close(without_batch.location, with_batch.location)
    assert without_batch.scale.isnan().all()


def average_moments(norm: nn.Module, z: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and deviation of each example, averaged, as the norm's outputs tell them.

    Without gamma and beta, y = (z - mean) / deviation: two positions give both unknowns.
    """
    plain = copy.deepcopy(norm)
    nn.init.ones_(plain.weight)
    nn.init.zeros_(plain.bias)
    y = torch.cat([plain(example[None]) for example in z]).detach()
    z0, z1 = z[..., 0], z[..., 1]
    y0, y1 = y[..., 0], y[..., 1]

    deviation = (z1 - z0) / (y1 - y0)
    mean = z0 - deviation * y0
    return mean.mean(dim=0), deviation.mean(dim=0)


norms_over_positions = pytest.mark.parametrize(
    "norm", [nn.GroupNorm(2, UNITS), nn.InstanceNorm1d(UNITS, affine=True)], ids=str
)


@norms_over_positions
def test_moments_of_norms_over_positions_are_averages_over_examples(norm: nn.Module) -> None:
    model = randomised(nn.Conv1d(2, UNITS, 3), norm)
    z = model[0](torch.randn(8, 2, 9, **D)).detach()

    moments = compute_moments(norm, z)

    mean, deviation = average_moments(norm, z)
    assert_close(moments.mean, mean)
    assert_close(moments.deviation, deviation)


@norms_over_positions
def test_norms_over_positions_have_the_boundaries_of_their_average_moments(
    norm: nn.Module,
) -> None:
    model = randomised(nn.Conv1d(2, UNITS, 3), norm, nn.ReLU())
    x = torch.randn(8, 2, 9, **D)

    boundary = boundaries(model, x)["0"]

    z = model[0](x).detach()
    mean, deviation = average_moments(norm, z)
    gamma, beta = norm.weight.detach(), norm.bias.detach()
    expected = gamma * (by_unit(z, 1) - mean) / deviation + beta
    assert_close(predict(boundary, model[0], x), expected)


def test_batch_statistics_reach_later_layers_and_means_of_inputs() -> None:
    model = randomised(
        nn.Conv2d(2, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        GmPConv2d(4, 4, 3, input_norm=True),
        nn.BatchNorm2d(4),
        nn.ReLU(),
    ).train()
    x = torch.randn(5, 2, 8, 8, **D)

    boundary = boundaries(model, x, statistics="batch")["3"]

    inputs = model[:3](x)
    centred = inputs - inputs.mean(dim=(0, 2, 3), keepdim=True)
    z = by_unit(pre_activation(model, x, model[5]), -3)
    assert_close(predict(boundary, model[3], centred), z)


@pytest.mark.parametrize("norm", [FrozenBatchNorm2d(4), nn.BatchNorm2d(4).eval()])
def test_a_norm_that_is_frozen_in_training_is_read_by_its_running_statistics(
    norm: nn.Module,
) -> None:
    norm.running_mean += 1.0
    model = nn.Sequential(nn.Conv2d(2, 4, 3), norm, nn.ReLU())
    x = torch.randn(5, 2, 8, 8)
    assert model.training

    by_batch = boundaries(model, x, statistics="batch")["0"]
    by_running = boundaries(model, x, statistics="running")["0"]

    assert torch.equal(by_batch.distance, by_running.distance)


# Weights that are computed, transposed or packed.

HOOKED = {
    "weight_norm": nn.utils.weight_norm,
    "weight_norm over inputs": lambda layer: nn.utils.weight_norm(layer, dim=1),
    "spectral_norm": nn.utils.spectral_norm,
    "pruning": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("add_hook", HOOKED.values(), ids=HOOKED)
def test_a_weight_that_a_hook_computes_is_the_one_of_the_next_call(add_hook: Callable) -> None:
    layer = add_hook(nn.Linear(FAN_IN, UNITS)).double()
    model = nn.Sequential(layer, nn.ReLU()).eval()
    x = draw_batch(layer)
    model(x)
    for parameter in layer.parameters():  # layer.weight is still that of the last call
        parameter.data.mul_(1.5).add_(0.1)
    buffers = copy.deepcopy(dict(layer.named_buffers()))

    boundary = layer_boundaries(layer)

    torch.testing.assert_close(dict(layer.named_buffers()), buffers, rtol=0, atol=0)
    assert_close(predict(boundary, layer, x), layer(x).detach())
    check(model, x)


def test_spectral_norm_is_read_without_a_step_of_its_power_iteration() -> None:
    layer = parametrizations.spectral_norm(nn.Linear(FAN_IN, UNITS, **D))
    model = nn.Sequential(layer, nn.ReLU()).train()
    x = draw_batch(layer)
    before = copy.deepcopy(layer.state_dict())

    boundary = boundaries(model, x)["0"]

    torch.testing.assert_close(layer.state_dict(), before, rtol=0, atol=0)
    assert all(module.training for module in model.modules())
    assert_close(predict(boundary, layer, x), layer.eval()(x).detach())


@pytest.mark.parametrize("converted", [False, True])
def test_a_transposed_weight_has_units_in_its_columns(converted: bool) -> None:
    library = pytest.importorskip("transformers.pytorch_utils")
    layer = randomise(library.Conv1D(UNITS, FAN_IN))
    model = nn.Sequential(layer, nn.ReLU(), nn.Linear(UNITS, 2, **D)).eval()
    x = torch.randn(4, 3, FAN_IN, **D)
    z = by_unit(pre_activation(model, x, model[1]), -1).detach()

    if converted:
        model = gp.convert_(model)
    boundary = boundaries(model, x)["0"]

    assert_close(predict(boundary, nn.Identity(), x), z)


def make_attention() -> tuple[nn.MultiheadAttention, tuple[Tensor, Tensor, Tensor]]:
    """Return self-attention with random parameters, and inputs."""
    attention = randomise(nn.MultiheadAttention(8, 2, batch_first=True)).eval()
    x = torch.randn(2, 3, 8, **D)
    return attention, (x, x, x)


@pytest.mark.parametrize("with_inputs", [False, True])
def test_attention_has_the_units_of_its_projections(with_inputs: bool) -> None:
    attention, inputs = make_attention()

    found = boundaries(attention, inputs if with_inputs else None)

    assert list(found) == ["in_proj_weight", "out_proj"]
    rows = attention.in_proj_weight.detach()
    assert_close(found["in_proj_weight"].direction, F.normalize(rows))
    assert_close(found["in_proj_weight"].scale, rows.norm(dim=1))
    assert found["in_proj_weight"].distance.isnan().all()


def test_converted_attention_has_the_directions_of_the_original() -> None:
    attention, inputs = make_attention()
    rows = attention.in_proj_weight.detach()

    found = boundaries(gp.convert_(attention), inputs)

    assert_close(found["in_proj"].direction, F.normalize(rows))


def test_converted_attention_inside_a_model_needs_no_inputs() -> None:
    attention, _ = make_attention()
    rows = attention.in_proj_weight.detach()
    model = nn.ModuleDict({"a": gp.convert_(attention)})

    found = boundaries(model)

    assert_close(found["a.in_proj"].direction, F.normalize(rows))


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(UNITS), nn.LayerNorm(UNITS)], ids=str)
@pytest.mark.parametrize("make", [LINEAR["sp"], LINEAR["gmp, r inside"]])
def test_boundaries_of_bfloat16_parameters_are_computed_in_wider_numbers(
    make: Callable, norm: nn.Module
) -> None:
    narrow = randomised(make(), copy.deepcopy(norm)).bfloat16()
    if isinstance(norm, nn.LayerNorm):
        nn.init.zeros_(narrow[1].bias)
    wide = copy.deepcopy(narrow).double()

    boundary = layer_boundaries(*narrow)

    expected = layer_boundaries(*wide)
    torch.testing.assert_close(boundary.direction, expected.direction, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(boundary.distance, expected.distance, rtol=1e-4, atol=1e-4)
