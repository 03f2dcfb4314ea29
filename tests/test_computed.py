"""Weights and biases of layers can be assigned, and refuse to be written into."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune

import geoparam as gp
from geoparam.computed import Computed

DOUBLE = {"dtype": torch.float64}
COORDINATES = ["angles", "intrinsic"]

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


def test_an_attentions_projection_is_assigned_to_and_refuses_writes() -> None:
    attention = gp.convert_(nn.MultiheadAttention(8, 2))
    names, x = list(attention.state_dict()), torch.randn(3, 1, 8)
    for computed in (attention.in_proj_weight, attention.in_proj_bias):
        with pytest.raises(RuntimeError, match="would be lost"):
            nn.init.zeros_(computed)
    plain = nn.MultiheadAttention(8, 2)
    nn.init.normal_(plain.in_proj_bias)
    attention.in_proj_weight, attention.in_proj_bias = plain.in_proj_weight, plain.in_proj_bias
    attention.out_proj = plain.out_proj
    assert list(attention.state_dict()) == names
    torch.testing.assert_close(attention(x, x, x)[0], plain(x, x, x)[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("coordinates", COORDINATES)
@pytest.mark.parametrize("name", ["weight", "bias", "direction", "location", "theta"])
def test_all_that_is_computed_refuses_writes(name: str, coordinates: str) -> None:
    layer = gp.GmPLinear(6, 5, coordinates=coordinates)
    with torch.no_grad(), pytest.raises(RuntimeError, match="would be lost"):
        getattr(layer, name).zero_()


def test_reading_gives_plain_tensors_and_gradients() -> None:
    layer, x = gp.GmPLinear(6, 5), torch.randn(3, 6)
    y = F.linear(x, layer.weight, layer.bias)
    assert type(y) is type(layer.weight * 2) is type(layer.weight.sum()) is Tensor
    torch.testing.assert_close(y, layer(x))
    (layer.weight.square().sum() + layer.weight.t().sum()).backward()
    assert layer.r.grad.isfinite().all()
    other = torch.zeros(5, 6)
    assert torch.equal(other.add_(layer.weight.detach()), layer.weight)
    assert layer.weight.requires_grad_() is not None


def test_pickles_and_compiled_code_have_plain_tensors() -> None:
    layer = gp.GmPLinear(6, 5)
    w = layer.weight.detach()
    assert isinstance(w, Computed)
    assert type(pickle.loads(pickle.dumps(w))) is Tensor
    compiled = torch.compile(lambda x: F.linear(x, layer.weight), backend="eager", fullgraph=True)
    x = torch.randn(3, 6)
    torch.testing.assert_close(compiled(x), F.linear(x, w))


@pytest.mark.parametrize("wrap", [nn.Parameter, lambda t: t])
@pytest.mark.parametrize("coordinates", COORDINATES)
def test_assigning_sets_weight_or_bias_and_leaves_the_other(wrap: Callable, coordinates) -> None:  # noqa: ANN001
    layer = gp.GmPLinear.from_linear(nn.Linear(6, 5, **DOUBLE), coordinates=coordinates)
    parameters = list(layer.parameters())
    w, b, bias = torch.randn(5, 6, **DOUBLE), torch.randn(5, **DOUBLE), layer.bias.detach()
    layer.weight = wrap(w)
    torch.testing.assert_close(layer.weight, w, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(layer.bias, bias, rtol=1e-12, atol=1e-12)
    layer.bias = wrap(b)
    torch.testing.assert_close(layer.weight, w, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(layer.bias, b, rtol=1e-12, atol=1e-12)
    assert all(a is c for a, c in zip(layer.parameters(), parameters, strict=True))
    assert all(p.requires_grad for p in parameters)


def test_with_an_activation_the_weight_is_the_unit_vectors() -> None:
    layer = gp.GmPLinear(6, 5, activation=torch.relu)
    layer.weight = u = F.normalize(torch.randn(5, 6))
    torch.testing.assert_close(layer.direction, u)
    layer.bias = b = torch.randn(5)
    torch.testing.assert_close(layer.lam.detach(), b)
    with pytest.raises(ValueError, match="assign rows of length 1"):
        layer.weight = 2 * u


def test_a_bias_can_be_taken_away_and_given() -> None:
    layer, x = gp.GmPLinear(6, 5), torch.randn(3, 6)
    layer.bias = None
    assert layer.lam is None and layer.bias is None
    torch.testing.assert_close(layer(x), F.linear(x, layer.weight))
    layer.bias = b = torch.randn(5)
    torch.testing.assert_close(layer.bias, b)
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
def test_what_cannot_be_assigned(name: str, value: Any, message: str) -> None:
    layer = gp.GmPLinear.from_linear(nn.Linear(6, 5))
    before = copy.deepcopy(layer.state_dict())
    with pytest.raises(ValueError, match=message):
        setattr(layer, name, value)
    assert all(torch.equal(v, before[k]) for k, v in layer.state_dict().items())


def test_pruning_is_refused_in_a_sentence_and_the_layer_stays_as_it_was() -> None:
    layer, x = gp.GmPLinear(4, 3), torch.randn(2, 4)
    before, names = layer(x), set(layer.state_dict())
    with pytest.raises(ValueError, match="pruning masks a weight that is a parameter.*fold_"):
        prune.l1_unstructured(layer, "weight", 0.5)
    assert torch.equal(layer(x), before) and set(layer.state_dict()) == names


def test_peft_refuses_to_merge_into_a_converted_layer() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["0"], init_lora_weights=False)
    model = gp.convert_(nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 2)))
    with pytest.raises(ValueError, match="GmPLinear"):
        peft.get_peft_model(copy.deepcopy(model), config)
    config._register_custom_module({gp.GmPLinear: peft.tuners.lora.Linear})
    adapted = peft.get_peft_model(model, config).eval()
    with pytest.raises(RuntimeError, match="would be lost"):
        adapted.merge_and_unload()
