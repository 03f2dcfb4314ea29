"""Why a BatchNorm stays is said in the words of its case, and a second conversion goes on."""

import copy
import functools
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from batchnorm_choices import batch_norms, choices, remove_batchnorm
from torch import Tensor, nn
from zoo import pretend_pretrained

import geoparam as gp

X = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def advice(model: nn.Module, x: Tensor = X, **options: Any) -> str:
    """The warnings, or the error, of a conversion."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            gp.convert_(model, example_inputs=x, **options)
        except ValueError as error:
            return str(error)
    return " ".join(str(warning.message) for warning in caught)


def build(norm: Any = nn.BatchNorm2d) -> nn.Module:
    layers = [nn.Conv2d(3, 6, 3), norm(6), nn.ReLU(), nn.Conv2d(6, 6, 3), norm(6), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Conv2d(6, 2, 1))
    return pretend_pretrained(model) if norm is nn.BatchNorm2d else model


class FixedNorm(nn.Module):
    """The frozen norm of facebookresearch/detr, which has no eps, and of transformers."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        for name in ("weight", "bias", "running_mean", "running_var"):
            self.register_buffer(name, torch.rand(channels) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        w, b, m, v = (t.view(-1, 1, 1) for t in self.buffers())
        return (x - m) * (w * (v + 1e-5).rsqrt()) + b


NoStatistics = functools.partial(nn.BatchNorm2d, track_running_stats=False)

REASONS = {
    "synchronised": (nn.SyncBatchNorm, "imn", "convert before convert_sync_batchnorm"),
    "no statistics": (NoStatistics, "imn", "it has no running statistics"),
    "no statistics, fold": (NoStatistics, "fold", "it has no running statistics"),
    "constants": (FixedNorm, "imn", "it holds constants alone"),
    "constants, fold": (FixedNorm, "fold", "it holds constants alone"),
    "named as torchvision's": (
        type("FrozenBatchNorm2d", (FixedNorm,), {}),
        "fold",
        "it holds constants alone",
    ),
}


@pytest.mark.parametrize(("norm", "choice", "reason"), REASONS.values(), ids=REASONS)
def test_where_every_norm_stays_the_reason_is_said(norm: Any, choice: str, reason: str) -> None:
    text = advice(build(norm), norm=choice)
    assert f"removes nothing. 1 stays: {reason}" in text
    assert "from scratch" not in text and "eval()" not in text
    assert reason in advice(build(norm), norm=choice, weights="plain")


def test_eval_is_no_advice_for_norms_without_running_statistics() -> None:
    model = build()
    model[4] = NoStatistics(6)
    text = advice(model, norm="fold")
    assert "1 norms stay" in text and "'4' first: it has no running statistics" in text
    assert "eval()" not in text


def test_a_norm_behind_an_activation_is_named() -> None:
    layers = [nn.Conv2d(3, 6, 3), nn.ReLU(), nn.BatchNorm2d(6)]
    text = advice(nn.Sequential(*layers, nn.Conv2d(6, 2, 1)), norm="imn")
    assert "removes nothing. 2 stays: relu comes before it, not a layer" in text


class SameConv(nn.Conv2d):
    """timm's Conv2dSame, in short."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.pad(x, (0, 1, 0, 1)))


LEFT_BEFORE = {
    "another class": (lambda: SameConv(3, 6, 3), "it computes something else than its base class"),
    "transposed": (lambda: nn.ConvTranspose2d(3, 6, 3), "there is no such GmP layer"),
    "weight_norm": (
        lambda: nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 6, 3)),
        "its weight is not a Parameter but computed",
    ),
}


@pytest.mark.parametrize(("conv", "reason"), LEFT_BEFORE.values(), ids=LEFT_BEFORE)
def test_a_norm_behind_a_layer_that_is_left_has_that_layers_reason(conv: Any, reason: str) -> None:
    model = nn.Sequential(conv(), nn.BatchNorm2d(6), nn.ReLU(), *build(), nn.Flatten())
    model[3] = nn.Conv2d(6, 6, 3)
    text = advice(pretend_pretrained(model), norm="fold", weights="plain")
    assert f"'1' first: 0 before it is left ({reason}" in text


class Domains(nn.Module):
    """A norm for each domain."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 2, 1)
        self.norms = nn.ModuleList([nn.BatchNorm2d(6), nn.BatchNorm2d(6)])
        self.domains = [0]

    def forward(self, x: Tensor) -> Tensor:
        z = self.conv(x)
        return sum(self.head(self.norms[domain](z).relu()) for domain in self.domains)


def test_norms_that_do_not_run_and_layers_with_two_norms_have_their_reasons() -> None:
    model = pretend_pretrained(Domains())
    model.domains = [0, 1]
    assert "norms.0 stays: it is not all that follows conv" in advice(model, norm="fold")
    model = pretend_pretrained(Domains())
    assert "'norms.1' first: it does not run on example_inputs" in advice(model, norm="fold")


def test_norms_that_share_their_parameters_stay() -> None:
    model = build()
    model[4].weight = model[1].weight
    text = advice(model, norm="fold")
    assert "removes nothing. 1 stays: it shares memory with 4.weight" in text
    assert model[4].weight is model[1].weight


class Tokens(nn.Module):
    """BatchNorm1d after a linear layer: over its channels, or over the positions."""

    def __init__(self, swaps: bool) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(5, 8), nn.BatchNorm1d(8 if swaps else 7)
        self.last, self.swaps = nn.Linear(8, 2), swaps

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = self.norm(x.transpose(1, 2)).transpose(1, 2) if self.swaps else self.norm(x)
        return self.last(x.relu())


def test_what_comes_between_a_layer_and_its_norm_is_named() -> None:
    x = torch.randn(4, 7, 5)
    assert "norm stays: transpose comes before it" in advice(Tokens(True), x, norm="fold")
    text = advice(Tokens(False), x, norm="fold")
    assert "norm stays: its channels are another dimension than the layer's" in text


@pytest.mark.parametrize("dropout", [nn.Dropout(0.5), nn.Dropout2d(0.5)])
def test_a_norm_behind_dropout_stays_because_training_differs(dropout: nn.Module) -> None:
    layers = [nn.Conv2d(3, 6, 3), dropout, nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 2, 1)]
    model = pretend_pretrained(nn.Sequential(*layers))
    assert "2 stays: dropout comes before it in training" in advice(model, norm="fold")
    assert isinstance(model[2], nn.BatchNorm2d)


class Detectron2Conv(nn.Conv2d):
    """detectron2's Conv2d."""

    def __init__(self, inputs: int, outputs: int, norm: nn.Module) -> None:
        super().__init__(inputs, outputs, 3, bias=False)
        self.norm, self.activation = norm, F.relu

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.norm(super().forward(x)))


def test_a_layer_that_calls_its_norm_itself_gets_a_sentence_that_says_what_to_do() -> None:
    model = nn.Sequential(Detectron2Conv(3, 6, nn.BatchNorm2d(6)), nn.Conv2d(6, 4, 1), nn.ReLU())
    what = r"use nn.Sequential\(layer, norm, activation\)"
    with pytest.raises(ValueError, match=f"(?s)nothing to convert.*0: Detectron2Conv .*{what}"):
        gp.plan(model, norm="fold", weights="plain", example_inputs=X)
    model.append(nn.Conv2d(4, 2, 1))
    assert "0.norm stays: a norm is called in a layer's forward" in advice(model, norm="fold")


class TwoParts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = build()[:6]
        head = [nn.Conv2d(6, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Conv2d(5, 2, 1)]
        self.head = pretend_pretrained(nn.Sequential(*head))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))


@choices
def test_a_backbone_is_converted_first_and_the_whole_model_later(choice: str) -> None:
    original = TwoParts().eval()
    model = copy.deepcopy(original)
    model.backbone = remove_batchnorm(model.backbone, choice, X)
    model = remove_batchnorm(model, choice, X)
    assert not batch_norms(model)
    assert gp.verify(original, model, X) < 1e-5
    restored = gp.fold_(model, restore_norm=True)
    assert gp.verify(original, restored, X) < 1e-5
    assert list(restored.state_dict()) == list(original.state_dict())


@choices
def test_a_second_conversion_in_the_same_way_says_that_it_is_done(choice: str) -> None:
    model = remove_batchnorm(build(), choice, X)
    text = advice(model, norm="fold", weights="plain")
    assert "nothing to convert" in text and "held" not in text
    assert "already converted" in text or "it has its input's mean already" in text


def test_folded_plain_weights_go_under_geometric_parameterization_and_back() -> None:
    original = build()
    model = gp.convert_(copy.deepcopy(original), norm="fold", weights="plain", example_inputs=X)
    gp.convert_(model, example_inputs=X)
    assert isinstance(model[0], gp.GmPConv2d) and isinstance(model[3], gp.GmPConv2d)
    assert gp.verify(original, model, X) < 1e-5
    restored = gp.fold_(model, restore_norm=True)
    assert gp.verify(original, restored, X) < 1e-5
    assert list(restored.state_dict()) == list(original.state_dict())


def test_a_layer_absorbs_one_norm() -> None:
    layers = [nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.BatchNorm2d(6), nn.ReLU()]
    model = pretend_pretrained(nn.Sequential(*layers, nn.Conv2d(6, 2, 1)))
    original, options = copy.deepcopy(model), {"norm": "fold", "weights": "plain"}
    with pytest.warns(UserWarning, match="1 norms stay"):
        gp.convert_(model, example_inputs=X, **options)
    assert "2 stays: the layer before it has absorbed another norm" in advice(model, **options)
    assert gp.verify(original, gp.fold_(model, restore_norm=True), X) < 1e-5
