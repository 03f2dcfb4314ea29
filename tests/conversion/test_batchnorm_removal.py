"""convert_(norm="imn"): BatchNorm goes, evaluation stays, and what cannot be kept is said."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from zoo import pretend_pretrained

import geoparam as gp

X = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(0))


class TwoConvs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 6, 3, padding=1, stride=2, bias=False)
        self.norm2 = nn.BatchNorm2d(6)
        self.head = nn.Linear(6, 2)
        pretend_pretrained(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm1(self.first(x)).relu()
        return self.head(self.norm2(self.second(x)).relu().mean(dim=(2, 3)))


def test_pretrained_batchnorm_is_absorbed_exactly() -> None:
    model = TwoConvs().double()
    original = copy.deepcopy(model)
    gp.convert_(model, norm="imn", example_inputs=X.double(), calibration=X.double() + 1)
    assert gp.verify(original, model, X.double()) < 1e-12
    assert not any(isinstance(m, nn.BatchNorm2d) for m in model.modules())
    assert model.first.input_norm is None  # the first layer sees data


def test_calibration_sets_the_running_means() -> None:
    model = TwoConvs().eval()
    batches = [X, X[:2] * 2]
    hidden = torch.cat([model.norm1(model.first(b)).relu() for b in batches])
    gp.convert_(model, norm="imn", example_inputs=X, calibration=batches)
    assert model.second.input_norm_form == "bias"
    assert model.second.input_norm.num_batches_tracked == 5  # the next has momentum's share, 0.2
    mean = hidden.mean(dim=(0, 2, 3))
    torch.testing.assert_close(model.second.input_norm.running_mean, mean, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("momentum", [0.1, 0.2, None])
def test_the_first_batch_moves_a_calibrated_mean_by_momentum(momentum: float | None) -> None:
    options = {"weights": "plain", "momentum": momentum, "calibration": [X, X, X]}
    model = gp.convert_(TwoConvs(), norm="imn", example_inputs=X, **options).train()
    with torch.no_grad():
        hidden = model.norm1(model.first(2 * X)).relu().mean(dim=(0, 2, 3))
        expected = model.second.running_mean.lerp(hidden, momentum or 1 / 4)
        model(2 * X)
    torch.testing.assert_close(model.second.running_mean, expected)


def test_from_scratch_the_form_is_the_same_and_folds_to_the_originals_keys() -> None:
    model = gp.convert_(TwoConvs(), norm="imn", init="sphere", example_inputs=X)
    assert model.first.input_norm is None
    assert model.second.input_norm is not None and model.second.input_norm_form is True
    assert model.second.lam is not None  # it takes over BatchNorm's offset
    model(X).sum().backward()
    folded = gp.fold_(copy.deepcopy(model))
    assert gp.verify(model, folded, X) < 1e-5
    assert set(folded.state_dict()) == set(TwoConvs().state_dict())


WITHOUT_BIAS = {
    "no norm": nn.Identity,
    "another norm": lambda: nn.GroupNorm(2, 8),
    "no statistics": lambda: nn.BatchNorm2d(8, track_running_stats=False),
}


@pytest.mark.parametrize("weights", ["geometric", "plain"])
@pytest.mark.parametrize("norm", WITHOUT_BIAS.values(), ids=WITHOUT_BIAS)
def test_from_scratch_other_keys_are_said_at_conversion(norm, weights: str) -> None:  # noqa: ANN001
    layers = [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, bias=False), norm(), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(32, 2))
    options = {"norm": "imn", "init": "glorot", "weights": weights, "example_inputs": X}
    original = copy.deepcopy(model)
    with pytest.warns(UserWarning, match="1 layers, '2' first, will not fold to the keys"):
        gp.convert_(model, **options)
    model(X)
    folded = gp.fold_(copy.deepcopy(model), restore_norm=True)
    assert gp.verify(model, folded, X) < 1e-5
    assert set(folded.state_dict()) != set(original.state_dict())
    gp.convert_(original, lambda module, name: name == "0", **options)  # nothing is said


def test_a_norm_that_others_use_stays() -> None:
    class Shared(TwoConvs):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            x = self.norm1(x).relu() + x
            return self.head(self.norm2(self.second(x)).relu().mean(dim=(2, 3)))

    model = Shared()
    plan = gp.plan(model, norm="imn", example_inputs=X)
    absorbed = {d.name: d.norm for d in plan.decisions if d.converted}
    assert absorbed == {"first": None, "second": "norm2"}


class Doubling(nn.BatchNorm2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


@pytest.mark.parametrize("norm", [Doubling(6), nn.SyncBatchNorm(6)])
def test_a_norm_that_computes_something_else_stays(norm: nn.Module) -> None:
    model = TwoConvs()
    model.norm2 = norm
    original = copy.deepcopy(model)
    assert "norm2 stays" in str(gp.plan(model, norm="imn", example_inputs=X))
    gp.convert_(model, norm="imn", example_inputs=X)
    assert gp.verify(original, model, X) < 1e-5


class ReadsWeight(TwoConvs):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.first.weight.mean() * 10


class ReadsNorm(TwoConvs):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
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
def test_imn_errors_leave_the_model_alone(build, options, message) -> None:  # noqa: ANN001
    model = build()
    before = model.state_dict()
    with pytest.raises(ValueError, match=message):
        gp.convert_(model, norm="imn", example_inputs=X, **options)
    assert model.state_dict().keys() == before.keys()
    assert not any(isinstance(m, gp.GmPLayer) for m in model.modules())


class FunctionalNorm(TwoConvs):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = self.norm1
        x = nn.functional.batch_norm(self.first(x), n.running_mean, n.running_var, n.weight)
        return self.head(self.norm2(self.second(x.relu())).relu().mean(dim=(2, 3)))


def test_a_norm_used_through_its_statistics_stays() -> None:
    model = FunctionalNorm().eval()
    original = copy.deepcopy(model)
    gp.convert_(model, norm="imn", example_inputs=X)
    assert isinstance(model.norm1, nn.BatchNorm2d) and isinstance(model.first, gp.GmPConv2d)
    assert gp.verify(original, model, X) < 1e-5


def test_a_list_of_example_inputs_is_one_call() -> None:
    class Sum(TwoConvs):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return super().forward(a + b)

    plain = Sum().eval()
    one, other = (
        gp.convert_(copy.deepcopy(plain), norm="imn", example_inputs=inputs)
        for inputs in ((X, 2 * X), [X, 2 * X])
    )
    assert torch.equal(one.second.input_norm.running_mean, other.second.input_norm.running_mean)


def test_freezing_survives_absorbing_a_norm() -> None:
    model = TwoConvs()
    model.second.requires_grad_(False)
    gp.convert_(model, norm="imn", example_inputs=X)
    assert not model.second.latitude.requires_grad
    assert model.second.r.requires_grad and model.second.lam.requires_grad  # as gamma and beta
    gp.fold_(model)
    assert not model.second.weight.requires_grad and model.norm2.weight.requires_grad


def test_a_part_of_a_converted_model_does_not_fold() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1))
    gp.convert_(model, norm="imn", init="glorot", example_inputs=X)
    with pytest.raises(ValueError, match="Fold the whole model"):
        gp.fold_(nn.Sequential(*model[1:], gp.GmPConv2d(2, 2, 1)))


def test_a_model_that_was_never_trained_is_noticed() -> None:
    model = TwoConvs()
    model.norm1.reset_running_stats(), model.norm2.reset_running_stats()
    with pytest.warns(UserWarning, match="pass norm='imn' and init='glorot'; .*pretrained=True"):
        gp.convert_(copy.deepcopy(model), norm="imn", example_inputs=X)
    for options in ({"pretrained": True}, {"init": "glorot"}):  # a warning would be an error
        gp.convert_(copy.deepcopy(model), norm="imn", example_inputs=X, **options)
    model(X)
    gp.convert_(model, norm="imn", example_inputs=X)


def test_a_model_without_batchnorm_is_noticed() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    x = torch.randn(3, 4)
    with pytest.warns(UserWarning, match="found no BatchNorm that follows a layer"):
        gp.convert_(copy.deepcopy(model), norm="imn", example_inputs=x)
    gp.convert_(model, norm="imn", init="glorot", example_inputs=x)
    assert model[0].input_norm is None and model[2].input_norm is not None


def test_norm_needs_example_inputs_and_a_known_name() -> None:
    with pytest.raises(ValueError, match="example_inputs"):
        gp.convert_(TwoConvs(), norm="imn", pretrained=True)
    with pytest.raises(ValueError, match="norm is None, 'imn' or 'fold'"):
        gp.convert_(TwoConvs(), norm="bn")


@pytest.mark.parametrize("without", ["weight", "bias"])
def test_a_norm_with_half_of_its_parameters_is_restored(without: str) -> None:
    model = TwoConvs()
    for norm in (model.norm1, model.norm2):
        setattr(norm, without, None)
    original = copy.deepcopy(model)
    gp.fold_(gp.convert_(model, norm="imn", example_inputs=X))
    assert gp.verify(original, model, X) < 1e-5
    original.load_state_dict(model.state_dict())


def test_a_model_without_values_converts_and_loads_and_folds() -> None:
    model = gp.convert_(TwoConvs(), norm="imn", example_inputs=X)
    empty = gp.convert_(TwoConvs().to("meta"), norm="imn", example_inputs=X.to("meta"))
    empty.load_state_dict(model.state_dict(), assign=True)
    assert gp.verify(model, empty, X) == 0
    assert gp.verify(model, gp.fold_(empty), X) < 1e-5


@pytest.mark.parametrize("weights", ["geometric", "plain"])
def test_a_bias_before_a_frozen_norm_goes_on_learning(weights: str) -> None:
    model = TwoConvs()
    for norm in (model.norm1, model.norm2):
        norm.requires_grad_(False)
    gp.convert_(model, norm="imn", weights=weights, example_inputs=X)
    key = "lam" if weights == "geometric" else "bias"
    assert getattr(model.first, key).requires_grad
    assert not getattr(model.second, key).requires_grad  # it had no bias
    assert gp.fold_(model).first.bias.requires_grad


@pytest.mark.parametrize("weights", ["geometric", "plain"])
@pytest.mark.parametrize("learns", [True, False])
def test_a_restored_norm_is_frozen_or_thawed_with_its_layer(weights: str, learns: bool) -> None:
    model = TwoConvs()
    for part in (model.first, model.norm1):
        part.requires_grad_(not learns)
    gp.convert_(model, norm="imn", weights=weights, example_inputs=X)
    model.first.requires_grad_(learns)
    gp.fold_(model, restore_norm=True)
    own = [*model.first.parameters(), *model.norm1.parameters()]
    assert all(p.requires_grad == learns for p in own)
    assert all(p.requires_grad for p in model.norm2.parameters())


@pytest.mark.parametrize("layer", ["first", "second"])
def test_a_layer_that_got_a_parametrization_folds_to_one_that_learns(layer: str) -> None:
    model = gp.convert_(TwoConvs(), norm="imn", weights="plain", example_inputs=X)
    weight_norm(getattr(model, layer))
    before = copy.deepcopy(model)
    folded = getattr(gp.fold_(model), layer)
    assert gp.verify(before, model, X) < 1e-5
    assert type(folded) is nn.Conv2d and not folded._modules and folded.weight.requires_grad


def test_after_an_error_frozen_is_what_was() -> None:
    model = TwoConvs().eval()
    model.norm1.requires_grad_(False)
    model.first.bias.requires_grad_(False)
    model.second.register_forward_hook(lambda layer, x, y: 2 * y + 1)
    flags = [p.requires_grad for p in model.parameters()]
    with pytest.raises(ValueError, match="differs by"):
        gp.convert_(model, norm="imn", weights="plain", example_inputs=X)
    assert flags == [p.requires_grad for p in model.parameters()]


def test_a_layer_that_is_not_called_gets_no_input_mean() -> None:
    block = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model, x = nn.Sequential(nn.Linear(8, 8), block, nn.Linear(8, 2)), torch.randn(4, 5, 8)
    gp.convert_(model, norm="imn", init="glorot", example_inputs=x)
    assert model[1].self_attn.out_proj.input_norm is None  # attention reads its weight
    assert model[1].linear1.input_norm is not None
