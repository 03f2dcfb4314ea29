"""Mean normalization: what is subtracted, what is remembered."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from geoparam import GmPConv2d, InputMeanNorm, MeanOnlyBatchNorm, fused, recalibrate_
from geoparam.ops import rectified, shifted_op

SHAPES = [(6, 3), (6, 3, 5), (4, 3, 5, 2), (2, 3, 4, 5, 2)]


def others(x: torch.Tensor) -> list[int]:
    return [d for d in range(x.ndim) if d != 1]


@pytest.mark.parametrize("shape", SHAPES)
def test_subtracts_each_channels_mean(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, dtype=torch.float64) + 3
    centred = InputMeanNorm(3, dtype=torch.float64)(x)
    torch.testing.assert_close(centred, x - x.mean(dim=others(x), keepdim=True))


def test_channels_in_the_last_dimension() -> None:
    x = torch.randn(2, 5, 3)
    torch.testing.assert_close(InputMeanNorm(3, dim=-1)(x), x - x.mean(dim=(0, 1)))


@pytest.mark.parametrize("momentum", [0.01, 0.3, None])
def test_running_mean_follows_batchnorm(momentum: float | None) -> None:
    ours, torchs = InputMeanNorm(3, momentum=momentum), nn.BatchNorm1d(3, momentum=momentum)
    for _ in range(5):
        x = torch.randn(8, 3) + 2
        ours(x)
        torchs(x)
    torch.testing.assert_close(ours.running_mean, torchs.running_mean)
    assert ours.num_batches_tracked == torchs.num_batches_tracked == 5


def test_evaluation_uses_the_running_mean() -> None:
    norm = InputMeanNorm(3, momentum=0.5)
    norm(torch.randn(8, 3) + 4)
    norm.eval()
    before = norm.running_mean.clone()
    x = torch.randn(5, 3)
    assert torch.equal(norm(x), x - before)
    assert torch.equal(norm.running_mean, before)


def test_without_tracking_evaluation_uses_the_batch() -> None:
    norm = InputMeanNorm(3, track_running_stats=False).eval()
    x = torch.randn(5, 3)
    torch.testing.assert_close(norm(x), x - x.mean(dim=0))
    assert not norm.state_dict()


def test_the_means_gradient_flows() -> None:
    x = torch.randn(4, 3, 2, dtype=torch.float64, requires_grad=True)
    norm = InputMeanNorm(3, dtype=torch.float64)
    assert torch.autograd.gradcheck(norm, (x,))
    assert torch.autograd.grad(norm(x).sum(), x)[0].abs().max() < 1e-12


def test_statistics_are_float32_under_autocast() -> None:
    norm = InputMeanNorm(1, momentum=1.0)
    x = (100 + torch.rand(4096, 1)).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        centred = norm(x)
    assert centred.dtype == torch.bfloat16
    assert norm.running_mean.dtype == torch.float32
    torch.testing.assert_close(norm.running_mean, x.float().mean(dim=0), atol=1e-4, rtol=0)
    assert centred.float().mean().abs() < 1e-2


def test_an_empty_batch_changes_nothing() -> None:
    norm = InputMeanNorm(3)
    norm(torch.randn(4, 3))
    before = norm.running_mean.clone()
    assert norm(torch.empty(0, 3)).shape == (0, 3)
    assert torch.equal(norm.running_mean, before)
    assert norm.num_batches_tracked == 1


@pytest.mark.parametrize("bias", [True, False])
def test_mean_only_batch_norm_has_its_bias_after(bias: bool) -> None:
    norm = MeanOnlyBatchNorm(3, bias=bias)
    x = torch.randn(8, 3, 2)
    expected = x - x.mean(dim=(0, 2), keepdim=True)
    if bias:
        nn.init.normal_(norm.bias)
        expected = expected + norm.bias.view(3, 1)
    torch.testing.assert_close(norm(x), expected)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("kind", [InputMeanNorm, MeanOnlyBatchNorm])
@pytest.mark.parametrize(("shape", "dim"), [*((s, 1) for s in SHAPES), ((2, 5, 3), -1)])
@pytest.mark.parametrize("before", [nn.Identity(), nn.Tanh(), fused.ReLU()], ids=str)
def test_few_passes_are_the_readable_form(
    switch: Callable,
    monkeypatch: pytest.MonkeyPatch,
    before: nn.Module,
    shape: tuple[int, ...],
    dim: int,
    kind: type[InputMeanNorm],
    device: str,
) -> None:
    norm = kind(3, momentum=0.3, dim=dim, dtype=torch.float64, device=device)
    x = torch.randn(shape, dtype=torch.float64, device=device, requires_grad=True)
    results: list[dict[str, Tensor]] = []
    for on in (False, True):
        switch(on)
        monkeypatch.setattr(fused, "DEVICES", {device} if on else set())
        twin = copy.deepcopy(norm)
        y = twin(before(x * 1))
        inputs = [x, *twin.parameters()]
        slopes = torch.autograd.grad(y.pow(3).sum(), inputs, create_graph=True)
        curved = torch.autograd.grad(slopes[0].pow(2).sum(), inputs, allow_unused=True)
        x.grad = None
        y = twin(before(x * 1))
        y.pow(3).sum().backward()
        found = [y, x.grad, *slopes, *curved, *[p.grad for p in twin.parameters()]]
        results.append({**twin.state_dict(), **{str(i): t for i, t in enumerate(found)}})
    for name, value in results[0].items():
        torch.testing.assert_close(results[1][name], value, atol=1e-12, rtol=1e-10, msg=name)


class MeanOfTheFirst(InputMeanNorm):
    """What a user may make of it: here the mean of two images."""

    def mean(self, x: Tensor) -> Tensor:
        return super().mean(x[:2])


@pytest.mark.parametrize("mode", ["passes", "compiled"])
@pytest.mark.parametrize("place", ["alone", "in a layer", "in a bias"])
def test_a_subclass_may_have_another_mean(
    switch: Callable, monkeypatch: pytest.MonkeyPatch, mode: str, place: str
) -> None:
    def step(on: bool) -> list[Tensor]:
        switch(on and mode == "passes")
        torch.manual_seed(0)
        norm = MeanOfTheFirst(3).double()
        kind = "bias" if place == "in a bias" else True
        layer = GmPConv2d(3, 4, 3, padding=1, activation=torch.relu, input_norm=kind).double()
        layer.input_norm = norm
        model = norm if place == "alone" else layer
        x = torch.randn(4, 3, 5, 5, dtype=torch.float64, requires_grad=True)
        torch.compiler.reset()
        call = torch.compile(model, backend="aot_eager") if on and mode == "compiled" else model
        y = call(x)
        y.pow(3).sum().backward()
        return [y, x.grad, *[p.grad for p in model.parameters()], norm.running_mean]

    expected = step(False)
    monkeypatch.setattr(rectified, "possible", lambda x: torch.compiler.is_compiling())
    monkeypatch.setattr(shifted_op, "wanted", lambda stored: torch.compiler.is_compiling())
    torch.testing.assert_close(step(True), expected)


def test_a_frozen_input_gets_nothing_and_the_bias_its_gradient(switch: Callable) -> None:
    switch(True)
    norm, x = MeanOnlyBatchNorm(3), torch.randn(4, 3, 2)
    norm(x).sum().backward()
    torch.testing.assert_close(norm.bias.grad, torch.full((3,), 8.0))
    norm.bias.requires_grad_(False)
    assert not norm(x).requires_grad


def test_reset_forgets_and_state_dict_remembers() -> None:
    norm, other = InputMeanNorm(3), InputMeanNorm(3)
    norm(torch.randn(4, 3) + 5)
    other.load_state_dict(norm.state_dict())
    assert torch.equal(other.running_mean, norm.running_mean)
    norm.reset_running_stats()
    assert not norm.running_mean.any() and norm.num_batches_tracked == 0


def test_wrong_number_of_channels() -> None:
    with pytest.raises(ValueError, match="expected 3 channels in dimension 1"):
        InputMeanNorm(3)(torch.randn(2, 4))
    with pytest.raises(ValueError, match="expected 3 channels"):
        InputMeanNorm(3)(torch.randn(3))
    with pytest.raises(ValueError, match="num_features"):
        InputMeanNorm(0)


def normed(kind: str) -> nn.Module:
    """Return a model with one norm, dropout and a layer."""
    norms = {
        "bn": nn.BatchNorm2d(3),
        "imn": InputMeanNorm(3),
        "mbn": MeanOnlyBatchNorm(3),
        "layer": GmPConv2d(3, 4, 3, padding=1, input_norm=True),
        "layer, bias form": GmPConv2d(3, 4, 3, padding=1, input_norm="bias"),
    }
    return nn.Sequential(norms[kind], nn.Dropout(0.5))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", ["bn", "imn", "mbn", "layer", "layer, bias form"])
def test_recalibrated_statistics_are_plain_averages(kind: str, training: bool) -> None:
    model = normed(kind).train(training)
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


@pytest.mark.parametrize("form", [list, tuple, lambda pair: {"input": pair[0]}])
def test_recalibration_takes_what_loaders_yield(form: Callable) -> None:
    x = torch.randn(4, 3)
    batch = form((x,) if form is tuple else (x, torch.zeros(4)))
    norm = nn.BatchNorm1d(3)
    torch.testing.assert_close(recalibrate_(norm, [batch]).running_mean, x.mean(dim=0))


def test_recalibration_without_norms_or_batches_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a model whose norms have running statistics"):
        recalibrate_(nn.BatchNorm1d(3, track_running_stats=False), [torch.zeros(2, 3)])
    norm = InputMeanNorm(3)
    norm.running_mean.fill_(2.0)
    with pytest.raises(ValueError, match="needs batches; got none"):
        recalibrate_(norm, [])
    assert norm.running_mean.eq(2.0).all()
