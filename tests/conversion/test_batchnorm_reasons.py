"""Why a BatchNorm stays is said in the words of its case, and a second conversion goes on."""

import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from batchnorm_choices import batch_norms, choices, remove_batchnorm
from torch import Tensor, nn
from zoo import pretend_pretrained

import geoparam as gp

X = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def read_advice(model: nn.Module, x: Tensor = X, **options: Any) -> str:
    """Return the warnings, or the error, of a conversion."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            gp.convert_(model, example_inputs=x, **options)
        except ValueError as error:
            return str(error)
    return " ".join(str(warning.message) for warning in caught)


def build(norm: Callable[[int], nn.Module]) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3),
        norm(6),
        nn.ReLU(),
        nn.Conv2d(6, 6, 3),
        norm(6),
        nn.ReLU(),
        nn.Conv2d(6, 2, 1),
    )


def build_pretrained() -> nn.Sequential:
    return pretend_pretrained(build(nn.BatchNorm2d))


# Norms that cannot be removed.


class FixedNorm(nn.Module):
    """The frozen norm of facebookresearch/detr, which has no eps, and of transformers."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        for name in ("weight", "bias", "running_mean", "running_var"):
            self.register_buffer(name, torch.rand(channels) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        weight, bias, mean, variance = (buffer.view(-1, 1, 1) for buffer in self.buffers())
        scale = weight * (variance + 1e-5).rsqrt()
        return (x - mean) * scale + bias


class FrozenBatchNorm2d(FixedNorm):
    """Named as torchvision's."""


NoStatistics = functools.partial(nn.BatchNorm2d, track_running_stats=False)

NORMS_AND_REASONS = {
    "synchronised": (nn.SyncBatchNorm, "imn", "convert before convert_sync_batchnorm"),
    "no statistics": (NoStatistics, "imn", "it has no running statistics"),
    "no statistics, fold": (NoStatistics, "fold", "it has no running statistics"),
    "constants": (FixedNorm, "imn", "it holds constants alone"),
    "constants, fold": (FixedNorm, "fold", "it holds constants alone"),
    "named as torchvision's": (FrozenBatchNorm2d, "fold", "it holds constants alone"),
}
every_reason = pytest.mark.parametrize(
    ("norm", "choice", "reason"), NORMS_AND_REASONS.values(), ids=NORMS_AND_REASONS
)


@every_reason
def test_where_every_norm_stays_the_reason_is_said(
    norm: Callable, choice: str, reason: str
) -> None:
    text = read_advice(build(norm), norm=choice)

    assert f"removes nothing. 1 stays: {reason}" in text
    assert "from scratch" not in text
    assert "eval()" not in text


@every_reason
def test_the_reason_is_said_for_plain_weights_too(
    norm: Callable, choice: str, reason: str
) -> None:
    assert reason in read_advice(build(norm), norm=choice, weights="plain")


def test_eval_is_no_advice_for_norms_without_running_statistics() -> None:
    model = build_pretrained()
    model[4] = NoStatistics(6)

    text = read_advice(model, norm="fold")

    assert "1 norm stays" in text
    assert "'4' first: it has no running statistics" in text
    assert "eval()" not in text


def test_norms_that_share_their_parameters_stay() -> None:
    model = build_pretrained()
    model[4].weight = model[1].weight

    text = read_advice(model, norm="fold")

    assert "removes nothing. 1 stays: it shares memory with 4.weight" in text
    assert model[4].weight is model[1].weight


class Domains(nn.Module):
    """A norm for each domain."""

    def __init__(self, domains: list[int]) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3)
        self.norms = nn.ModuleList([nn.BatchNorm2d(6), nn.BatchNorm2d(6)])
        self.head = nn.Conv2d(6, 2, 1)
        self.domains = domains

    def forward(self, x: Tensor) -> Tensor:
        z = self.conv(x)
        outputs = [self.head(self.norms[domain](z).relu()) for domain in self.domains]
        return torch.stack(outputs).sum(dim=0)


def test_norms_of_a_layer_with_two_norms_stay() -> None:
    model = pretend_pretrained(Domains([0, 1]))

    text = read_advice(model, norm="fold")
    assert "norms.0 stays: it is not all that follows conv" in text


def test_norms_that_do_not_run_stay() -> None:
    model = pretend_pretrained(Domains([0]))

    text = read_advice(model, norm="fold")
    assert "'norms.1' first: it does not run on example_inputs" in text


def test_a_layer_absorbs_one_norm() -> None:
    original = nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 2, 1)
    )
    pretend_pretrained(original)
    model = copy.deepcopy(original)
    options = {"norm": "fold", "weights": "plain"}

    with pytest.warns(UserWarning, match="1 norm stays"):
        gp.convert_(model, example_inputs=X, **options)

    again = read_advice(model, **options)
    assert "2 stays: the layer before it has absorbed another norm" in again
    assert gp.verify(original, gp.fold_(model, restore_norm=True), X) < 1e-5


# What stands before a norm.


def test_an_activation_before_a_norm_is_named() -> None:
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.BatchNorm2d(6), nn.Conv2d(6, 2, 1))

    text = read_advice(model, norm="imn")
    assert "removes nothing. 2 stays: relu comes before it, not a layer" in text


class SameConv(nn.Conv2d):
    """timm's Conv2dSame, in short."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.pad(x, (0, 1, 0, 1)))


LAYERS_AND_REASONS = {
    "another class": (
        lambda: SameConv(3, 6, 3),
        "it computes something else than its base class",
    ),
    "transposed": (
        lambda: nn.ConvTranspose2d(3, 6, 3),
        "there is no such GmP layer",
    ),
    "weight_norm": (
        lambda: nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 6, 3)),
        "its weight is not a Parameter but computed",
    ),
}


@pytest.mark.parametrize(
    ("build_layer", "reason"), LAYERS_AND_REASONS.values(), ids=LAYERS_AND_REASONS
)
def test_a_norm_behind_a_layer_that_is_left_has_that_layers_reason(
    build_layer: Callable, reason: str
) -> None:
    model = nn.Sequential(
        build_layer(),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 6, 3),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 2, 1),
    )
    pretend_pretrained(model)

    text = read_advice(model, norm="fold", weights="plain")
    assert f"'1' first: 0 before it is left ({reason}" in text


class Tokens(nn.Module):
    """BatchNorm1d after a linear layer: over its 8 channels, or over 7 positions."""

    def __init__(self, over_channels: bool) -> None:
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.norm = nn.BatchNorm1d(8 if over_channels else 7)
        self.last = nn.Linear(8, 2)
        self.over_channels = over_channels

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.over_channels:
            x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        else:
            x = self.norm(x)
        return self.last(x.relu())


@pytest.mark.parametrize(
    ("over_channels", "reason"),
    [
        (True, "transpose comes before it"),
        (False, "its channels are another dimension than the layer's"),
    ],
)
def test_what_comes_between_a_layer_and_its_norm_is_named(
    over_channels: bool, reason: str
) -> None:
    text = read_advice(Tokens(over_channels), torch.randn(4, 7, 5), norm="fold")

    assert f"norm stays: {reason}" in text


class Noise(nn.Module):
    """Passes its input on untouched in evaluation, as torchvision's StochasticDepth does."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x) if self.training else x


@pytest.mark.parametrize("dropout", [nn.Dropout(0.5), nn.Dropout2d(0.5), Noise()])
def test_a_norm_behind_dropout_stays_because_training_differs(dropout: nn.Module) -> None:
    norm = nn.BatchNorm2d(6)
    model = nn.Sequential(nn.Conv2d(3, 6, 3), dropout, norm, nn.ReLU(), nn.Conv2d(6, 2, 1))
    pretend_pretrained(model)

    text = read_advice(model, norm="fold")

    assert "2 stays: dropout, or what else acts in training alone, comes" in text
    assert model[2] is norm


def test_a_norm_behind_an_identity_is_absorbed() -> None:
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.Identity(), nn.BatchNorm2d(6), nn.ReLU())
    model = nn.Sequential(*model, nn.Conv2d(6, 2, 1))
    pretend_pretrained(model)

    gp.convert_(model, norm="fold", example_inputs=X)

    assert not batch_norms(model)


class BN(nn.BatchNorm2d):
    """A subclass that changes nothing, and has no "norm" in its name."""


class Doubled(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def test_an_empty_subclass_of_batchnorm_is_absorbed_whatever_its_name() -> None:
    model = build(BN)
    pretend_pretrained(model)

    gp.convert_(model, norm="fold", example_inputs=X)

    assert not batch_norms(model)


def test_a_subclass_of_batchnorm_with_a_forward_of_its_own_stays() -> None:
    model = build(Doubled)
    model[1] = nn.BatchNorm2d(6)
    pretend_pretrained(model)

    text = read_advice(model, norm="fold")

    assert "'4' first: it computes something else than its base class" in text


class OwnNorm(nn.Module):
    """Calls F.batch_norm on buffers of its own, and is no BatchNorm of torch's."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(channels))
        self.register_buffer("variance", torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.mean, self.variance, training=self.training)


def test_the_plan_names_a_module_that_calls_batch_norm_itself() -> None:
    model = build(nn.BatchNorm2d)
    model[4] = OwnNorm(6)
    pretend_pretrained(model)

    plan = gp.plan(model, norm="fold", example_inputs=X)

    assert "depends on the batch in training: 1 norm left (4)" in str(plan)
    assert plan.reasons["4"] == "it calls batch_norm itself, and may use the batch"


class NormByFormula(nn.Module):
    """A batch norm written out, which calls no function of torch's."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("running_var", torch.ones(channels, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        variance = self.running_var
        if self.training:
            variance = x.var(dim=(0, 2, 3), keepdim=True)
        return x / (variance + 1e-5).sqrt()


def test_the_plan_names_a_batch_norm_that_is_written_out() -> None:
    model = build(nn.BatchNorm2d)
    model[4] = NormByFormula(6)
    pretend_pretrained(model)

    plan = gp.plan(model, norm="fold", example_inputs=X)

    assert "depends on the batch in training: 1 norm left (4)" in str(plan)
    assert plan.reasons["4"] == "it has a running variance, and may use the batch"


def test_a_conversion_beside_a_module_that_calls_batch_norm_itself_warns_of_it() -> None:
    model = build(nn.BatchNorm2d)
    model[4] = OwnNorm(6)
    pretend_pretrained(model)

    with pytest.warns(UserWarning, match="1 norm stays .* it calls batch_norm itself"):
        gp.convert_(model, norm="fold", example_inputs=X)


class Detectron2Conv(nn.Conv2d):
    """detectron2's Conv2d."""

    def __init__(self, inputs: int, outputs: int, norm: nn.Module) -> None:
        super().__init__(inputs, outputs, 3, bias=False)
        self.norm = norm
        self.activation = F.relu

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.norm(super().forward(x)))


def test_the_error_says_what_to_do_with_a_layer_that_calls_its_norm_itself() -> None:
    model = nn.Sequential(Detectron2Conv(3, 6, nn.BatchNorm2d(6)), nn.Conv2d(6, 4, 1), nn.ReLU())
    reason = r"0: Detectron2Conv .*use nn.Sequential\(layer, norm, activation\)"

    with pytest.raises(ValueError, match=f"(?s)nothing to convert.*{reason}"):
        gp.plan(model, norm="fold", weights="plain", example_inputs=X)


def test_a_norm_that_a_layer_calls_itself_stays() -> None:
    layer = Detectron2Conv(3, 6, nn.BatchNorm2d(6))
    model = nn.Sequential(layer, nn.Conv2d(6, 4, 1), nn.ReLU(), nn.Conv2d(4, 2, 1))

    text = read_advice(model, norm="fold")
    assert "0.norm stays: a norm is called in a layer's forward" in text


# A second conversion.


class TwoParts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = build(nn.BatchNorm2d)[:6]
        self.head = nn.Sequential(
            nn.Conv2d(6, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Conv2d(5, 2, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))


@choices
def test_a_backbone_is_converted_first_and_the_whole_model_later(choice: str) -> None:
    original = pretend_pretrained(TwoParts()).eval()
    model = copy.deepcopy(original)

    model.backbone = remove_batchnorm(model.backbone, choice, X)
    model = remove_batchnorm(model, choice, X)
    assert not batch_norms(model)
    assert gp.verify(original, model, X) < 1e-5

    restored = gp.fold_(model, restore_norm=True)
    assert gp.verify(original, restored, X) < 1e-5
    assert list(restored.state_dict()) == list(original.state_dict())


ALREADY_DONE = {
    "imn": "already converted",
    "imn plain": "it has its input's mean already",
    "fold": "already converted",
    "fold plain": "already converted",
    "frozen": "it has its input's mean already",
}


@pytest.mark.parametrize(("choice", "reason"), ALREADY_DONE.items())
def test_a_second_conversion_in_the_same_way_says_that_it_is_done(
    choice: str, reason: str
) -> None:
    model = remove_batchnorm(build_pretrained(), choice, X)

    text = read_advice(model, norm="fold", weights="plain")

    assert "nothing to convert" in text
    assert reason in text
    assert "held" not in text


def test_folded_plain_weights_go_under_geometric_parameterization_and_back() -> None:
    original = build_pretrained()
    model = remove_batchnorm(copy.deepcopy(original), "fold plain", X)

    gp.convert_(model, example_inputs=X)
    assert isinstance(model[0], gp.GmPConv2d)
    assert isinstance(model[3], gp.GmPConv2d)
    assert gp.verify(original, model, X) < 1e-5

    restored = gp.fold_(model, restore_norm=True)
    assert gp.verify(original, restored, X) < 1e-5
    assert list(restored.state_dict()) == list(original.state_dict())


def test_the_printed_plan_groups_norms_that_stay_by_their_reasons() -> None:
    blocks = [nn.Sequential(nn.Conv2d(3, 3, 1), nn.GELU(), nn.BatchNorm2d(3)) for _ in range(5)]
    last = nn.Sequential(nn.Conv2d(3, 3, 1), nn.MaxPool2d(1), nn.BatchNorm2d(3))
    model = nn.Sequential(*blocks, last, nn.Flatten(), nn.Linear(48, 2))

    text = str(gp.plan(model, norm="fold", example_inputs=torch.randn(2, 3, 4, 4)))

    assert text.endswith(
        "norms left:\n"
        "  0.2, 1.2, 2.2 and 2 more: gelu comes before it, not a layer\n"
        "  5.2: max_pool2d comes before it"
    )


def test_where_nothing_is_converted_a_norms_reason_is_said_in_few_lines() -> None:
    """As in ConvMixer, whose norms follow activations."""
    blocks = [nn.Sequential(nn.Conv2d(3, 3, 1), nn.GELU(), nn.BatchNorm2d(3)) for _ in range(40)]
    model = nn.Sequential(*blocks, nn.Flatten(), nn.Linear(48, 2))

    with pytest.raises(ValueError, match="0.2 stays: gelu comes before it") as refused:
        gp.convert_(model, norm="fold", weights="plain", example_inputs=torch.randn(2, 3, 4, 4))

    text = str(refused.value)
    assert "0.0: Conv2d (no BatchNorm follows it directly)" in text
    assert text.endswith("and 29 more layers")
    assert len(text.splitlines()) == 17
