"""Layers compute what torch.nn's do, from directions, distances and scales."""

import copy
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from same_training import check_same_training
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from geoparam import GmPConv1d, GmPConv2d, GmPConv3d, GmPLinear, InputMeanNorm, convert_, sphere
from geoparam.base_layer import GmPLayer
from geoparam.input_mean_layers import InputMeanConv2d, InputMeanLinear

DOUBLE = {"dtype": torch.float64}
PADDED = {"kernel_size": 3, "padding": 1}
CONVS = {1: (GmPConv1d, nn.Conv1d), 2: (GmPConv2d, nn.Conv2d), 3: (GmPConv3d, nn.Conv3d)}
CONV_OPTIONS = [
    {},
    {"stride": 2},
    {"padding": 1},
    {"padding": "same"},
    {"padding": "same", "kernel_size": 4, "dilation": 2},
    {"padding": "valid"},
    {"dilation": 2, "padding": 2},
    {"groups": 2, "padding": 1},
    {"groups": 4},
    {"kernel_size": 1},
    {"bias": False, "padding": 1},
    {"padding": 1, "padding_mode": "reflect"},
    {"padding": 1, "padding_mode": "circular", "stride": 2},
    {"padding": "same", "padding_mode": "replicate"},
]

both_coordinates = pytest.mark.parametrize("coordinates", ["angles", "intrinsic"])
all_conv_options = pytest.mark.parametrize("options", CONV_OPTIONS, ids=str)


def image(rank: int = 2) -> Tensor:
    """Return a batch of 3 images with 4 channels and this many spatial dimensions."""
    sizes = [7, 6, 8][:rank]
    return torch.randn(3, 4, *sizes, **DOUBLE)


def perturb(layer: GmPLayer) -> GmPLayer:
    """Give a new layer offsets and scales of both signs, so that nothing is 0 or 1 by chance."""
    nn.init.normal_(layer.r)
    if layer.lam is not None:
        nn.init.normal_(layer.lam)
    return layer


# Beside torch.nn's layers.


@both_coordinates
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("n", [1, 2, 3, 20])
def test_linear_equals_torchs(n: int, bias: bool, coordinates: str) -> None:
    linear = nn.Linear(n, 5, bias, **DOUBLE)
    layer = GmPLinear.from_linear(linear, coordinates=coordinates)
    x = torch.randn(2, 4, n, **DOUBLE)

    assert_close(layer(x), linear(x), rtol=1e-12, atol=1e-12)
    assert_close(layer.weight, linear.weight.detach(), rtol=1e-12, atol=1e-12)


@both_coordinates
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("n", [1, 2, 3, 20])
def test_linear_becomes_torchs_again(n: int, bias: bool, coordinates: str) -> None:
    linear = nn.Linear(n, 5, bias, **DOUBLE)
    layer = GmPLinear.from_linear(linear, coordinates=coordinates)

    back = layer.to_linear()

    assert type(back) is nn.Linear
    assert_close(back.weight, linear.weight, rtol=1e-12, atol=1e-12)
    assert (back.bias is not None) == bias


@all_conv_options
@pytest.mark.parametrize(("rank", "coordinates"), [(1, "angles"), (2, "intrinsic"), (3, "angles")])
def test_convolution_equals_torchs(rank: int, options: dict, coordinates: str) -> None:
    gmp_class, torch_class = CONVS[rank]
    conv = torch_class(4, 8, **{"kernel_size": 3, **options}, **DOUBLE)
    layer = gmp_class.from_conv(conv, coordinates=coordinates)
    batch = image(rank)
    one_image = batch[0]

    assert_close(layer(batch), conv(batch), rtol=1e-11, atol=1e-11)
    assert_close(layer(one_image), conv(one_image), rtol=1e-11, atol=1e-11)


@all_conv_options
@pytest.mark.parametrize(("rank", "coordinates"), [(1, "angles"), (2, "intrinsic"), (3, "angles")])
def test_convolution_becomes_torchs_again(rank: int, options: dict, coordinates: str) -> None:
    gmp_class, torch_class = CONVS[rank]
    conv = torch_class(4, 8, **{"kernel_size": 3, **options}, **DOUBLE)
    layer = gmp_class.from_conv(conv, coordinates=coordinates)
    x = image(rank)

    back = layer.to_conv()

    assert type(back) is torch_class
    assert_close(back(x), conv(x), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("n", [13, 576, 4608])
def test_float32_conversion_keeps_weights_to_a_millionth(n: int) -> None:
    linear = nn.Linear(n, 8)
    layer = GmPLinear.from_linear(linear)

    error = (layer.weight - linear.weight).norm(dim=1)
    relative_error = error / linear.weight.norm(dim=1)
    assert relative_error.max() < 1e-6


@both_coordinates
def test_the_papers_unit_has_r_outside(coordinates: str) -> None:
    layer = perturb(GmPLinear(6, 5, activation=F.elu, coordinates=coordinates, **DOUBLE))
    x = torch.randn(7, 6, **DOUBLE)

    expected = layer.r * F.elu(x @ layer.direction.T + layer.lam)
    assert_close(layer(x), expected)
    assert torch.equal(layer.weight, layer.direction)
    assert layer.bias is layer.lam


# Views of the parameters.


@pytest.fixture
def conv(coordinates: str) -> GmPConv2d:
    return perturb(GmPConv2d(4, 6, 3, coordinates=coordinates, **DOUBLE))


@both_coordinates
def test_views_have_the_weights_shape(conv: GmPConv2d) -> None:
    assert conv.direction.shape == (6, 4, 3, 3)
    assert conv.weight.shape == (6, 4, 3, 3)
    assert conv.location.shape == (6, 4, 3, 3)


@both_coordinates
def test_directions_have_length_one(conv: GmPConv2d) -> None:
    lengths = conv.direction.flatten(1).norm(dim=1)
    assert_close(lengths, torch.ones(6, **DOUBLE))


@both_coordinates
def test_the_weight_is_r_times_the_direction(conv: GmPConv2d) -> None:
    assert_close(conv.weight, conv.r.view(-1, 1, 1, 1) * conv.direction)


@both_coordinates
def test_the_bias_is_r_times_lam(conv: GmPConv2d) -> None:
    assert_close(conv.bias, conv.r * conv.lam)


@both_coordinates
def test_theta_is_measured_from_the_pole(conv: GmPConv2d) -> None:
    latitude = math.pi / 2 - conv.theta
    assert_close(sphere.to_unit(latitude), conv.direction.flatten(1))


@both_coordinates
def test_the_location_is_the_point_of_the_boundary_nearest_to_the_origin(conv: GmPConv2d) -> None:
    u = conv.direction.flatten(1)
    location = conv.location.flatten(1)

    on_boundary = (location * u).sum(dim=1) + conv.lam
    assert_close(on_boundary, torch.zeros(6, **DOUBLE))
    assert_close(location.norm(dim=1), conv.lam.abs())


# One input, zeros and initial values.


def test_one_input_has_a_sign_and_no_angle() -> None:
    layer = GmPLinear(1, 200)

    assert layer.sign.unique().tolist() == [-1.0, 1.0]
    assert set(layer.state_dict()) == {"sign", "r", "lam"}
    assert set(dict(layer.named_parameters())) == {"r", "lam"}


def test_signs_are_saved_and_loaded() -> None:
    layer, other = GmPLinear(1, 200), GmPLinear(1, 200)
    other.load_state_dict(layer.state_dict())
    x = torch.randn(3, 1)

    assert torch.equal(other(x), layer(x))


@both_coordinates
@pytest.mark.parametrize("activation", [None, torch.relu])
def test_zero_rows_and_zero_scales_stay_finite(
    activation: Callable | None, coordinates: str
) -> None:
    linear = nn.Linear(5, 3)
    linear.weight.data[1] = 0
    linear.bias.data[1] = 0
    layer = GmPLinear.from_linear(linear, coordinates=coordinates)
    layer.activation = activation

    output = layer(torch.randn(4, 5))
    output.sum().backward()

    assert layer.r[1] == 0
    assert torch.equal(output[:, 1], torch.zeros(4))
    for parameter in layer.parameters():
        assert parameter.grad.isfinite().all()


def test_sphere_initialisation_is_uniform() -> None:
    layer = GmPLinear(3, 20000)
    u = layer.direction.detach()

    covariance = u.T @ u / len(u)
    assert u.mean(dim=0).abs().max() < 0.02
    assert_close(covariance, torch.eye(3) / 3, atol=0.01, rtol=0)


def test_sphere_initialisation_has_unit_scales_and_no_offsets() -> None:
    layer = GmPLinear(3, 20000)

    assert (layer.r == 1).all()
    assert (layer.lam == 0).all()


def test_glorot_initialisation_has_the_released_codes_bound() -> None:
    layer = GmPConv2d(16, 64, 3, init="glorot")
    weight = layer.weight.detach()

    bound = math.sqrt(6 / (9 * 16 + 64))
    assert weight.abs().max() <= bound * (1 + 1e-5)
    assert weight.std() == pytest.approx(bound / math.sqrt(3), rel=0.05)
    assert (layer.lam == 0).all()


def test_glorot_initialisation_has_both_signs_in_the_last_coordinate() -> None:
    """The released code's inverse loses the sign of the last coordinate."""
    layer = GmPConv2d(16, 64, 3, init="glorot")

    is_negative = layer.weight.flatten(1)[:, -1] < 0
    assert 0.3 < is_negative.float().mean() < 0.7


def test_meta_layers_can_be_materialised() -> None:
    layer = GmPLinear(5, 4, input_norm=True, device="meta").to_empty(device="cpu")

    layer.reset_parameters()

    assert not layer.input_norm.running_mean.any()
    assert_close(layer.direction.norm(dim=1), torch.ones(4))


@pytest.mark.parametrize("plain", [nn.Linear(5, 4), nn.Conv2d(4, 6, 3, groups=2)])
def test_converted_layers_reset_their_parameters_as_torchs_do(plain: nn.Module) -> None:
    on_meta = copy.deepcopy(plain).to("meta")
    converted = convert_(on_meta).to_empty(device="cpu")

    for layer in (plain, converted):
        torch.manual_seed(0)
        layer.reset_parameters()

    assert_close(converted.weight, plain.weight.detach())
    assert_close(converted.bias, plain.bias.detach())


# The input's mean, subtracted by the layer.


@all_conv_options
def test_border_form_equals_the_module(options: dict) -> None:
    options = {"kernel_size": 3, **options, **DOUBLE}
    fused = perturb(GmPConv2d(4, 8, input_norm="border", **options))
    pair = nn.Sequential(InputMeanNorm(4, **DOUBLE), GmPConv2d(4, 8, **options))

    check_same_training(fused, pair, image() + 2)


@pytest.mark.parametrize("mode", [True, "bias", "border"])
@pytest.mark.parametrize("shape", [(8, 4), (2, 5, 4)])
def test_a_linear_layer_with_input_norm_equals_the_module(
    shape: tuple[int, ...], mode: bool | str
) -> None:
    fused = perturb(GmPLinear(4, 6, input_norm=mode, activation=torch.tanh, **DOUBLE))
    norm = InputMeanNorm(4, dim=-1, **DOUBLE)
    plain = GmPLinear(4, 6, activation=torch.tanh, **DOUBLE)

    check_same_training(fused, nn.Sequential(norm, plain), torch.randn(shape, **DOUBLE) + 2)


@pytest.fixture
def bias_form(groups: int, form: bool | str) -> GmPConv2d:
    """Return a padded convolution that subtracts its input's mean by way of its bias."""
    return perturb(GmPConv2d(4, 6, **PADDED, groups=groups, input_norm=form, **DOUBLE))


both_names_of_the_bias_form = pytest.mark.parametrize("form", [True, "bias"])
with_and_without_groups = pytest.mark.parametrize("groups", [1, 2])


@both_names_of_the_bias_form
@with_and_without_groups
def test_bias_form_equals_a_centred_input_away_from_the_border(bias_form: GmPConv2d) -> None:
    x = image() + 1
    centred = x - x.mean(dim=(0, 2, 3), keepdim=True)

    interior = bias_form(x)[..., 1:-1, 1:-1]

    expected = F.conv2d(centred, bias_form.weight, bias_form.bias, groups=bias_form.groups)
    assert_close(interior, expected)


@both_names_of_the_bias_form
@with_and_without_groups
def test_bias_form_subtracts_the_same_at_the_border(bias_form: GmPConv2d) -> None:
    """Zeros are padded to the input as it is."""
    x = image() + 1
    plain = F.conv2d(x, bias_form.weight, padding=1, groups=bias_form.groups)

    difference = bias_form(x) - plain

    one_per_channel = difference[:1, :, :1, :1]
    assert_close(difference, one_per_channel.expand_as(difference))


@both_names_of_the_bias_form
@with_and_without_groups
def test_bias_form_folds(bias_form: GmPConv2d) -> None:
    x = image() + 1
    bias_form(x)

    folded = bias_form.eval().to_conv()

    assert_close(folded(x), bias_form(x))


def test_border_form_does_not_fold_into_a_bias_under_padding() -> None:
    with pytest.raises(ValueError, match="input_norm=True"):
        GmPConv2d(4, 6, **PADDED, input_norm="border").to_conv()


def test_border_form_folds_into_a_bias_without_padding() -> None:
    folded = GmPConv2d(4, 6, 3, input_norm="border").to_conv()

    assert folded.bias is not None


def old_state(layer: nn.Module) -> dict[str, Tensor]:
    """Return the state as version 1 wrote it, when True was the border form."""
    state = layer.state_dict()
    state._metadata[""]["version"] = 1
    return state


def test_an_old_state_under_padding_is_refused() -> None:
    layer = GmPConv2d(4, 6, **PADDED, input_norm=True)

    with pytest.raises(ValueError, match="input_norm_form = 'border'"):
        layer.load_state_dict(old_state(layer))


@pytest.mark.parametrize("form", ["border", "bias"])
def test_an_old_state_under_padding_loads_once_input_norm_is_named(form: str) -> None:
    layer = GmPConv2d(4, 6, **PADDED, input_norm=True)
    state = old_state(layer)
    named_later = GmPConv2d(4, 6, **PADDED, input_norm=True)
    named_later.input_norm_form = form

    named_later.load_state_dict(state)
    GmPConv2d(4, 6, **PADDED, input_norm=form).load_state_dict(state)


@pytest.mark.parametrize(
    "layer", [GmPConv2d(4, 6, 3, input_norm=True), GmPLinear(4, 6, input_norm=True)]
)
def test_an_old_state_loads_where_the_forms_are_the_same(layer: nn.Module) -> None:
    layer.load_state_dict(old_state(layer))


def test_a_state_loads_with_and_without_its_version() -> None:
    layer = GmPConv2d(4, 6, **PADDED, input_norm=True)
    state = layer.state_dict()

    layer.load_state_dict(state)
    layer.load_state_dict(dict(state))


def test_layers_that_compute_something_else_are_not_taken_for_their_base() -> None:
    with pytest.raises(ValueError, match="InputMeanLinear computes something else"):
        GmPLinear.from_linear(InputMeanLinear(4, 3))


# Evaluation, momentum and number types.


@both_coordinates
@torch.no_grad()
def test_evaluation_sees_every_write(coordinates: str) -> None:
    """Here as another process writes into shared memory: torch sees nothing of it."""
    layer = GmPLinear(6, 8, coordinates=coordinates).eval()
    fresh = GmPLinear(6, 8, coordinates=coordinates).eval()
    x = torch.randn(4, 6)
    layer(x)

    for parameter in layer.parameters():
        parameter.numpy()[:] *= 2

    fresh.load_state_dict(layer.state_dict())
    assert torch.equal(layer(x), fresh(x))


def test_layers_take_a_momentum() -> None:
    default = GmPConv2d(4, 6, 3, input_norm=True)
    cumulative = GmPLinear(4, 6, input_norm=True, momentum=None)

    assert default.input_norm.momentum == 0.2
    assert cumulative.input_norm.momentum is None


@pytest.mark.parametrize("input_norm", [True, False])
def test_an_empty_batch_passes(input_norm: bool) -> None:
    layer = GmPConv2d(4, 6, **PADDED, input_norm=input_norm)

    assert layer(torch.empty(0, 4, 5, 5)).shape[0] == 0
    for buffer in layer.buffers():
        assert buffer.isfinite().all()


@both_coordinates
@pytest.mark.parametrize("norm", [False, True, "border"])
def test_autocast_follows_float32(coordinates: str, norm: bool | str) -> None:
    options = {"activation": torch.relu, "coordinates": coordinates, "input_norm": norm}
    layer = GmPConv2d(4, 8, **PADDED, **options)
    x = image().float()
    expected = layer(x)

    with torch.autocast("cpu", torch.bfloat16):
        output = layer(x)
        output.float().square().sum().backward()

    assert output.dtype == torch.bfloat16
    assert_close(output.float(), expected, atol=0.05, rtol=0.05)
    for parameter in layer.parameters():
        assert parameter.grad.dtype == torch.float32
        assert parameter.grad.isfinite().all()


# What is refused.


def linear_with(row: float, bias: float, dtype: torch.dtype = torch.float32) -> nn.Linear:
    """Return a layer whose second unit has this weight, in each of its inputs, and bias."""
    linear = nn.Linear(4, 2, dtype=dtype)
    linear.weight.data[1] = row
    linear.bias.data[1] = bias
    return linear


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"in_features": 0}, "in_features is a whole number, 1 or more; got 0"),
        ({"out_features": 0}, "out_features is a whole number"),
        ({"init": "he"}, "init is 'sphere'"),
        ({"coordinates": "polar"}, "coordinates are 'angles'"),
        ({"coordinates": "intrinsic", "natural": True}, "natural=True corrects"),
        ({"input_norm": "mean"}, "input_norm is False"),
        ({"activation": "relu"}, "activation is a function"),
    ],
)
def test_wrong_options_of_a_linear_layer_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GmPLinear(**{"in_features": 3, "out_features": 2, **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"in_channels": 0}, "in_channels is a whole number"),
        ({"groups": 3}, "divisible by groups"),
        ({"kernel_size": (3, 3, 3)}, "kernel_size is one number or 2"),
        ({"padding_mode": "mirror"}, "padding_mode"),
    ],
)
def test_wrong_options_of_a_convolution_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GmPConv2d(**{"in_channels": 4, "out_channels": 6, "kernel_size": 3, **options})


@pytest.mark.parametrize(
    ("linear", "message"),
    [
        (nn.Conv2d(1, 1, 1), "made from an nn.Linear; got Conv2d"),
        (linear_with(math.nan, 0), "NaN or infinite values.*got 4"),
        (linear_with(0, 1), r"rows \[1\].*zero weight and a bias"),
        (linear_with(1e-6, 1, torch.float16), "lam = b / r is no torch.float16"),
        (linear_with(60000, 0, torch.float16), "longer than the largest torch.float16"),
    ],
)
def test_a_linear_layer_is_not_made_from(linear: nn.Module, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GmPLinear.from_linear(linear)


@pytest.mark.parametrize(
    ("conv", "message"),
    [
        (nn.Conv1d(1, 1, 1), "made from an nn.Conv2d; got Conv1d"),
        (nn.ConvTranspose2d(1, 1, 1), "got ConvTranspose2d"),
    ],
)
def test_a_convolution_is_not_made_from(conv: nn.Module, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GmPConv2d.from_conv(conv)


def test_a_layer_with_r_outside_is_no_linear_layer() -> None:
    with pytest.raises(ValueError, match="r outside"):
        GmPLinear(3, 2, activation=torch.relu).to_linear()


def test_repr_names_the_options_of_a_convolution() -> None:
    layer = GmPConv2d(4, 6, **PADDED, activation=torch.relu, input_norm="bias")

    first_lines = (
        "GmPConv2d(\n  4, 6, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1), "
        "coordinates='angles', activation=relu, input_norm='bias'"
    )
    assert repr(layer).startswith(first_lines)


def test_repr_names_the_options_of_a_linear_layer() -> None:
    layer = GmPLinear(3, 2, bias=False, natural=True)

    assert repr(layer) == "GmPLinear(3, 2, bias=False, coordinates='angles', natural=True)"


@both_coordinates
def test_a_type_that_cannot_hold_a_rows_length_is_refused(coordinates: str) -> None:
    """Each element of the row fits into float16, the row's length does not."""
    model = nn.Sequential(nn.Linear(100, 3), nn.ReLU(), nn.Linear(3, 2))
    model[0].weight.data[1] = 1e4
    convert_(model, coordinates=coordinates)

    with pytest.raises(ValueError, match=r"r of GmPLinear\(100, 3.* is 100000 in row 1"):
        model.half()

    assert model[0].r.dtype == torch.float32
    assert model.bfloat16()(torch.ones(1, 100).bfloat16()).isfinite().all()


def test_a_type_that_cannot_hold_a_distance_is_refused() -> None:
    layer = GmPLinear(4, 3)
    layer.weight = torch.full((3, 4), 1e-6)
    layer.bias = torch.ones(3)

    with pytest.raises(ValueError, match="lam of GmPLinear.* is 500000 in row 0"):
        layer.to(torch.float16)


# Overhead.


class CallCounter(TorchDispatchMode):
    """Counts the operators that reach a device, views of tensors among them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # noqa: ANN001, ANN204
        self.calls += 1
        return function(*args, **(kwargs or {}))


def count_calls(layer: nn.Module) -> int:
    """Return how many operators a step of a layer and its ReLU calls, forward and backward."""
    x = torch.randn(4, 8, 6, 6, requires_grad=True)
    with CallCounter() as counter:
        layer(x).relu().sum().backward()
    return counter.calls


SIZES = {"in_channels": 8, "out_channels": 16, "kernel_size": 3, "padding": 1}
LAYERS_AND_CALLS = {
    "BatchNorm": (nn.Sequential(nn.Conv2d(**SIZES, bias=False), nn.BatchNorm2d(16)), 17),
    "input mean": (InputMeanConv2d(**SIZES), 27),
    "angles": (GmPConv2d(**SIZES), 21),
    "angles, input mean": (GmPConv2d(**SIZES, input_norm=True), 36),
    "intrinsic": (GmPConv2d(**SIZES, coordinates="intrinsic"), 26),
    "intrinsic, input mean": (GmPConv2d(**SIZES, coordinates="intrinsic", input_norm=True), 41),
}


@pytest.mark.parametrize(("layer", "most"), LAYERS_AND_CALLS.values(), ids=LAYERS_AND_CALLS)
def test_a_training_step_of_a_layer_and_its_relu_calls_few_operators(
    layer: nn.Module, most: int
) -> None:
    if count_calls(nn.Conv2d(**SIZES, bias=False)) > 11:
        pytest.skip("an older torch makes more calls of its own")

    assert count_calls(layer) <= most
