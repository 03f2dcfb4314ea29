"""The table of methods: what each is made of, and how it starts."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import geoparam as gp
from geoparam_lab import methods

PLAIN = ("sp", "sp+imn", "wn", "wn+imn", "wn+mbn", "bn", "bn+decay", "ln")
GMP = ("gmp", "gmp+imn", "gmp+mbn", "gmp+bn", "gmp+ln")
NATURAL = ("natural", "natural+imn")
INTRINSIC = ("intrinsic", "intrinsic+imn", "intrinsic+mbn")
GEOMETRIC = (*GMP, *NATURAL, *INTRINSIC)
NAMES = (*PLAIN, *GEOMETRIC)
WITH_IMN = [name for name in NAMES if name.endswith("+imn")]

# The arguments of a layer of 40 units, and the shape of its inputs.
LAYERS = {
    nn.Linear: ((6, 40), (5, 6)),
    nn.Conv2d: ((6, 40, 3), (5, 6, 4, 4)),
}
each_layer = pytest.mark.parametrize("layer", LAYERS, ids=["linear", "conv2d"])


def class_names(modules: nn.Module) -> list[str]:
    names = [type(module).__name__ for module in modules.children()]
    return [name.removeprefix("Parametrized") for name in names]


def affine_weight(layer: nn.Module) -> Tensor:
    """The affine map's weight, r u where r is outside."""
    weight = layer.weight.detach()
    if getattr(layer, "activation", None) is None:
        return weight
    r = layer.r.detach()
    return weight * r.view(-1, *[1] * (weight.ndim - 1))


def make_block(name: str, layer: type[nn.Module] = nn.Linear) -> nn.Sequential:
    """A hidden layer of 6 inputs and 40 units with its norm and activation."""
    arguments, _ = LAYERS[layer]
    with methods.use_seed(0):
        return methods.get(name).block(layer, *arguments)


def test_the_table_has_every_method_and_no_other() -> None:
    assert tuple(methods.METHODS) == NAMES


def test_titles_are_abbreviations() -> None:
    assert methods.TITLES["wn+mbn"] == "WN+MBN"
    assert methods.TITLES["gmp+imn"] == "GmP+IMN"


@pytest.mark.parametrize("name", NAMES)
def test_rates_are_the_papers(name: str) -> None:
    assert methods.METHODS[name].lr == (0.1 if name in GEOMETRIC else 0.01)


@pytest.mark.parametrize(
    ("name", "linear", "conv2d"),
    [
        ("sp", "Linear ReLU", "Conv2d ReLU"),
        ("wn", "Linear ReLU", "Conv2d ReLU"),
        ("sp+imn", "Linear ReLU InputMeanNorm", "Conv2d ReLU InputMeanNorm"),
        ("wn+imn", "Linear ReLU InputMeanNorm", "Conv2d ReLU InputMeanNorm"),
        ("wn+mbn:mbn=before", "Linear InputMeanNorm ReLU", "Conv2d InputMeanNorm ReLU"),
        ("gmp+mbn", "GmPLinear MeanOnlyBatchNorm ReLU", "GmPConv2d MeanOnlyBatchNorm ReLU"),
        ("wn+mbn", "Linear MeanOnlyBatchNorm ReLU", "Conv2d MeanOnlyBatchNorm ReLU"),
        ("bn", "Linear BatchNorm1d ReLU", "Conv2d BatchNorm2d ReLU"),
        ("ln", "Linear LayerNorm ReLU", "Conv2d GroupNorm ReLU"),
        ("gmp", "GmPLinear", "GmPConv2d"),
        ("gmp+imn", "GmPLinear InputMeanNorm", "GmPConv2d InputMeanNorm"),
        ("gmp+bn", "GmPLinear BatchNorm1d ReLU", "GmPConv2d BatchNorm2d ReLU"),
        ("gmp+ln", "GmPLinear LayerNorm ReLU", "GmPConv2d GroupNorm ReLU"),
    ],
)
def test_a_block_is_layer_norm_and_relu(name: str, linear: str, conv2d: str) -> None:
    assert " ".join(class_names(make_block(name, nn.Linear))) == linear
    assert " ".join(class_names(make_block(name, nn.Conv2d))) == conv2d


@each_layer
@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_of_a_block_gets_a_gradient(name: str, layer: type[nn.Module]) -> None:
    block = make_block(name, layer)
    _, input_shape = LAYERS[layer]

    out = block(torch.randn(input_shape))
    (out * torch.randn_like(out)).sum().backward()

    assert out.shape[:2] == (5, 40)
    for parameter in block.parameters():
        assert parameter.grad is not None
        assert parameter.grad.any()


@pytest.mark.parametrize(
    ("name", "has_bias"), [("bn", False), ("gmp+bn", False), ("ln", True), ("gmp+ln", True)]
)
def test_a_layer_before_a_norm_has_an_offset_unless_it_would_cancel(
    name: str, has_bias: bool
) -> None:
    layer = make_block(name)[0]

    assert (layer.bias is not None) == has_bias


@pytest.mark.parametrize("name", ["gmp+bn", "gmp+ln"])
def test_with_a_norm_r_is_inside_the_activation(name: str) -> None:
    assert make_block(name)[0].activation is None


@each_layer
@pytest.mark.parametrize("name", ["wn+mbn", "bn", "gmp+imn", "gmp+bn"])
def test_norms_have_keras_momentum_and_epsilon(name: str, layer: type[nn.Module]) -> None:
    norm = make_block(name, layer)[1]

    assert norm.momentum == 0.01
    if hasattr(norm, "eps"):
        assert norm.eps == 1e-3


@pytest.mark.parametrize(
    ("name", "is_normalized"), [("sp", False), ("wn", True), ("wn+mbn", True), ("gmp", False)]
)
def test_the_output_layer_is_weight_normalised_under_wn_alone(
    name: str, is_normalized: bool
) -> None:
    output = methods.mlp(name, (3, 8, 2))[-1]

    assert isinstance(output, nn.Linear)
    assert output.bias is not None
    assert parametrize.is_parametrized(output, "weight") == is_normalized


def test_mbn_after_the_mean_has_the_offset() -> None:
    layer, norm, _ = make_block("wn+mbn")

    assert layer.bias is None
    assert norm.bias is not None


def test_mbn_before_has_no_offset() -> None:
    layer, norm, _ = make_block("wn+mbn:mbn=before")

    assert layer.bias is None
    assert not list(norm.parameters())


@pytest.mark.parametrize("name", WITH_IMN)
def test_imn_stands_after_every_hidden_layer(name: str) -> None:
    model = methods.mlp(name, (3, 8, 8, 2))

    hidden = ["GmPLinear"] if name in GEOMETRIC else ["Linear", "ReLU"]
    assert class_names(model) == [*hidden, "InputMeanNorm", *hidden, "InputMeanNorm", "Linear"]


@pytest.mark.parametrize("name", WITH_IMN)
def test_imn_centres_the_input_of_every_layer_but_the_first(name: str) -> None:
    model = methods.mlp(name, (3, 8, 8, 2))
    _, *later_layers = [m for m in model if isinstance(m, nn.Linear | gp.GmPLinear)]
    inputs = []
    for layer in later_layers:
        layer.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))

    model(torch.randn(50, 3, dtype=torch.float64))

    assert len(inputs) == 2
    for layer_input in inputs:
        assert layer_input.mean(0).abs().max() < 1e-12


def test_imn_at_the_input_is_in_hidden_layers_but_the_first() -> None:
    model = methods.mlp("gmp+imn", (3, 8, 8, 2), imn="input")

    assert class_names(model) == ["GmPLinear", "GmPLinear", "Linear"]
    assert model[0].input_norm is None
    assert isinstance(model[1].input_norm, gp.InputMeanNorm)


@each_layer
@pytest.mark.parametrize("name", ["sp", "wn", "bn", "gmp", "gmp+ln", "intrinsic"])
def test_glorot_weights_fill_the_bound_of_the_papers_code(
    name: str, layer: type[nn.Module]
) -> None:
    weight = affine_weight(make_block(name, layer)[0])

    positions = 9 if layer is nn.Conv2d else 1
    fan_in = 6 * positions
    # The papers' code has k^2 out for plain layers, and out alone for the others.
    fan_out = 40 * positions if name in ("sp", "bn") else 40
    bound = math.sqrt(6 / (fan_in + fan_out))
    assert 0.95 * bound < weight.abs().max() <= bound * (1 + 1e-5)
    assert weight.min() < -0.9 * bound
    assert abs(weight.mean()) < 0.2 * bound


@pytest.mark.parametrize("name", ["wn", "gmp", "natural", "intrinsic"])
@pytest.mark.parametrize("inputs", [1, 6])
def test_from_one_seed_methods_without_a_norm_start_as_one_function(
    name: str, inputs: int
) -> None:
    widths = (inputs, 30, 20, 2)
    x = torch.randn(20, inputs, dtype=torch.float64)

    output = methods.mlp(name, widths, seed=7)(x)

    expected = methods.mlp("sp", widths, seed=7)(x)
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["sp", "wn"])
def test_hidden_layers_are_glorot_or_he(name: str) -> None:
    weight = {
        init: methods.mlp(name, (400, 400, 1), init=init)[0].weight
        for init in ("glorot", "sphere", "he")
    }

    assert torch.equal(weight["sphere"], weight["glorot"])
    assert weight["he"].std().item() == pytest.approx(math.sqrt(2 / 400), rel=0.01)


@pytest.mark.parametrize("init", ["glorot", "he"])
@pytest.mark.parametrize("name", ["sp", "wn"])
def test_output_layers_are_always_glorot(name: str, init: str) -> None:
    weight = methods.mlp(name, (400, 400, 1), init=init)[-1].weight

    bound = math.sqrt(6 / 401)
    assert weight.abs().max() <= bound * (1 + 1e-12)


@pytest.mark.parametrize("name", ["gmp", "intrinsic+imn"])
@pytest.mark.parametrize("inputs", [1, 6])
def test_the_released_start_loses_the_sign_of_the_last_component(name: str, inputs: int) -> None:
    usual = methods.mlp(name, (inputs, 50, 1), init="glorot")[0]
    released = methods.mlp(name, (inputs, 50, 1), init="released")[0]

    expected = usual.weight.clone()
    if inputs > 1:
        assert (expected[:, -1] < 0).any()
        expected[:, -1].abs_()
    torch.testing.assert_close(released.weight, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(released.r, usual.r, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_offsets_start_at_0(name: str) -> None:
    parameters = methods.mlp(name, (3, 8, 2)).named_parameters()
    offsets = [p for key, p in parameters if key.endswith(("bias", "lam"))]

    assert offsets
    for offset in offsets:
        assert not offset.any()


@pytest.mark.parametrize("name", ["wn", "bn", "gmp", "intrinsic"])
def test_a_network_follows_from_its_seed(name: str) -> None:
    first, repeated, other = (methods.mlp(name, (3, 8, 2), seed=seed) for seed in (4, 4, 5))

    expected = first.state_dict()
    for key, tensor in repeated.state_dict().items():
        assert torch.equal(tensor, expected[key])
    assert not torch.equal(affine_weight(first[0]), affine_weight(other[0]))


@pytest.mark.parametrize("name", ["wn", "bn", "gmp", "intrinsic"])
def test_a_network_leaves_torchs_random_state_alone(name: str) -> None:
    before = torch.get_rng_state()

    methods.mlp(name, (3, 8, 2), seed=4)

    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", NAMES)
def test_parameters_and_buffers_have_the_dtype_asked_for(name: str, dtype: torch.dtype) -> None:
    state = methods.mlp(name, (3, 8, 2), dtype=dtype).state_dict()

    dtypes = {tensor.dtype for tensor in state.values() if tensor.is_floating_point()}

    assert dtypes == {dtype}


def test_an_order_of_the_inputs_is_a_permutation() -> None:
    order = methods.get("gmp:order=3").draw_order(6).tolist()

    assert sorted(order) == [0, 1, 2, 3, 4, 5]
    assert order != [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("name", ["sp", "wn", "bn", "gmp", "gmp+mbn", "intrinsic"])
def test_another_order_of_the_inputs_is_the_same_function_of_them(name: str) -> None:
    x = torch.randn(20, 6, dtype=torch.float64)
    order = methods.get(f"{name}:order=3").draw_order(6)

    output = methods.mlp(f"{name}:order=3", (6, 30, 2), seed=7)(x[:, order])

    expected = methods.mlp(name, (6, 30, 2), seed=7)(x)
    torch.testing.assert_close(output, expected)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("batchnorm", {}, "a method is one of sp, sp.imn, wn, .* got 'batchnorm'"),
        ("gmp", {"init": "he"}, "GmP has directions and scales"),
        ("sp", {"init": "xavier"}, "init is one of glorot, sphere, released, he; got 'xavier'"),
        ("gmp+imn", {"imn": "both"}, "imn is one of output, input; got 'both'"),
        ("sp+imn", {"imn": "input"}, "imn='input' is a form of geometric layers; got SP.IMN"),
        ("gmp:order=x", {}, "order is a seed, from 0 on; got 'x'"),
        ("gmp:angle_lr=2", {}, "angle_lr is one of None, fan_in; got '2'"),
        ("wn+mbn", {"mbn": "none"}, "mbn is one of after, before; got 'none'"),
        ("wn+mbn:decay=1", {}, "options of wn.mbn are init, imn, mbn, angle_lr, order"),
        ("gmp:init=sphere:init=glorot", {}, "'gmp' has init twice"),
        ("bn:imn=input", {}, "imn is an option of methods with imn; got 'bn'"),
    ],
)
def test_unknown_methods_and_options_are_refused(
    name: str, options: dict[str, str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        methods.get(name, **options)


def test_a_network_needs_two_widths() -> None:
    with pytest.raises(ValueError, match="inputs, hidden layers, outputs"):
        methods.mlp("sp", (3,))
