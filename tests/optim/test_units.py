"""What is a unit, what stays plain, what is said about it; groups, bases and bad input."""

import copy
import functools
from typing import Any

import pytest
import torch
from plain_models import assert_same_weights, backward, build, cnn, mlp, rows, train
from torch import Tensor, nn

import geoparam as gp


def unit_names(optimizer: gp.GeometricOptimizer) -> list[str]:
    groups = [group for group in optimizer.param_groups if group["geometry"] != "rest"]
    return [name for group in groups for name in group["param_names"]]


def test_the_table_says_what_is_a_unit_and_what_stays_plain() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
    model.extend([nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 2)])
    with torch.no_grad():
        model[4].bias[3] = 9.0  # more than the row's length: too far for a distance
        model[6].weight[1] = 0.0
    lines = str(build(model)).splitlines()
    assert lines[0].endswith("SGD; rest SGD): 164 of 274 parameters are units")
    found = {line.split()[0]: line.split(maxsplit=1)[1] for line in lines[2:] if len(line) > 9}
    assert found["0.weight"].split() == ["4", "9", "lam", "fixed,", "1", "follows"]
    assert found["4.weight"].split() == ["8", "16", "-", "free"]
    assert "zeros has no direction" in found["6.weight"]
    assert found["7.weight"] == "the output layer"


class Mixed(nn.Module):
    """Layers of all kinds: a transposed one in groups, attention, and a tied embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.apart = nn.MultiheadAttention(8, 2, kdim=5, vdim=5, batch_first=True)
        self.up = nn.ConvTranspose1d(8, 4, 3, groups=2)
        self.down = nn.Conv1d(4, 8, 3)
        self.head = nn.Linear(8, 6, bias=False)
        self.head.weight = self.embedding.weight
        self.mixture = nn.Parameter(torch.randn(2, 2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + self.attention(x, x, x)[0] + self.apart(x, x[..., :5], x[..., :5])[0]
        x = self.down(self.up(x.mT)).mT
        return self.head(x) * self.mixture.sum()


def test_all_kinds_of_layers_have_units_and_embeddings_never() -> None:
    model = Mixed()
    optimizer = build(model)
    apart = [f"apart.{key}_proj_weight" for key in "qkv"]
    assert set(unit_names(optimizer)) == {
        "attention.in_proj_weight", "attention.out_proj.weight", *apart, "apart.out_proj.weight",
        "up.weight", "down.weight",
    }  # fmt: skip
    text = str(optimizer)
    assert "tied to an embedding" in text and "not in a known layer" in text
    tokens = torch.arange(6)[None]
    losses = []
    for _ in range(30):
        loss = nn.functional.cross_entropy(model(tokens)[0], tokens[0])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize("coordinates", ["intrinsic", "angles"])
@pytest.mark.parametrize("groups", [1, 2])
def test_a_transposed_convolution_has_its_units_in_columns(groups: int, coordinates: str) -> None:
    """Its unit is what makes one output channel; r is fixed, so the lengths of these stay."""
    layer = nn.ConvTranspose2d(4, 6, 3, groups=groups)
    model = nn.Sequential(layer, nn.Flatten(), nn.Linear(54, 2)).double()

    def lengths() -> Tensor:
        columns = model[0].weight.detach().unflatten(0, (groups, -1)).square()
        return columns.sum(dim=(1, 3, 4)).sqrt().flatten()

    before, old = lengths(), model[0].weight.detach().clone()
    optimizer = build(model, scale="fixed", coordinates=coordinates)
    assert f"{6:6} {36 // groups:6}" in str(optimizer)
    for _ in range(3):
        model.zero_grad()
        model(torch.randn(2, 4, 1, 1).double()).square().sum().backward()
        optimizer.step()
    assert (model[0].weight - old).abs().max() > 1e-3
    torch.testing.assert_close(lengths(), before, rtol=1e-12, atol=0)


@pytest.mark.parametrize("coordinates", ["intrinsic", "angles"])
@pytest.mark.parametrize("options", [{}, {"base": torch.optim.Adam, "lr": 1e-2}])
def test_transformers_conv1d_is_a_linear_layer_transposed(
    coordinates: str, options: dict[str, Any]
) -> None:
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
    linear = mlp()
    other = copy.deepcopy(linear)
    other[3] = conv1d(7, 8).double()
    other[3].weight.data, other[3].bias.data = linear[3].weight.data.T.clone(), linear[3].bias.data
    other[3].bias.data = other[3].bias.data.clone()
    for model in (linear, other):
        train(model, build(model, coordinates=coordinates, **options), steps=5)
    torch.testing.assert_close(other[3].weight.T, linear[3].weight, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(other[3].bias, linear[3].bias, rtol=1e-12, atol=1e-14)


def test_example_inputs_find_the_norm_that_follows() -> None:
    class Backwards(nn.Module):
        """Its modules are not in the order in which they run."""

        def __init__(self) -> None:
            super().__init__()
            self.head, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
            self.first = nn.Linear(3, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.norm(self.first(x)).relu())

    guessed, found = build(Backwards()), build(Backwards(), example_inputs=torch.randn(5, 3))
    assert "fixed, norm follows" not in str(guessed).split("first.weight")[1]
    assert unit_names(found) == ["first.weight"]
    assert "fixed, norm follows" in str(found)


def test_filter_fn_chooses_the_layers() -> None:
    model = mlp()
    optimizer = build(model, filter_fn=lambda module, name: name in ("0", "6"))
    assert unit_names(optimizer) == ["0.weight", "6.weight"]
    assert "filter_fn" in str(optimizer)


def test_the_rest_trains_by_its_own_optimizer() -> None:
    model, plain = mlp(), mlp()
    optimizer = build(
        model, torch.optim.Adam, lr=1e-2, rest=functools.partial(torch.optim.SGD, momentum=0.9)
    )
    assert "Adam; rest SGD" in str(optimizer)
    head = torch.optim.SGD(plain[6].parameters(), lr=1e-2, momentum=0.9)
    for step in range(3):
        plain[:6].load_state_dict(model[:6].state_dict())
        backward(model, step)
        backward(plain, step)
        optimizer.step()
        head.step()
    assert_same_weights(model[6], plain[6])
    assert "r/momentum_buffer" in optimizer.state[model[0].weight]
    assert "direction/exp_avg" in optimizer.state[model[0].weight]


@pytest.mark.parametrize(
    "base",
    [
        functools.partial(torch.optim.SGD, momentum=0.9),
        lambda params, **options: torch.optim.SGD(params, momentum=0.9, **options),
    ],
    ids=["partial", "callable"],
)
def test_a_callable_serves_as_a_class_does(base: Any) -> None:
    model, other = mlp(), mlp()
    train(model, build(model, base))
    train(other, build(other, momentum=0.9))
    assert_same_weights(model, other)


def test_groups_keep_their_rates_and_other_keys() -> None:
    model, slow = mlp(), mlp()
    groups = [
        {"params": model[0].parameters(), "lr": 0.01, "lr_scale": 0.2},
        {"params": [*model[3].parameters(), *model[6].parameters()], "lr_scale": 1.0},
    ]
    optimizer = build(model, groups=groups)
    found = [(g["lr"], g["lr_scale"], g["param_names"]) for g in optimizer.param_groups]
    assert found == [
        (0.01, 0.2, ["0.weight"]), (0.01, 0.2, ["0.bias"]),
        (0.05, 1.0, ["3.weight"]), (0.05, 1.0, ["3.bias", "6.weight", "6.bias"]),
    ]  # fmt: skip
    train(model, optimizer, steps=1)
    train(slow, build(slow, lr=0.01), steps=1)
    assert_same_weights(model[0], slow[0])


def test_a_groups_rate_scales_its_turn() -> None:
    model = mlp()
    groups = [
        {"params": list(model[0].parameters()), "lr": 0.025},
        {"params": list(model[3:].parameters())},
    ]
    optimizer = build(model, turn=4.0, groups=groups)
    assert [group["lr"] for group in optimizer.param_groups] == [2.0, 0.025, 4.0, 0.05]


def test_timm_groups_are_divided() -> None:
    timm = pytest.importorskip("timm.optim")
    model = mlp()
    optimizer = build(model, groups=timm.param_groups_weight_decay(model, 0.1))
    decays = {n: g["weight_decay"] for g in optimizer.param_groups for n in g["param_names"]}
    assert decays["0.weight"] == 0 and decays["6.weight"] == 0.1 and decays["6.bias"] == 0


def test_added_parameters_are_part_of_the_rest() -> None:
    model, extra = mlp(), nn.Parameter(torch.ones(2, 2).double())
    optimizer = build(model, momentum=0.9)
    train(model, optimizer, steps=2)
    optimizer.add_param_group({"params": extra, "lr": 0.5})
    plain = mlp()
    train(plain, build(plain, momentum=0.9), steps=3)
    extra.grad = torch.ones_like(extra)
    train(model, optimizer, steps=1, first=2)
    assert_same_weights(model, plain)
    torch.testing.assert_close(extra.detach(), torch.full((2, 2), 0.5).double())


@pytest.mark.parametrize("coordinates", ["intrinsic", "angles"])
@pytest.mark.parametrize(
    "base, options",
    [
        (torch.optim.RAdam, {"lr": 0.01}), (torch.optim.NAdam, {"lr": 0.01}),
        (torch.optim.RMSprop, {"lr": 0.003}), (torch.optim.Adafactor, {"lr": 0.03}),
        (torch.optim.Rprop, {"lr": 0.003}), (torch.optim.ASGD, {"lr": 0.1}),
        (torch.optim.Adagrad, {"lr": 0.03}), (torch.optim.Adadelta, {"lr": 2.0}),
        (torch.optim.Adamax, {"lr": 0.01}), (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True}),
        (torch.optim.SGD, {"foreach": True, "momentum": 0.9, "nesterov": True}),
        (torch.optim.Adam, {"lr": 0.01, "foreach": False}),
        (torch.optim.Adam, {"lr": 0.01, "fused": True}), (torch.optim.Muon, {"lr": 0.02}),
    ],
)  # fmt: skip
def test_any_base_lowers_the_loss(base: Any, options: dict[str, Any], coordinates: str) -> None:
    model = mlp()
    optimizer = build(model, base, coordinates=coordinates, **options)
    start = backward(model)
    for _ in range(40):
        backward(model)
        optimizer.step()
    assert backward(model) < start - 0.1


def test_maximize_goes_up() -> None:
    model = mlp()
    optimizer = build(model, maximize=True)
    start = backward(model)
    optimizer.step()
    assert backward(model) > start


class Nothing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(3, 4)


@pytest.mark.parametrize(
    "model, options, words",
    [
        (mlp, {"base": torch.optim.LBFGS}, "LBFGS .* closure"),
        (mlp, {"base": torch.optim.Adam, "differentiable": True}, "differentiable=True"),
        (mlp, {"turn": 0}, "turn is an angle in degrees"),
        (mlp, {"turn": 181}, "at most 180; got 181"),
        (mlp, {"max_turn": -1}, "max_turn is an angle"),
        (mlp, {"coordinates": "polar"}, "'intrinsic' or 'angles'; got 'polar'"),
        (mlp, {"scale": "none"}, "'free' or 'fixed'; got 'none'"),
        (mlp, {"base": "SGD"}, "an optimizer's class"),
        (mlp, {"rest": 3}, "rest is an optimizer's class"),
        (mlp, {"groups": [{"params": [nn.Parameter(torch.zeros(2))]}]}, "the model does not"),
        (mlp, {"filter_fn": lambda module, name: False}, "no layer of this model has units"),
        (Nothing, {}, "no layer of this model has units"),
        (lambda: list(mlp().parameters()), {}, "the first argument is the model"),
        (lambda: gp.convert_(mlp()), {}, "geometry in the layer already"),
        (lambda: nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 1)), {}, "run the model once"),
    ],
)
def test_bad_input_gets_a_sentence(model: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words) as error:
        build(model(), **options)
    assert str(error.value).endswith(".") and "\n" not in str(error.value)


def test_an_instance_is_no_class() -> None:
    model = mlp()
    with pytest.raises(ValueError, match="an optimizer's class"):
        build(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_what_is_in_no_group_is_not_trained() -> None:
    model = mlp()
    optimizer = build(model, groups=[{"params": model[3:].parameters()}])
    before = rows(model[0])
    train(model, optimizer)
    torch.testing.assert_close(rows(model[0]), before, rtol=0, atol=0)


def test_the_model_is_not_touched() -> None:
    model = cnn(norm=nn.BatchNorm2d)
    before = copy.deepcopy(model)
    train(model, build(model))
    assert str(model) == str(before) and list(model.state_dict()) == list(before.state_dict())
    assert all(type(p) is nn.Parameter for p in model.parameters())
