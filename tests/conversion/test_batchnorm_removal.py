"""convert_(norm="imn"): BatchNorm goes, evaluation stays, and what cannot be kept is said."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from model_checks import has_batchnorm
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.testing import assert_close
from zoo import pretend_pretrained

import geoparam as gp

X = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(0))

both_weights = pytest.mark.parametrize("weights", ["geometric", "plain"])


class TwoConvs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 6, 3, padding=1, stride=2, bias=False)
        self.norm2 = nn.BatchNorm2d(6)
        self.head = nn.Linear(6, 2)
        pretend_pretrained(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.classify(self.norm1(self.first(x)).relu())

    def classify(self, x: Tensor) -> Tensor:
        """Return the scores of the first layer's output."""
        x = self.norm2(self.second(x)).relu()
        return self.head(x.mean(dim=(2, 3)))


def remove_batchnorm(model: nn.Module, **options: Any) -> nn.Module:
    return gp.convert_(model, **{"norm": "imn", "example_inputs": X, **options})


# Pretrained models and calibration.


def test_pretrained_batchnorm_is_absorbed_exactly() -> None:
    model = TwoConvs().double()
    original = copy.deepcopy(model)
    x = X.double()

    remove_batchnorm(model, example_inputs=x, calibration=x + 1)

    assert gp.verify(original, model, x) < 1e-12
    assert not has_batchnorm(model)


def test_the_first_layer_gets_no_input_mean() -> None:
    """It sees data."""
    model = remove_batchnorm(TwoConvs())

    assert model.first.input_norm is None
    assert model.second.input_norm_form == "bias"


def test_calibration_sets_the_running_means() -> None:
    model = TwoConvs().eval()
    batches = [X, X[:2] * 2]
    hidden = [model.norm1(model.first(batch)).relu() for batch in batches]

    remove_batchnorm(model, calibration=batches)

    mean = torch.cat(hidden).mean(dim=(0, 2, 3))
    assert_close(model.second.input_norm.running_mean, mean, atol=1e-5, rtol=1e-5)


def test_a_data_loader_with_labels_calibrates() -> None:
    data = torch.utils.data.TensorDataset(X, torch.arange(len(X)))
    loader = torch.utils.data.DataLoader(data, batch_size=2)
    model = TwoConvs()

    by_loader = remove_batchnorm(copy.deepcopy(model), calibration=loader)
    by_tensors = remove_batchnorm(model, calibration=[X[:2], X[2:]])

    means = [each.second.input_norm.running_mean for each in (by_loader, by_tensors)]
    assert_close(*means, rtol=0, atol=0)


def test_after_calibration_the_next_batch_has_the_share_of_momentum() -> None:
    model = remove_batchnorm(TwoConvs(), calibration=[X, X])

    next_share = 1 / model.second.input_norm.num_batches_tracked
    assert next_share == model.second.input_norm.momentum == 0.2


@pytest.mark.parametrize("momentum", [0.1, 0.2, None])
@torch.no_grad()
def test_the_first_batch_moves_a_calibrated_mean_by_momentum(momentum: float | None) -> None:
    calibration = [X, X, X]
    model = remove_batchnorm(
        TwoConvs(), weights="plain", momentum=momentum, calibration=calibration
    )
    share = momentum or 1 / (len(calibration) + 1)
    model.train()
    batch_mean = model.norm1(model.first(2 * X)).relu().mean(dim=(0, 2, 3))
    expected = model.second.running_mean.lerp(batch_mean, share)

    model(2 * X)

    assert_close(model.second.running_mean, expected)


# Models that are trained from the start.


def test_from_scratch_the_layers_have_the_same_form() -> None:
    model = remove_batchnorm(TwoConvs(), init="sphere")

    assert model.first.input_norm is None
    assert model.second.input_norm is not None
    assert model.second.input_norm_form is True
    assert model.second.lam is not None  # it takes over BatchNorm's offset


def test_from_scratch_a_model_folds_to_the_originals_keys() -> None:
    model = remove_batchnorm(TwoConvs(), init="sphere")
    model(X)

    folded = gp.fold_(copy.deepcopy(model))

    assert gp.verify(model, folded, X) < 1e-5
    assert set(folded.state_dict()) == set(TwoConvs().state_dict())


def build_network_with(norm: nn.Module) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, bias=False),
        norm,
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32, 2),
    )


every_norm_that_adds_a_bias = pytest.mark.parametrize(
    "build_norm",
    [
        nn.Identity,
        lambda: nn.GroupNorm(2, 8),
        lambda: nn.BatchNorm2d(8, track_running_stats=False),
    ],
    ids=["no norm", "another norm", "no statistics"],
)


@both_weights
@every_norm_that_adds_a_bias
def test_from_scratch_other_keys_are_said_at_conversion(
    build_norm: Callable, weights: str
) -> None:
    model = build_network_with(build_norm())
    keys = set(model.state_dict())

    with pytest.warns(UserWarning, match="1 layers, '2' first, will not fold to the keys"):
        remove_batchnorm(model, init="glorot", weights=weights)

    model(X)
    folded = gp.fold_(copy.deepcopy(model), restore_norm=True)
    assert gp.verify(model, folded, X) < 1e-5
    assert set(folded.state_dict()) != keys


@both_weights
@every_norm_that_adds_a_bias
def test_nothing_is_said_if_the_filter_leaves_the_layer_out(
    build_norm: Callable, weights: str
) -> None:
    """A warning would be an error."""
    model = build_network_with(build_norm())

    remove_batchnorm(
        model, filter_fn=lambda module, name: name == "0", init="glorot", weights=weights
    )


# Norms that stay.


class ResidualAroundNorm(TwoConvs):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.classify(self.norm1(x).relu() + x)


def test_a_norm_whose_input_others_use_stays() -> None:
    plan = gp.plan(ResidualAroundNorm(), norm="imn", example_inputs=X)

    absorbed = {d.name: d.norm for d in plan.decisions if d.converted}
    assert absorbed == {"first": None, "second": "norm2"}


class Doubling(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


@pytest.mark.parametrize("norm", [Doubling(6), nn.SyncBatchNorm(6)])
def test_a_norm_that_computes_something_else_stays(norm: nn.Module) -> None:
    model = TwoConvs()
    model.norm2 = norm
    original = copy.deepcopy(model)

    assert "norm2 stays" in str(gp.plan(model, norm="imn", example_inputs=X))
    remove_batchnorm(model)

    assert gp.verify(original, model, X) < 1e-5


class FunctionalNorm(TwoConvs):
    def forward(self, x: Tensor) -> Tensor:
        mean, variance = self.norm1.running_mean, self.norm1.running_var
        x = nn.functional.batch_norm(self.first(x), mean, variance, self.norm1.weight)
        return self.classify(x.relu())


def test_a_norm_used_through_its_statistics_stays() -> None:
    model = FunctionalNorm().eval()
    original = copy.deepcopy(model)

    remove_batchnorm(model)

    assert isinstance(model.norm1, nn.BatchNorm2d)
    assert isinstance(model.first, gp.GmPConv2d)
    assert gp.verify(original, model, X) < 1e-5


# Errors and warnings.


class ReadsWeight(TwoConvs):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.first.weight.mean() * 10


class ReadsNorm(TwoConvs):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.norm1.running_mean.mean()


def with_broken_norm() -> nn.Module:
    model = TwoConvs()
    model.norm1.running_var[0] = torch.nan
    return model


@pytest.mark.parametrize(
    ("build", "options", "message"),
    [
        (ReadsWeight, {}, "differs by .* on example_inputs"),
        (ReadsNorm, {}, "does not run.*running_mean.*filter_fn"),
        (with_broken_norm, {}, "'norm1' has statistics.*'first' cannot absorb"),
        (TwoConvs, {"calibration": X * torch.nan}, "no finite mean.*'second'"),
        (TwoConvs, {"calibration": []}, "no finite mean"),
        (TwoConvs, {"calibration": X[:0]}, "no finite mean.*they are empty"),
    ],
)
def test_imn_errors_leave_the_model_alone(build: Callable, options: dict, message: str) -> None:
    model = build()
    keys = model.state_dict().keys()

    with pytest.raises(ValueError, match=message):
        remove_batchnorm(model, **options)

    assert model.state_dict().keys() == keys
    assert not any(isinstance(module, gp.GmPLayer) for module in model.modules())


def test_after_an_error_frozen_is_what_was() -> None:
    model = TwoConvs().eval()
    model.first.bias.requires_grad_(False)  # conversion would let it learn, as norm1's bias does
    model.second.register_forward_hook(lambda layer, x, y: 2 * y + 1)
    before = [parameter.requires_grad for parameter in model.parameters()]

    with pytest.raises(ValueError, match="differs by"):
        remove_batchnorm(model, weights="plain")

    assert [parameter.requires_grad for parameter in model.parameters()] == before


def test_a_part_of_a_converted_model_does_not_fold() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1))
    remove_batchnorm(model, init="glorot")
    part = nn.Sequential(*model[1:], gp.GmPConv2d(2, 2, 1))

    with pytest.raises(ValueError, match="Fold the whole model"):
        gp.fold_(part)


def build_untrained() -> TwoConvs:
    """Return a network whose BatchNorms have seen no batch."""
    model = TwoConvs()
    model.norm1.reset_running_stats()
    model.norm2.reset_running_stats()
    return model


def test_a_model_that_was_never_trained_is_noticed() -> None:
    with pytest.warns(UserWarning, match="pass norm='imn' and init='glorot'; .*pretrained=True"):
        remove_batchnorm(build_untrained())


@pytest.mark.parametrize("options", [{"pretrained": True}, {"init": "glorot"}])
def test_no_training_is_not_noticed_if_the_options_say_it(options: dict) -> None:
    """A warning would be an error."""
    remove_batchnorm(build_untrained(), **options)


def test_one_batch_counts_as_training() -> None:
    """A warning would be an error."""
    model = build_untrained()
    model(X)

    remove_batchnorm(model)


def build_without_batchnorm() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))


def test_a_model_without_batchnorm_is_noticed() -> None:
    with pytest.warns(UserWarning, match="found no BatchNorm that follows a layer"):
        remove_batchnorm(build_without_batchnorm(), example_inputs=torch.randn(3, 4))


def test_from_scratch_a_model_without_batchnorm_gets_input_means() -> None:
    model = build_without_batchnorm()

    remove_batchnorm(model, init="glorot", example_inputs=torch.randn(3, 4))

    assert model[0].input_norm is None
    assert model[2].input_norm is not None


def test_norm_needs_example_inputs() -> None:
    with pytest.raises(ValueError, match="example_inputs"):
        gp.convert_(TwoConvs(), norm="imn", pretrained=True)


def test_unknown_norms_are_refused() -> None:
    with pytest.raises(ValueError, match="norm is None, 'imn' or 'fold'"):
        gp.convert_(TwoConvs(), norm="bn")


# Folding, freezing and other forms of a model.


@pytest.mark.parametrize("inputs_type", [tuple, list])
def test_several_example_inputs_are_one_calls_arguments(inputs_type: type) -> None:
    class Sum(TwoConvs):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return super().forward(a + b)

    model = Sum().eval()
    expected = model.norm1(model.first(3 * X)).relu().mean(dim=(0, 2, 3))

    remove_batchnorm(model, example_inputs=inputs_type([X, 2 * X]))

    assert_close(model.second.input_norm.running_mean, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("without", ["weight", "bias"])
def test_a_norm_with_half_of_its_parameters_is_restored(without: str) -> None:
    model = TwoConvs()
    setattr(model.norm1, without, None)
    setattr(model.norm2, without, None)
    original = copy.deepcopy(model)

    gp.fold_(remove_batchnorm(model))

    assert gp.verify(original, model, X) < 1e-5
    original.load_state_dict(model.state_dict())


def test_a_model_without_values_converts_and_loads_and_folds() -> None:
    model = remove_batchnorm(TwoConvs())
    empty = remove_batchnorm(TwoConvs().to("meta"), example_inputs=X.to("meta"))

    empty.load_state_dict(model.state_dict(), assign=True)

    assert gp.verify(model, empty, X) == 0
    assert gp.verify(model, gp.fold_(empty), X) < 1e-5


def test_a_frozen_layer_stays_frozen_and_its_norms_scale_and_offset_learn() -> None:
    model = TwoConvs()
    model.second.requires_grad_(False)

    remove_batchnorm(model)
    assert not model.second.latitude.requires_grad
    assert model.second.r.requires_grad
    assert model.second.lam.requires_grad

    gp.fold_(model)
    assert not model.second.weight.requires_grad
    assert model.norm2.weight.requires_grad


@pytest.mark.parametrize(("weights", "bias"), [("geometric", "lam"), ("plain", "bias")])
def test_a_bias_before_a_frozen_norm_goes_on_learning(weights: str, bias: str) -> None:
    model = TwoConvs()
    model.norm1.requires_grad_(False)
    model.norm2.requires_grad_(False)

    remove_batchnorm(model, weights=weights)

    assert model.first.get_parameter(bias).requires_grad
    assert not model.second.get_parameter(bias).requires_grad  # it had no bias
    assert gp.fold_(model).first.bias.requires_grad


@both_weights
@pytest.mark.parametrize("learns", [True, False])
def test_a_restored_norm_is_frozen_or_thawed_with_its_layer(weights: str, learns: bool) -> None:
    model = TwoConvs()
    model.first.requires_grad_(not learns)
    model.norm1.requires_grad_(not learns)
    remove_batchnorm(model, weights=weights)
    model.first.requires_grad_(learns)

    gp.fold_(model, restore_norm=True)

    for parameter in (*model.first.parameters(), *model.norm1.parameters()):
        assert parameter.requires_grad == learns
    for parameter in model.norm2.parameters():
        assert parameter.requires_grad


@pytest.mark.parametrize("name", ["first", "second"])
def test_a_layer_that_got_a_parametrization_folds_to_one_that_learns(name: str) -> None:
    model = remove_batchnorm(TwoConvs(), weights="plain")
    weight_norm(model.get_submodule(name))
    before = copy.deepcopy(model)

    gp.fold_(model)

    layer = model.get_submodule(name)
    assert gp.verify(before, model, X) < 1e-5
    assert type(layer) is nn.Conv2d
    assert not layer._modules
    assert layer.weight.requires_grad


def test_a_layer_that_is_not_called_gets_no_input_mean() -> None:
    """Attention reads its output layer's weight instead."""
    block = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.Sequential(nn.Linear(8, 8), block, nn.Linear(8, 2))

    remove_batchnorm(model, init="glorot", example_inputs=torch.randn(4, 5, 8))

    assert block.self_attn.out_proj.input_norm is None
    assert block.linear1.input_norm is not None


@both_weights
def test_what_was_converted_or_folded_in_inference_mode_trains(weights: str) -> None:
    model = TwoConvs()

    with torch.inference_mode():
        remove_batchnorm(model, weights=weights)
    model(X).sum().backward()
    with torch.inference_mode():
        gp.fold_(model)
    model(X).sum().backward()

    assert all(parameter.grad is not None for parameter in model.second.parameters())


@both_weights
def test_a_model_that_was_built_in_inference_mode_is_converted_and_folded(weights: str) -> None:
    with torch.inference_mode():
        model = TwoConvs().eval()
        expected = model(X)
        remove_batchnorm(model, weights=weights)
        gp.fold_(model)

        assert_close(model(X), expected)
