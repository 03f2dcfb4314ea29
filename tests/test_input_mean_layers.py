"""Layers with plain weights and their input's mean, and the conversion that makes them."""

import copy

import pytest
import torch
import torch.nn.functional as F
from model_checks import assert_same_state, copy_state, has_batchnorm, has_geoparam_modules
from same_training import check_same_training
from torch import Tensor, nn
from torch.testing import assert_close

import geoparam as gp
from geoparam import centred_map
from geoparam.centred_map import shift_bias
from geoparam.checkpoints import fold_state_dict
from geoparam.input_mean_layers import InputMeanConv2d, adopt

DOUBLE = {"dtype": torch.float64}
PLAIN_WEIGHTS = {"norm": "imn", "weights": "plain"}

IMAGE = (2, 4, 7, 6)
LAYERS_AND_SHAPES = {
    "linear": (nn.Linear(4, 6), (5, 4)),
    "tokens": (nn.Linear(4, 6), (2, 5, 4)),
    "1d": (nn.Conv1d(4, 6, 3), (2, 4, 7)),
    "grouped": (nn.Conv2d(4, 6, 3, groups=2), IMAGE),
    "depthwise": (nn.Conv2d(4, 4, 3, groups=4, bias=False), IMAGE),
    "strided": (nn.Conv2d(4, 6, 3, stride=2), IMAGE),
    "valid": (nn.Conv2d(4, 6, 3, padding="valid"), IMAGE),
    "1x1": (nn.Conv2d(4, 6, 1), IMAGE),
    "1x1, no bias": (nn.Conv2d(4, 6, 1, bias=False), IMAGE),
    "reflect": (nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"), IMAGE),
    "3d": (nn.Conv3d(4, 6, 2), (2, 4, 3, 4, 3)),
    "3d, one image of depth 1": (nn.Conv3d(4, 6, 1), (4, 1, 5, 4)),
}
every_layer = pytest.mark.parametrize(
    ("plain", "shape"), LAYERS_AND_SHAPES.values(), ids=LAYERS_AND_SHAPES
)


@pytest.fixture(params=[True, False], ids=["own", "formula"])
def own_backward(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether convolutions may use their own backward pass, or autograd's of the formula."""
    if not request.param:
        monkeypatch.setattr(centred_map, "_has_own_backward", lambda *_: False)
    return request.param


# The map and its gradients.


@every_layer
def test_training_is_that_of_a_centred_input(
    plain: nn.Module, shape: tuple[int, ...], own_backward: bool
) -> None:
    spatial_dims = len(getattr(plain, "kernel_size", ()))
    plain = copy.deepcopy(plain).double()
    layer = adopt(copy.deepcopy(plain))
    norm = gp.InputMeanNorm(4, dim=-1 - spatial_dims, **DOUBLE)
    x = torch.randn(shape, **DOUBLE) + 3

    check_same_training(layer, nn.Sequential(norm, plain), x)


CONVOLUTIONS_AND_SHAPES = {
    "1d": (gp.InputMeanConv1d(4, 3, 3, stride=2, padding=1), (2, 4, 7)),
    "no bias": (gp.InputMeanConv2d(4, 3, 3, bias=False), (2, 4, 4, 5)),
    "dilated": (gp.InputMeanConv2d(4, 3, (2, 3), (1, 2), (1, 0), (2, 1)), (2, 4, 4, 5)),
    "1x1": (gp.InputMeanConv2d(4, 3, 1), (2, 4, 2, 3)),
    "3d": (gp.InputMeanConv3d(2, 3, 2, padding=1), (2, 2, 2, 1, 2)),
}
every_convolution = pytest.mark.parametrize(
    ("layer", "shape"), CONVOLUTIONS_AND_SHAPES.values(), ids=CONVOLUTIONS_AND_SHAPES
)


@every_convolution
def test_the_convolution_and_its_two_derivatives_are_those_of_the_formula(
    layer: nn.Module, shape: tuple[int, ...]
) -> None:
    layer.double()

    def compute(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return centred_map.map_centred(layer, layer, x, weight, bias)

    def formula(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        mean = x.mean([0, *range(2, x.ndim)])
        return layer._map(x, weight, shift_bias(bias, weight, mean))

    tensors = [torch.randn(shape, **DOUBLE), *layer.parameters()]
    inputs = tuple(tensor.detach().clone().requires_grad_() for tensor in tensors)

    output = compute(*inputs)
    assert type(output.grad_fn).__name__ == "_CentredConvBackward"
    assert_close(output, formula(*inputs))
    assert torch.autograd.gradcheck(compute, inputs)
    assert torch.autograd.gradgradcheck(compute, inputs)


def test_second_derivatives_where_an_input_is_computed_from_a_weight() -> None:
    layer = gp.InputMeanConv1d(3, 3, 1, **DOUBLE)
    x = torch.randn(2, 3, 4, **DOUBLE)

    def apply_twice(weight: Tensor) -> Tensor:
        y = centred_map.map_centred(layer, layer, x, weight, layer.bias)
        return centred_map.map_centred(layer, layer, y.tanh(), weight, layer.bias)

    weight = layer.weight.detach().clone().requires_grad_()
    assert torch.autograd.gradgradcheck(apply_twice, weight)


@pytest.mark.parametrize("frozen", [["weight"], ["bias"], ["weight", "bias"]])
def test_only_what_learns_gets_a_gradient(frozen: list[str]) -> None:
    layer = gp.InputMeanConv2d(4, 3, 3)
    for name in frozen:
        layer.get_parameter(name).requires_grad_(False)
    x = torch.randn(2, 4, 5, 5, requires_grad=True)

    layer(x).square().sum().backward()

    assert x.grad is not None
    for name, parameter in layer.named_parameters():
        assert (parameter.grad is None) == (name in frozen)


class HalvedMean(gp.InputMeanConv2d):
    def mean(self, x: Tensor) -> Tensor:
        return super().mean(x) / 2


class DoubledConv(gp.InputMeanConv2d):
    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return 2 * super()._conv_forward(x, weight, bias)


def test_an_overridden_mean_is_used() -> None:
    layer = HalvedMean(4, 3, 3)
    x = torch.randn(2, 4, 5, 5) + 3

    shifted = shift_bias(layer.bias, layer.weight, x.mean((0, 2, 3)) / 2)
    assert_close(layer(x), F.conv2d(x, layer.weight, shifted))


def test_an_overridden_convolution_is_used() -> None:
    layer = gp.InputMeanConv2d(4, 3, 3)
    doubled = DoubledConv(4, 3, 3)
    doubled.load_state_dict(layer.state_dict())
    x = torch.randn(2, 4, 5, 5) + 3

    assert_close(doubled(x), 2 * layer(x))


def test_an_in_place_relu_copies_nothing() -> None:
    x = torch.randn(2, 4, 3, 3).to(memory_format=torch.channels_last).requires_grad_()

    z = gp.InputMeanConv2d(4, 6, 1)(x)

    assert not z._is_view()
    assert z.is_contiguous(memory_format=torch.channels_last)
    assert "Relu" in type(z.relu_().grad_fn).__name__  # CopySlices on a view


@pytest.mark.parametrize(
    "layer",
    [gp.InputMeanConv2d(4, 6, 3), gp.GmPConv2d(4, 6, 3, input_norm=True)],
    ids=["plain weights", "geometric weights"],
)
def test_the_gradient_inside_and_outside_of_autocast_is_the_same(layer: nn.Module) -> None:
    x = torch.randn(2, 4, 5, 5, requires_grad=True)

    with torch.autocast("cpu", torch.bfloat16):
        loss = layer(x).square().sum()
    outside = torch.autograd.grad(loss, list(layer.parameters()))
    with torch.autocast("cpu", torch.bfloat16):
        loss = layer(x).square().sum()
        inside = torch.autograd.grad(loss, list(layer.parameters()))

    assert_close(inside, outside, rtol=0, atol=0)


def test_another_type_than_the_weights_is_refused_by_torch(own_backward: bool) -> None:
    x = torch.randn(2, 4, 5, 5, dtype=torch.float64, requires_grad=True)

    with pytest.raises(RuntimeError, match="dtype|type"):
        gp.InputMeanConv2d(4, 6, 3)(x)


def test_autocast_leaves_float64_alone(own_backward: bool) -> None:
    x = torch.randn(2, 4, 5, 5, dtype=torch.float64, requires_grad=True)

    with torch.autocast("cpu", torch.bfloat16):
        output = gp.InputMeanConv2d(4, 6, 3).double()(x)

    assert output.dtype == torch.float64


class Dropped(nn.Module):
    """A parametrization that gives another weight in each call."""

    def forward(self, weight: Tensor) -> Tensor:
        return F.dropout(weight, 0.5)


def test_a_parametrization_is_computed_once(own_backward: bool) -> None:
    layer = gp.InputMeanConv2d(4, 6, 1).double()
    nn.utils.parametrize.register_parametrization(layer, "weight", Dropped(), unsafe=True)
    x = torch.randn(5, 4, 3, 3, **DOUBLE, requires_grad=True) + 3

    channel_means = layer(x).mean(dim=(0, 2, 3))

    assert_close(channel_means, layer.bias)


@pytest.mark.parametrize("kernel", [1, 3])
def test_gradients_may_be_batched(kernel: int) -> None:
    layer = gp.InputMeanConv2d(4, 3, kernel, **DOUBLE)
    z = layer(torch.randn(2, 4, 4, 4, **DOUBLE, requires_grad=True))
    output_grads = torch.randn(5, *z.shape, **DOUBLE)

    [batched] = torch.autograd.grad(
        z, layer.weight, output_grads, retain_graph=True, is_grads_batched=True
    )

    one_by_one = [
        torch.autograd.grad(z, layer.weight, output_grad, retain_graph=True)[0]
        for output_grad in output_grads
    ]
    assert_close(batched, torch.stack(one_by_one))


def test_a_dynamic_batch_is_exported_in_training() -> None:
    layer = gp.InputMeanConv2d(4, 6, 3)
    batch = torch.export.Dim("batch", min=2)

    program = torch.export.export(
        layer, (torch.randn(2, 4, 5, 5),), dynamic_shapes=({0: batch},), strict=False
    )

    assert program.module()(torch.randn(7, 4, 5, 5)).shape == (7, 6, 3, 3)


def test_zeros_are_padded_to_the_input_as_it_is() -> None:
    layer = adopt(nn.Conv2d(4, 6, 3, padding=1, **DOUBLE))
    x = torch.randn(2, 4, 7, 6, **DOUBLE) + 3

    difference = layer(x) - F.conv2d(x, layer.weight, padding=1)

    one_per_channel = difference[:1, :, :1, :1]
    assert_close(difference, one_per_channel.expand_as(difference))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_layers_of_half_types_keep_their_type(dtype: torch.dtype) -> None:
    layer = gp.InputMeanConv2d(4, 6, 3).to(dtype)
    x = torch.randn(2, 4, 6, 6, dtype=dtype) + 1

    assert layer(x).dtype == dtype


def test_autocast_is_near_float32() -> None:
    layer = gp.InputMeanConv2d(4, 6, 3)
    x = torch.randn(2, 4, 6, 6) + 1
    expected = layer(x)

    with torch.autocast("cpu", torch.bfloat16):
        output = layer(x)

    assert output.dtype == torch.bfloat16
    assert_close(output.float(), expected, atol=0.05, rtol=0.05)


# The layer made from one of torch's.


def test_an_adopted_layer_has_torchs_parameters_options_and_hooks() -> None:
    conv = nn.Conv2d(4, 6, 3, stride=2, bias=False).eval()
    conv.register_forward_hook(lambda *_: None)

    layer = adopt(conv, momentum=0.3)

    assert isinstance(layer, nn.Conv2d)
    assert layer.weight is conv.weight
    assert layer.stride == (2, 2)
    assert not layer.training
    assert len(layer._forward_hooks) == 1


def test_an_adopted_layer_adds_a_bias_and_a_running_mean() -> None:
    layer = adopt(nn.Conv2d(4, 6, 3, bias=False), momentum=0.3)

    assert list(layer.state_dict()) == ["weight", "bias", "running_mean", "num_batches_tracked"]
    assert layer.momentum == 0.3


def test_adopting_a_layer_leaves_the_old_one_as_it_was() -> None:
    conv = nn.Conv2d(4, 6, 3, bias=False)

    adopt(conv)

    assert conv.bias is None
    assert not conv._buffers


# Whole models.


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Convolutions that are padded, grouped, strided and reflecting, trained for a few batches."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2, padding=1, groups=4),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 6, 3, padding=1, padding_mode="reflect", bias=False),
        nn.BatchNorm2d(6, affine=False),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 7),
        nn.BatchNorm1d(7),
        nn.ReLU(),
        nn.Linear(7, 3),
    )
    model.to(dtype)
    for _ in range(5):
        model(images(dtype))
    for index in (1, 4, 12):
        nn.init.normal_(model[index].weight)
        nn.init.normal_(model[index].bias)
    return model.eval()


def images(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(6, 3, 8, 8, dtype=dtype) + 1


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 3e-6), (torch.float64, 1e-12)])
def test_conversion_keeps_the_function(dtype: torch.dtype, bound: float) -> None:
    model = network(dtype)
    original = copy.deepcopy(model)
    x = images(dtype)

    gp.convert_(model, **PLAIN_WEIGHTS, pretrained=True, example_inputs=(x,))

    assert gp.verify(original, model, x) < bound
    assert not has_batchnorm(model)


def test_conversion_changes_all_layers_but_the_first_and_the_last() -> None:
    model = network()

    gp.convert_(model, **PLAIN_WEIGHTS, pretrained=True, example_inputs=images())

    assert type(model[0]) is nn.Conv2d  # the first layer sees data
    assert type(model[3]) is gp.InputMeanConv2d
    assert type(model[11]) is gp.InputMeanLinear


def test_conversion_keeps_the_parameters_and_their_names() -> None:
    model = network()
    before = dict(model.named_parameters())

    gp.convert_(model, **PLAIN_WEIGHTS, pretrained=True, example_inputs=images())

    after = dict(model.named_parameters())
    kept = before.keys() & after.keys()
    assert kept >= {"0.weight", "3.weight", "6.weight", "11.weight", "14.weight", "14.bias"}
    for name in kept:
        assert after[name] is before[name]


def test_conversion_adds_biases_and_running_means_alone() -> None:
    model = network()
    before = dict(model.named_parameters())

    gp.convert_(model, **PLAIN_WEIGHTS, pretrained=True, example_inputs=images())

    added = model.state_dict().keys() - before.keys()
    last_words = {name.rpartition(".")[2] for name in added}
    assert last_words == {"bias", "running_mean", "num_batches_tracked"}


def train(model: nn.Module) -> None:
    """Train for three steps, and leave the model in evaluation mode."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model.train()
    for _ in range(3):
        optimizer.zero_grad()
        model(images()).square().mean().backward()
        optimizer.step()
    model.eval()


every_init = pytest.mark.parametrize("init", [None, "glorot", "sphere"])


@every_init
def test_folding_gives_a_plain_model(init: str | None) -> None:
    model = network()
    gp.convert_(model, **PLAIN_WEIGHTS, init=init, example_inputs=images())
    train(model)

    plain = gp.fold_(copy.deepcopy(model))

    assert gp.verify(model, plain, images()) == 0
    assert not has_geoparam_modules(plain)
    assert not has_batchnorm(plain)


@every_init
def test_folding_with_restored_norms_gives_the_originals_keys(init: str | None) -> None:
    model = network()
    original = copy.deepcopy(model)
    x = images()
    gp.convert_(model, **PLAIN_WEIGHTS, init=init, example_inputs=x)
    train(model)

    restored = gp.fold_(copy.deepcopy(model), restore_norm=True)

    assert gp.verify(model, restored, x) < 1e-5
    assert list(restored.state_dict()) == list(original.state_dict())
    restored.load_state_dict(original.state_dict())
    assert gp.verify(original, restored, x) == 0


def test_geometric_weights_can_be_folded_without_their_norms() -> None:
    model = network()
    x = images()
    gp.convert_(model, norm="imn", pretrained=True, example_inputs=x)

    plain = gp.fold_(copy.deepcopy(model), restore_norm=False)

    assert gp.verify(model, plain, x) < 1e-5
    assert not has_batchnorm(plain)
    assert type(plain[1]) is nn.Identity


@pytest.mark.parametrize("init", ["sphere", "glorot"])
def test_initialisation_goes_into_the_same_parameters(init: str) -> None:
    model = network()
    weight = model[3].weight
    before = weight.detach().clone()

    gp.convert_(model, **PLAIN_WEIGHTS, init=init, momentum=0.3, example_inputs=images())

    assert model[3].weight is weight
    assert not torch.equal(weight, before)
    assert not model[3].bias.any()
    assert model[3].momentum == 0.3


def test_sphere_initialisation_gives_rows_of_length_one() -> None:
    model = network()

    gp.convert_(model, **PLAIN_WEIGHTS, init="sphere", example_inputs=images())

    lengths = model[3].weight.flatten(1).norm(dim=1)
    assert_close(lengths, torch.ones(8))


class Regularised(nn.Module):
    """A network that reads a weight in its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3)
        self.conv = nn.Conv2d(4, 4, 3)
        self.bn = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn(self.conv(self.first(x).relu())).relu()
        return self.head(y.mean(dim=(2, 3))) + self.conv.weight.sum()


def test_a_model_that_reads_a_weight_is_put_back() -> None:
    model = Regularised().eval()
    nn.init.constant_(model.bn.weight, 3)
    before = copy_state(model)

    with pytest.raises(ValueError, match="the converted model differs"):
        gp.convert_(model, **PLAIN_WEIGHTS, pretrained=True, example_inputs=images())

    assert type(model.conv) is nn.Conv2d
    assert_same_state(model, before)


def test_layers_without_a_norm_are_left() -> None:
    model = nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)
    ).eval()

    text = str(gp.plan(model, **PLAIN_WEIGHTS, example_inputs=torch.randn(5, 4)))

    assert "1 of 3 layers with plain weights, " in text
    assert "3: Linear (no BatchNorm follows it directly)" in text


def test_a_file_folds_as_the_model_does() -> None:
    model = network()
    x = images()
    gp.convert_(model, **PLAIN_WEIGHTS, example_inputs=x)

    state = fold_state_dict(model.state_dict())

    folded = gp.fold_(copy.deepcopy(model))
    assert state.keys() == folded.state_dict().keys()
    folded.load_state_dict(state)
    assert gp.verify(model, folded, x) < 1e-5


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_jit_traces_a_layer() -> None:
    x = torch.randn(2, 3, 5, 5)
    layer = InputMeanConv2d(3, 4, 3).eval()

    traced = torch.jit.trace(layer, x)

    assert_close(traced(x), layer(x))


@pytest.mark.parametrize("kind", [InputMeanConv2d, gp.GmPConv2d])
def test_layers_run_on_meta_tensors(kind: type[nn.Module]) -> None:
    layer = kind(3, 4, 3, device="meta")

    output = layer(torch.randn(2, 3, 5, 5, device="meta"))

    assert output.is_meta
    assert output.shape == (2, 4, 3, 3)


def test_peft_refuses_to_adapt_a_layer_whose_bias_depends_on_its_weight() -> None:
    peft = pytest.importorskip("peft")
    model = nn.Sequential(gp.InputMeanLinear(6, 9), nn.ReLU(), nn.Linear(9, 2))

    with pytest.raises(ValueError, match="Fold the model first"):
        peft.get_peft_model(model, peft.LoraConfig(target_modules=["0"]))


WRONG_WEIGHTS = [
    ({"weights": "plain"}, "GeometricOptimizer alone"),
    ({"weights": "flat"}, "'geometric' or 'plain'"),
    ({**PLAIN_WEIGHTS, "init": "he"}, "init is None or one of"),
]
OPTIONS_OF_COORDINATES = [
    ({**PLAIN_WEIGHTS, "coordinates": "angles"}, "none are"),
    ({**PLAIN_WEIGHTS, "natural": True}, "none are"),
]


@pytest.mark.parametrize(("options", "message"), WRONG_WEIGHTS)
def test_wrong_options_are_refused_by_the_plan(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gp.plan(network(), example_inputs=images(), **options)


@pytest.mark.parametrize(("options", "message"), WRONG_WEIGHTS + OPTIONS_OF_COORDINATES)
def test_wrong_options_are_refused_by_the_conversion(options: dict, message: str) -> None:
    model = network()
    before = copy_state(model)

    with pytest.raises(ValueError, match=message):
        gp.convert_(model, example_inputs=images(), **options)

    assert_same_state(model, before)


@pytest.mark.compile
@pytest.mark.parametrize("autocast", [False, True])
def test_compiled_training_is_one_graph_with_the_same_numbers(autocast: bool) -> None:
    model = network()
    x = images()
    gp.convert_(model, **PLAIN_WEIGHTS, pretrained=True, example_inputs=x)
    model.train()
    twin = copy.deepcopy(model)
    torch.compiler.reset()
    compiled = torch.compile(twin, backend="aot_eager", fullgraph=True)

    for network_or_compiled in (model, compiled):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            network_or_compiled(x).float().square().mean().backward()

    for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert_close(other.grad, parameter.grad)
    assert_close([*twin.buffers()], [*model.buffers()])


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_scripting_says_to_fold_first() -> None:
    with pytest.raises(ValueError, match=r"Fold the model first .* torch.jit.script cannot"):
        torch.jit.script(nn.Sequential(gp.InputMeanLinear(3, 4)))
