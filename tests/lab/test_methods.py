"""The table of methods: what each is made of, and how it starts."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import geoparam as gp
from geoparam_lab import methods

NAMES = (
    "sp sp+imn wn wn+imn wn+mbn bn bn+decay ln gmp gmp+imn gmp+mbn gmp+bn gmp+ln natural "
    "natural+imn intrinsic intrinsic+imn intrinsic+mbn"
).split()
GEOMETRIC = [name for name in NAMES if name.startswith(("gmp", "natural", "intrinsic"))]
KINDS = {"linear": ((6, 40), (5, 6)), "conv2d": ((6, 40, 3), (5, 6, 4, 4))}


def kinds_of(block: nn.Sequential) -> list[str]:
    return [type(module).__name__.removeprefix("Parametrized") for module in block]


def weight_of(layer: nn.Module) -> Tensor:
    """The affine map's weight, r u where r is outside."""
    weight = layer.weight.detach()
    if getattr(layer, "activation", None) is not None:
        weight = weight * layer.r.detach().view(-1, *[1] * (weight.ndim - 1))
    return weight


def block(name: str, kind: str, **options: str) -> nn.Sequential:
    with methods.use_seed(0):
        layer = nn.Linear if kind == "linear" else nn.Conv2d
        return methods.get(name, **options).block(layer, *KINDS[kind][0])


def test_the_table_has_every_method_and_no_other() -> None:
    assert list(methods.METHODS) == NAMES


def test_titles_and_the_papers_rates() -> None:
    assert methods.TITLES["wn+mbn"] == "WN+MBN" and methods.TITLES["gmp+imn"] == "GmP+IMN"
    rates = {name: 0.1 if name in GEOMETRIC else 0.01 for name in NAMES}
    assert {name: method.lr for name, method in methods.METHODS.items()} == rates


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
    assert kinds_of(block(name, "linear")) == linear.split()
    assert kinds_of(block(name, "conv2d")) == conv2d.split()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_of_a_block_gets_a_gradient(name: str, kind: str) -> None:
    made, x = block(name, kind), torch.randn(KINDS[kind][1])
    out = made(x)
    (out * torch.randn_like(out)).sum().backward()
    assert out.shape[:2] == (5, 40)
    assert all(p.grad is not None and p.grad.any() for p in made.parameters())


@pytest.mark.parametrize(
    ("name", "has_bias"), [("bn", False), ("gmp+bn", False), ("ln", True), ("gmp+ln", True)]
)
def test_with_a_norm_r_is_inside_and_an_offset_that_would_cancel_is_left_out(
    name: str, has_bias: bool
) -> None:
    layer = block(name, "linear")[0]
    assert (layer.bias is not None) == has_bias and getattr(layer, "activation", None) is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["wn+mbn", "bn", "gmp+imn", "gmp+bn"])
def test_norms_have_keras_momentum_and_epsilon(name: str, kind: str) -> None:
    norm = block(name, kind)[1]
    assert norm.momentum == 0.01
    assert getattr(norm, "eps", 1e-3) == 1e-3


@pytest.mark.parametrize("name", ["sp", "wn", "wn+mbn", "gmp"])
def test_the_output_layer_is_weight_normalised_under_wn_alone(name: str) -> None:
    output = methods.mlp(name, (3, 8, 2))[-1]
    assert parametrize.is_parametrized(output, "weight") == (name in ("wn", "wn+mbn"))
    assert isinstance(output, nn.Linear) and output.bias is not None


def test_mbns_offset_comes_after_it_or_units_have_none() -> None:
    (layer, norm, _), before = block("wn+mbn", "linear"), block("wn+mbn:mbn=before", "linear")
    assert layer.bias is None and norm.bias is not None
    assert before[0].bias is None and not list(before[1].parameters())


@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith("+imn")])
def test_imn_centres_the_input_of_every_layer_but_the_first(name: str) -> None:
    model, x = methods.mlp(name, (3, 8, 8, 2)), torch.randn(50, 3, dtype=torch.float64)
    inputs = []
    for layer in (model[len(model) // 2], model[-1]):
        layer.register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
    model(x)
    block = ["GmPLinear"] if name in GEOMETRIC else ["Linear", "ReLU"]
    assert kinds_of(model) == 2 * [*block, "InputMeanNorm"] + ["Linear"]
    assert all(given.mean(0).abs().max() < 1e-12 for given in inputs) and len(inputs) == 2


def test_imn_at_the_input_is_in_hidden_layers_but_the_first() -> None:
    model = methods.mlp("gmp+imn", (3, 8, 8, 2), imn="input")
    assert kinds_of(model) == "GmPLinear GmPLinear Linear".split()
    assert model[0].input_norm is None and isinstance(model[1].input_norm, gp.InputMeanNorm)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["sp", "wn", "bn", "gmp", "gmp+ln", "intrinsic"])
def test_glorot_weights_fill_the_bound_of_the_papers_code(name: str, kind: str) -> None:
    weight = weight_of(block(name, kind)[0])
    positions = 9 if kind == "conv2d" else 1
    plain = name in ("sp", "bn", "ln")
    bound = math.sqrt(6 / (positions * 6 + (positions * 40 if plain else 40)))
    assert 0.95 * bound < weight.abs().max() <= bound * (1 + 1e-5)
    assert weight.min() < -0.9 * bound and abs(weight.mean()) < 0.2 * bound


@pytest.mark.parametrize("name", ["wn", "gmp", "natural", "intrinsic"])
@pytest.mark.parametrize("inputs", [1, 6])
def test_from_one_seed_methods_without_a_norm_start_as_one_function(
    name: str, inputs: int
) -> None:
    x = torch.randn(20, inputs, dtype=torch.float64)
    expected = methods.mlp("sp", (inputs, 30, 20, 2), seed=7)(x)
    found = methods.mlp(name, (inputs, 30, 20, 2), seed=7)(x)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["sp", "wn"])
def test_other_layers_are_glorot_or_he_and_outputs_always_glorot(name: str) -> None:
    glorot, sphere, he = (
        methods.mlp(name, (400, 400, 1), init=init) for init in ("glorot", "sphere", "he")
    )
    assert torch.equal(sphere[0].weight, glorot[0].weight)
    assert he[0].weight.std().item() == pytest.approx(math.sqrt(2 / 400), rel=0.01)
    bound = math.sqrt(6 / 401) * (1 + 1e-12)
    assert max(model[-1].weight.abs().max() for model in (glorot, he)) <= bound


@pytest.mark.parametrize("name", ["gmp", "intrinsic+imn"])
def test_the_released_start_loses_the_sign_of_the_last_component(name: str) -> None:
    for sizes in ((1, 50, 1), (6, 50, 1)):
        usual, released = (methods.mlp(name, sizes, init=i)[0] for i in ("glorot", "released"))
        expected = usual.weight.clone()
        if sizes[0] > 1:
            assert (expected[:, -1] < 0).any()
            expected[:, -1].abs_()
        torch.testing.assert_close(released.weight, expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(released.r, usual.r, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_offsets_start_at_0(name: str) -> None:
    offsets = [
        parameter
        for key, parameter in methods.mlp(name, (3, 8, 2)).named_parameters()
        if key.endswith(("bias", "lam"))
    ]
    assert offsets and not any(offset.any() for offset in offsets)


@pytest.mark.parametrize("name", ["wn", "bn", "gmp", "intrinsic"])
def test_a_seed_says_everything_and_leaves_torch_alone(name: str) -> None:
    before = torch.get_rng_state()
    first, again, other = (methods.mlp(name, (3, 8, 2), seed=seed) for seed in (4, 4, 5))
    assert torch.equal(torch.get_rng_state(), before)
    same = zip(first.state_dict().values(), again.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in same)
    assert not torch.equal(weight_of(first[0]), weight_of(other[0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_everything_is_of_the_type_asked_for(dtype: torch.dtype) -> None:
    for name in NAMES:
        state = methods.mlp(name, (3, 8, 2), dtype=dtype).state_dict().values()
        assert {t.dtype for t in state if t.is_floating_point()} == {dtype}


@pytest.mark.parametrize("name", ["sp", "wn", "bn", "gmp", "gmp+mbn", "intrinsic"])
def test_another_order_of_the_inputs_is_the_same_function_of_them(name: str) -> None:
    x = torch.randn(20, 6, dtype=torch.float64)
    order = methods.get(f"{name}:order=3").draw_order(6)
    assert sorted(order.tolist()) == [*range(6)] != order.tolist()
    found = methods.mlp(f"{name}:order=3", (6, 30, 2), seed=7)(x[:, order])
    torch.testing.assert_close(found, methods.mlp(name, (6, 30, 2), seed=7)(x))


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
def test_what_is_not_known_is_refused(name: str, options: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        methods.get(name, **options)


def test_a_network_needs_two_widths() -> None:
    with pytest.raises(ValueError, match="inputs, hidden layers, outputs"):
        methods.mlp("sp", (3,))
