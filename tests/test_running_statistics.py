"""freeze_means_: in training, too, the means are constants."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from model_checks import assert_same_state, copy_state
from torch import Tensor, nn
from torch.testing import assert_close

import geoparam as gp
from geoparam.model.norms import uses_batch

FLAT, IMAGES = (6, 3), (4, 3, 5, 5)
KINDS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "InputMeanNorm": (lambda: gp.InputMeanNorm(3), IMAGES),
    "MeanOnlyBatchNorm": (lambda: gp.MeanOnlyBatchNorm(3), FLAT),
    "GmPLinear": (lambda: gp.GmPLinear(3, 4, input_norm=True), FLAT),
    "GmPConv2d": (lambda: gp.GmPConv2d(3, 4, 3, padding=1, input_norm=True), IMAGES),
    "border": (lambda: gp.GmPConv2d(3, 4, 3, padding=1, input_norm="border"), IMAGES),
    "InputMeanLinear": (lambda: gp.InputMeanLinear(3, 4), FLAT),
    "InputMeanConv2d": (lambda: gp.InputMeanConv2d(3, 4, 3, padding=1), IMAGES),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def build_trained(kind: str) -> tuple[nn.Module, Tensor]:
    """Return a model whose means have seen two batches, and another batch."""
    build, shape = KINDS[kind]
    model = nn.Sequential(build())
    for _ in range(2):
        model(torch.randn(shape) + 1)
    return model, torch.randn(shape)


def output_and_gradient(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    output = model(x)
    [gradient] = torch.autograd.grad(output.sin().sum(), x)
    return output, gradient


# Frozen means in training.


@every_kind
def test_frozen_training_computes_what_evaluation_does(kind: str) -> None:
    model, x = build_trained(kind)
    expected = output_and_gradient(copy.deepcopy(model).eval(), x)

    assert gp.freeze_means_(model) is model

    assert_close(output_and_gradient(model, x), expected, rtol=0, atol=0)


@every_kind
def test_frozen_training_leaves_the_state_alone(kind: str) -> None:
    model, x = build_trained(kind)
    before = copy_state(model)

    gp.freeze_means_(model)
    model(x)

    assert_same_state(model, before)


@every_kind
def test_frozen_training_takes_a_batch_of_one(kind: str) -> None:
    model, x = build_trained(kind)

    gp.freeze_means_(model)

    assert_close(model(x[:1]), model(x)[:1])


@every_kind
def test_means_that_are_thawed_are_the_batchs_again(kind: str) -> None:
    model, x = build_trained(kind)
    expected = output_and_gradient(copy.deepcopy(model), x)

    gp.freeze_means_(model)
    model(x)
    gp.freeze_means_(model, freeze=False)

    assert_close(output_and_gradient(model, x), expected, rtol=0, atol=0)


@every_kind
def test_a_later_batch_leaves_the_graph_of_an_evaluation_alone(kind: str) -> None:
    model, x = build_trained(kind)
    variables = [x.requires_grad_(), *model.parameters()]
    expected = torch.autograd.grad(model.eval()(x).sin().sum(), variables)

    loss = model.eval()(x).sin().sum()
    model.train()(x)
    gradients = torch.autograd.grad(loss, variables)

    assert_close(gradients, expected, rtol=0, atol=0)


@every_kind
def test_copies_stay_frozen(kind: str) -> None:
    model, x = build_trained(kind)
    gp.freeze_means_(model)

    twin = copy.deepcopy(model)

    assert_close(twin(x), model(x), rtol=0, atol=0)
    assert "frozen=True" in repr(twin)


@every_kind
def test_a_state_dict_does_not_say_that_means_are_frozen(kind: str) -> None:
    model, x = build_trained(kind)
    gp.freeze_means_(model)
    fresh, _ = build_trained(kind)

    fresh.load_state_dict(model.state_dict())
    assert not torch.equal(fresh(x), model(x))

    fresh.load_state_dict(model.state_dict())
    gp.freeze_means_(fresh)
    assert_close(fresh(x), model(x), rtol=0, atol=0)


def test_large_images_are_centred_by_the_frozen_mean_too() -> None:
    """They are large enough for a backward pass of the layer's own."""
    layer = gp.InputMeanConv2d(16, 2, 1)
    x = (torch.randn(4, 16, 256, 256) + 1).to(memory_format=torch.channels_last)
    x.requires_grad_()

    output = gp.freeze_means_(layer)(x)

    assert_close(output, nn.functional.conv2d(x, layer.weight, layer.bias))
    assert layer.num_batches_tracked == 0


def test_a_part_of_a_model_is_frozen_by_itself() -> None:
    frozen, free = gp.InputMeanLinear(3, 3), gp.InputMeanLinear(3, 3)
    model = nn.Sequential(frozen, free)

    gp.freeze_means_(frozen)
    model(torch.randn(FLAT))

    assert frozen.num_batches_tracked == 0
    assert free.num_batches_tracked == 1


def test_analysis_reads_a_frozen_norm_by_its_running_mean() -> None:
    norm = gp.MeanOnlyBatchNorm(3)
    assert uses_batch(norm, norm)

    gp.freeze_means_(norm)
    assert not uses_batch(norm, norm)


def test_folding_forgets_that_means_were_frozen() -> None:
    model, _ = build_trained("InputMeanConv2d")
    gp.freeze_means_(model)

    [folded] = gp.fold_(model)

    assert "frozen" not in vars(folded)


# Recalibration.


@every_kind
def test_recalibration_moves_frozen_means_and_they_stay_frozen(kind: str) -> None:
    model, x = build_trained(kind)
    batches = [torch.randn_like(x) for _ in range(3)]
    expected = gp.recalibrate_(copy.deepcopy(model), batches).state_dict()

    gp.recalibrate_(gp.freeze_means_(model), batches)
    assert_same_state(model, expected)

    model(x + 5)
    assert_same_state(model, expected)


def test_after_an_error_in_recalibration_means_are_frozen_still() -> None:
    model, _ = build_trained("InputMeanNorm")
    gp.freeze_means_(model)

    with pytest.raises(ValueError, match="expected 3 channels"):
        gp.recalibrate_(model, [torch.randn(2, 5)])

    assert model[0].frozen


class BrokenReset(gp.InputMeanNorm):
    def reset_running_stats(self) -> None:
        raise KeyboardInterrupt


def test_after_an_error_before_the_first_batch_nothing_is_changed() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), gp.InputMeanNorm(2), BrokenReset(2)).train()
    model(torch.randn(4, 2))
    state = copy_state(model)

    with pytest.raises(KeyboardInterrupt):
        gp.recalibrate_(model, [torch.randn(4, 2)])

    assert_same_state(model, state)
    assert all(module.training for module in model.modules())
    assert [norm.momentum for norm in model] == [0.1, 0.2, 0.2]


class InterruptedRestoring(nn.Module):
    """Once it has run, Ctrl-C comes when its mode is put back."""

    def forward(self, x: Tensor) -> Tensor:
        self.has_run = True
        return x

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "training" and vars(self).pop("has_run", False):
            raise KeyboardInterrupt
        super().__setattr__(name, value)


def test_an_interrupt_while_flags_are_put_back_leaves_them_whole() -> None:
    model = nn.Sequential(InterruptedRestoring(), gp.InputMeanNorm(2), nn.Dropout()).train()

    with pytest.raises(KeyboardInterrupt):
        gp.recalibrate_(model, [torch.randn(4, 2)])

    assert all(module.training for module in model.modules())


# Models without means, and what is refused.


@pytest.mark.parametrize("freeze", [True, False])
@pytest.mark.parametrize("norm", ["imn", "fold"])
@pytest.mark.parametrize("weights", ["plain", "geometric"])
def test_a_converted_model_without_means_has_nothing_to_freeze(
    norm: str, weights: str, freeze: bool
) -> None:
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 3, 1))
    x = torch.randn(IMAGES)
    model(x)
    gp.convert_(model, norm=norm, weights=weights, example_inputs=x)

    assert gp.freeze_means_(model, freeze) is model


@pytest.mark.parametrize("freeze", [True, False])
def test_a_geometric_layer_without_means_has_nothing_to_freeze(freeze: bool) -> None:
    model = nn.Sequential(gp.GmPLinear(3, 3))

    assert gp.freeze_means_(model, freeze) is model


USES_BATCH = r"1 other norms use the batch in training, '0' first. Call eval\(\)"


@pytest.fixture
def with_batchnorm() -> nn.Sequential:
    return nn.Sequential(nn.BatchNorm2d(3), gp.InputMeanNorm(3))


@pytest.mark.parametrize("training", [True, False])
def test_norms_that_go_on_using_the_batch_are_named(
    with_batchnorm: nn.Sequential, training: bool
) -> None:
    with_batchnorm.train(training)

    with pytest.warns(UserWarning, match=USES_BATCH):
        gp.freeze_means_(with_batchnorm)


def test_thawing_names_no_other_norms(with_batchnorm: nn.Sequential) -> None:
    """A warning would be an error."""
    gp.freeze_means_(with_batchnorm, freeze=False)


def test_norms_in_evaluation_alone_are_not_named(with_batchnorm: nn.Sequential) -> None:
    """A warning would be an error."""
    with_batchnorm[0].eval()

    gp.freeze_means_(with_batchnorm)


def test_norms_without_statistics_are_named_in_evaluation_too(
    with_batchnorm: nn.Sequential,
) -> None:
    with_batchnorm[0].eval()
    with_batchnorm[0].running_mean = None

    with pytest.warns(UserWarning, match=USES_BATCH):
        gp.freeze_means_(with_batchnorm)


@pytest.mark.parametrize(
    ("model", "freeze", "message"),
    [
        (nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), True, "no mean normalization"),
        (gp.InputMeanNorm(2), "no", "freeze is True or False"),
        ([gp.InputMeanNorm(2)], True, "takes a model"),
    ],
)
def test_what_cannot_be_frozen_is_refused(model: Any, freeze: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gp.freeze_means_(model, freeze)
