"""Layers compute what torch.nn's do, from directions, distances and scales."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from same_training import check_same_training
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from geoparam import GmPConv1d, GmPConv2d, GmPConv3d, GmPLinear, InputMeanNorm, convert_, sphere
from geoparam.base_layer import GmPLayer
from geoparam.input_mean_layers import InputMeanConv2d, InputMeanLinear

DOUBLE = {"dtype": torch.float64}
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
COORDINATES = ["angles", "intrinsic"]


def image(rank: int, channels: int = 4, batch: int = 3) -> torch.Tensor:
    return torch.randn(batch, channels, *[7, 6, 8][:rank], dtype=torch.float64)


def perturb(layer: GmPLayer) -> GmPLayer:
    """Give a new layer offsets and scales of both signs, so that nothing is 0 or 1 by chance."""
    with torch.no_grad():
        layer.r.copy_(torch.randn_like(layer.r))
        if layer.lam is not None:
            layer.lam.normal_()
    return layer


@pytest.mark.parametrize("coordinates", COORDINATES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("n", [1, 2, 3, 20])
def test_linear_equals_torchs(n: int, bias: bool, coordinates: str) -> None:
    linear = nn.Linear(n, 5, bias, **DOUBLE)
    layer = GmPLinear.from_linear(linear, coordinates=coordinates)
    x = torch.randn(2, 4, n, **DOUBLE)
    torch.testing.assert_close(layer(x), linear(x), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(layer.weight, linear.weight.detach(), rtol=1e-12, atol=1e-12)
    back = layer.to_linear()
    torch.testing.assert_close(back.weight, linear.weight, rtol=1e-12, atol=1e-12)
    assert (back.bias is None) == (not bias) and type(back) is nn.Linear


@pytest.mark.parametrize("options", CONV_OPTIONS, ids=str)
@pytest.mark.parametrize(("rank", "coordinates"), [(1, "angles"), (2, "intrinsic"), (3, "angles")])
def test_convolution_equals_torchs(rank: int, options: dict, coordinates: str) -> None:
    ours, torchs = CONVS[rank]
    conv = torchs(4, 8, **{"kernel_size": 3, **options}, **DOUBLE)
    layer = ours.from_conv(conv, coordinates=coordinates)
    x = image(rank)
    torch.testing.assert_close(layer(x), conv(x), rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(layer(x[0]), conv(x[0]), rtol=1e-11, atol=1e-11)
    back = layer.to_conv()
    assert type(back) is torchs
    torch.testing.assert_close(back(x), conv(x), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("n", [13, 576, 4608])
def test_float32_conversion_keeps_weights_to_a_millionth(n: int) -> None:
    linear = nn.Linear(n, 8)
    error = (GmPLinear.from_linear(linear).weight - linear.weight).norm(dim=1)
    assert (error / linear.weight.norm(dim=1)).max() < 1e-6


@pytest.mark.parametrize("coordinates", COORDINATES)
def test_the_papers_unit_has_r_outside(coordinates: str) -> None:
    layer = perturb(GmPLinear(6, 5, activation=F.elu, coordinates=coordinates, **DOUBLE))
    x = torch.randn(7, 6, **DOUBLE)
    expected = layer.r * F.elu(x @ layer.direction.T + layer.lam)
    torch.testing.assert_close(layer(x), expected)
    assert torch.equal(layer.weight, layer.direction) and layer.bias is layer.lam


@pytest.mark.parametrize("coordinates", COORDINATES)
def test_views(coordinates: str) -> None:
    layer = perturb(GmPConv2d(4, 6, 3, coordinates=coordinates, **DOUBLE))
    u = layer.direction
    assert u.shape == layer.weight.shape == layer.location.shape == (6, 4, 3, 3)
    torch.testing.assert_close(u.flatten(1).norm(dim=1), torch.ones(6, **DOUBLE))
    torch.testing.assert_close(layer.weight, layer.r.view(-1, 1, 1, 1) * u)
    torch.testing.assert_close(layer.bias, layer.r * layer.lam)
    torch.testing.assert_close(sphere.to_unit(math.pi / 2 - layer.theta), u.flatten(1))
    # The location lies on the boundary, and its distance from the origin is |lam|.
    on_boundary = (layer.location * u).flatten(1).sum(dim=1) + layer.lam
    torch.testing.assert_close(on_boundary, torch.zeros(6, **DOUBLE))
    torch.testing.assert_close(layer.location.flatten(1).norm(dim=1), layer.lam.abs())


def test_one_input_has_a_sign_and_no_angle() -> None:
    layer = GmPLinear(1, 200)
    assert not hasattr(layer, "latitude")
    assert layer.sign.unique().tolist() == [-1.0, 1.0]
    assert set(layer.state_dict()) == {"sign", "r", "lam"}
    assert {name for name, _ in layer.named_parameters()} == {"r", "lam"}
    other = GmPLinear(1, 200)
    other.load_state_dict(layer.state_dict())
    x = torch.randn(3, 1)
    assert torch.equal(other(x), layer(x))


@pytest.mark.parametrize("activation", [None, torch.relu])
def test_zero_rows_and_zero_scales_stay_finite(activation) -> None:  # noqa: ANN001
    linear = nn.Linear(5, 3)
    with torch.no_grad():
        linear.weight[1], linear.bias[1] = 0, 0
    for coordinates in COORDINATES:
        layer = GmPLinear.from_linear(linear, coordinates=coordinates)
        layer.activation = activation
        x = torch.randn(4, 5)
        out = layer(x)
        assert layer.r[1] == 0 and torch.equal(out[:, 1], torch.zeros(4))
        out.sum().backward()
        assert all(p.grad.isfinite().all() for p in layer.parameters())


def test_sphere_initialisation_is_uniform_and_width_independent() -> None:
    layer = GmPLinear(3, 20000)
    u = layer.direction.detach()
    assert u.mean(dim=0).abs().max() < 0.02
    torch.testing.assert_close(u.T @ u / 20000, torch.eye(3) / 3, atol=0.01, rtol=0)
    assert (layer.r == 1).all() and (layer.lam == 0).all()


def test_glorot_initialisation_has_the_released_codes_bound() -> None:
    layer = GmPConv2d(16, 64, 3, init="glorot")
    w = layer.weight.detach()
    bound = math.sqrt(6 / (9 * 16 + 64))
    assert w.abs().max() <= bound * (1 + 1e-5)
    assert w.std() == pytest.approx(bound / math.sqrt(3), rel=0.05)
    assert (layer.lam == 0).all()
    # All signs occur in the last coordinate, which the released code's inverse loses.
    assert 0.3 < (w.flatten(1)[:, -1] < 0).float().mean() < 0.7


def test_meta_layers_can_be_materialised() -> None:
    layer = GmPLinear(5, 4, input_norm=True, device="meta").to_empty(device="cpu")
    layer.reset_parameters()
    assert not layer.input_norm.running_mean.any()
    torch.testing.assert_close(layer.direction.norm(dim=1), torch.ones(4))


@pytest.mark.parametrize("build", [lambda: nn.Linear(5, 4), lambda: nn.Conv2d(4, 6, 3, groups=2)])
def test_converted_layers_are_drawn_anew_as_torchs_are(build: Callable) -> None:
    plain, converted = build(), convert_(build().to("meta")).to_empty(device="cpu")
    for layer in (plain, converted):
        torch.manual_seed(0)
        layer.reset_parameters()
    torch.testing.assert_close(converted.weight, plain.weight.detach())
    torch.testing.assert_close(converted.bias, plain.bias.detach())


@pytest.mark.parametrize("options", CONV_OPTIONS, ids=str)
def test_border_form_equals_the_module(options: dict) -> None:
    options = {"kernel_size": 3, **options, **DOUBLE}
    fused = perturb(GmPConv2d(4, 8, input_norm="border", **options))
    pair = nn.Sequential(InputMeanNorm(4, **DOUBLE), GmPConv2d(4, 8, **options))
    check_same_training(fused, pair, image(2) + 2)


@pytest.mark.parametrize("mode", [True, "bias", "border"])
@pytest.mark.parametrize("shape", [(8, 4), (2, 5, 4)])
def test_fused_input_norm_of_linear(shape: tuple[int, ...], mode: bool | str) -> None:
    fused = perturb(GmPLinear(4, 6, input_norm=mode, activation=torch.tanh, **DOUBLE))
    plain = GmPLinear(4, 6, activation=torch.tanh, **DOUBLE)
    pair = nn.Sequential(InputMeanNorm(4, dim=-1, **DOUBLE), plain)
    check_same_training(fused, pair, torch.randn(shape, **DOUBLE) + 2)


@pytest.mark.parametrize("form", [True, "bias"])
@pytest.mark.parametrize("groups", [1, 2])
def test_bias_form_subtracts_a_constant_and_folds(groups: int, form: bool | str) -> None:
    layer = perturb(GmPConv2d(4, 6, 3, padding=1, groups=groups, input_norm=form, **DOUBLE))
    x = image(2) + 1
    mean = x.mean(dim=(0, 2, 3), keepdim=True)
    interior = F.conv2d(x - mean, layer.weight, layer.bias, groups=groups)
    torch.testing.assert_close(layer(x)[..., 1:-1, 1:-1], interior)
    # Zeros are padded to the input as it is, so the constant is the same at the border.
    plain = F.conv2d(x, layer.weight, padding=1, groups=groups)
    constant = layer(x) - plain
    torch.testing.assert_close(constant, constant[:1, :, :1, :1].expand_as(constant))
    folded = layer.eval().to_conv()
    torch.testing.assert_close(folded(x), layer(x))


def test_border_form_does_not_fold_into_a_bias() -> None:
    with pytest.raises(ValueError, match="input_norm=True"):
        GmPConv2d(4, 6, 3, padding=1, input_norm="border").to_conv()
    assert GmPConv2d(4, 6, 3, input_norm="border").to_conv().bias is not None


def old_state(layer: nn.Module) -> dict[str, torch.Tensor]:
    """The state as version 1 wrote it, when True was the border form."""
    state = layer.state_dict()
    state._metadata[""]["version"] = 1
    return state


def test_an_old_state_under_padding_is_refused_until_input_norm_is_named() -> None:
    layer = GmPConv2d(4, 6, 3, padding=1, input_norm=True)
    state = old_state(layer)
    with pytest.raises(ValueError, match="input_norm_form = 'border'"):
        layer.load_state_dict(state)
    for form in ("border", "bias"):
        layer.input_norm_form = form
        layer.load_state_dict(state)
        GmPConv2d(4, 6, 3, padding=1, input_norm=form).load_state_dict(state)


def test_other_states_load() -> None:
    layer = GmPConv2d(4, 6, 3, padding=1, input_norm=True)
    layer.load_state_dict(layer.state_dict())
    for same in (GmPConv2d(4, 6, 3, input_norm=True), GmPLinear(4, 6, input_norm=True)):
        same.load_state_dict(old_state(same))  # without padding the forms are one
    layer.load_state_dict(dict(layer.state_dict()))  # without a version


def test_layers_that_compute_something_else_are_not_taken_for_their_base() -> None:
    with pytest.raises(ValueError, match="InputMeanLinear computes something else"):
        GmPLinear.from_linear(InputMeanLinear(4, 3))


@pytest.mark.parametrize("coordinates", COORDINATES)
@torch.no_grad()
def test_evaluation_sees_every_write(coordinates: str) -> None:
    """Here as another process writes into shared memory: torch sees nothing of it."""
    layer, fresh = (GmPLinear(6, 8, coordinates=coordinates).eval() for _ in range(2))
    x = torch.randn(4, 6)
    layer(x)
    for p in layer.parameters():
        p.numpy()[:] *= 2
    fresh.load_state_dict(layer.state_dict())
    assert torch.equal(layer(x), fresh(x))


def test_layers_take_a_momentum() -> None:
    assert GmPConv2d(4, 6, 3, input_norm=True).input_norm.momentum == 0.2
    assert GmPLinear(4, 6, input_norm=True, momentum=None).input_norm.momentum is None


def test_an_empty_batch_passes() -> None:
    for layer in (GmPConv2d(4, 6, 3, padding=1, input_norm=True), GmPConv2d(4, 6, 3)):
        assert layer(torch.empty(0, 4, 5, 5)).shape[0] == 0
        assert all(b.isfinite().all() for b in layer.buffers())


@pytest.mark.parametrize("coordinates", COORDINATES)
@pytest.mark.parametrize("norm", [False, True, "border"])
def test_autocast_follows_float32(coordinates: str, norm) -> None:  # noqa: ANN001
    layer = GmPConv2d(
        4, 8, 3, padding=1, activation=torch.relu, coordinates=coordinates, input_norm=norm
    )
    x = image(2).float()
    expected = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x)
        out.float().square().sum().backward()
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), expected, atol=0.05, rtol=0.05)
    assert all(
        p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in layer.parameters()
    )


def linear_with(row: float, bias: float, dtype: torch.dtype = torch.float32) -> nn.Linear:
    """A layer whose second unit has this weight, in each of its inputs, and bias."""
    linear = nn.Linear(4, 2, dtype=dtype)
    with torch.no_grad():
        linear.weight[1], linear.bias[1] = row, bias
    return linear


HALF = torch.float16


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: GmPLinear(0, 3), "in_features is a whole number, 1 or more; got 0"),
        (lambda: GmPLinear(3, 0), "out_features is a whole number"),
        (lambda: GmPConv2d(0, 3, 3), "in_channels is a whole number"),
        (lambda: GmPConv2d(4, 6, 3, groups=3), "divisible by groups"),
        (lambda: GmPConv2d(4, 6, (3, 3, 3)), "kernel_size is one number or 2"),
        (lambda: GmPConv2d(4, 6, 3, padding_mode="mirror"), "padding_mode"),
        (lambda: GmPLinear(3, 2, init="he"), "init is 'sphere'"),
        (lambda: GmPLinear(3, 2, coordinates="polar"), "coordinates are 'angles'"),
        (lambda: GmPLinear(3, 2, coordinates="intrinsic", natural=True), "natural=True corrects"),
        (lambda: GmPLinear(3, 2, input_norm="mean"), "input_norm is False"),
        (lambda: GmPLinear(3, 2, activation="relu"), "activation is a function"),
        (lambda: GmPLinear.from_linear(nn.Conv2d(1, 1, 1)), "made from an nn.Linear; got Conv2d"),
        (lambda: GmPConv2d.from_conv(nn.Conv1d(1, 1, 1)), "made from an nn.Conv2d; got Conv1d"),
        (lambda: GmPConv2d.from_conv(nn.ConvTranspose2d(1, 1, 1)), "got ConvTranspose2d"),
        (lambda: GmPLinear.from_linear(linear_with(math.nan, 0)), "NaN or infinite values.*got 4"),
        (
            lambda: GmPLinear.from_linear(linear_with(1e-6, 1, HALF)),
            "lam = b / r is no torch.float16",
        ),
        (
            lambda: GmPLinear.from_linear(linear_with(60000, 0, HALF)),
            "longer than the largest torch.float16",
        ),
        (lambda: GmPLinear.from_linear(linear_with(0, 1)), r"rows \[1\].*zero weight and a bias"),
        (lambda: GmPLinear(3, 2, activation=torch.relu).to_linear(), "r outside"),
    ],
)
def test_bad_input_is_refused(call, message: str) -> None:  # noqa: ANN001
    with pytest.raises(ValueError, match=message):
        call()


def test_repr_says_what_it_is() -> None:
    layer = GmPConv2d(4, 6, 3, padding=1, activation=torch.relu, input_norm="bias")
    assert repr(layer).startswith(
        "GmPConv2d(\n  4, 6, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1), "
        "coordinates='angles', activation=relu, input_norm='bias'"
    )
    assert repr(GmPLinear(3, 2, bias=False, natural=True)) == (
        "GmPLinear(3, 2, bias=False, coordinates='angles', natural=True)"
    )


@pytest.mark.parametrize("coordinates", ["angles", "intrinsic"])
def test_a_type_that_cannot_hold_a_rows_length_is_refused(coordinates: str) -> None:
    """Each element of the row fits into float16, the row's length does not."""
    model = nn.Sequential(nn.Linear(100, 3), nn.ReLU(), nn.Linear(3, 2))
    with torch.no_grad():
        model[0].weight[1] = 1e4
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


class CallCounter(TorchDispatchMode):
    """Counts the operators that reach a device, views of tensors among them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # noqa: ANN001, ANN204
        self.calls += 1
        return function(*args, **(kwargs or {}))


SIZES = {"in_channels": 8, "out_channels": 16, "kernel_size": 3, "padding": 1}
CALLS = {
    "BatchNorm": (nn.Sequential(nn.Conv2d(**SIZES, bias=False), nn.BatchNorm2d(16)), 17),
    "input mean": (InputMeanConv2d(**SIZES), 27),
    "angles": (GmPConv2d(**SIZES), 21),
    "angles, input mean": (GmPConv2d(**SIZES, input_norm=True), 36),
    "intrinsic": (GmPConv2d(**SIZES, coordinates="intrinsic"), 26),
    "intrinsic, input mean": (GmPConv2d(**SIZES, coordinates="intrinsic", input_norm=True), 41),
}


@pytest.mark.parametrize(("layer", "most"), CALLS.values(), ids=CALLS)
def test_calls_of_torch_in_a_training_step_of_a_layer_and_its_relu(
    layer: nn.Module, most: int
) -> None:
    if count_calls(nn.Conv2d(**SIZES, bias=False)) > 11:
        pytest.skip("an older torch makes more calls of its own")
    assert count_calls(layer) <= most


def count_calls(layer: nn.Module) -> int:
    """Return how many operators a step of a layer and its ReLU calls, forward and backward."""
    x = torch.randn(4, 8, 6, 6, requires_grad=True)
    with CallCounter() as counter:
        layer(x).relu().sum().backward()
    return counter.calls
