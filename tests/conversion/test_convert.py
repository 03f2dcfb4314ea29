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
from torch import nn
from torch.nn.utils import parametrizations, prune, weight_norm
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

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.stem(x)).relu()
        x = x + self.again(self.shared(x).relu())
        return self.head(self.hidden(x.mean(dim=(2, 3))).relu())


def net() -> Net:
    return pretend_pretrained(Net())


X = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("options", [{}, {"coordinates": "intrinsic"}, {"natural": True}])
def test_same_function_and_shared_layers_stay_shared(options: dict) -> None:
    model = net()
    original = copy.deepcopy(model)
    assert gp.convert_(model, **options) is model
    assert gp.verify(original, model, X) < 1e-5
    assert isinstance(model.shared, gp.GmPConv2d) and model.shared is model.again
    assert type(model.head) is nn.Linear and type(model.norm) is nn.BatchNorm2d


def test_bare_layers_are_returned() -> None:
    linear = nn.Linear(4, 3)
    converted = gp.convert_(linear)
    assert isinstance(converted, gp.GmPLinear)
    assert gp.verify(linear, converted, torch.randn(2, 4)) < 1e-5
    assert type(gp.fold_(converted)) is nn.Linear


def test_filter_chooses_and_may_take_the_output_layer() -> None:
    model = gp.convert_(net(), filter_fn=lambda module, name: name == "head")
    assert isinstance(model.head, gp.GmPLinear) and type(model.hidden) is nn.Linear


def test_nothing_matched_and_converting_twice_are_errors() -> None:
    with pytest.raises(ValueError, match="nothing to convert"):
        gp.convert_(net(), filter_fn=lambda module, name: False)
    with pytest.raises(ValueError, match="no layers"):
        gp.convert_(nn.Sequential(nn.ReLU()))
    with pytest.raises(ValueError, match="already converted"):
        gp.convert_(gp.convert_(net()))


def test_frozen_parameters_mode_dtype_and_hooks_stay() -> None:
    model = net().double().eval()
    model.stem.weight.requires_grad_(False)
    model.hidden.bias.requires_grad_(False)
    model.shared.train()
    calls = []
    handle = model.hidden.register_forward_hook(lambda *_: calls.append("hidden"))
    model.hidden.register_full_backward_hook(lambda *_: calls.append("backward"))
    plan = gp.plan(model)
    gp.convert_(model)
    assert not model.stem.latitude.requires_grad and not model.stem.r.requires_grad
    assert not model.hidden.lam.requires_grad and model.hidden.r.requires_grad
    assert any("frozen bias" in note for d in plan.decisions for note in d.notes)
    assert model.stem.latitude.dtype == torch.float64
    assert not model.hidden.training and model.shared.training
    model(X.double())
    handle.remove()
    model(X.double()).sum().backward()
    assert calls == ["hidden", "backward"]


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
    kinds = [type(m) for m in model.modules()]
    with pytest.raises(ValueError, match=message):
        gp.convert_(model)
    assert [type(m) for m in model.modules()] == kinds


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_torchs_weight_norm_is_absorbed_and_goes_on_learning() -> None:
    model = net()
    parametrizations.weight_norm(model.hidden)
    original = copy.deepcopy(model)
    gp.convert_(model)
    assert isinstance(model.hidden, gp.GmPLinear)
    assert gp.verify(original, model, X) < 1e-5
    assert all(p.requires_grad for p in model.hidden.parameters())
    with torch.no_grad():
        assert gp.GmPLinear.from_linear(weight_norm(nn.Linear(3, 2))).latitude.requires_grad


def test_a_tied_output_layer_is_left_alone() -> None:
    model = gp.convert_(Tied())
    assert model.head.weight is model.embedding.weight
    plan = gp.plan(Tied(), filter_fn=lambda module, name: True)  # also where this asks for it
    assert "tied to embedding.weight" in str(plan)


def test_zero_rows_are_reported_and_steep_rows_left() -> None:
    model = net()
    with torch.no_grad():
        model.shared.weight[0], model.shared.bias[0] = 0, 0
        model.hidden.weight[2] *= 1e-6
        model.hidden.bias[2] = 1
    original = copy.deepcopy(model)
    text = str(gp.plan(model))
    assert "shared: Conv2d (1 zero rows have r = 0)" in text
    normed = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))
    normed[1].weight.data[:2] = 0.0
    found = str(gp.plan(normed, norm="imn", example_inputs=torch.ones(1, 4)))
    assert "absorbs 1; 2 zero rows have r = 0" in found
    assert f"hidden: Linear (1 rows with |bias| > {STEEPEST} |weight|)" in text
    gp.convert_(model)
    assert type(model.hidden) is nn.Linear
    assert gp.verify(original, model, X) < 1e-5
    gp.fold_(model)
    assert gp.verify(original, model, X) < 1e-5


def test_rows_that_are_drawn_anew_are_no_zero_rows() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    nn.init.zeros_(model[0].weight)
    nn.init.zeros_(model[0].bias)
    assert "8 zero rows have r = 0" in str(gp.plan(model))
    assert "zero rows" not in str(gp.plan(model, init="glorot"))


def test_other_layers_are_listed() -> None:
    class Odd(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 2

    experts = nn.Sequential(nn.SiLU())
    experts.up = nn.Parameter(torch.randn(4, 16, 8))
    others = Odd(4, 4), nn.Bilinear(2, 2, 4), nn.ConvTranspose1d(4, 4, 1), experts
    model = nn.Sequential(nn.Linear(4, 4), *others, nn.Linear(4, 2))
    model.class_token = nn.Parameter(torch.zeros(1, 1, 8))
    text = str(gp.plan(model))
    assert "1: Odd (it computes something else than its base class)" in text
    assert "2: Bilinear (no GmP form of this type)" in text
    assert (
        "3: ConvTranspose1d (there is no such GmP layer; GeometricOptimizer" in text
        and "5: Linear (the output layer)" in text
    )
    assert "4: Sequential (no GmP form of this type)" in text and "class_token" not in text


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_attention_in_both_of_torchs_paths(bias: bool, mode: str) -> None:
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True, bias=bias)
    converted = gp.convert_(copy.deepcopy(layer), filter_fn=lambda module, name: True)
    assert isinstance(converted.self_attn, gp.GmPMultiheadAttention)
    x = torch.randn(2, 5, 16)
    getattr(layer, mode)()
    getattr(converted, mode)()
    with torch.set_grad_enabled(mode == "train"):
        torch.testing.assert_close(converted(x), layer(x), atol=1e-5, rtol=1e-4)
    folded = gp.fold_(copy.deepcopy(converted))
    assert list(folded.state_dict()) == list(layer.state_dict())


class OddConv(nn.Conv2d):
    def _conv_forward(self, x, weight, bias):  # noqa: ANN001, ANN202
        return super()._conv_forward(x, weight / weight.norm(), bias)


class OddCall(nn.Conv2d):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return super().__call__(x) * 2


class OddImplementation(nn.Conv2d):
    def _call_impl(self, *args: torch.Tensor) -> torch.Tensor:
        return 2 * super()._call_impl(*args)


class OddWeight(nn.Conv2d):
    is_ready = False

    def __getattr__(self, name: str) -> object:
        value = super().__getattr__(name)
        return value / 2 if name == "weight" and self.is_ready else value


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
    assert not isinstance(model[0], gp.GmPConv2d) and isinstance(model[1], gp.GmPConv2d)
    torch.testing.assert_close(model(X), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("init", [None, "sphere"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_frozen_layers_stay_frozen_everywhere(init: str | None, device: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 2)).to(device)
    gp.convert_(model, init=init)
    assert not any(p.requires_grad for p in model[0].parameters())
    folded = gp.fold_(model)
    assert not any(p.requires_grad for p in folded[0].parameters())


def test_rows_too_long_for_their_type_are_left() -> None:
    model = nn.Sequential(nn.Linear(64, 4), nn.Linear(4, 4), nn.Linear(4, 2)).half()
    with torch.no_grad():
        model[0].weight.fill_(60_000)
    gp.convert_(model)
    assert type(model[0]) is nn.Linear and isinstance(model[1], gp.GmPLinear)


def test_the_plan_prints_a_summary() -> None:
    model = net()
    total = sum(p.numel() for p in model.parameters())
    text = str(gp.plan(model))
    assert text.startswith("3 of 4 layers under GmP") and f"of {total:,} parameters" in text


def two_layers(function: Callable) -> nn.Module:
    return FunctionModel(function, hidden=nn.Linear(4, 4), head=nn.Linear(4, 4))


def test_a_model_may_change_its_inputs() -> None:
    model = two_layers(lambda m, x: m.head(m.hidden(x.sub_(1)).relu()))
    x, ones = torch.ones(3, 4), torch.ones(3, 4)
    assert gp.verify(model, model, x) == 0
    gp.convert_(model, example_inputs=x)
    assert torch.equal(x, ones)


def test_inputs_in_objects_are_copied_and_outputs_in_objects_compared() -> None:
    model = two_layers(lambda m, d: SimpleNamespace(y=m.head(m.hidden(d.x.mul_(2)).relu())))
    given = SimpleNamespace(x=torch.ones(3, 4))
    gp.convert_(model, example_inputs=(given,))
    assert type(model.head) is nn.Linear and torch.equal(given.x, torch.ones(3, 4))
    assert gp.verify(model, two_layers(model.function), given) > 0
    given.lock, given.itself, given.layer = threading.Lock(), given, model.hidden
    assert gp.verify(model, model, given) == 0 and torch.equal(given.x, torch.ones(3, 4))


def test_what_a_first_run_adds_does_not_stay() -> None:
    """transformers' models install hooks in their first run, and remember that they have."""

    def run(m: FunctionModel, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(m, "ready"):
            m.ready = m.hidden.register_forward_hook(lambda layer, x, y: 2 * y)
        return m.head(m.hidden(x))

    model, x = two_layers(run), torch.randn(3, 4)
    gp.plan(model, example_inputs=x)
    assert not model.hidden._forward_hooks and gp.verify(model, copy.deepcopy(model), x) == 0


def test_other_outputs_are_seen_beside_infinite_ones() -> None:
    is_plain = lambda m: type(m.hidden) is nn.Linear  # noqa: E731
    model = two_layers(lambda m, x: (m.head(m.hidden(x) + is_plain(m)), x / 0))
    with pytest.raises(ValueError, match="differs by"):
        gp.convert_(model, example_inputs=torch.ones(3, 4))
    assert is_plain(model)


def test_layers_and_norms_take_their_input_by_torchs_name() -> None:
    model = two_layers(lambda m, x: m.head(input=m.norm(input=m.hidden(input=m.first(input=x)))))
    model.first, model.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
    x = torch.randn(6, 4)
    model(x)
    for options in ({}, {"norm": "imn"}, {"norm": "imn", "weights": "plain"}):
        converted = gp.convert_(copy.deepcopy(model), example_inputs=x, **options)
        assert gp.verify(model, converted, x) < 1e-5


def test_attributes_that_a_user_set_survive_conversion_and_folding() -> None:
    model = two_layers(lambda m, x: m.head(m.hidden(x) * m.hidden.gain))
    model.hidden.gain = 2.0
    gp.convert_(model)(torch.ones(1, 4))
    model.hidden.gain = 3.0
    hidden = gp.fold_(model).hidden
    assert vars(hidden).keys() == {*vars(nn.Linear(1, 1)), "gain"} and hidden.gain == 3


def test_without_example_inputs_heads_beside_each_other_stay_plain() -> None:
    sizes = {"body": (4, 8), "hidden": (8, 8), "classes": (8, 10), "box": (8, 4)}
    model = nn.ModuleDict({name: nn.Linear(*size) for name, size in sizes.items()})
    decisions = {d.name: d.converted for d in gp.plan(model).decisions}
    assert decisions == {"body": True, "hidden": True, "classes": False, "box": False}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dynamo", [True, False])
def test_onnx_export_says_to_fold_first(dynamo: bool) -> None:
    pytest.importorskip("onnxscript")
    model = gp.convert_(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))).eval()
    with pytest.raises(Exception, match="fold the model first"):
        torch.onnx.export(model, (torch.ones(1, 4),), io.BytesIO(), dynamo=dynamo, verbose=False)
