"""The trace says what a model's author would: what follows a layer, where data enters and ends."""

import random
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from function_model import FunctionModel
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from geoparam.layers import GmPConv2d, GmPLinear
from geoparam.model.graph import Graph
from geoparam.model.trace import output_layers, trace
from geoparam.norm import InputMeanNorm

PIXELS = torch.linspace(-1, 1, 2 * 3 * 8 * 8).reshape(2, 3, 8, 8)


def conv() -> nn.Conv2d:
    return nn.Conv2d(3, 3, 3, padding=1)


def summary(graph: Graph, layer: str) -> tuple:
    """Return what follows a layer as (norm, activation, through a sum, exclusive)."""
    (norm, exclusive), call = graph.norm_after(layer), graph.calls(layer)[0]
    activation = call.activation and graph.nodes[call.activation].op
    return norm and norm.name, activation, "sum" in call.path, exclusive


# Real models. Nothing is computed on the meta device, so that full sizes take no time.


def test_resnet_convolutions_before_the_sum_are_told_apart() -> None:
    vision = pytest.importorskip("torchvision.models")
    with torch.device("meta"):
        graph = trace(vision.resnet50(), torch.zeros(1, 3, 64, 64))
    chains = Counter(summary(graph, layer)[1:] for layer in graph.layers)
    relu, after_sum, last = ("relu", False, True), ("relu", True, True), (None, False, False)
    assert chains == {relu: 33, after_sum: 20, last: 1}
    assert (graph.first, graph.outputs) == (("conv1",), ("fc",))
    assert summary(graph, "layer2.0.downsample.0") == ("layer2.0.downsample.1", "relu", True, True)


def test_transformer_layer_is_seen_in_spite_of_its_fast_path() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    graph = trace(layer.eval(), torch.zeros(2, 5, 8))
    assert graph.layers == ("self_attn.in_proj_weight", "self_attn.out_proj", "linear1", "linear2")
    assert graph.first == graph.layers[:1]
    assert graph.outputs == ("linear2",)
    assert summary(graph, "linear1") == (None, "relu", False, False)
    assert summary(graph, "linear2") == (None, None, True, False)


def test_attention_with_separate_projections_has_four_layers() -> None:
    attention = nn.MultiheadAttention(8, 2, kdim=4, vdim=6, batch_first=True)
    graph = trace(attention, (torch.zeros(1, 3, 8), torch.zeros(1, 5, 4), torch.zeros(1, 5, 6)))
    assert graph.first == ("q_proj_weight", "k_proj_weight", "v_proj_weight")
    assert graph.outputs == ("out_proj",)


ACTIVATIONS = {
    "module": (lambda m, x: m.relu(x), "relu"),
    "F.relu": (lambda m, x: F.relu(x), "relu"),
    "F.relu in place": (lambda m, x: F.relu(x, inplace=True), "relu"),
    "torch.relu_": (lambda m, x: torch.relu_(x), "relu"),
    "in-place method": (lambda m, x: x.relu_(), "relu"),
    "overload": (lambda m, x: torch.ops.aten.relu.default(x), "relu"),
    "leaky": (lambda m, x: m.leaky(x), "leaky_relu"),
    "torch.tanh": (lambda m, x: torch.tanh(x), "tanh"),
    "with a parameter": (lambda m, x: m.prelu(x), "prelu"),
}


@pytest.mark.parametrize(("function", "op"), ACTIVATIONS.values(), ids=ACTIVATIONS)
def test_every_spelling_of_an_activation_has_one_name(function: Callable, op: str) -> None:
    modules = {"relu": nn.ReLU(), "leaky": nn.LeakyReLU(0.2), "prelu": nn.PReLU()}
    layers = {"conv": conv(), "fc": nn.Linear(3, 2)}
    forward = lambda m, x: m.fc(function(m, m.conv(x)).mean((2, 3)))  # noqa: E731
    graph = trace(FunctionModel(forward, **layers, **modules), PIXELS)
    assert summary(graph, "conv") == (None, op, False, False)
    assert graph.layers == ("conv", "fc")


SUMS = {
    "a + b": lambda a, b: a + b,
    "a += b": lambda a, b: a.__iadd__(b),
    "b.add(a)": lambda a, b: b.add(a),
    "a - b": lambda a, b: a - b,
}


@pytest.mark.parametrize("add", SUMS.values(), ids=SUMS)
def test_activation_after_a_residual_sum_is_flagged(add: Callable) -> None:
    model = FunctionModel(
        lambda m, x: F.relu_(add(m.bn(m.conv(x)), x)), conv=conv(), bn=nn.BatchNorm2d(3)
    )
    assert summary(trace(model, PIXELS), "conv") == ("bn", "relu", True, True)


def test_what_does_nothing_in_evaluation_is_not_there() -> None:
    nothing = [nn.Identity(), nn.Dropout(0.5), nn.Sequential()]
    model = nn.Sequential(conv(), nothing[0], nn.BatchNorm2d(3), nothing[1], nn.ReLU(), nothing[2])
    graph = trace(model, PIXELS)
    assert summary(graph, "0") == ("2", "relu", False, True)
    assert graph.calls("0")[0].path == ()


def test_pooling_and_constants_are_passed_and_named() -> None:
    model = FunctionModel(lambda m, x: F.relu(F.max_pool2d(m.conv(x), 2) * 0.5), conv=conv())
    (call,) = trace(model, PIXELS).calls("conv")
    assert call.activation is not None and call.path == ("max_pool2d", "mul")


def changed_in_another_view(m: nn.Module, x: Tensor) -> Tensor:
    y = m.conv(x)
    y[:, :1].relu_()
    return m.bn(y)


EXCLUSIVE = {
    "layer read twice": (lambda m, x: m.bn(y := m.conv(x)) + y, False),
    "layer is an output": (lambda m, x: (y := m.conv(x), m.bn(y)), False),
    "norm shared by two layers": (lambda m, x: m.bn(m.other(m.bn(m.conv(x)))), False),
    "one call without the norm": (lambda m, x: m.conv(m.bn(m.conv(x))), False),
    "behind a pooling": (lambda m, x: m.bn(F.max_pool2d(m.conv(x), 2)), False),
    "changed through another view": (changed_in_another_view, False),
    "both called twice": (lambda m, x: m.bn(m.conv(m.bn(m.conv(x)))), True),
    "only the shape is read": (
        lambda m, x: m.bn(y := m.conv(x)) + torch.zeros_like(y) + y.shape[0],
        True,
    ),
}


@pytest.mark.parametrize(("forward", "exclusive"), EXCLUSIVE.values(), ids=EXCLUSIVE)
def test_a_norm_is_exclusive_if_it_reads_one_layer_and_nothing_else_does(
    forward: Callable, exclusive: bool
) -> None:
    model = FunctionModel(forward, conv=conv(), bn=nn.BatchNorm2d(3), other=conv())
    assert trace(model, PIXELS).norm_after("conv")[1] == exclusive


@pytest.mark.parametrize(("shape", "exclusive"), [((4, 6), True), ((4, 6, 6), False)])
def test_norm_counts_channels_where_the_linear_layer_has_them(
    shape: tuple[int, ...], exclusive: bool
) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
    assert trace(model, torch.zeros(shape)).norm_after("0")[1] == exclusive


def test_several_heads_and_several_inputs() -> None:
    parts = {name: nn.Linear(4, 4) for name in ("a", "b", "body", "left", "right")}

    def forward(m: nn.Module, x: Tensor, *, y: Tensor) -> dict:
        hidden = F.relu(m.body(torch.cat([m.a(x), m.b(y)])))
        return {"left": m.left(hidden).softmax(-1), "rest": [m.right(hidden)]}

    graph = trace(FunctionModel(forward, **parts), (torch.zeros(1, 4),), {"y": torch.zeros(1, 4)})
    assert (graph.first, graph.outputs) == (("a", "b"), ("left", "right"))


def test_hidden_states_in_a_dataclass_are_not_output_layers() -> None:
    @dataclass
    class Output:
        logits: Tensor
        hidden: tuple[Tensor, ...]
        cache: None = None

    def forward(m: nn.Module, ids: Tensor) -> Output:
        hidden = m.body(m.emb(ids))
        return Output(m.head(hidden), (hidden,))

    model = FunctionModel(
        forward, emb=nn.Embedding(9, 4), body=nn.Linear(4, 4), head=nn.Linear(4, 9)
    )
    graph = trace(model, {"ids": torch.zeros(1, 3, dtype=torch.long)})
    assert (graph.first, graph.outputs) == ((), ("head",))


@pytest.mark.parametrize("product", [F.linear, lambda x, w: x @ w.t(), lambda x, w: x @ w.T])
def test_tied_weight_in_a_function_is_a_layer_of_its_owner(product: Callable) -> None:
    model = FunctionModel(lambda m, i: product(m.fc(m.emb(i)), m.emb.weight), fc=nn.Linear(4, 4))
    model.emb = nn.Embedding(9, 4)
    graph = trace(model, torch.zeros(1, 3, dtype=torch.long))
    assert graph.outputs == ("emb",)
    assert graph.layers == ("fc", "emb")


def test_unused_layer_is_no_layer_of_the_graph() -> None:
    model = FunctionModel(lambda m, x: m.conv(x), conv=conv(), spare=conv())
    graph = trace(model, PIXELS)
    assert graph.layers == ("conv",)
    assert output_layers(model) == ("spare",) and output_layers(nn.Linear(2, 2)) == ()
    with pytest.raises(ValueError, match="'spare' ran; these did: conv"):
        graph.norm_after("spare")


def test_layers_with_computed_weights_are_one_step() -> None:
    model = nn.Sequential(
        GmPConv2d(3, 4, 3, activation=nn.ReLU()),
        nn.AvgPool2d(6),
        GmPConv2d(4, 4, 1, input_norm=True, coordinates="intrinsic"),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        weight_norm(nn.Linear(4, 3)),
        InputMeanNorm(3),
        nn.Tanh(),
        GmPLinear(3, 2),
    )
    graph = trace(model, PIXELS)
    assert graph.layers == ("0", "2", "6", "9")
    assert (graph.first, graph.outputs) == (("0",), ("9",))
    assert summary(graph, "2") == ("3", "relu", False, True)
    assert summary(graph, "6") == ("7", "tanh", False, True)
    assert output_layers(model) == ("9",)


def test_model_and_random_state_are_left_alone() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))
            self.register_buffer("replaced", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            self.replaced = torch.rand(())
            return x

    model = nn.Sequential(conv(), nn.BatchNorm2d(3), nn.Dropout(), Counting(), nn.ReLU())
    model.train()
    model[1].eval()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    tensors = [id(value) for value in model.state_dict(keep_vars=True).values()]
    flags = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    trace(model, PIXELS)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert [id(value) for value in model.state_dict(keep_vars=True).values()] == tensors
    assert [module.training for module in model.modules()] == flags
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_what_a_model_keeps_outside_of_buffers_is_left_alone() -> None:
    shared: list = []

    def forward(m: FunctionModel, x: Tensor) -> Tensor:
        m.count = m.new = m.count + 1
        m.mean.add_(x.mean())
        m.replaced = x.mean() + float(np.random.rand()) + random.random()
        m.seen.append(m.count)
        m.conv.seen.append(m.count)
        assert m.tied[0] is m.conv.weight and shared == [1, 1]
        return m.conv(x)

    model = FunctionModel(forward, conv=conv())
    model.count, model.mean, model.replaced = 0, torch.zeros(()), torch.zeros(())
    model.seen, model.conv.seen, model.tied = shared, shared, [model.conv.weight]
    before, states = dict(vars(model)), (str(np.random.get_state()), random.getstate())
    trace(model, PIXELS)
    assert vars(model) == before and model.mean == 0
    assert model.seen is model.conv.seen is shared and shared == []
    assert (str(np.random.get_state()), random.getstate()) == states


def test_what_lists_and_dicts_hold_is_left_alone() -> None:
    def forward(m: FunctionModel, x: Tensor) -> Tensor:
        m.means[0].add_(1)
        m.sums["own"].add_(1)
        m.array += 1
        m.computed.add_(1)
        return m.conv(x)

    model = FunctionModel(forward, conv=conv())
    model.means, model.sums, model.array = [torch.zeros(2)], {"own": torch.zeros(2)}, np.zeros(2)
    model.odd = [np.array([threading.Lock()], dtype=object), dict]
    model.register_buffer("computed", model.conv.weight.mean(0) * 0)
    trace(model, PIXELS)
    left = model.means[0], model.sums["own"], model.array, model.computed
    assert not any(each.any() for each in left)


def test_model_is_left_alone_when_its_forward_fails() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(5, 6))
    with pytest.raises(ValueError, match="does not run on these inputs"):
        trace(model, torch.zeros(1, 3))
    assert all(module.training for module in model.modules())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert torch.is_grad_enabled()


def test_changes_in_place_are_seen_from_inside_inference_mode() -> None:
    model = FunctionModel(
        lambda m, x: m.bn(m.conv(x)).add_(x).relu_(), conv=conv(), bn=nn.BatchNorm2d(3)
    )
    with torch.inference_mode():
        assert summary(trace(model, PIXELS), "conv") == ("bn", "relu", True, True)
        assert torch.is_inference_mode_enabled()


@pytest.mark.filterwarnings("ignore:.*torch.jit.*")
def test_lazy_and_scripted_modules_are_refused() -> None:
    with pytest.raises(ValueError, match="lazy"):
        trace(nn.Sequential(nn.LazyLinear(3)), torch.zeros(1, 3))
    scripted = torch.jit.script(nn.Sequential(nn.Linear(3, 3), nn.ReLU()))
    with pytest.raises(ValueError, match="scripted"):
        trace(nn.Sequential(nn.Linear(3, 3), scripted), torch.zeros(1, 3))


def test_compiled_model_is_run_eagerly() -> None:
    model = torch.compile(nn.Sequential(nn.Linear(3, 3), nn.ReLU()))
    assert summary(trace(model, torch.zeros(1, 3)), "_orig_mod.0")[1] == "relu"


@pytest.mark.parametrize("inputs", [(PIXELS, 1), [PIXELS, 1], (), {"x": PIXELS, "labels": 1}])
def test_inputs_that_do_not_fit_are_refused_in_words(inputs: object) -> None:
    """What a DataLoader yields has labels besides."""
    advice = r"give \(\{\.\.\.\},\)" if isinstance(inputs, dict) else r"\(x, y\) give x alone"
    with pytest.raises(ValueError, match=advice):
        trace(nn.Sequential(nn.Flatten()), inputs)


def test_a_linear_layer_is_one_whatever_its_name_and_bytes_are_images() -> None:
    class NormInitLinear(nn.Linear):
        pass

    assert trace(nn.Sequential(NormInitLinear(3, 3)), torch.zeros(1, 3)).outputs == ("0",)
    model = FunctionModel(lambda m, x: m.conv(x / 255), conv=nn.Conv2d(3, 4, 1))
    assert trace(model, PIXELS.byte()).first == ("conv",)
