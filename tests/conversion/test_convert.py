"""convert_: the same function, or an error that leaves the model alone."""

import copy
import io
import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from checkpoint_models import Tied
from function_model import FunctionModel
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune, weight_norm
from torch.testing import assert_close
from zoo import pretend_pretrained

import geoparam as gp
from geoparam.coordinates import STEEPEST


class Net(nn.Module):
    """A small network with a BatchNorm, a residual sum, a shared and a grouped layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.shared = nn.Conv2d(8, 8, 3, padding=1, groups=2)
        self.again = self.shared
        self.hidden = nn.Linear(8, 6)
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x)).relu()
        x = x + self.again(self.shared(x).relu())
        return self.head(self.hidden(x.mean(dim=(2, 3))).relu())


def net() -> Net:
    return pretend_pretrained(Net())


def module_types(model: nn.Module) -> list[type[nn.Module]]:
    return [type(module) for module in model.modules()]


def take_every_layer(module: nn.Module, name: str) -> bool:
    return True


X = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(0))


# Which layers are converted.


@pytest.mark.parametrize("options", [{}, {"coordinates": "intrinsic"}, {"natural": True}])
def test_the_converted_model_is_the_same_function(options: dict) -> None:
    model = net()
    original = copy.deepcopy(model)

    assert gp.convert_(model, **options) is model
    assert gp.verify(original, model, X) < 1e-5


def test_shared_layers_stay_shared() -> None:
    model = gp.convert_(net())

    assert isinstance(model.shared, gp.GmPConv2d)
    assert model.again is model.shared


def test_output_layers_and_batchnorms_are_left() -> None:
    model = gp.convert_(net())

    assert type(model.head) is nn.Linear
    assert type(model.norm) is nn.BatchNorm2d


def test_bare_layers_are_returned() -> None:
    linear = nn.Linear(4, 3)

    converted = gp.convert_(linear)

    assert isinstance(converted, gp.GmPLinear)
    assert gp.verify(linear, converted, torch.randn(2, 4)) < 1e-5
    assert type(gp.fold_(converted)) is nn.Linear


def test_a_filter_may_choose_the_output_layer_alone() -> None:
    model = gp.convert_(net(), filter_fn=lambda module, name: name == "head")

    assert isinstance(model.head, gp.GmPLinear)
    assert type(model.hidden) is nn.Linear


def test_a_filter_that_matches_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="nothing to convert"):
        gp.convert_(net(), filter_fn=lambda module, name: False)


def test_a_model_without_layers_is_an_error() -> None:
    with pytest.raises(ValueError, match="no layers"):
        gp.convert_(nn.Sequential(nn.ReLU()))


def test_converting_twice_is_an_error() -> None:
    model = gp.convert_(net())

    with pytest.raises(ValueError, match="already converted"):
        gp.convert_(model)


# What stays as it was.


def test_frozen_parameters_stay_frozen() -> None:
    model = net()
    model.stem.weight.requires_grad_(False)
    model.hidden.bias.requires_grad_(False)

    gp.convert_(model)

    assert not model.stem.latitude.requires_grad
    assert not model.stem.r.requires_grad
    assert not model.hidden.lam.requires_grad
    assert model.hidden.r.requires_grad


def test_the_plan_notes_a_frozen_bias() -> None:
    model = net()
    model.hidden.bias.requires_grad_(False)

    assert "frozen bias" in str(gp.plan(model))


def test_the_number_type_stays() -> None:
    model = gp.convert_(net().double())

    assert model.stem.latitude.dtype == torch.float64


def test_each_layers_mode_stays() -> None:
    model = net().eval()
    model.shared.train()

    gp.convert_(model)

    assert not model.hidden.training
    assert model.shared.training


def test_hooks_stay_and_their_handles_remove_them() -> None:
    model = net()
    calls = []
    handle = model.hidden.register_forward_hook(lambda *_: calls.append("forward"))
    model.hidden.register_full_backward_hook(lambda *_: calls.append("backward"))

    gp.convert_(model)
    model(X)
    handle.remove()
    model(X).sum().backward()

    assert calls == ["forward", "backward"]


def tie(model: Net) -> None:
    model.other = nn.Linear(8, 6)
    model.other.weight = model.hidden.weight


BROKEN = {
    "weight of 'hidden' holds NaN": lambda model: model.hidden.weight.data.fill_(torch.nan),
    "'hidden' shares memory with other.weight.*Untie": tie,
    "'hidden'.*remove_weight_norm": lambda model: weight_norm(model.hidden),
    "'hidden' has parametrizations.*remove_parametrizations": (
        lambda model: parametrizations.spectral_norm(model.hidden)
    ),
    "'hidden'.*prune.remove": lambda model: prune.l1_unstructured(model.hidden, "weight", 0.5),
    "'lazy.weight' is lazy": lambda model: model.add_module("lazy", nn.LazyLinear(4)),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize(("message", "change"), BROKEN.items(), ids=BROKEN)
def test_errors_name_the_layer_and_leave_the_model_alone(message: str, change: Callable) -> None:
    model = net()
    change(model)
    before = module_types(model)

    with pytest.raises(ValueError, match=message):
        gp.convert_(model)

    assert module_types(model) == before


# Weight norm, ties, zero and steep rows.


def test_torchs_weight_norm_is_absorbed_and_goes_on_learning() -> None:
    model = net()
    parametrizations.weight_norm(model.hidden)
    original = copy.deepcopy(model)

    gp.convert_(model)

    assert isinstance(model.hidden, gp.GmPLinear)
    assert gp.verify(original, model, X) < 1e-5
    for parameter in model.hidden.parameters():
        assert parameter.requires_grad


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@torch.no_grad()
def test_a_layer_with_the_older_weight_norm_goes_on_learning() -> None:
    layer = gp.GmPLinear.from_linear(weight_norm(nn.Linear(3, 2)))

    assert layer.latitude.requires_grad


def test_a_tied_output_layer_is_left_alone() -> None:
    model = gp.convert_(Tied())

    assert model.head.weight is model.embedding.weight


def test_a_tied_output_layer_is_left_even_if_the_filter_takes_it() -> None:
    assert "tied to embedding.weight" in str(gp.plan(Tied(), filter_fn=take_every_layer))


@pytest.fixture
def odd_rows_net() -> Net:
    """Return a network with a zero row, and a row that is tiny beside its bias."""
    model = net()
    model.shared.weight.data[0] = 0
    model.shared.bias.data[0] = 0
    model.hidden.weight.data[2] *= 1e-6
    model.hidden.bias.data[2] = 1
    return model


def test_zero_rows_are_reported(odd_rows_net: Net) -> None:
    assert "shared: Conv2d (1 zero rows have r = 0)" in str(gp.plan(odd_rows_net))


def test_steep_rows_are_reported(odd_rows_net: Net) -> None:
    reason = f"hidden: Linear (1 rows with |bias| > {STEEPEST} |weight|)"
    assert reason in str(gp.plan(odd_rows_net))


def test_zero_rows_of_a_batchnorm_are_reported() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))
    model[1].weight.data[:2] = 0.0

    text = str(gp.plan(model, norm="imn", example_inputs=torch.ones(1, 4)))
    assert "absorbs 1; 2 zero rows have r = 0" in text


def test_a_layer_with_steep_rows_is_left_and_zero_rows_are_kept(odd_rows_net: Net) -> None:
    model = odd_rows_net
    original = copy.deepcopy(model)

    gp.convert_(model)
    assert type(model.hidden) is nn.Linear
    assert gp.verify(original, model, X) < 1e-5

    gp.fold_(model)
    assert gp.verify(original, model, X) < 1e-5


def test_zero_rows_are_not_reported_where_weights_are_initialised() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    nn.init.zeros_(model[0].weight)
    nn.init.zeros_(model[0].bias)

    assert "8 zero rows have r = 0" in str(gp.plan(model))
    assert "zero rows" not in str(gp.plan(model, init="glorot"))


# Layers of other kinds.


class OddLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def test_the_plan_lists_other_layers_with_the_reason() -> None:
    experts = nn.Sequential(nn.SiLU())
    experts.up = nn.Parameter(torch.randn(4, 16, 8))
    model = nn.Sequential(
        nn.Linear(4, 4),
        OddLinear(4, 4),
        nn.Bilinear(2, 2, 4),
        nn.ConvTranspose1d(4, 4, 1),
        experts,
        nn.Linear(4, 2),
    )

    text = str(gp.plan(model))

    assert "1: OddLinear (it computes something else than its base class)" in text
    assert "2: Bilinear (no GmP form of this type)" in text
    assert "3: ConvTranspose1d (there is no such GmP layer; GeometricOptimizer" in text
    assert "4: Sequential (no GmP form of this type)" in text
    assert "5: Linear (the output layer)" in text


def test_the_plan_does_not_list_parameters_of_the_model_itself() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model.class_token = nn.Parameter(torch.zeros(1, 1, 8))

    assert "class_token" not in str(gp.plan(model))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_attention_in_both_of_torchs_paths(bias: bool, training: bool) -> None:
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True, bias=bias)
    converted = gp.convert_(copy.deepcopy(layer), filter_fn=take_every_layer)
    layer.train(training)
    converted.train(training)
    x = torch.randn(2, 5, 16)

    assert isinstance(converted.self_attn, gp.GmPMultiheadAttention)
    with torch.set_grad_enabled(training):
        assert_close(converted(x), layer(x), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("bias", [True, False])
def test_folded_attention_has_torchs_keys(bias: bool) -> None:
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True, bias=bias)
    converted = gp.convert_(copy.deepcopy(layer), filter_fn=take_every_layer)

    folded = gp.fold_(converted)

    assert list(folded.state_dict()) == list(layer.state_dict())


class OddConv(nn.Conv2d):
    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(x, weight / weight.norm(), bias)


class OddCall(nn.Conv2d):
    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x) * 2


class OddImplementation(nn.Conv2d):
    def _call_impl(self, *args: Tensor) -> Tensor:
        return 2 * super()._call_impl(*args)


class OddWeight(nn.Conv2d):
    is_ready = False

    def __getattr__(self, name: str) -> object:
        value = super().__getattr__(name)
        if name == "weight" and self.is_ready:
            return value / 2
        return value


class WithParameter(nn.Conv2d):
    def __init__(self, *args: int) -> None:
        super().__init__(*args)
        self.gain = nn.Parameter(torch.ones(1))


class WithBuffer(nn.Conv2d):
    def __init__(self, *args: int) -> None:
        super().__init__(*args)
        self.register_buffer("mask", torch.zeros(4, 1, 1))
        self.register_forward_hook(lambda layer, inputs, z: z * layer.mask)


def patched(*args: int) -> nn.Conv2d:
    """Return a convolution whose forward was replaced on the object."""
    conv = nn.Conv2d(*args)
    conv.forward = lambda x: nn.functional.conv2d(x, conv.weight) * 2  # type: ignore[method-assign]
    return conv


@pytest.mark.parametrize(
    "build", [OddConv, OddCall, OddImplementation, OddWeight, WithParameter, WithBuffer, patched]
)
def test_layers_that_compute_something_else_are_left(build: Callable) -> None:
    model = nn.Sequential(build(3, 4, 3), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 2, 1))
    model[0].is_ready = True
    expected = model(X)

    gp.convert_(model)

    assert not isinstance(model[0], gp.GmPConv2d)
    assert isinstance(model[1], gp.GmPConv2d)
    assert_close(model(X), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("init", [None, "sphere"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_frozen_layers_stay_frozen_in_conversion_and_folding(
    init: str | None, device: str
) -> None:
    frozen = nn.Linear(4, 4).requires_grad_(False)
    model = nn.Sequential(frozen, nn.Linear(4, 2)).to(device)

    gp.convert_(model, init=init)
    assert not any(p.requires_grad for p in model[0].parameters())

    gp.fold_(model)
    assert not any(p.requires_grad for p in model[0].parameters())


def test_rows_too_long_for_their_type_are_left() -> None:
    model = nn.Sequential(nn.Linear(64, 4), nn.Linear(4, 4), nn.Linear(4, 2)).half()
    model[0].weight.data.fill_(60_000)

    gp.convert_(model)

    assert type(model[0]) is nn.Linear
    assert isinstance(model[1], gp.GmPLinear)


def test_the_plan_prints_a_summary() -> None:
    model = net()
    parameter_count = sum(p.numel() for p in model.parameters())

    text = str(gp.plan(model))

    assert text.startswith("3 of 4 layers under GmP")
    assert f"of {parameter_count:,} parameters" in text


# Models that are written in unusual ways.


def two_layers(function: Callable) -> FunctionModel:
    return FunctionModel(function, hidden=nn.Linear(4, 4), head=nn.Linear(4, 4))


def test_a_model_may_change_its_inputs() -> None:
    model = two_layers(lambda m, x: m.head(m.hidden(x.sub_(1)).relu()))
    x = torch.ones(3, 4)

    assert gp.verify(model, model, x) == 0
    gp.convert_(model, example_inputs=x)

    assert torch.equal(x, torch.ones(3, 4))


def from_object_to_object(model: FunctionModel, data: SimpleNamespace) -> SimpleNamespace:
    """Read the input from an attribute, change it in place, and return the output in another."""
    x = data.x.mul_(2)
    return SimpleNamespace(y=model.head(model.hidden(x).relu()))


def test_inputs_in_objects_are_copied() -> None:
    model = two_layers(from_object_to_object)
    data = SimpleNamespace(x=torch.ones(3, 4))

    gp.convert_(model, example_inputs=(data,))

    assert type(model.head) is nn.Linear
    assert torch.equal(data.x, torch.ones(3, 4))


def test_inputs_may_hold_locks_themselves_and_layers() -> None:
    model = two_layers(from_object_to_object)
    data = SimpleNamespace(x=torch.ones(3, 4))
    data.lock = threading.Lock()
    data.itself = data
    data.layer = model.hidden

    assert gp.verify(model, model, data) == 0
    assert torch.equal(data.x, torch.ones(3, 4))


def test_outputs_in_objects_are_compared() -> None:
    model = two_layers(from_object_to_object)
    other = two_layers(from_object_to_object)

    assert gp.verify(model, other, SimpleNamespace(x=torch.ones(3, 4))) > 0


def test_what_a_first_run_adds_does_not_stay() -> None:
    """transformers' models install hooks in their first run, and remember that they have."""

    def run(model: FunctionModel, x: Tensor) -> Tensor:
        if not hasattr(model, "ready"):
            model.ready = model.hidden.register_forward_hook(lambda layer, x, y: 2 * y)
        return model.head(model.hidden(x))

    model = two_layers(run)
    x = torch.randn(3, 4)

    gp.plan(model, example_inputs=x)

    assert not model.hidden._forward_hooks
    assert gp.verify(model, copy.deepcopy(model), x) == 0


def test_other_outputs_are_seen_beside_infinite_ones() -> None:
    def run(model: FunctionModel, x: Tensor) -> tuple[Tensor, Tensor]:
        is_plain = type(model.hidden) is nn.Linear
        infinite = x / 0
        return model.head(model.hidden(x) + is_plain), infinite

    model = two_layers(run)

    with pytest.raises(ValueError, match="differs by"):
        gp.convert_(model, example_inputs=torch.ones(3, 4))
    assert type(model.hidden) is nn.Linear


@pytest.mark.parametrize("options", [{}, {"norm": "imn"}, {"norm": "imn", "weights": "plain"}])
def test_layers_and_norms_take_their_input_by_torchs_name(options: dict) -> None:
    model = two_layers(lambda m, x: m.head(input=m.norm(input=m.hidden(input=m.first(input=x)))))
    model.first = nn.Linear(4, 4)
    model.norm = nn.BatchNorm1d(4)
    x = torch.randn(6, 4)
    model(x)

    converted = gp.convert_(copy.deepcopy(model), example_inputs=x, **options)

    assert gp.verify(model, converted, x) < 1e-5


def test_attributes_that_a_user_set_survive_conversion_and_folding() -> None:
    model = two_layers(lambda m, x: m.head(m.hidden(x) * m.hidden.gain))
    model.hidden.gain = 2.0

    gp.convert_(model)
    model(torch.ones(1, 4))
    model.hidden.gain = 3.0
    gp.fold_(model)

    assert model.hidden.gain == 3
    assert vars(model.hidden).keys() == {*vars(nn.Linear(1, 1)), "gain"}


def test_without_example_inputs_heads_beside_each_other_stay_plain() -> None:
    model = nn.ModuleDict(
        {
            "body": nn.Linear(4, 8),
            "hidden": nn.Linear(8, 8),
            "classes": nn.Linear(8, 10),
            "box": nn.Linear(8, 4),
        }
    )

    decisions = gp.plan(model).decisions
    is_converted = {decision.name: decision.converted for decision in decisions}
    assert is_converted == {"body": True, "hidden": True, "classes": False, "box": False}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dynamo", [True, False])
def test_onnx_export_says_to_fold_first(dynamo: bool) -> None:
    pytest.importorskip("onnxscript")
    model = gp.convert_(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))).eval()

    try:
        with pytest.raises(Exception, match="fold the model first"):
            torch.onnx.export(
                model, (torch.ones(1, 4),), io.BytesIO(), dynamo=dynamo, verbose=False
            )
    finally:
        torch.set_autocast_cache_enabled(True)  # torch's exporter leaves it off after an error
