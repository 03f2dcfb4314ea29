"""Packed projections and stacked experts train as the layers that they hold."""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from function_model import FunctionModel
from plain_models import (
    assert_same_weights,
    backward,
    both_coordinates,
    build,
    find_angles,
    find_table,
    gpt2,
    mixture,
    rms,
    rows,
    train,
)
from torch import Tensor, nn

Layer = tuple[Tensor, Tensor | None]  # weight and bias
Pieces = Callable[[Callable[[str], Tensor]], Iterable[Layer]]

BASES: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9},
    "Adam": {"base": torch.optim.Adam, "lr": 1e-2},
    "Muon": {"base": torch.optim.Muon, "lr": 1e-2},
    "angles": {"base": torch.optim.Adam, "lr": 1e-2, "coordinates": "angles"},
    "SGD, turn": {"momentum": 0.9, "turn": 2.0},
    "Adam, turn": {"base": torch.optim.Adam, "lr": 1e-2, "turn": 2.0},
    "Muon, turn": {"base": torch.optim.Muon, "lr": 1e-2, "turn": 2.0},
}
every_base = pytest.mark.parametrize("base", BASES)
SIZES = 6, 6, 4  # rows of q, k and v


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT, dim=-1) @ v


def packed() -> FunctionModel:
    """Return a head of attention whose projections are one matrix."""
    torch.manual_seed(1)

    def forward(model: Any, x: Tensor) -> Tensor:
        q, k, v = model.qkv(x).split(SIZES, dim=-1)
        return model.head(attend(q, k, v))

    qkv, head = nn.Linear(6, sum(SIZES)), nn.Linear(4, 3)
    return FunctionModel(forward, qkv=qkv, head=head).double()


def apart() -> FunctionModel:
    """Return the same with three matrices."""
    source = packed()
    layers = {}
    weights, biases = (p.detach().split(SIZES) for p in source.qkv.parameters())
    for name, weight, bias in zip("qkv", weights, biases, strict=True):
        layers[name] = nn.Linear(6, len(weight)).double()
        layers[name].load_state_dict({"weight": weight, "bias": bias})

    def forward(model: Any, x: Tensor) -> Tensor:
        q, k, v = model.q(x), model.k(x), model.v(x)
        return model.head(attend(q, k, v))

    return FunctionModel(forward, **layers, head=source.head)


@every_base
def test_a_packed_projection_trains_as_three_layers(base: str) -> None:
    model, other = packed(), apart()
    optimizer = build(model, split={"qkv": SIZES}, **BASES[base])
    same = build(other, **BASES[base])
    one, two = train(model, optimizer, 20), train(other, same, 20)
    bound = 2e-2 if "Muon" in base else 1e-12  # Newton-Schulz steps are in bfloat16
    torch.testing.assert_close(one, two, rtol=bound, atol=bound)


def test_an_undivided_projection_does_not() -> None:
    model, other = packed(), apart()
    one = train(model, build(model, split={}, **BASES["SGD, turn"]), 20)
    two = train(other, build(other, **BASES["SGD, turn"]), 20)
    assert abs(one[-1] - two[-1]) > 1e-3


# ---- layers of all kinds, piece by piece


class Piecewise:
    """A model's packed or stacked layers beside nn.Linear layers that get the same gradients.

    Args:
        model: the model with the packed layers.
        pieces: a function that cuts weights and biases, or their gradients, into layers. It
            receives a function from a parameter's name to a tensor.
    """

    def __init__(self, model: nn.Module, pieces: Pieces) -> None:
        self.model, self.pieces = model, pieces
        self.apart = nn.ModuleList()
        for weight, bias in self.find_values():
            rows, fan_in = weight.shape
            layer = nn.Linear(fan_in, rows, bias=bias is not None, dtype=weight.dtype)
            layer.weight.data.copy_(weight)
            if bias is not None:
                layer.bias.data.copy_(bias)
            self.apart.append(layer)

    def find_values(self) -> list[Layer]:
        """Return copies of the layers' weights and biases."""
        cut = self.pieces(lambda name: self.model.get_parameter(name).detach().clone())
        return list(cut)

    def find_turns(self, before: list[Layer]) -> list[float]:
        """Return the rms angle by which each layer has turned."""
        pairs = zip(before, self.find_values(), strict=True)
        return [rms(find_angles(old, new)) for (old, _), (new, _) in pairs]

    def hand_over_gradients(self) -> None:
        cut = self.pieces(lambda name: self.model.get_parameter(name).grad)
        for layer, (weight, bias) in zip(self.apart, cut, strict=True):
            layer.weight.grad = weight.clone()
            if bias is not None:
                layer.bias.grad = bias.clone()

    def assert_same(self, tolerance: float) -> None:
        for layer, (weight, bias) in zip(self.apart, self.find_values(), strict=True):
            assert (layer.weight - weight).abs().max() < tolerance
            if bias is not None:
                assert (layer.bias - bias).abs().max() < tolerance


def attention() -> Piecewise:
    torch.manual_seed(1)
    mha = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(model: Any, x: Tensor) -> Tensor:
        mixed, _ = model.attention(x, x, x)
        return model.head(mixed)

    model = FunctionModel(forward, attention=mha, head=nn.Linear(6, 3))

    def pieces(get: Any) -> Any:
        weights, biases = (get(f"attention.in_proj_{x}").chunk(3) for x in ("weight", "bias"))
        return zip(weights, biases, strict=True)

    return Piecewise(model.double(), pieces)


def gpt2s_attention() -> Piecewise:
    def pieces(get: Any) -> Any:
        for i in (0, 1):
            layer = f"transformer.h.{i}.attn.c_attn"
            weights = get(f"{layer}.weight").t().chunk(3)
            yield from zip(weights, get(f"{layer}.bias").chunk(3), strict=True)

    return Piecewise(gpt2(), pieces)


def mixtral() -> Piecewise:
    """Its experts are (experts, outputs, inputs); gate and up are halves of a matrix."""

    def pieces(get: Any) -> Any:
        for i in (0, 1):
            experts = f"model.layers.{i}.mlp.experts"
            for both in get(f"{experts}.gate_up_proj"):
                for half in both.chunk(2):
                    yield half, None
            for down in get(f"{experts}.down_proj"):
                yield down, None

    return Piecewise(mixture("Mixtral"), pieces)


def transposed_mixtral() -> Piecewise:
    """Mixtral, with the memory of its experts in the order (experts, inputs, outputs)."""
    both = mixtral()
    for p in both.model.parameters():
        if p.ndim == 3:
            p.data = p.data.mT.contiguous().mT
    return both


def gpt_oss() -> Piecewise:
    """Its experts are (experts, inputs, outputs) with biases; gate and up are interleaved."""

    def pieces(get: Any) -> Any:
        for i in (0, 1):
            for key in ("gate_up_proj", "down_proj"):
                name = f"model.layers.{i}.mlp.experts.{key}"
                weights = [weight.t() for weight in get(name)]
                yield from zip(weights, get(f"{name}_bias"), strict=True)

    return Piecewise(mixture("GptOss"), pieces)


class Experts(nn.Module):
    """Three experts in a stack of one's own: (inputs, experts, outputs)."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(6, 3, 8) / 3)

    def forward(self, x: Tensor) -> Tensor:
        chosen = torch.arange(len(x)) % 3
        return torch.einsum("bi,ibo->bo", x, self.w1[:, chosen]).tanh()


def own_stack() -> Piecewise:
    torch.manual_seed(1)
    model = nn.Sequential(Experts(), nn.Linear(8, 3)).double()

    def pieces(get: Any) -> Any:
        for weight in get("0.w1").permute(1, 2, 0):
            for half in weight.split((3, 5)):
                yield half, None

    return Piecewise(model, pieces)


LAYOUTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "MultiheadAttention": (attention, {}),
    "GPT-2": (gpt2s_attention, {}),
    "Mixtral": (mixtral, {}),
    "transposed Mixtral": (transposed_mixtral, {}),
    "GPT-OSS": (gpt_oss, {}),
    "own stack": (own_stack, {"stacks": {"w1": "ieo"}, "split": {"w1": (3, 5)}}),
}
every_layout = pytest.mark.parametrize("layout", LAYOUTS)


@every_layout
@every_base
def test_layers_in_one_parameter_train_as_layers_apart(layout: str, base: str) -> None:
    make, options = LAYOUTS[layout]
    both = make()
    optimizer = build(both.model, **BASES[base], **options)
    same = build(both.apart, filter_fn=lambda *_: True, **BASES[base])
    for step in range(3):
        backward(both.model, step)
        both.hand_over_gradients()
        optimizer.step()
        same.step()
    both.assert_same(5e-3 if "Muon" in base else 1e-12)


@every_layout
def test_each_layer_in_a_parameter_turns_by_the_angle(layout: str) -> None:
    make, options = LAYOUTS[layout]
    both = make()
    optimizer = build(both.model, torch.optim.Muon, turn=2.0, max_turn=180, **options)
    before = both.find_values()
    train(both.model, optimizer, 1)
    expected = [2.0] * len(before)
    assert both.find_turns(before) == pytest.approx(expected, rel=1e-6)


def test_an_own_projection_is_split_by_a_number_of_equal_parts() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3)).double()
    before = rows(model[0]).chunk(3)
    optimizer = build(model, turn=2.0, max_turn=180, split={"0": 3})
    train(model, optimizer, 1)
    for old, new in zip(before, rows(model[0]).chunk(3), strict=True):
        assert rms(find_angles(old, new)) == pytest.approx(2.0, rel=1e-6)


@pytest.mark.parametrize("base", ["SGD, turn", "Adam, turn", "Muon, turn"])
def test_an_expert_without_tokens_does_not_turn(base: str) -> None:
    """Nor by momentum: it has met tokens before."""
    both = mixtral()
    optimizer = build(both.model, **BASES[base])
    train(both.model, optimizer)
    before = both.find_values()
    token = torch.tensor([[3, 3]])
    both.model.zero_grad()
    both.model(token, labels=token).loss.backward()
    both.hand_over_gradients()
    has_tokens = [bool(layer.weight.grad.any()) for layer in both.apart]
    optimizer.step()
    turns = both.find_turns(before)
    assert 0 < sum(has_tokens) < len(has_tokens)
    assert [turn > 0.1 for turn in turns] == has_tokens
    assert max(turn for turn, has in zip(turns, has_tokens, strict=True) if not has) < 1e-6


@pytest.mark.parametrize("name, router", [("Mixtral", "gate"), ("GptOss", "router")])
def test_experts_are_units_and_routers_stay_plain(name: str, router: str) -> None:
    table = find_table(build(mixture(name)))
    assert table[f"model.layers.1.mlp.{router}.weight"] == "a router"
    assert table["lm_head.weight"].startswith("the output layer")
    parts = 8 if name == "Mixtral" else 4
    assert table["model.layers.1.mlp.experts.gate_up_proj"].endswith(f"free; {parts} layers")
    assert table["model.layers.1.mlp.experts.down_proj"].endswith("free; 4 layers")


def test_a_router_of_ones_own_beside_experts_stays_plain() -> None:
    block = nn.ModuleDict({"gate": nn.Linear(6, 3), "experts": Experts()})
    model = nn.ModuleDict({"block": block, "head": nn.Linear(8, 3)})
    table = find_table(build(model, stacks={"experts.w1": "ieo"}))
    assert table["block.gate.weight"] == "a router"
    assert table["block.experts.w1"].startswith("24 6")


def test_a_router_in_the_module_of_a_stack_stays_plain() -> None:
    mixture = Experts()
    mixture.gate = nn.Linear(6, 3)
    model = nn.Sequential(mixture, nn.Linear(8, 3))
    assert find_table(build(model, stacks={"w1": "ieo"}))["0.gate.weight"] == "a router"


class TopTwoRouter(nn.Module):
    """As in Switch Transformers: the router is a module around its layer."""

    def __init__(self) -> None:
        super().__init__()
        self.classifier = nn.Linear(6, 3)


@pytest.mark.parametrize("name, router", [("router", nn.ModuleDict({"layer": nn.Linear(6, 3)})),
                                          ("gating", TopTwoRouter())])  # fmt: skip
def test_the_layers_inside_a_router_stay_plain(name: str, router: nn.Module) -> None:
    block = nn.ModuleDict({name: router, "up": nn.Linear(6, 8)})
    model = nn.ModuleDict({"block": block, "head": nn.Linear(8, 3)})

    table = find_table(build(model))

    [layer] = dict(router.named_children())
    assert table[f"block.{name}.{layer}.weight"] == "a router"
    assert table["block.up.weight"].startswith("8 6")


class Llama4TextExperts(nn.Module):
    """Parameters of transformers' module of this name, which has no marks of its layout."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(3, 6, 16))
        self.down_proj = nn.Parameter(torch.randn(3, 8, 6))


def test_the_experts_of_llama_4_are_units() -> None:
    model = nn.ModuleDict({"experts": Llama4TextExperts(), "head": nn.Linear(6, 3)})

    table = find_table(build(model))

    assert table["experts.gate_up_proj"].startswith("48 6")
    assert table["experts.gate_up_proj"].endswith("free; 6 layers")
    assert table["experts.down_proj"].startswith("18 8")


def test_the_table_hints_at_a_projection_that_looks_packed() -> None:
    model = FunctionModel(attend, qkv=nn.Linear(6, 18), head=nn.Linear(5, 3))
    assert find_table(build(model))["qkv.weight"].endswith("q, k, v in one? Then give split=")
    assert find_table(build(model, split={"qkv": 3}))["qkv.weight"].endswith("free; 3 layers")


def test_a_projection_that_looks_packed_is_warned_of_where_units_turn() -> None:
    model = FunctionModel(attend, qkv=nn.Linear(6, 18), head=nn.Linear(5, 3))
    words = "q, k and v seem to be one matrix in qkv, .* split={'qkv': 3}; split={}"
    with pytest.warns(UserWarning, match=words):
        build(model, turn=2.0)
    build(model, turn=2.0, split={})
    build(model, turn=2.0, split={"qkv": 3})


@pytest.mark.parametrize(
    ("name", "rows", "words"),
    [
        ("qkv_proj", 16, "q, k and v .* split={'qkv_proj': \\(rows of q, of k, of v\\)}"),  # Phi-3
        ("c_attn", 10, "q, k and v .* split={'c_attn': \\(rows of q, of k, of v\\)}"),  # StarCoder
        ("query_key_value", 18, "q, k and v .* split={'query_key_value': 3}"),  # Falcon, Bloom
    ],
)
def test_packed_projections_of_any_size_are_warned_of(name: str, rows: int, words: str) -> None:
    model = nn.ModuleDict({name: nn.Linear(6, rows), "head": nn.Linear(rows, 3)})
    with pytest.warns(UserWarning, match=words):
        optimizer = build(model, turn=2.0)
    assert find_table(optimizer)[f"{name}.weight"].endswith("in one? Then give split=")


@pytest.mark.filterwarnings("error")
def test_frozen_layers_are_not_asked_about() -> None:
    model = nn.ModuleDict({"qkv": nn.Linear(6, 18), "experts": Experts(), "up": nn.Linear(6, 8)})
    model["head"] = nn.Linear(8, 3)
    model["qkv"].requires_grad_(False)
    model["experts"].requires_grad_(False)
    build(model, turn=2.0)


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize("wrap", [nn.utils.parametrizations.weight_norm, nn.utils.weight_norm])
def test_a_convolutions_computed_weight_is_no_stack_of_experts(wrap: Callable) -> None:
    layers = wrap(nn.Conv1d(4, 4, 3)), nn.Conv1d(4, 4, 3), nn.Conv1d(4, 2, 3)
    table = find_table(build(nn.Sequential(*layers), turn=2.0))
    assert not any(reason.endswith("Then give stacks=") for reason in table.values())


def test_a_misspelt_part_is_told_the_layer_that_comes_near() -> None:
    model = nn.ModuleDict({"head": nn.Linear(6, 3), "c_attn": nn.Linear(6, 18)})
    with pytest.raises(ValueError, match="Names here are, for example, c_attn, head"):
        build(model, split={"c_atn": 3})


def test_a_stack_without_axes_stays_plain() -> None:
    model = nn.Sequential(Experts(), nn.Linear(8, 8), nn.Linear(8, 3))
    assert find_table(build(model))["0.w1"].startswith("not in a known layer; experts?")


def test_a_stack_without_axes_is_warned_of_when_units_turn() -> None:
    model = nn.Sequential(Experts(), nn.Linear(8, 8), nn.Linear(8, 3))
    words = "three dimensions do not turn: 0.w1. .* stacks={'0.w1': 'eoi'}"
    with pytest.warns(UserWarning, match=words):
        build(model, turn=2.0)
    build(model, turn=2.0, stacks={})


@both_coordinates
@pytest.mark.parametrize("is_traced", [False, True])
def test_all_kinds_of_layers_have_units(coordinates: str, is_traced: bool) -> None:
    attention = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    transposed = nn.ConvTranspose1d(6, 6, 1, groups=2), nn.BatchNorm1d(6)
    embedding, head = nn.Embedding(6, 8), nn.Linear(8, 6)
    model = nn.Sequential(embedding, attention, *transposed, head).double()
    head.weight = embedding.weight
    tokens = torch.arange(6)[None]
    inputs = tokens if is_traced else None
    optimizer = build(model, coordinates=coordinates, example_inputs=inputs)
    names = optimizer.param_groups[0]["param_names"]
    inner = ["self_attn.in_proj_weight", "self_attn.out_proj.weight"]
    inner += ["linear1.weight", "linear2.weight"]
    assert names == [*(f"1.{name}" for name in inner), "2.weight"]

    loss = model(tokens).square().mean()
    loss.backward()
    optimizer.step()
    assert model(tokens).square().mean() < loss


@both_coordinates
def test_units_of_a_transposed_convolution_are_its_columns(coordinates: str) -> None:
    layer = nn.ConvTranspose1d(6, 6, 1, groups=2)
    model = nn.Sequential(layer, nn.Linear(8, 3)).double()
    before = copy.deepcopy(layer.weight)
    optimizer = build(model, coordinates=coordinates, scale="fixed")
    x = torch.randn(4, 6, 8).double()
    model(x).square().mean().backward()
    optimizer.step()
    for new, old in zip(layer.weight.chunk(2), before.chunk(2), strict=True):
        torch.testing.assert_close(new.norm(dim=0), old.norm(dim=0))


@pytest.mark.parametrize(
    "options, words",
    [
        ({"split": {"qkv": 5}}, "split: 'qkv' has 16 rows, which 5 does not divide"),
        ({"split": {"qkv": (6, 6)}}, "split: 'qkv' has 16 rows; the parts \\(6, 6\\) must add up"),
        ({"split": {"qvk": 2}}, "split: no layer's name ends in 'qvk', .* for example, "),
        ({"split": {"qkv": True}}, "split: 'qkv' needs a number of parts, or rows; got True"),
        ({"split": 3}, "split maps the end of a name to a value; got 3"),
        (
            {"stacks": {"qkv.weight": "eoi"}},
            "must have three dimensions; its shape is \\(16, 6\\)",
        ),
        ({"stacks": {"experts": "eoi"}}, "stacks: no layer's name ends in 'experts'"),
    ],
)
def test_a_split_or_stack_that_does_not_fit_gets_a_sentence(options: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        build(packed(), **options)


@pytest.mark.parametrize("axes", ["eo", "eoo", 3])
def test_the_letters_of_a_stack_are_checked(axes: Any) -> None:
    model = nn.Sequential(Experts(), nn.Linear(8, 3))
    with pytest.raises(ValueError, match=f"letters e, o and i once each; got {axes!r}"):
        build(model, stacks={"w1": axes})


def test_a_state_of_packed_layers_goes_on() -> None:
    model, other = packed(), packed()
    options = {"split": {"qkv": SIZES}, "turn": 2.0}
    optimizer, resumed = build(model, **options), build(other, **options)
    train(model, optimizer)
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(optimizer.state_dict())
    train(model, optimizer)
    train(other, resumed)
    assert_same_weights(model, other)
