"""Mean normalization: what is subtracted, what is remembered."""

from typing import Any

import pytest
import torch
from torch import nn

from geoparam import GmPConv2d, GmPLinear, InputMeanNorm, MeanOnlyBatchNorm, recalibrate_
from geoparam.centred_map import shift_bias

SHAPES = [(6, 3), (6, 3, 5), (4, 3, 5, 2), (2, 3, 4, 5, 2)]


@pytest.mark.parametrize("shape", SHAPES)
def test_subtracts_each_channels_mean(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, dtype=torch.float64) + 3
    centred = InputMeanNorm(3, dtype=torch.float64)(x)
    others = [d for d in range(x.ndim) if d != 1]
    torch.testing.assert_close(centred, x - x.mean(dim=others, keepdim=True))


@pytest.mark.parametrize("momentum", [0.01, 0.3, None])
def test_running_mean_follows_batchnorm(momentum: float | None) -> None:
    ours = InputMeanNorm(3, momentum=momentum)
    ours.corrected = False
    torchs = nn.BatchNorm1d(3, momentum=momentum)
    for _ in range(5):
        x = torch.randn(8, 3) + 2
        ours(x)
        torchs(x)
    torch.testing.assert_close(ours.running_mean, torchs.running_mean)
    assert ours.num_batches_tracked == torchs.num_batches_tracked == 5


@pytest.mark.parametrize("momentum", [0.1, 0.3, 1.0])
def test_running_mean_is_the_average_until_momentum_is_more(momentum: float) -> None:
    norm, expected = InputMeanNorm(3, momentum=momentum), torch.zeros(3)
    for step in range(1, 30):
        mean = torch.randn(3) + 2
        norm(torch.stack([mean - 1, mean + 1]))
        expected = expected + max(momentum, 1 / step) * (mean - expected)
        torch.testing.assert_close(norm.running_mean, expected)
    assert norm.num_batches_tracked == 29


@pytest.mark.parametrize("form", [True, "bias", "border"])
def test_one_value_per_channel_is_refused_in_training_as_batchnorm_does(form: bool | str) -> None:
    layer = GmPLinear(8, 4, input_norm=form)
    layer(torch.randn(2, 8))
    layer.eval()(torch.randn(1, 8))
    for x in (torch.randn(1, 8), torch.randn(8)):
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            layer.train()(x)


def test_the_product_is_float32_under_autocast() -> None:
    w, mean = torch.randn(5, 64), 100 * torch.rand(64)
    expected = shift_bias(None, w, mean)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(shift_bias(None, w, mean), expected)
    narrow = shift_bias(None, w.bfloat16(), mean.bfloat16())
    assert narrow.dtype == torch.float32


def test_evaluation_uses_the_running_mean() -> None:
    norm = InputMeanNorm(3, momentum=0.5)
    norm(torch.randn(8, 3) + 4)
    norm.eval()
    before = norm.running_mean.clone()
    x = torch.randn(5, 3)
    assert torch.equal(norm(x), x - before)
    assert torch.equal(norm.running_mean, before)


def test_the_means_gradient_flows() -> None:
    x = torch.randn(4, 3, 2, dtype=torch.float64, requires_grad=True)
    norm = InputMeanNorm(3, dtype=torch.float64)
    assert torch.autograd.gradcheck(norm, (x,))
    assert torch.autograd.grad(norm(x).sum(), x)[0].abs().max() < 1e-12


@pytest.mark.parametrize("bias", [True, False])
def test_mean_only_batch_norm_has_its_bias_after(bias: bool) -> None:
    norm = MeanOnlyBatchNorm(3, bias=bias)
    x = torch.randn(8, 3, 2)
    expected = x - x.mean(dim=(0, 2), keepdim=True)
    if bias:
        nn.init.normal_(norm.bias)
        expected = expected + norm.bias.view(3, 1)
    torch.testing.assert_close(norm(x), expected)


def test_wrong_number_of_channels() -> None:
    with pytest.raises(ValueError, match="expected 3 channels in dimension 1"):
        InputMeanNorm(3)(torch.randn(2, 4))
    with pytest.raises(ValueError, match="expected 3 channels"):
        InputMeanNorm(3)(torch.randn(3))
    with pytest.raises(ValueError, match="num_features"):
        InputMeanNorm(0)


NORMS = {
    "bn": lambda: nn.BatchNorm2d(3),
    "imn": lambda: InputMeanNorm(3),
    "mbn": lambda: MeanOnlyBatchNorm(3),
    "layer": lambda: GmPConv2d(3, 4, 3, padding=1, input_norm=True),
    "layer, bias form": lambda: GmPConv2d(3, 4, 3, padding=1, input_norm="bias"),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", NORMS)
def test_recalibrated_statistics_are_plain_averages(kind: str, training: bool) -> None:
    model = nn.Sequential(NORMS[kind](), nn.Dropout(0.5)).train(training)
    norm = model[0].input_norm if kind.startswith("layer") else model[0]
    norm.running_mean.fill_(9.0)
    norm.eval()  # frozen by its user, and so it stays
    momentum, random = norm.momentum, torch.get_rng_state()
    batches = [torch.randn(4, 3, 5, 5) + number for number in range(3)]
    state = torch.get_rng_state()
    assert recalibrate_(model, iter(batches)) is model
    assert torch.equal(torch.get_rng_state(), state) and not torch.equal(state, random)
    means = torch.stack([x.mean(dim=(0, 2, 3)) for x in batches])
    torch.testing.assert_close(norm.running_mean, means.mean(dim=0))
    if kind == "bn":
        variances = torch.stack([x.var(dim=(0, 2, 3)) for x in batches])
        torch.testing.assert_close(norm.running_var, variances.mean(dim=0))
    assert norm.momentum == momentum and norm.num_batches_tracked == 3
    assert not norm.training and model.training is model[1].training is training
    assert all(parameter.grad is None for parameter in model.parameters())


X = torch.randn(4, 3)


@pytest.mark.parametrize("batch", [X, [X, torch.zeros(4)], (X,), {"input": X}])
def test_recalibration_takes_what_loaders_yield(batch: Any) -> None:
    norm = recalibrate_(nn.BatchNorm1d(3), [batch])
    torch.testing.assert_close(norm.running_mean, X.mean(dim=0))


def test_a_tuple_is_the_arguments_of_one_call_in_recalibration_too() -> None:
    with pytest.raises(ValueError, match=r"of a batch \(x, y\) give x alone"):
        recalibrate_(nn.BatchNorm1d(3), [(X, torch.zeros(4))])


def test_recalibration_without_norms_or_batches_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a model whose norms have running statistics"):
        recalibrate_(nn.BatchNorm1d(3, track_running_stats=False), [torch.zeros(2, 3)])
    norm = InputMeanNorm(3)
    norm.running_mean.fill_(2.0)
    with pytest.raises(ValueError, match="needs batches; got none"):
        recalibrate_(norm, [])
    assert norm.running_mean.eq(2.0).all()
    for batch in ((), [], {"labels": torch.zeros(2)}):
        with pytest.raises(ValueError, match="forward cannot be called with these inputs"):
            recalibrate_(norm, [torch.zeros(2, 3), batch])
        assert norm.running_mean.eq(2.0).all() and norm.num_batches_tracked == 0


def test_recalibration_leaves_norms_alone_that_do_not_run() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3))
    model.auxiliary = nn.BatchNorm1d(3)
    model.forward = lambda x: model[0](x)
    model.auxiliary.running_var.fill_(5.0)
    x = torch.randn(8, 3)
    torch.testing.assert_close(recalibrate_(model, x)[0].running_mean, x.mean(dim=0))
    assert model.auxiliary.running_var.eq(5.0).all()
