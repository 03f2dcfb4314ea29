"""Weights and biases of layers can be assigned, and refuse to be written into."""

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from model_checks import assert_same_state, copy_state
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.testing import assert_close

import geoparam as gp
from geoparam.computed import Computed

DOUBLE = {"dtype": torch.float64}

both_coordinates = pytest.mark.parametrize("coordinates", ["angles", "intrinsic"])


# Writes are refused.


WRITES: dict[str, Callable[[Tensor], object]] = {
    "nn.init": lambda w: nn.init.zeros_(w),
    "nn.init of a draw": lambda w: nn.init.kaiming_uniform_(w),
    "data": lambda w: w.data.mul_(2),
    "data of a row": lambda w: w.data[0].zero_(),
    "detached": lambda w: w.detach().zero_(),
    "item": lambda w: w.data.__setitem__(0, 0.0),
    "a view": lambda w: w.detach().view(-1).fill_(1),
    "out": lambda w: torch.add(w.detach(), 1, out=w.detach()),
    "+=": lambda w: w.data.__iadd__(1),
    "data =": lambda w: setattr(w, "data", torch.zeros_like(w)),
    "foreach": lambda w: torch._foreach_mul_([w.detach()], 2.0),
    "copy_": lambda w: w.data.copy_(torch.zeros(5, 6)),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_writes_in_place_are_refused(write: Callable[[Tensor], object]) -> None:
    layer = gp.GmPLinear(6, 5)

    with torch.no_grad(), pytest.raises(RuntimeError, match="would be lost. Assign to it"):
        write(layer.weight)


@both_coordinates
@pytest.mark.parametrize("name", ["weight", "bias", "direction", "location", "theta"])
def test_all_that_is_computed_refuses_writes(name: str, coordinates: str) -> None:
    layer = gp.GmPLinear(6, 5, coordinates=coordinates)

    with torch.no_grad(), pytest.raises(RuntimeError, match="would be lost"):
        getattr(layer, name).zero_()


@pytest.mark.parametrize("name", ["in_proj_weight", "in_proj_bias"])
def test_an_attentions_projection_refuses_writes(name: str) -> None:
    attention = gp.convert_(nn.MultiheadAttention(8, 2))

    with pytest.raises(RuntimeError, match="would be lost"):
        nn.init.zeros_(getattr(attention, name))


# Reading.


def test_what_is_computed_from_a_weight_is_a_plain_tensor() -> None:
    layer = gp.GmPLinear(6, 5)

    assert type(F.linear(torch.randn(3, 6), layer.weight, layer.bias)) is Tensor
    assert type(layer.weight * 2) is Tensor
    assert type(layer.weight.sum()) is Tensor


def test_weight_and_bias_compute_the_layers_output() -> None:
    layer = gp.GmPLinear(6, 5)
    x = torch.randn(3, 6)

    assert_close(F.linear(x, layer.weight, layer.bias), layer(x))


def test_gradients_flow_through_a_weight_that_was_read() -> None:
    layer = gp.GmPLinear(6, 5)

    loss = layer.weight.square().sum() + layer.weight.t().sum()
    loss.backward()

    assert layer.r.grad.isfinite().all()


def test_other_tensors_may_be_written_from_a_weight() -> None:
    layer = gp.GmPLinear(6, 5)
    other = torch.zeros(5, 6)

    other.add_(layer.weight.detach())

    assert torch.equal(other, layer.weight)


def test_a_weight_may_be_asked_to_require_gradients() -> None:
    assert gp.GmPLinear(6, 5).weight.requires_grad_() is not None


def test_a_pickled_weight_is_a_plain_tensor() -> None:
    weight = gp.GmPLinear(6, 5).weight.detach()

    assert isinstance(weight, Computed)
    assert type(pickle.loads(pickle.dumps(weight))) is Tensor


def test_compiled_code_reads_a_weight() -> None:
    layer = gp.GmPLinear(6, 5)
    compiled = torch.compile(lambda x: F.linear(x, layer.weight), backend="eager", fullgraph=True)
    x = torch.randn(3, 6)

    assert_close(compiled(x), F.linear(x, layer.weight))


# Assigning.


@pytest.fixture
def layer(coordinates: str) -> gp.GmPLinear:
    return gp.GmPLinear.from_linear(nn.Linear(6, 5, **DOUBLE), coordinates=coordinates)


as_parameter_or_tensor = pytest.mark.parametrize("wrap", [nn.Parameter, torch.Tensor.clone])


@as_parameter_or_tensor
@both_coordinates
def test_assigning_a_weight_leaves_the_bias(layer: gp.GmPLinear, wrap: Callable) -> None:
    weight = torch.randn(5, 6, **DOUBLE)
    bias = layer.bias.detach().clone()

    layer.weight = wrap(weight)

    assert_close(layer.weight, weight, rtol=1e-12, atol=1e-12)
    assert_close(layer.bias, bias, rtol=1e-12, atol=1e-12)


@as_parameter_or_tensor
@both_coordinates
def test_assigning_a_bias_leaves_the_weight(layer: gp.GmPLinear, wrap: Callable) -> None:
    weight = layer.weight.detach().clone()
    bias = torch.randn(5, **DOUBLE)

    layer.bias = wrap(bias)

    assert_close(layer.weight, weight, rtol=1e-12, atol=1e-12)
    assert_close(layer.bias, bias, rtol=1e-12, atol=1e-12)


@as_parameter_or_tensor
@both_coordinates
def test_assigning_keeps_the_parameters_and_they_learn(
    layer: gp.GmPLinear, wrap: Callable
) -> None:
    parameters = list(layer.parameters())

    layer.weight = wrap(torch.randn(5, 6, **DOUBLE))
    layer.bias = wrap(torch.randn(5, **DOUBLE))

    for after, before in zip(layer.parameters(), parameters, strict=True):
        assert after is before
        assert after.requires_grad


def test_an_attentions_projection_can_be_assigned() -> None:
    attention = gp.convert_(nn.MultiheadAttention(8, 2))
    keys = list(attention.state_dict())
    plain = nn.MultiheadAttention(8, 2)
    nn.init.normal_(plain.in_proj_bias)
    x = torch.randn(3, 1, 8)

    attention.in_proj_weight = plain.in_proj_weight
    attention.in_proj_bias = plain.in_proj_bias
    attention.out_proj = plain.out_proj

    assert list(attention.state_dict()) == keys
    output, _ = attention(x, x, x)
    expected, _ = plain(x, x, x)
    assert_close(output, expected, atol=1e-5, rtol=1e-5)


def test_with_an_activation_the_weight_is_the_unit_vectors() -> None:
    layer = gp.GmPLinear(6, 5, activation=torch.relu)
    u = F.normalize(torch.randn(5, 6))

    layer.weight = u

    assert_close(layer.direction, u)


def test_with_an_activation_the_bias_is_lam() -> None:
    layer = gp.GmPLinear(6, 5, activation=torch.relu)
    bias = torch.randn(5)

    layer.bias = bias

    assert_close(layer.lam.detach(), bias)


def test_with_an_activation_rows_of_another_length_are_refused() -> None:
    layer = gp.GmPLinear(6, 5, activation=torch.relu)

    with pytest.raises(ValueError, match="assign rows of length 1"):
        layer.weight = 2 * F.normalize(torch.randn(5, 6))


def test_a_bias_can_be_removed() -> None:
    layer = gp.GmPLinear(6, 5)
    x = torch.randn(3, 6)

    layer.bias = None

    assert layer.bias is None
    assert layer.lam is None
    assert_close(layer(x), F.linear(x, layer.weight))


def test_a_bias_that_was_removed_can_be_added_again() -> None:
    layer = gp.GmPLinear(6, 5)
    layer.bias = None
    bias = torch.randn(5)

    layer.bias = bias

    assert_close(layer.bias, bias)
    assert "lam" in layer.state_dict()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("weight", torch.zeros(6, 5), r"has shape \(5, 6\)"),
        ("bias", torch.zeros(6), r"has shape \(5,\)"),
        ("weight", torch.full((5, 6), torch.nan), "NaN"),
        ("weight", torch.zeros(5, 6), "zero weight and a bias"),
        ("weight", torch.ones(5, 6).int(), "floating-point values; got torch.int32"),
        ("weight", None, "floating-point values; got NoneType"),
        ("bias", 0.5, "floating-point values; got float"),
    ],
)
def test_what_cannot_be_assigned_is_refused(name: str, value: Any, message: str) -> None:
    layer = gp.GmPLinear.from_linear(nn.Linear(6, 5))
    before = copy_state(layer)

    with pytest.raises(ValueError, match=message):
        setattr(layer, name, value)

    assert_same_state(layer, before)


# Tools that write into weights.


def test_pruning_is_refused_in_a_sentence_and_the_layer_stays_as_it_was() -> None:
    layer = gp.GmPLinear(4, 3)
    before = copy_state(layer)
    x = torch.randn(2, 4)
    expected = layer(x)

    with pytest.raises(ValueError, match="pruning masks a weight that is a parameter.*fold_"):
        prune.l1_unstructured(layer, "weight", 0.5)

    assert_same_state(layer, before)
    assert torch.equal(layer(x), expected)


@pytest.fixture
def mlp() -> nn.Module:
    return gp.convert_(nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 2)))


def test_peft_refuses_to_adapt_a_converted_layer(mlp: nn.Module) -> None:
    peft = pytest.importorskip("peft")

    with pytest.raises(ValueError, match="GmPLinear"):
        peft.get_peft_model(mlp, peft.LoraConfig(target_modules=["0"]))


def test_peft_refuses_to_merge_into_a_converted_layer(mlp: nn.Module) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["0"], init_lora_weights=False)
    config._register_custom_module({gp.GmPLinear: peft.tuners.lora.Linear})
    adapted = peft.get_peft_model(mlp, config).eval()

    with pytest.raises(RuntimeError, match="would be lost"):
        adapted.merge_and_unload()
