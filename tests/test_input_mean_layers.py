"""Layers with plain weights and their input's mean, and the conversion that makes them."""

import copy

import pytest
import torch
import torch.nn.functional as F
from same_training import check_same_training
from torch import Tensor, nn

import geoparam as gp
from geoparam import centred_map
from geoparam.centred_map import shift_bias
from geoparam.checkpoints import fold_state_dict
from geoparam.input_mean_layers import InputMeanConv2d, adopt

DOUBLE = {"dtype": torch.float64}
LAYERS = {
    "linear": (nn.Linear(4, 6, **DOUBLE), (5, 4)),
    "tokens": (nn.Linear(4, 6, **DOUBLE), (2, 5, 4)),
    "1d": (nn.Conv1d(4, 6, 3, **DOUBLE), (2, 4, 7)),
    "grouped": (nn.Conv2d(4, 6, 3, groups=2, **DOUBLE), (2, 4, 7, 6)),
    "depthwise": (nn.Conv2d(4, 4, 3, groups=4, bias=False, **DOUBLE), (2, 4, 7, 6)),
    "strided": (nn.Conv2d(4, 6, 3, stride=2, **DOUBLE), (2, 4, 7, 6)),
    "valid": (nn.Conv2d(4, 6, 3, padding="valid", **DOUBLE), (2, 4, 7, 6)),
    "1x1": (nn.Conv2d(4, 6, 1, **DOUBLE), (2, 4, 7, 6)),
    "1x1, no bias": (nn.Conv2d(4, 6, 1, bias=False, **DOUBLE), (2, 4, 7, 6)),
    "reflect": (nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect", **DOUBLE), (2, 4, 7, 6)),
    "3d": (nn.Conv3d(4, 6, 2, **DOUBLE), (2, 4, 3, 4, 3)),
    "3d, one image of depth 1": (nn.Conv3d(4, 6, 1, **DOUBLE), (4, 1, 5, 4)),
}


@pytest.fixture(params=[True, False], ids=["own", "formula"])
def own_backward(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether convolutions may use their own backward pass, or autograd's of the formula."""
    if not request.param:
        monkeypatch.setattr(centred_map, "_has_own_backward", lambda *_: False)
    return request.param


@pytest.mark.parametrize(("plain", "shape"), LAYERS.values(), ids=LAYERS)
def test_training_is_that_of_a_centred_input(
    plain: nn.Module, shape: tuple[int, ...], own_backward: bool
) -> None:
    layer = adopt(copy.deepcopy(plain))
    dim = -1 - len(getattr(plain, "kernel_size", ()))
    pair = nn.Sequential(gp.InputMeanNorm(4, dim=dim, **DOUBLE), copy.deepcopy(plain))
    x = torch.randn(shape, **DOUBLE) + 3
    check_same_training(layer, pair, x)


CONVOLUTIONS = {
    "1d": (gp.InputMeanConv1d(4, 3, 3, stride=2, padding=1, **DOUBLE), (2, 4, 7)),
    "no bias": (gp.InputMeanConv2d(4, 3, 3, bias=False, **DOUBLE), (2, 4, 4, 5)),
    "dilated": (gp.InputMeanConv2d(4, 3, (2, 3), (1, 2), (1, 0), (2, 1), **DOUBLE), (2, 4, 4, 5)),
    "1x1": (gp.InputMeanConv2d(4, 3, 1, **DOUBLE), (2, 4, 2, 3)),
    "3d": (gp.InputMeanConv3d(2, 3, 2, padding=1, **DOUBLE), (2, 2, 2, 1, 2)),
}


@pytest.mark.parametrize(("layer", "shape"), CONVOLUTIONS.values(), ids=CONVOLUTIONS)
def test_a_convolution_and_its_two_derivatives(layer: nn.Module, shape: tuple[int, ...]) -> None:
    x, *parameters = torch.randn(shape, **DOUBLE), *layer.parameters()
    inputs = tuple(p.detach().clone().requires_grad_() for p in (x, *parameters))

    def compute(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return centred_map.map_centred(layer, layer, x, weight, bias)

    def formula(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        mean = x.mean([0, *range(2, x.ndim)])
        return layer._map(x, weight, shift_bias(bias, weight, mean))

    assert type(compute(*inputs).grad_fn).__name__ == "_CentredConvBackward"
    torch.testing.assert_close(compute(*inputs), formula(*inputs))
    assert torch.autograd.gradcheck(compute, inputs)
    assert torch.autograd.gradgradcheck(compute, inputs)


def test_second_derivatives_where_an_input_is_computed_from_a_weight() -> None:
    layer = gp.InputMeanConv1d(3, 3, 1, **DOUBLE)
    x = torch.randn(2, 3, 4, **DOUBLE)

    def twice(weight: Tensor) -> Tensor:
        y = centred_map.map_centred(layer, layer, x, weight, layer.bias)
        return centred_map.map_centred(layer, layer, y.tanh(), weight, layer.bias)

    weight = layer.weight.detach().clone().requires_grad_()
    assert torch.autograd.gradgradcheck(twice, weight)


@pytest.mark.parametrize("frozen", [["weight"], ["bias"], ["weight", "bias"]])
def test_only_what_learns_gets_a_gradient(frozen: list[str]) -> None:
    layer = gp.InputMeanConv2d(4, 3, 3)
    for name in frozen:
        getattr(layer, name).requires_grad_(False)
    x = torch.randn(2, 4, 5, 5, requires_grad=True)
    layer(x).square().sum().backward()
    assert x.grad is not None
    assert all((p.grad is None) is (name in frozen) for name, p in layer.named_parameters())


def test_an_overridden_mean_or_convolution_is_used() -> None:
    class Halved(gp.InputMeanConv2d):
        def mean(self, x: Tensor) -> Tensor:
            return super().mean(x) / 2

    class Doubled(gp.InputMeanConv2d):
        def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            return 2 * super()._conv_forward(x, weight, bias)

    x = torch.randn(2, 4, 5, 5) + 3
    layer = gp.InputMeanConv2d(4, 3, 3)
    halved, doubled = Halved(4, 3, 3), Doubled(4, 3, 3)
    halved.load_state_dict(layer.state_dict()), doubled.load_state_dict(layer.state_dict())
    torch.testing.assert_close(doubled(x), 2 * layer(x))
    shifted = shift_bias(layer.bias, layer.weight, x.mean((0, 2, 3)) / 2)
    torch.testing.assert_close(halved(x), F.conv2d(x, layer.weight, shifted))


def test_an_in_place_relu_copies_nothing() -> None:
    x = torch.randn(2, 4, 3, 3).to(memory_format=torch.channels_last)
    z = gp.InputMeanConv2d(4, 6, 1)(x.requires_grad_())
    assert not z._is_view() and z.is_contiguous(memory_format=torch.channels_last)
    assert "Relu" in type(z.relu_().grad_fn).__name__  # CopySlices on a view


@pytest.mark.parametrize("kind", [gp.InputMeanConv2d, gp.GmPConv2d])
def test_the_gradient_inside_and_outside_of_autocast_is_the_same(kind: type[nn.Module]) -> None:
    options = {"input_norm": True} if kind is gp.GmPConv2d else {}
    layer, x = kind(4, 6, 3, **options), torch.randn(2, 4, 5, 5, requires_grad=True)
    gradients = []
    for inside in (False, True):
        with torch.autocast("cpu", torch.bfloat16):
            loss = layer(x).square().sum()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        gradients.append([p.grad for p in layer.parameters()])
        layer.zero_grad()
    assert all(map(torch.equal, *gradients))


def test_another_type_than_the_weights_is_refused_by_torch(own_backward: bool) -> None:
    x = torch.randn(2, 4, 5, 5, dtype=torch.float64, requires_grad=True)
    with pytest.raises(RuntimeError, match="dtype|type"):
        gp.InputMeanConv2d(4, 6, 3)(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert gp.InputMeanConv2d(4, 6, 3).double()(x).dtype == torch.float64


class Dropped(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return F.dropout(weight, 0.5)


def test_a_parametrization_is_computed_once(own_backward: bool) -> None:
    layer = gp.InputMeanConv2d(4, 6, 1).double()
    nn.utils.parametrize.register_parametrization(layer, "weight", Dropped(), unsafe=True)
    z = layer(torch.randn(5, 4, 3, 3, **DOUBLE, requires_grad=True) + 3)
    torch.testing.assert_close(z.mean(dim=(0, 2, 3)), layer.bias)


@pytest.mark.parametrize("kernel", [1, 3])
def test_gradients_may_be_batched(kernel: int) -> None:
    layer, x = gp.InputMeanConv2d(4, 3, kernel, **DOUBLE), torch.randn(2, 4, 4, 4, **DOUBLE)
    z = layer(x.requires_grad_())
    several = torch.randn(5, *z.shape, **DOUBLE)
    [found] = torch.autograd.grad(z, layer.weight, several, True, is_grads_batched=True)
    one_by_one = [torch.autograd.grad(z, layer.weight, g, True)[0] for g in several]
    torch.testing.assert_close(found, torch.stack(one_by_one))


def test_a_dynamic_batch_is_exported_in_training() -> None:
    layer, batch = gp.InputMeanConv2d(4, 6, 3), torch.export.Dim("batch", min=2)
    program = torch.export.export(
        layer, (torch.randn(2, 4, 5, 5),), dynamic_shapes=({0: batch},), strict=False
    )
    assert program.module()(torch.randn(7, 4, 5, 5)).shape == (7, 6, 3, 3)


def test_zeros_are_padded_to_the_input_as_it_is() -> None:
    layer = adopt(nn.Conv2d(4, 6, 3, padding=1, **DOUBLE))
    x = torch.randn(2, 4, 7, 6, **DOUBLE) + 3
    constant = layer(x) - F.conv2d(x, layer.weight, padding=1)
    torch.testing.assert_close(constant, constant[:1, :, :1, :1].expand_as(constant))


def test_the_layer_is_torchs_with_the_same_parameters_and_options() -> None:
    conv = nn.Conv2d(4, 6, 3, stride=2, bias=False).eval()
    handle = conv.register_forward_hook(lambda *_: None)
    layer = adopt(conv, momentum=0.3)
    assert isinstance(layer, nn.Conv2d) and layer.weight is conv.weight and not layer.training
    assert layer.stride == (2, 2) and layer.momentum == 0.3 and len(layer._forward_hooks) == 1
    assert list(layer.state_dict()) == ["weight", "bias", "running_mean", "num_batches_tracked"]
    assert conv.bias is None and not conv._buffers  # the old layer is as it was
    handle.remove()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_and_autocast(dtype: torch.dtype) -> None:
    layer = gp.InputMeanConv2d(4, 6, 3)
    x = torch.randn(2, 4, 6, 6) + 1
    expected = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        found = layer(x)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), expected, atol=0.05, rtol=0.05)
    assert copy.deepcopy(layer).to(dtype)(x.to(dtype)).dtype == dtype


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Convolutions that are padded, grouped, strided and reflecting, trained for a few batches."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2, padding=1, groups=4), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 6, 3, padding=1, padding_mode="reflect", bias=False),
        nn.BatchNorm2d(6, affine=False), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(6, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, 3),
    ).to(dtype)  # fmt: skip
    for _ in range(5):
        model(images(dtype))
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.affine:
                module.weight.normal_(), module.bias.normal_()
    return model.eval()


def images(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(6, 3, 8, 8, dtype=dtype) + 1


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 3e-6), (torch.float64, 1e-12)])
def test_conversion_keeps_the_function_the_parameters_and_their_keys(
    dtype: torch.dtype, bound: float
) -> None:
    model, x = network(dtype), images(dtype)
    original, before = copy.deepcopy(model), dict(model.named_parameters())
    gp.convert_(model, norm="imn", pretrained=True, weights="plain", example_inputs=(x,))
    assert gp.verify(original, model, x) < bound
    after = dict(model.named_parameters())
    kept = [name for name in before if name in after]
    assert all(after[name] is before[name] for name in kept)
    assert {"0.weight", "3.weight", "6.weight", "11.weight", "14.weight", "14.bias"} <= set(kept)
    new = {name.rpartition(".")[2] for name in model.state_dict() if name not in before}
    assert new == {"bias", "running_mean", "num_batches_tracked"}
    assert type(model[0]) is nn.Conv2d  # the first layer sees data
    assert type(model[3]) is gp.InputMeanConv2d and type(model[11]) is gp.InputMeanLinear
    assert not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules())


def trained(model: nn.Module) -> nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        model.train()(images()).square().mean().backward()
        optimizer.step()
    return model.eval()


@pytest.mark.parametrize("init", [None, "glorot", "sphere"])
def test_folding_gives_a_plain_model_and_restored_norms_the_originals_keys(
    init: str | None,
) -> None:
    model, x = network(), images()
    original = copy.deepcopy(model)
    gp.convert_(model, norm="imn", weights="plain", init=init, example_inputs=x)
    trained(model)
    plain = gp.fold_(copy.deepcopy(model))
    assert gp.verify(model, plain, x) == 0
    assert not any(type(m).__module__.startswith("geoparam") for m in plain.modules())
    assert not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in plain.modules())
    restored = gp.fold_(copy.deepcopy(model), restore_norm=True)
    assert gp.verify(model, restored, x) < 1e-5
    assert list(restored.state_dict()) == list(original.state_dict())
    restored.load_state_dict(original.state_dict())
    assert gp.verify(original, restored, x) == 0


def test_geometric_weights_can_be_folded_without_their_norms() -> None:
    model, x = network(), images()
    gp.convert_(model, norm="imn", pretrained=True, example_inputs=x)
    plain = gp.fold_(copy.deepcopy(model), restore_norm=False)
    assert gp.verify(model, plain, x) < 1e-5
    assert not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in plain.modules())
    assert type(plain[1]) is nn.Identity


@pytest.mark.parametrize(("init", "length"), [("sphere", 1.0), ("glorot", None)])
def test_initialisation_goes_into_the_same_parameters(init: str, length: float | None) -> None:
    model, x = network(), images()
    weight, before = model[3].weight, model[3].weight.detach().clone()
    gp.convert_(model, norm="imn", weights="plain", init=init, momentum=0.3, example_inputs=x)
    assert model[3].weight is weight and not torch.equal(weight, before)
    assert model[3].momentum == 0.3 and not model[3].bias.any()
    if length is not None:
        torch.testing.assert_close(weight.flatten(1).norm(dim=1), torch.full((8,), length))


def test_a_model_that_reads_a_weight_is_put_back() -> None:
    class Regularised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.conv = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)
            self.bn, self.head = nn.BatchNorm2d(4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            y = self.bn(self.conv(self.first(x).relu())).relu().mean(dim=(2, 3))
            return self.head(y) + self.conv.weight.sum()

    model = Regularised().eval()
    with torch.no_grad():
        model.bn.weight.fill_(3)
    before = copy.deepcopy(model)
    with pytest.raises(ValueError, match="the converted model differs"):
        gp.convert_(model, norm="imn", pretrained=True, weights="plain", example_inputs=images())
    assert type(model.conv) is nn.Conv2d
    assert all(map(torch.equal, model.state_dict().values(), before.state_dict().values()))


def test_layers_without_a_norm_are_left() -> None:
    model = nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)
    ).eval()
    x = torch.randn(5, 4)
    text = str(gp.plan(model, norm="imn", weights="plain", example_inputs=x))
    assert "1 of 3 layers with plain weights, " in text
    assert "3: Linear (no BatchNorm follows it directly)" in text


def test_a_file_folds_as_the_model_does() -> None:
    model, x = network(), images()
    model(x)
    gp.convert_(model, norm="imn", weights="plain", example_inputs=x)
    state = fold_state_dict(model.state_dict())
    folded = gp.fold_(copy.deepcopy(model))
    assert state.keys() == folded.state_dict().keys()
    folded.load_state_dict(state)
    assert gp.verify(model, folded, x) < 1e-5


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_layers_are_traced_by_jit_and_run_on_meta_tensors() -> None:
    x = torch.randn(2, 3, 5, 5)
    layer = InputMeanConv2d(3, 4, 3).eval()
    torch.testing.assert_close(torch.jit.trace(layer, x)(x), layer(x))
    for kind in (InputMeanConv2d, gp.GmPConv2d):
        shapes = kind(3, 4, 3, device="meta")(x.to("meta"))
        assert shapes.is_meta and shapes.shape == (2, 4, 3, 3)


def test_peft_refuses_to_adapt_a_layer_whose_bias_depends_on_its_weight() -> None:
    peft = pytest.importorskip("peft")
    model = nn.Sequential(gp.InputMeanLinear(6, 9), nn.ReLU(), nn.Linear(9, 2))
    with pytest.raises(ValueError, match="Fold the model first"):
        peft.get_peft_model(model, peft.LoraConfig(target_modules=["0"]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": "plain"}, "GeometricOptimizer alone"),
        ({"weights": "plain", "norm": "imn", "coordinates": "angles"}, "none are"),
        ({"weights": "plain", "norm": "imn", "natural": True}, "none are"),
        ({"weights": "flat"}, "'geometric' or 'plain'"),
        ({"weights": "plain", "norm": "imn", "init": "he"}, "init is None or one of"),
    ],
)
def test_wrong_options_are_refused(options: dict, message: str) -> None:
    model = network()
    state = copy.deepcopy(model.state_dict())
    for function in (gp.convert_,) if message == "none are" else (gp.plan, gp.convert_):
        with pytest.raises(ValueError, match=message):
            function(model, example_inputs=images(), **options)
    assert all(map(torch.equal, model.state_dict().values(), state.values()))
    assert len(model.state_dict()) == len(state)


@pytest.mark.compile
@pytest.mark.parametrize("autocast", [False, True])
def test_compiled_training_is_one_graph_with_the_same_numbers(autocast: bool) -> None:
    model, x = network(), images()
    gp.convert_(model, norm="imn", pretrained=True, weights="plain", example_inputs=x)
    twin = copy.deepcopy(model.train())
    torch.compiler.reset()
    compiled = torch.compile(twin, backend="aot_eager", fullgraph=True)
    for run in (model, compiled):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            run(x).float().square().mean().backward()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    torch.testing.assert_close([*model.buffers()], [*twin.buffers()])
