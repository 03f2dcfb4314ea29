"""fold_: plain torch.nn again, with the same function."""

import copy

import pytest
import torch
import torch.nn.functional as F
from function_model import FunctionModel
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

import geoparam as gp

DOUBLE = {"dtype": torch.float64}


def perturb(model: nn.Module, negative: bool = True) -> nn.Module:
    """Let every layer have offsets, scales of both signs and a mean that has moved."""
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, gp.GmPLinear | gp.GmPConv2d):
                module.r.uniform_(0.5, 2)
                module.r[::2] *= -1 if negative else 1
                module.lam.normal_()
            if isinstance(module, gp.InputMeanNorm):
                module.running_mean.normal_()
    return model


def assert_folds(model: nn.Module, x: torch.Tensor, **options: object) -> nn.Module:
    folded = gp.fold_(copy.deepcopy(model), **options)
    assert not any(type(m).__module__.startswith("geoparam") for m in folded.modules())
    assert gp.verify(model, folded, x) < 1e-12
    return folded


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
    folded = assert_folds(perturb(model), torch.randn(2, 3, 6, 6, **DOUBLE))
    assert [type(m) for m in folded] == [
        nn.Conv2d, nn.ReLU, nn.Conv2d, nn.Flatten, nn.Linear, nn.Linear,
    ]  # fmt: skip


def test_the_papers_border_form_becomes_a_batchnorm() -> None:
    model = nn.Sequential(gp.GmPConv2d(3, 4, 3, padding=1, input_norm="border", **DOUBLE))
    folded = assert_folds(perturb(model), torch.randn(2, 3, 6, 6, **DOUBLE))
    norm, conv = folded[0]
    assert type(norm) is nn.BatchNorm2d and not norm.affine and type(conv) is nn.Conv2d


@pytest.mark.parametrize("activation", [torch.relu, F.relu, nn.ReLU(), nn.LeakyReLU(0.2)])
def test_r_moves_through_a_homogeneous_activation(activation) -> None:  # noqa: ANN001
    model = nn.Sequential(
        gp.GmPLinear(4, 6, activation=activation, **DOUBLE), nn.Linear(6, 2, **DOUBLE)
    )
    folded = assert_folds(perturb(model, negative=False), torch.randn(3, 4, **DOUBLE))
    assert torch.equal(folded[1].weight, model[1].weight)
    assert isinstance(folded[0], nn.Sequential)


def through(*steps: nn.Module) -> nn.Module:
    return nn.Sequential(gp.GmPConv2d(3, 6, 3, padding=1, activation=torch.relu, **DOUBLE), *steps)


PERMUTED = FunctionModel(lambda m, x: x.permute(0, 2, 3, 1).flatten(1))
MEAN = FunctionModel(lambda m, x: x.mean(dim=(2, 3), dtype=x.dtype) / 3)
TOKEN = FunctionModel(lambda m, x: x.flatten(2).transpose(1, 2)[:, 0])


@pytest.mark.parametrize(
    "model",
    [
        through(nn.Conv2d(6, 4, 3, groups=2, **DOUBLE)),
        through(nn.AvgPool2d(2), nn.Dropout(), nn.Conv2d(6, 4, 2, **DOUBLE)),
        through(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 2, **DOUBLE)),
        through(nn.Flatten(), nn.Linear(216, 2, **DOUBLE)),
        through(PERMUTED, nn.Linear(216, 2, **DOUBLE)),
        through(MEAN, nn.Linear(6, 2, **DOUBLE)),
        through(TOKEN, nn.Linear(6, 2, **DOUBLE)),
        through(gp.GmPConv2d(6, 4, 3, padding=1, activation=F.elu, **DOUBLE),
                nn.Conv2d(4, 2, 1, **DOUBLE)),
        through(gp.GmPConv2d(6, 4, 3, padding=1, input_norm="border", **DOUBLE)),
        through(gp.GmPConv2d(6, 4, 3, padding=1, input_norm="bias", groups=2, **DOUBLE)),
    ],
    ids=[
        *("grouped", "pooled", "averaged", "flattened", "channels last", "mean", "tokens"),
        *("elu", "border", "bias"),
    ],
)  # fmt: skip
def test_negative_r_becomes_a_layer_that_scales(model: nn.Module) -> None:
    folded = assert_folds(perturb(model), torch.randn(2, 3, 6, 6, **DOUBLE))
    scale = folded[0][-1]
    assert type(scale) is nn.Conv2d and scale.bias is None
    assert torch.equal(scale.weight.flatten(), model[0].r)


class SquaredReLU(nn.ReLU):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).square()


@pytest.mark.parametrize("activation", [torch.tanh, F.mish, nn.GELU(), nn.ReLU6(), SquaredReLU()])
def test_r_of_zero_leaves_the_mean_that_is_subtracted(activation) -> None:  # noqa: ANN001
    model = nn.Sequential(
        gp.GmPConv2d(3, 6, 3, activation=activation, **DOUBLE),
        gp.GmPConv2d(6, 4, 3, padding=1, input_norm=True, **DOUBLE),
    )
    perturb(model)
    with torch.no_grad():
        model[0].r[0] = 0
        model[1].input_norm.running_mean.copy_(torch.arange(1, 7))
    x = torch.randn(2, 3, 6, 6, **DOUBLE)
    assert_folds(model, x, example_inputs=x)


def test_one_layer_that_feeds_three_and_not_the_twin_of_one() -> None:
    model = FunctionModel(
        lambda m, x: (
            m.left(y := m.stem(x)) + m.right(y) + m.twin(m.other(x)) + m.attention(y, y, y)[0]
        ),
        stem=gp.GmPLinear(4, 6, activation=torch.relu, **DOUBLE),
        left=nn.Linear(6, 6, **DOUBLE),
        right=gp.GmPLinear(6, 6, **DOUBLE),
        other=nn.Linear(4, 6, **DOUBLE),
        twin=nn.Linear(6, 6, **DOUBLE),
        attention=gp.convert_(nn.MultiheadAttention(6, 2, **DOUBLE)),
    )
    model.twin.weight = model.left.weight
    x = torch.randn(3, 4, **DOUBLE)
    assert_folds(perturb(model), x, example_inputs=x)


class Absolute(nn.Conv2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.abs())


CONV = 6, 4, 1
FLOOR = FunctionModel(lambda m, x: torch.div(x, 0.1, rounding_mode="floor"))
INTEGER = FunctionModel(lambda m, x: x.mul(9).to(torch.int32).double())
NEXT = {
    "max pooling": (nn.MaxPool2d(2), nn.Conv2d(*CONV, **DOUBLE)),
    "norm": (nn.BatchNorm2d(6, **DOUBLE), nn.Conv2d(*CONV, **DOUBLE)),
    "output": (),
    "weight_norm": (weight_norm(nn.Conv2d(*CONV, **DOUBLE)),),
    "spectral_norm": (spectral_norm(nn.Conv2d(*CONV, **DOUBLE)),),
    "subclass": (Absolute(*CONV, **DOUBLE),),
    "floor": (FLOOR, nn.Conv2d(*CONV, **DOUBLE)),
    "integer": (INTEGER, nn.Conv2d(*CONV, **DOUBLE)),
}


@pytest.mark.parametrize("steps", NEXT.values(), ids=NEXT)
@pytest.mark.parametrize("activation", [torch.relu, torch.tanh])
def test_whatever_comes_next_r_is_kept(steps: tuple[nn.Module, ...], activation) -> None:  # noqa: ANN001
    x = torch.randn(2, 3, 6, 6, **DOUBLE)
    model = perturb(through(*steps))
    model[0].activation = activation
    assert_folds(model, x, example_inputs=x)
    assert_folds(model, x)


@pytest.mark.parametrize("activation", [torch.relu, F.gelu])
def test_r_outside_of_a_linear_layer_becomes_a_diagonal(activation) -> None:  # noqa: ANN001
    model = FunctionModel(
        lambda m, x: m.head(x + m.layer(x)),
        layer=gp.GmPLinear(4, 4, activation=activation, **DOUBLE),
        head=nn.Linear(4, 2, **DOUBLE),
    )
    model.layer.r.requires_grad_(False)
    folded = assert_folds(perturb(model), torch.randn(2, 3, 4, **DOUBLE))
    scale = folded.layer[2]
    assert torch.equal(scale.weight, torch.diag(model.layer.r)) and not scale.weight.requires_grad


class AbsoluteGmP(gp.GmPConv2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.abs())


def test_a_subclass_that_computes_something_else_is_refused_and_nothing_changes() -> None:
    model = perturb(through(AbsoluteGmP(*CONV, **DOUBLE)))
    before, modules = {k: v.clone() for k, v in model.state_dict().items()}, list(model.modules())
    with pytest.raises(ValueError, match="the folded model differs by"):
        gp.fold_(model, example_inputs=torch.randn(2, 3, 6, 6, **DOUBLE) - 1)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert list(model.modules()) == modules


def test_mean_norm_modules_become_batchnorms() -> None:
    model = nn.Sequential(
        gp.InputMeanNorm(3, **DOUBLE),
        nn.Conv2d(3, 4, 3, **DOUBLE),
        gp.MeanOnlyBatchNorm(4, **DOUBLE),
        nn.ReLU(),
        nn.Flatten(),
        gp.MeanOnlyBatchNorm(64, bias=False, **DOUBLE),
    )
    perturb(model)
    nn.init.normal_(model[2].bias)
    x = torch.randn(2, 3, 6, 6, **DOUBLE)
    folded = assert_folds(model, x, example_inputs=x)
    assert type(folded[2]) is nn.BatchNorm2d and type(folded[5]) is nn.BatchNorm1d
    with pytest.raises(ValueError, match="example_inputs"):
        gp.fold_(copy.deepcopy(model))


class Named(nn.Linear):
    """A class of one's own that computes what nn.Linear does."""


@pytest.mark.parametrize("options", [{}, {"norm": "imn", "weights": "plain", "init": "glorot"}])
def test_a_class_of_ones_own_comes_back_and_any_name_will_do(options: dict) -> None:
    model = FunctionModel(
        lambda m, x: m.out(F.relu(m.in_proj_weight(F.relu(m.first(x))))),
        first=nn.Linear(3, 4), in_proj_weight=Named(4, 4), out=nn.Linear(4, 2),
    )  # fmt: skip
    x = torch.randn(5, 3)
    assert gp.BoundaryTracker(model, probe=x).history.keys() >= {"first", "in_proj_weight"}
    model.in_proj_weight.init = "mine"  # GmP layers have one, too
    gp.convert_(model, example_inputs=x, **options)
    assert type(model.in_proj_weight) is not Named
    folded = gp.fold_(model).in_proj_weight
    assert type(folded) is Named and folded.init == "mine"


def test_broken_parameters_unknown_activations_and_plain_models_are_refused() -> None:
    model = gp.convert_(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)))
    model[0].r.data[1] = torch.nan
    with pytest.raises(ValueError, match="'0' folds to NaN"):
        gp.fold_(model)
    with pytest.raises(ValueError, match="nothing to fold"):
        gp.fold_(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="nn.Module as its activation"):
        gp.fold_(gp.GmPLinear(2, 2, activation=lambda x: x.relu()))
