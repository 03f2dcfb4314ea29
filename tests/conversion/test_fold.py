"""fold_: plain torch.nn again, with the same function."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from function_model import FunctionModel
from model_checks import assert_same_state, copy_state, has_geoparam_modules
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

import geoparam as gp

DOUBLE = {"dtype": torch.float64}
X = torch.randn(2, 3, 6, 6, **DOUBLE)

every_kind_of_activation = pytest.mark.parametrize("activation", [torch.relu, torch.tanh])


@torch.no_grad()
def perturb(model: nn.Module, negative: bool = True) -> nn.Module:
    """Let every layer have offsets, scales of both signs and a mean that has moved."""
    for module in model.modules():
        if isinstance(module, gp.GmPLinear | gp.GmPConv2d):
            module.r.uniform_(0.5, 2)
            module.lam.normal_()
            if negative:
                module.r[::2] *= -1
        if isinstance(module, gp.InputMeanNorm):
            module.running_mean.normal_()
    return model


def fold_and_check(model: nn.Module, x: Tensor, **options: Any) -> nn.Module:
    """Return the folded model, which must be plain and the same function."""
    folded = gp.fold_(copy.deepcopy(model), **options)
    assert not has_geoparam_modules(folded)
    assert gp.verify(model, folded, x) < 1e-12
    return folded


# Layers alone.


@pytest.mark.parametrize("coordinates", ["angles", "intrinsic"])
def test_layers_without_activation_fold_whatever_r_is(coordinates: str) -> None:
    options = {"coordinates": coordinates, **DOUBLE}
    model = nn.Sequential(
        gp.GmPConv2d(3, 6, 3, padding=1, **options),
        nn.ReLU(),
        gp.GmPConv2d(6, 4, 3, stride=2, dilation=2, input_norm="bias", padding=2, **options),
        nn.Flatten(),
        gp.GmPLinear(36, 5, input_norm=True, **options),
        gp.GmPLinear(5, 1, **options),
    )

    folded = fold_and_check(perturb(model), X)

    plain_types = [nn.Conv2d, nn.ReLU, nn.Conv2d, nn.Flatten, nn.Linear, nn.Linear]
    assert [type(module) for module in folded] == plain_types


def test_the_papers_border_form_becomes_a_batchnorm() -> None:
    layer = gp.GmPConv2d(3, 4, 3, padding=1, input_norm="border", **DOUBLE)

    folded = fold_and_check(perturb(nn.Sequential(layer)), X)

    norm, conv = folded[0]
    assert type(norm) is nn.BatchNorm2d
    assert not norm.affine
    assert type(conv) is nn.Conv2d


@pytest.mark.parametrize("activation", [torch.relu, F.relu, nn.ReLU(), nn.LeakyReLU(0.2)])
def test_r_moves_through_a_homogeneous_activation(activation: Callable) -> None:
    layer = gp.GmPLinear(4, 6, activation=activation, **DOUBLE)
    head = nn.Linear(6, 2, **DOUBLE)
    model = perturb(nn.Sequential(layer, head), negative=False)

    folded = fold_and_check(model, torch.randn(3, 4, **DOUBLE))

    assert isinstance(folded[0], nn.Sequential)
    assert torch.equal(folded[1].weight, head.weight)


# r outside of an activation, and what comes next.


def after_relu(*steps: nn.Module) -> nn.Module:
    """Return a convolution with r outside of its ReLU, and these modules after it."""
    first = gp.GmPConv2d(3, 6, 3, padding=1, activation=torch.relu, **DOUBLE)
    return nn.Sequential(first, *steps)


channels_last = FunctionModel(lambda m, x: x.permute(0, 2, 3, 1).flatten(1))
mean = FunctionModel(lambda m, x: x.mean(dim=(2, 3), dtype=x.dtype) / 3)
first_token = FunctionModel(lambda m, x: x.flatten(2).transpose(1, 2)[:, 0])

STEPS_THAT_KEEP_CHANNELS = {
    "grouped": [nn.Conv2d(6, 4, 3, groups=2)],
    "pooled": [nn.AvgPool2d(2), nn.Dropout(), nn.Conv2d(6, 4, 2)],
    "averaged": [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 2)],
    "flattened": [nn.Flatten(), nn.Linear(216, 2)],
    "channels last": [channels_last, nn.Linear(216, 2)],
    "mean": [mean, nn.Linear(6, 2)],
    "tokens": [first_token, nn.Linear(6, 2)],
    "elu": [gp.GmPConv2d(6, 4, 3, padding=1, activation=F.elu), nn.Conv2d(4, 2, 1)],
    "border": [gp.GmPConv2d(6, 4, 3, padding=1, input_norm="border")],
    "bias": [gp.GmPConv2d(6, 4, 3, padding=1, input_norm="bias", groups=2)],
}


@pytest.mark.parametrize("steps", STEPS_THAT_KEEP_CHANNELS.values(), ids=STEPS_THAT_KEEP_CHANNELS)
def test_negative_r_becomes_a_layer_that_scales(steps: list[nn.Module]) -> None:
    model = perturb(after_relu(*steps).double())

    folded = fold_and_check(model, X)

    scale = folded[0][-1]
    assert type(scale) is nn.Conv2d
    assert scale.bias is None
    assert torch.equal(scale.weight.flatten(), model[0].r)


class SquaredReLU(nn.ReLU):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square()


@pytest.mark.parametrize("activation", [torch.tanh, F.mish, nn.GELU(), nn.ReLU6(), SquaredReLU()])
def test_r_of_zero_leaves_the_mean_that_is_subtracted(activation: Callable) -> None:
    first = gp.GmPConv2d(3, 6, 3, activation=activation, **DOUBLE)
    second = gp.GmPConv2d(6, 4, 3, padding=1, input_norm=True, **DOUBLE)
    model = perturb(nn.Sequential(first, second))
    first.r.data[0] = 0
    second.input_norm.running_mean.copy_(torch.arange(1, 7))

    fold_and_check(model, X, example_inputs=X)


def test_a_layer_may_feed_several_layers_one_of_which_is_tied() -> None:
    def forward(m: FunctionModel, x: Tensor) -> Tensor:
        y = m.stem(x)
        attended = m.attention(y, y, y)[0]
        return m.left(y) + m.right(y) + m.twin(m.other(x)) + attended

    model = FunctionModel(
        forward,
        stem=gp.GmPLinear(4, 6, activation=torch.relu, **DOUBLE),
        left=nn.Linear(6, 6, **DOUBLE),
        right=gp.GmPLinear(6, 6, **DOUBLE),
        other=nn.Linear(4, 6, **DOUBLE),
        twin=nn.Linear(6, 6, **DOUBLE),
        attention=gp.convert_(nn.MultiheadAttention(6, 2, **DOUBLE)),
    )
    model.twin.weight = model.left.weight
    x = torch.randn(3, 4, **DOUBLE)

    fold_and_check(perturb(model), x, example_inputs=x)


class Absolute(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.abs())


CONV = 6, 4, 1
floor = FunctionModel(lambda m, x: torch.div(x, 0.1, rounding_mode="floor"))
through_integers = FunctionModel(lambda m, x: x.mul(9).to(torch.int32).double())

STEPS_THAT_R_CANNOT_PASS: dict[str, list[nn.Module]] = {
    "max pooling": [nn.MaxPool2d(2), nn.Conv2d(*CONV)],
    "norm": [nn.BatchNorm2d(6), nn.Conv2d(*CONV)],
    "output": [],
    "weight_norm": [weight_norm(nn.Conv2d(*CONV))],
    "spectral_norm": [spectral_norm(nn.Conv2d(*CONV))],
    "subclass": [Absolute(*CONV)],
    "floor": [floor, nn.Conv2d(*CONV)],
    "integer": [through_integers, nn.Conv2d(*CONV)],
}


@pytest.mark.parametrize("has_inputs", [True, False])
@pytest.mark.parametrize("steps", STEPS_THAT_R_CANNOT_PASS.values(), ids=STEPS_THAT_R_CANNOT_PASS)
@every_kind_of_activation
def test_whatever_comes_next_r_is_kept(
    steps: list[nn.Module], activation: Callable, has_inputs: bool
) -> None:
    model = perturb(after_relu(*steps).double())
    model[0].activation = activation

    options = {"example_inputs": X} if has_inputs else {}
    fold_and_check(model, X, **options)


@pytest.mark.parametrize("activation", [torch.relu, F.gelu])
def test_r_outside_of_a_linear_layer_becomes_a_diagonal(activation: Callable) -> None:
    model = FunctionModel(
        lambda m, x: m.head(x + m.layer(x)),
        layer=gp.GmPLinear(4, 4, activation=activation, **DOUBLE),
        head=nn.Linear(4, 2, **DOUBLE),
    )
    model.layer.r.requires_grad_(False)

    folded = fold_and_check(perturb(model), torch.randn(2, 3, 4, **DOUBLE))

    scale = folded.layer[2]
    assert torch.equal(scale.weight, torch.diag(model.layer.r))
    assert not scale.weight.requires_grad


# Subclasses and norms.


class AbsoluteGmP(gp.GmPConv2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.abs())


def test_a_subclass_that_computes_something_else_is_refused_and_nothing_changes() -> None:
    model = perturb(after_relu(AbsoluteGmP(*CONV, **DOUBLE)))
    state = copy_state(model)
    modules = list(model.modules())

    with pytest.raises(ValueError, match="the folded model differs by"):
        gp.fold_(model, example_inputs=X - 1)

    assert_same_state(model, state)
    assert list(model.modules()) == modules


def build_with_mean_norms() -> nn.Module:
    model = nn.Sequential(
        gp.InputMeanNorm(3, **DOUBLE),
        nn.Conv2d(3, 4, 3, **DOUBLE),
        gp.MeanOnlyBatchNorm(4, **DOUBLE),
        nn.ReLU(),
        nn.Flatten(),
        gp.MeanOnlyBatchNorm(64, bias=False, **DOUBLE),
    )
    nn.init.normal_(model[2].bias)
    return perturb(model)


def test_mean_norm_modules_become_batchnorms() -> None:
    folded = fold_and_check(build_with_mean_norms(), X, example_inputs=X)

    assert type(folded[2]) is nn.BatchNorm2d
    assert type(folded[5]) is nn.BatchNorm1d


def test_mean_norm_modules_need_example_inputs() -> None:
    with pytest.raises(ValueError, match="example_inputs"):
        gp.fold_(build_with_mean_norms())


class UsersLinear(nn.Linear):
    """A user's class that computes what nn.Linear does."""


def build_with_users_class() -> FunctionModel:
    """Return an MLP with a layer of a user's class, under a name that attention uses."""
    return FunctionModel(
        lambda m, x: m.out(F.relu(m.in_proj_weight(F.relu(m.first(x))))),
        first=nn.Linear(3, 4),
        in_proj_weight=UsersLinear(4, 4),
        out=nn.Linear(4, 2),
    )


def test_layers_of_any_name_are_tracked() -> None:
    tracker = gp.BoundaryTracker(build_with_users_class(), probe=torch.randn(5, 3))

    assert tracker.history.keys() >= {"first", "in_proj_weight"}


@pytest.mark.parametrize("options", [{}, {"norm": "imn", "weights": "plain", "init": "glorot"}])
def test_a_users_class_comes_back_with_its_attributes(options: dict) -> None:
    model = build_with_users_class()
    model.in_proj_weight.init = "mine"  # GmP layers have an attribute of this name

    gp.convert_(model, example_inputs=torch.randn(5, 3), **options)
    assert type(model.in_proj_weight) is not UsersLinear

    gp.fold_(model)
    assert type(model.in_proj_weight) is UsersLinear
    assert model.in_proj_weight.init == "mine"


# What is refused.


def test_broken_parameters_are_refused() -> None:
    model = gp.convert_(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)))
    model[0].r.data[1] = torch.nan

    with pytest.raises(ValueError, match="'0' folds to NaN"):
        gp.fold_(model)


def test_plain_models_are_refused() -> None:
    with pytest.raises(ValueError, match="nothing to fold"):
        gp.fold_(nn.Linear(2, 2))


def test_unknown_activations_are_refused() -> None:
    layer = gp.GmPLinear(2, 2, activation=lambda x: x.relu())

    with pytest.raises(ValueError, match="nn.Module as its activation"):
        gp.fold_(layer)
