"""Mean normalization: what is subtracted, what is remembered."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from geoparam import GmPConv2d, GmPLinear, InputMeanNorm, MeanOnlyBatchNorm, recalibrate_
from geoparam.centred_map import shift_bias

DOUBLE = {"dtype": torch.float64}


# What is subtracted.


@pytest.mark.parametrize("shape", [(6, 3), (6, 3, 5), (4, 3, 5, 2), (2, 3, 4, 5, 2)])
def test_each_channels_mean_is_subtracted(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, **DOUBLE) + 3
    other_dims = [dim for dim in range(x.ndim) if dim != 1]

    centred = InputMeanNorm(3, **DOUBLE)(x)

    assert_close(centred, x - x.mean(dim=other_dims, keepdim=True))


@pytest.mark.parametrize("bias", [True, False])
def test_mean_only_batch_norm_adds_its_bias_after_centring(bias: bool) -> None:
    norm = MeanOnlyBatchNorm(3, bias=bias)
    x = torch.randn(8, 3, 2)
    expected = x - x.mean(dim=(0, 2), keepdim=True)
    if bias:
        nn.init.normal_(norm.bias)
        expected = expected + norm.bias.view(3, 1)

    assert_close(norm(x), expected)


def test_evaluation_subtracts_the_running_mean_and_leaves_it() -> None:
    norm = InputMeanNorm(3, momentum=0.5)
    norm(torch.randn(8, 3) + 4)
    norm.eval()
    running_mean = norm.running_mean.clone()
    x = torch.randn(5, 3)

    assert torch.equal(norm(x), x - running_mean)
    assert torch.equal(norm.running_mean, running_mean)


def test_the_means_gradient_flows() -> None:
    x = torch.randn(4, 3, 2, **DOUBLE, requires_grad=True)
    norm = InputMeanNorm(3, **DOUBLE)

    assert torch.autograd.gradcheck(norm, (x,))


def test_the_sum_of_centred_values_has_no_gradient() -> None:
    x = torch.randn(4, 3, 2, **DOUBLE, requires_grad=True)
    norm = InputMeanNorm(3, **DOUBLE)

    [gradient] = torch.autograd.grad(norm(x).sum(), x)

    assert gradient.abs().max() < 1e-12


def test_the_shift_of_a_bias_is_float32_under_autocast() -> None:
    weight, mean = torch.randn(5, 64), 100 * torch.rand(64)
    expected = shift_bias(None, weight, mean)

    with torch.autocast("cpu", torch.bfloat16):
        shifted = shift_bias(None, weight, mean)

    assert torch.equal(shifted, expected)


def test_the_shift_of_a_bias_is_float32_for_narrow_types() -> None:
    weight, mean = torch.randn(5, 64), 100 * torch.rand(64)

    shifted = shift_bias(None, weight.bfloat16(), mean.bfloat16())

    assert shifted.dtype == torch.float32


# What is remembered.


@pytest.mark.parametrize("momentum", [0.01, 0.3, None])
def test_uncorrected_running_mean_follows_batchnorm(momentum: float | None) -> None:
    norm = InputMeanNorm(3, momentum=momentum)
    norm.corrected = False
    batchnorm = nn.BatchNorm1d(3, momentum=momentum)

    for _ in range(5):
        x = torch.randn(8, 3) + 2
        norm(x)
        batchnorm(x)

    assert_close(norm.running_mean, batchnorm.running_mean)
    assert norm.num_batches_tracked == batchnorm.num_batches_tracked == 5


@pytest.mark.parametrize("momentum", [0.1, 0.3, 1.0])
def test_running_mean_is_the_average_until_momentum_is_more(momentum: float) -> None:
    norm = InputMeanNorm(3, momentum=momentum)
    expected = torch.zeros(3)

    for step in range(1, 30):
        mean = torch.randn(3) + 2
        norm(torch.stack([mean - 1, mean + 1]))

        share = max(momentum, 1 / step)
        expected = expected + share * (mean - expected)
        assert_close(norm.running_mean, expected)
        assert norm.num_batches_tracked == step


# What is refused.


@pytest.mark.parametrize("form", [True, "bias", "border"])
@pytest.mark.parametrize("shape", [(1, 8), (8,)])
def test_one_value_per_channel_is_refused_in_training_as_batchnorm_does(
    form: bool | str, shape: tuple[int, ...]
) -> None:
    layer = GmPLinear(8, 4, input_norm=form)

    with pytest.raises(ValueError, match="more than 1 value per channel"):
        layer(torch.randn(shape))


@pytest.mark.parametrize("form", [True, "bias", "border"])
def test_one_value_per_channel_is_enough_in_evaluation(form: bool | str) -> None:
    layer = GmPLinear(8, 4, input_norm=form)
    layer(torch.randn(2, 8))

    assert layer.eval()(torch.randn(1, 8)).shape == (1, 4)


@pytest.mark.parametrize(
    ("shape", "message"),
    [((2, 4), "expected 3 channels in dimension 1"), ((3,), "expected 3 channels")],
)
def test_another_number_of_channels_is_refused(shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        InputMeanNorm(3)(torch.randn(shape))


def test_no_channels_are_refused() -> None:
    with pytest.raises(ValueError, match="num_features"):
        InputMeanNorm(0)


# Recalibration.


def build_norm(kind: str) -> nn.Module:
    if kind == "bn":
        return nn.BatchNorm2d(3)
    if kind == "imn":
        return InputMeanNorm(3)
    if kind == "mbn":
        return MeanOnlyBatchNorm(3)
    input_norm = "bias" if kind == "layer, bias form" else True
    return GmPConv2d(3, 4, 3, padding=1, input_norm=input_norm)


every_kind = pytest.mark.parametrize("kind", ["bn", "imn", "mbn", "layer", "layer, bias form"])
BATCHES = [torch.randn(4, 3, 5, 5) + offset for offset in range(3)]


def build_uncalibrated(kind: str, training: bool) -> tuple[nn.Sequential, nn.Module]:
    """Return a model, and its norm, whose mean is far off and whose user has frozen it."""
    model = nn.Sequential(build_norm(kind), nn.Dropout(0.5)).train(training)
    norm = model[0].input_norm if kind.startswith("layer") else model[0]
    norm.running_mean.fill_(9.0)
    norm.eval()
    return model, norm


@every_kind
@pytest.mark.parametrize("training", [True, False])
def test_recalibrated_means_are_plain_averages(kind: str, training: bool) -> None:
    model, norm = build_uncalibrated(kind, training)

    assert recalibrate_(model, iter(BATCHES)) is model

    means = [batch.mean(dim=(0, 2, 3)) for batch in BATCHES]
    assert_close(norm.running_mean, torch.stack(means).mean(dim=0))
    assert norm.num_batches_tracked == 3


@pytest.mark.parametrize("training", [True, False])
def test_recalibrated_variances_are_plain_averages(training: bool) -> None:
    model, norm = build_uncalibrated("bn", training)

    recalibrate_(model, BATCHES)

    variances = [batch.var(dim=(0, 2, 3)) for batch in BATCHES]
    assert_close(norm.running_var, torch.stack(variances).mean(dim=0))


@every_kind
@pytest.mark.parametrize("training", [True, False])
def test_recalibration_leaves_modes_momentum_and_gradients_alone(
    kind: str, training: bool
) -> None:
    model, norm = build_uncalibrated(kind, training)
    momentum = norm.momentum

    recalibrate_(model, BATCHES)

    assert model.training == training
    assert model[1].training == training
    assert not norm.training
    assert norm.momentum == momentum
    assert all(parameter.grad is None for parameter in model.parameters())


def test_recalibration_draws_no_random_numbers() -> None:
    """The model has dropout."""
    model, _ = build_uncalibrated("bn", training=True)
    before = torch.get_rng_state()

    recalibrate_(model, BATCHES)

    assert torch.equal(torch.get_rng_state(), before)


X = torch.randn(4, 3)


@pytest.mark.parametrize("batch", [X, [X, torch.zeros(4)], (X,), {"input": X}])
def test_recalibration_takes_what_loaders_yield(batch: Any) -> None:
    norm = recalibrate_(nn.BatchNorm1d(3), [batch])

    assert_close(norm.running_mean, X.mean(dim=0))


def test_a_tuple_is_the_arguments_of_one_call_in_recalibration_too() -> None:
    with pytest.raises(ValueError, match=r"of a batch \(x, y\) give x alone"):
        recalibrate_(nn.BatchNorm1d(3), [(X, torch.zeros(4))])


def test_recalibration_needs_running_statistics() -> None:
    with pytest.raises(ValueError, match="needs a model whose norms have running statistics"):
        recalibrate_(nn.BatchNorm1d(3, track_running_stats=False), [torch.zeros(2, 3)])


NO_INPUTS = "forward cannot be called with these inputs"
GOOD_BATCH = torch.zeros(2, 3)


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([], "needs batches; got none"),
        ([GOOD_BATCH, ()], NO_INPUTS),
        ([GOOD_BATCH, []], NO_INPUTS),
        ([GOOD_BATCH, {"labels": torch.zeros(2)}], NO_INPUTS),
    ],
)
def test_recalibration_that_fails_leaves_the_statistics_alone(
    batches: list[Tensor], message: str
) -> None:
    norm = InputMeanNorm(3)
    norm.running_mean.fill_(2.0)

    with pytest.raises(ValueError, match=message):
        recalibrate_(norm, batches)

    assert (norm.running_mean == 2).all()
    assert norm.num_batches_tracked == 0


def test_recalibration_leaves_norms_alone_that_do_not_run() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3))
    model.auxiliary = nn.BatchNorm1d(3)
    model.auxiliary.running_var.fill_(5.0)
    model.forward = lambda x: model[0](x)

    recalibrate_(model, X)

    assert_close(model[0].running_mean, X.mean(dim=0))
    assert (model.auxiliary.running_var == 5).all()
