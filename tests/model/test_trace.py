"""The trace says what a model's author would: what follows a layer, where data enters and ends."""

import copy
import random
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from function_model import FunctionModel
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.testing import assert_close

from geoparam.layers import GmPConv2d, GmPLinear
from geoparam.model.graph import Graph
from geoparam.model.trace import output_layers, trace
from geoparam.norm import InputMeanNorm

PIXELS = torch.linspace(-1, 1, 2 * 3 * 8 * 8).reshape(2, 3, 8, 8)


def conv() -> nn.Conv2d:
    return nn.Conv2d(3, 3, 3, padding=1)


class Chain(NamedTuple):
    """What follows a layer."""

    norm: str | None = None
    activation: str | None = None
    through_sum: bool = False
    exclusive: bool = False  # the norm is the layer's alone


def find_chain(graph: Graph, layer: str) -> Chain:
    """Return what follows the first call of a layer."""
    norm, exclusive = graph.norm_after(layer)
    call = graph.calls(layer)[0]
    activation = None
    if call.activation is not None:
        activation = graph.nodes[call.activation].op
    return Chain(norm and norm.name, activation, "sum" in call.path, exclusive)


# Real models. Nothing is computed on the meta device, so that full sizes take no time.


def test_resnet_convolutions_before_the_sum_are_told_apart() -> None:
    vision = pytest.importorskip("torchvision.models")
    with torch.device("meta"):
        graph = trace(vision.resnet50(), torch.zeros(1, 3, 64, 64))

    assert graph.first == ("conv1",)
    assert graph.outputs == ("fc",)
    chains = [find_chain(graph, layer) for layer in graph.layers]
    counts = Counter((chain.activation, chain.through_sum, chain.exclusive) for chain in chains)
    before_relu = ("relu", False, True)
    before_sum = ("relu", True, True)
    last = (None, False, False)
    assert counts == {before_relu: 33, before_sum: 20, last: 1}
    assert find_chain(graph, "layer2.0.downsample.0") == Chain(
        "layer2.0.downsample.1", "relu", through_sum=True, exclusive=True
    )


def test_transformer_layer_is_seen_in_spite_of_its_fast_path() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    graph = trace(layer.eval(), torch.zeros(2, 5, 8))

    assert graph.layers == ("self_attn.in_proj_weight", "self_attn.out_proj", "linear1", "linear2")
    assert graph.first == ("self_attn.in_proj_weight",)
    assert graph.outputs == ("linear2",)
    assert find_chain(graph, "linear1") == Chain(activation="relu")
    assert find_chain(graph, "linear2") == Chain(through_sum=True)


def test_attention_with_separate_projections_has_four_layers() -> None:
    attention = nn.MultiheadAttention(8, 2, kdim=4, vdim=6, batch_first=True)
    query = torch.zeros(1, 3, 8)
    key = torch.zeros(1, 5, 4)
    value = torch.zeros(1, 5, 6)

    graph = trace(attention, (query, key, value))

    assert graph.first == ("q_proj_weight", "k_proj_weight", "v_proj_weight")
    assert graph.outputs == ("out_proj",)


# What follows a layer.

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
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        activated = function(m, m.conv(x))
        return m.fc(activated.mean((2, 3)))

    activations = {"relu": nn.ReLU(), "leaky": nn.LeakyReLU(0.2), "prelu": nn.PReLU()}
    model = FunctionModel(forward, conv=conv(), fc=nn.Linear(3, 2), **activations)

    graph = trace(model, PIXELS)

    assert find_chain(graph, "conv") == Chain(activation=op)
    assert graph.layers == ("conv", "fc")


SUMS = {
    "a + b": lambda a, b: a + b,
    "a += b": lambda a, b: a.__iadd__(b),
    "b.add(a)": lambda a, b: b.add(a),
    "a - b": lambda a, b: a - b,
}


@pytest.mark.parametrize("add", SUMS.values(), ids=SUMS)
def test_activation_after_a_residual_sum_is_flagged(add: Callable) -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        normed = m.bn(m.conv(x))
        return F.relu_(add(normed, x))

    model = FunctionModel(forward, conv=conv(), bn=nn.BatchNorm2d(3))

    chain = find_chain(trace(model, PIXELS), "conv")

    assert chain == Chain("bn", "relu", through_sum=True, exclusive=True)


def test_what_does_nothing_in_evaluation_is_not_in_the_graph() -> None:
    model = nn.Sequential(
        conv(),
        nn.Identity(),
        nn.BatchNorm2d(3),
        nn.Dropout(0.5),
        nn.ReLU(),
        nn.Sequential(),
    )

    graph = trace(model, PIXELS)

    assert find_chain(graph, "0") == Chain("2", "relu", exclusive=True)
    assert graph.calls("0")[0].path == ()


def test_pooling_and_constants_are_passed_and_named() -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        largest = F.max_pool2d(m.conv(x), 2)
        return F.relu(largest * 0.5)

    model = FunctionModel(forward, conv=conv())

    (call,) = trace(model, PIXELS).calls("conv")

    assert call.activation is not None
    assert call.path == ("max_pool2d", "mul")


def test_changes_in_place_are_seen_from_inside_inference_mode() -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        z = m.bn(m.conv(x))
        return z.add_(x).relu_()

    model = FunctionModel(forward, conv=conv(), bn=nn.BatchNorm2d(3))

    with torch.inference_mode():
        graph = trace(model, PIXELS)
        assert torch.is_inference_mode_enabled()

    chain = find_chain(graph, "conv")
    assert chain == Chain("bn", "relu", through_sum=True, exclusive=True)


def test_compiled_model_is_run_eagerly() -> None:
    model = torch.compile(nn.Sequential(nn.Linear(3, 3), nn.ReLU()))

    graph = trace(model, torch.zeros(1, 3))

    assert find_chain(graph, "_orig_mod.0").activation == "relu"


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
    assert graph.first == ("0",)
    assert graph.outputs == ("9",)
    assert output_layers(model) == ("9",)
    assert find_chain(graph, "2") == Chain("3", "relu", exclusive=True)
    assert find_chain(graph, "6") == Chain("7", "tanh", exclusive=True)


# Whether a norm is its layer's alone.


def layer_read_twice(m: nn.Module, x: Tensor) -> Tensor:
    z = m.conv(x)
    return m.bn(z) + z


def layer_is_an_output(m: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    z = m.conv(x)
    return z, m.bn(z)


def norm_shared_by_two_layers(m: nn.Module, x: Tensor) -> Tensor:
    hidden = m.bn(m.conv(x))
    return m.bn(m.other(hidden))


def one_call_without_the_norm(m: nn.Module, x: Tensor) -> Tensor:
    hidden = m.bn(m.conv(x))
    return m.conv(hidden)


def behind_a_pooling(m: nn.Module, x: Tensor) -> Tensor:
    return m.bn(F.max_pool2d(m.conv(x), 2))


def changed_in_another_view(m: nn.Module, x: Tensor) -> Tensor:
    z = m.conv(x)
    z[:, :1].relu_()
    return m.bn(z)


def both_called_twice(m: nn.Module, x: Tensor) -> Tensor:
    hidden = m.bn(m.conv(x))
    return m.bn(m.conv(hidden))


def only_the_shape_is_read(m: nn.Module, x: Tensor) -> Tensor:
    z = m.conv(x)
    return m.bn(z) + torch.zeros_like(z) + z.shape[0]


SHARED = [
    layer_read_twice,
    layer_is_an_output,
    norm_shared_by_two_layers,
    one_call_without_the_norm,
    behind_a_pooling,
    changed_in_another_view,
]


def is_exclusive(forward: Callable) -> bool:
    """Return whether the norm after the layer `conv` is that layer's alone."""
    model = FunctionModel(forward, conv=conv(), bn=nn.BatchNorm2d(3), other=conv())
    _, exclusive = trace(model, PIXELS).norm_after("conv")
    return exclusive


@pytest.mark.parametrize("forward", [both_called_twice, only_the_shape_is_read])
def test_a_norm_is_exclusive_if_it_reads_one_layer_and_nothing_else_does(
    forward: Callable,
) -> None:
    assert is_exclusive(forward)


@pytest.mark.parametrize("forward", SHARED)
def test_a_norm_is_not_exclusive_if_layer_or_norm_has_another_use(forward: Callable) -> None:
    assert not is_exclusive(forward)


@pytest.mark.parametrize(("shape", "exclusive"), [((4, 6), True), ((4, 6, 6), False)])
def test_norm_counts_channels_where_the_linear_layer_has_them(
    shape: tuple[int, ...], exclusive: bool
) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))

    norm, is_alone = trace(model, torch.zeros(shape)).norm_after("0")

    assert norm is not None
    assert is_alone == exclusive


# Where data enters and ends.


def test_a_model_may_have_several_inputs_and_heads() -> None:
    def forward(m: nn.Module, x: Tensor, *, y: Tensor) -> dict:
        both = torch.cat([m.a(x), m.b(y)])
        hidden = F.relu(m.body(both))
        return {"left": m.left(hidden).softmax(-1), "rest": [m.right(hidden)]}

    layers = {name: nn.Linear(4, 4) for name in ("a", "b", "body", "left", "right")}
    model = FunctionModel(forward, **layers)

    graph = trace(model, (torch.zeros(1, 4),), {"y": torch.zeros(1, 4)})

    assert graph.first == ("a", "b")
    assert graph.outputs == ("left", "right")


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

    assert graph.first == ()
    assert graph.outputs == ("head",)


@pytest.mark.parametrize("product", [F.linear, lambda x, w: x @ w.t(), lambda x, w: x @ w.T])
def test_tied_weight_in_a_function_is_a_layer_of_its_owner(product: Callable) -> None:
    model = FunctionModel(lambda m, i: product(m.fc(m.emb(i)), m.emb.weight), fc=nn.Linear(4, 4))
    model.emb = nn.Embedding(9, 4)

    graph = trace(model, torch.zeros(1, 3, dtype=torch.long))

    assert graph.outputs == ("emb",)
    assert graph.layers == ("fc", "emb")


def test_a_subclass_of_linear_is_a_layer_whatever_its_name() -> None:
    class NormInitLinear(nn.Linear):
        pass

    graph = trace(nn.Sequential(NormInitLinear(3, 3)), torch.zeros(1, 3))

    assert graph.outputs == ("0",)


def test_bytes_are_images() -> None:
    model = FunctionModel(lambda m, x: m.conv(x / 255), conv=nn.Conv2d(3, 4, 1))

    graph = trace(model, PIXELS.byte())

    assert graph.first == ("conv",)


def test_an_unused_layer_is_not_in_the_graph() -> None:
    model = FunctionModel(lambda m, x: m.conv(x), conv=conv(), spare=conv())

    graph = trace(model, PIXELS)

    assert graph.layers == ("conv",)
    with pytest.raises(ValueError, match="'spare' ran; these did: conv"):
        graph.norm_after("spare")


def test_without_a_trace_the_last_registered_layer_is_the_output() -> None:
    model = FunctionModel(lambda m, x: m.conv(x), conv=conv(), spare=conv())

    assert output_layers(model) == ("spare",)


def test_a_layer_alone_is_no_output_layer() -> None:
    assert output_layers(nn.Linear(2, 2)) == ()


# The model is left as it was.


def has_hooks(model: nn.Module) -> bool:
    return any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


class Counting(nn.Module):
    """Changes one buffer in place in each call, and replaces another."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("replaced", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.replaced = torch.rand(())
        return x


@pytest.fixture
def counting_model() -> nn.Module:
    """Return a model in training mode, its norm in evaluation mode."""
    norm = nn.BatchNorm2d(3).eval()
    model = nn.Sequential(conv(), norm, nn.Dropout(), Counting(), nn.ReLU()).train()
    model[1].eval()
    return model


def test_parameters_and_buffers_are_left_alone(counting_model: nn.Module) -> None:
    before = copy.deepcopy(counting_model.state_dict())
    tensors = list(counting_model.state_dict(keep_vars=True).values())

    trace(counting_model, PIXELS)

    assert_close(counting_model.state_dict(), before, rtol=0, atol=0)
    tensors_after = counting_model.state_dict(keep_vars=True).values()
    assert list(map(id, tensors_after)) == list(map(id, tensors))


def test_training_flags_are_left_alone(counting_model: nn.Module) -> None:
    before = [module.training for module in counting_model.modules()]

    trace(counting_model, PIXELS)

    assert [module.training for module in counting_model.modules()] == before


def test_the_random_state_is_left_alone(counting_model: nn.Module) -> None:
    before = torch.get_rng_state()

    trace(counting_model, PIXELS)

    assert torch.equal(torch.get_rng_state(), before)


def test_no_hooks_are_left_behind(counting_model: nn.Module) -> None:
    trace(counting_model, PIXELS)

    assert not has_hooks(counting_model)


def test_attributes_that_are_no_buffers_are_left_alone() -> None:
    def forward(m: FunctionModel, x: Tensor) -> Tensor:
        m.count += 1
        m.new = m.count
        m.mean.add_(x.mean())
        m.replaced = x.mean()
        return m.conv(x)

    model = FunctionModel(forward, conv=conv())
    model.count = 0
    model.mean = torch.zeros(())
    model.replaced = torch.zeros(())
    before = dict(vars(model))

    trace(model, PIXELS)

    assert vars(model) == before
    assert model.mean == 0


def test_a_list_that_two_modules_share_is_left_alone() -> None:
    shared: list = []

    def forward(m: FunctionModel, x: Tensor) -> Tensor:
        m.seen.append(1)
        m.conv.seen.append(1)
        assert shared == [1, 1]
        return m.conv(x)

    model = FunctionModel(forward, conv=conv())
    model.seen = shared
    model.conv.seen = shared

    trace(model, PIXELS)

    assert model.seen is shared
    assert model.conv.seen is shared
    assert shared == []


def test_the_forward_finds_its_parameters_in_lists() -> None:
    def forward(m: FunctionModel, x: Tensor) -> Tensor:
        assert m.tied[0] is m.conv.weight
        return m.conv(x)

    model = FunctionModel(forward, conv=conv())
    model.tied = [model.conv.weight]

    trace(model, PIXELS)

    assert model.tied[0] is model.conv.weight


def test_random_states_of_numpy_and_python_are_left_alone() -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        noise = np.random.rand() + random.random()
        return m.conv(x) + noise

    model = FunctionModel(forward, conv=conv())
    numpy_state = str(np.random.get_state())
    python_state = random.getstate()

    trace(model, PIXELS)

    assert str(np.random.get_state()) == numpy_state
    assert random.getstate() == python_state


def test_tensors_in_lists_and_dicts_are_left_alone() -> None:
    def forward(m: FunctionModel, x: Tensor) -> Tensor:
        m.means[0].add_(1)
        m.sums["own"].add_(1)
        return m.conv(x)

    model = FunctionModel(forward, conv=conv())
    model.means = [torch.zeros(2)]
    model.sums = {"own": torch.zeros(2)}

    trace(model, PIXELS)

    assert not model.means[0].any()
    assert not model.sums["own"].any()


def test_arrays_and_computed_buffers_are_left_alone() -> None:
    def forward(m: FunctionModel, x: Tensor) -> Tensor:
        m.array += 1
        m.computed.add_(1)
        return m.conv(x)

    model = FunctionModel(forward, conv=conv())
    model.array = np.zeros(2)
    model.register_buffer("computed", model.conv.weight.mean(0) * 0)

    trace(model, PIXELS)

    assert not model.array.any()
    assert not model.computed.any()


def test_attributes_that_cannot_be_copied_are_allowed() -> None:
    model = nn.Sequential(conv())
    model.odd = [np.array([threading.Lock()], dtype=object), dict]

    assert trace(model, PIXELS).layers == ("0",)


def test_model_is_left_alone_when_its_forward_fails() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(5, 6))

    with pytest.raises(ValueError, match="does not run on these inputs"):
        trace(model, torch.zeros(1, 3))

    assert all(module.training for module in model.modules())
    assert not has_hooks(model)
    assert torch.is_grad_enabled()


# What cannot be traced.


def test_lazy_modules_are_refused() -> None:
    model = nn.Sequential(nn.LazyLinear(3))

    with pytest.raises(ValueError, match="lazy"):
        trace(model, torch.zeros(1, 3))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*")
def test_scripted_modules_are_refused() -> None:
    scripted = torch.jit.script(nn.Sequential(nn.Linear(3, 3), nn.ReLU()))
    model = nn.Sequential(nn.Linear(3, 3), scripted)

    with pytest.raises(ValueError, match="scripted"):
        trace(model, torch.zeros(1, 3))


WITHOUT_LABELS = r"\(x, y\) give x alone"
IN_A_TUPLE = r"give \(\{\.\.\.\},\)"


@pytest.mark.parametrize(
    ("inputs", "advice"),
    [
        ((PIXELS, 1), WITHOUT_LABELS),
        ([PIXELS, 1], WITHOUT_LABELS),
        ((), WITHOUT_LABELS),
        ({"x": PIXELS, "labels": 1}, IN_A_TUPLE),
    ],
    ids=["a tuple with labels", "a list with labels", "nothing", "a dict with labels"],
)
def test_inputs_that_do_not_fit_are_refused_with_advice(inputs: object, advice: str) -> None:
    """A DataLoader yields labels, too."""
    with pytest.raises(ValueError, match=advice):
        trace(nn.Sequential(nn.Flatten()), inputs)
