"""freeze_means_: in training, too, the means are constants."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

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
kinds = pytest.mark.parametrize(("build", "shape"), KINDS.values(), ids=KINDS)


def trained(build: Callable[[], nn.Module], shape: tuple[int, ...]) -> nn.Module:
    """A model whose means have seen two batches."""
    model = nn.Sequential(build())
    for _ in range(2):
        model(torch.randn(shape) + 1)
    return model


def run(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output, and the gradient of the input."""
    x = x.clone().requires_grad_()
    z = model(x)
    return z, torch.autograd.grad(z.sin().sum(), x)[0]


@kinds
def test_frozen_training_computes_what_evaluation_does(build, shape) -> None:  # noqa: ANN001
    model, x = trained(build, shape), torch.randn(shape)
    expected = run(copy.deepcopy(model).eval(), x)
    batch = run(copy.deepcopy(model), x)
    before = {key: value.clone() for key, value in model.state_dict().items()}

    assert gp.freeze_means_(model) is model
    torch.testing.assert_close(run(model.train(), x), expected, rtol=0, atol=0)
    torch.testing.assert_close(model(x[:1]), expected[0][:1])  # a batch of one is no exception
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[key], before[key]) for key in before)

    gp.freeze_means_(model, freeze=False)
    torch.testing.assert_close(run(model, x), batch, rtol=0, atol=0)


@kinds
def test_a_later_batch_leaves_the_graph_of_an_evaluation_alone(build, shape) -> None:  # noqa: ANN001
    model, x = trained(build, shape), torch.randn(shape, requires_grad=True)
    gradients = []
    for also_trains in (False, True):
        evaluated = model.eval()(x).sin().sum()
        if also_trains:
            model.train()(x)
        gradients.append(torch.autograd.grad(evaluated, x)[0])
    assert torch.equal(*gradients)


@kinds
def test_copies_stay_frozen_and_a_state_dict_does_not_say_it(build, shape) -> None:  # noqa: ANN001
    model, x = gp.freeze_means_(trained(build, shape)), torch.randn(shape)
    expected = model(x)
    torch.testing.assert_close(copy.deepcopy(model)(x), expected, rtol=0, atol=0)
    assert "frozen=True" in repr(model)

    fresh = nn.Sequential(build())
    fresh.load_state_dict(model.state_dict())
    assert not torch.equal(fresh(x), expected)
    fresh.load_state_dict(model.state_dict())
    torch.testing.assert_close(gp.freeze_means_(fresh)(x), expected, rtol=0, atol=0)


@kinds
def test_recalibration_moves_frozen_means_and_they_stay_frozen(build, shape) -> None:  # noqa: ANN001
    model, batches = trained(build, shape), [torch.randn(shape) for _ in range(3)]
    expected = gp.recalibrate_(copy.deepcopy(model), batches).state_dict()
    gp.recalibrate_(gp.freeze_means_(model), batches)
    assert all(map(torch.equal, model.state_dict().values(), expected.values()))
    model(batches[0] + 5)
    assert all(map(torch.equal, model.state_dict().values(), expected.values()))


def test_after_an_error_in_recalibration_means_are_frozen_still() -> None:
    model = gp.freeze_means_(trained(*KINDS["InputMeanNorm"]))
    with pytest.raises(ValueError, match="expected 3 channels"):
        gp.recalibrate_(model, [torch.randn(2, 5)])
    assert model[0].frozen


def test_after_an_error_before_the_first_batch_nothing_is_changed() -> None:
    class Broken(gp.InputMeanNorm):
        def reset_running_stats(self) -> None:
            raise KeyboardInterrupt

    model = nn.Sequential(nn.BatchNorm1d(2), gp.InputMeanNorm(2), Broken(2)).train()
    model(torch.randn(4, 2))
    state = copy.deepcopy(model.state_dict())
    with pytest.raises(KeyboardInterrupt):
        gp.recalibrate_(model, [torch.randn(4, 2)])
    assert all(torch.equal(t, state[key]) for key, t in model.state_dict().items())
    assert all(module.training for module in model.modules())
    assert [norm.momentum for norm in model] == [0.1, 0.2, 0.2]


def test_large_images_are_centred_by_the_frozen_mean_too() -> None:
    layer = gp.InputMeanConv2d(16, 2, 1)
    x = (torch.randn(4, 16, 256, 256) + 1).to(memory_format=torch.channels_last)
    x.requires_grad_()  # large enough for a backward pass of its own
    z = gp.freeze_means_(layer)(x)
    torch.testing.assert_close(z, nn.functional.conv2d(x, layer.weight, layer.bias))
    assert layer.num_batches_tracked == 0


def test_a_part_of_a_model_is_frozen_by_itself() -> None:
    model = nn.Sequential(gp.InputMeanLinear(3, 3), gp.InputMeanLinear(3, 3))
    gp.freeze_means_(model[0])
    model(torch.randn(FLAT))
    assert [layer.num_batches_tracked.item() for layer in model] == [0, 1]


def test_analysis_reads_a_frozen_norm_by_its_running_mean() -> None:
    norm = gp.MeanOnlyBatchNorm(3)
    assert uses_batch(norm, norm) and not uses_batch(gp.freeze_means_(norm), norm)


def test_folding_forgets_that_means_were_frozen() -> None:
    model = gp.freeze_means_(trained(*KINDS["InputMeanConv2d"]))
    assert "frozen" not in vars(gp.fold_(model)[0])


def batchnorm_net() -> nn.Module:
    layers = [nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 3, 1)]
    return trained(lambda: nn.Sequential(*layers), IMAGES)


@pytest.mark.parametrize("norm", ["imn", "fold"])
@pytest.mark.parametrize("weights", ["plain", "geometric"])
def test_a_converted_model_without_means_has_nothing_to_freeze(norm: str, weights: str) -> None:
    model = batchnorm_net()
    gp.convert_(model, norm=norm, weights=weights, example_inputs=torch.randn(IMAGES))
    for converted in (model, nn.Sequential(gp.GmPLinear(3, 3))):
        for freeze in (True, False):
            assert gp.freeze_means_(converted, freeze) is converted


def test_norms_that_go_on_using_the_batch_are_named() -> None:
    model = nn.Sequential(nn.BatchNorm2d(3), gp.InputMeanNorm(3)).eval()
    message = r"1 other norms use the batch in training, '0' first. Call eval\(\)"
    with pytest.warns(UserWarning, match=message):
        gp.freeze_means_(model)
    gp.freeze_means_(model, freeze=False)

    model.train()[0].eval()
    gp.freeze_means_(model)  # a warning would be an error
    model[0].running_mean = None  # it uses the batch in evaluation too
    with pytest.warns(UserWarning, match=message):
        gp.freeze_means_(model)


@pytest.mark.parametrize(
    ("model", "freeze", "message"),
    [
        (nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), True, "no mean normalization"),
        (gp.InputMeanNorm(2), "no", "freeze is True or False"),
        ([gp.InputMeanNorm(2)], True, "takes a model"),
    ],
)
def test_what_cannot_be_frozen_is_refused(model, freeze, message) -> None:  # noqa: ANN001
    with pytest.raises(ValueError, match=message):
        gp.freeze_means_(model, freeze)
