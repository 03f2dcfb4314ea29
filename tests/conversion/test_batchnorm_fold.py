"""convert_(norm="fold"): BatchNorm goes into the layer before it, and nothing needs a batch."""

import copy
from typing import Any

import pytest
import torch
from model_checks import assert_same_state, copy_state, has_batchnorm, has_geoparam_modules
from torch import Tensor, nn
from torch.testing import assert_close
from zoo import pretend_pretrained

import geoparam as gp

EXAMPLES = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))

both_weights = pytest.mark.parametrize("weights", ["geometric", "plain"])


def mobile_block() -> nn.Module:
    """A stem, MobileNetV2's depthwise block with ReLU6, and a head with BatchNorm1d."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU6(),
        nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU6(),
        nn.Conv2d(8, 6, 1),
        nn.BatchNorm2d(6),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 5),
        nn.BatchNorm1d(5),
        nn.ReLU(),
        nn.Linear(5, 2),
    )


NORMED_LAYERS = (0, 3, 6, 10)
OUTPUT_LAYER = 13


def build() -> nn.Module:
    return pretend_pretrained(mobile_block())


def fold_norms_(model: nn.Module, **options: Any) -> nn.Module:
    return gp.convert_(model, **{"norm": "fold", "example_inputs": EXAMPLES, **options})


# The function and the parameters.


@both_weights
def test_evaluation_stays_the_same_and_norms_go(weights: str) -> None:
    original = build().double()
    x = EXAMPLES.double()

    model = fold_norms_(copy.deepcopy(original), weights=weights, example_inputs=x)

    assert gp.verify(original, model, x) < 1e-12
    assert not has_batchnorm(model)


@both_weights
def test_training_equals_evaluation_and_does_not_depend_on_the_batch(weights: str) -> None:
    original = build().double().eval()
    x = EXAMPLES.double()

    model = fold_norms_(copy.deepcopy(original), weights=weights, example_inputs=x).train()

    assert_close(model(x), original(x), rtol=1e-10, atol=1e-10)
    assert_close(model(x[:1]), model(x)[:1], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("index", NORMED_LAYERS)
def test_r_takes_over_gamma_and_sigma_and_the_direction_stays(index: int) -> None:
    original = build()
    weight, norm = original[index].weight.flatten(1), original[index + 1]

    layer = fold_norms_(copy.deepcopy(original))[index]

    lengths = weight.norm(dim=1)
    sigma = (norm.running_var + norm.eps).sqrt()
    assert_close(layer.r, norm.weight * lengths / sigma)
    assert_close(layer.direction.flatten(1), weight / lengths[:, None])


@pytest.mark.parametrize("index", NORMED_LAYERS)
def test_folded_layers_subtract_no_input_mean(index: int) -> None:
    model = fold_norms_(build())

    assert model[index].input_norm is None


@pytest.mark.parametrize("index", [*NORMED_LAYERS, OUTPUT_LAYER])
def test_plain_weights_are_the_same_parameters_in_layers_of_torch(index: int) -> None:
    model = build()
    weight = model[index].weight

    fold_norms_(model, weights="plain")

    assert model[index].weight is weight
    assert type(model[index]) in (nn.Conv2d, nn.Linear)
    assert model[index].bias is not None


def test_the_output_layers_weight_keeps_its_values() -> None:
    model = build()
    before = model[OUTPUT_LAYER].weight.clone()

    fold_norms_(model, weights="plain")

    assert torch.equal(model[OUTPUT_LAYER].weight, before)


LAYERS_AND_NORMS: dict[str, tuple[nn.Module, nn.Module, tuple[int, ...]]] = {
    "linear": (nn.Linear(3, 4), nn.BatchNorm1d(4), (5, 3)),
    "conv1d": (nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4), (5, 3, 6)),
    "conv3d": (nn.Conv3d(3, 4, 2), nn.BatchNorm3d(4), (2, 3, 4, 4, 4)),
    "groups": (nn.Conv1d(4, 6, 3, groups=2), nn.BatchNorm1d(6), (2, 4, 5)),
    "no bias": (nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4), (5, 3)),
}


@both_weights
@pytest.mark.parametrize(
    ("layer", "norm", "shape"), LAYERS_AND_NORMS.values(), ids=LAYERS_AND_NORMS
)
def test_a_norm_that_ends_a_model_is_taken_out_and_put_back(
    layer: nn.Module, norm: nn.Module, shape: tuple[int, ...], weights: str
) -> None:
    original = pretend_pretrained(nn.Sequential(layer, norm))
    x = torch.randn(shape)

    model = fold_norms_(copy.deepcopy(original), weights=weights, example_inputs=x)
    assert not has_batchnorm(model)
    assert gp.verify(original, model, x) < 1e-5

    gp.fold_(model, restore_norm=True)
    assert gp.verify(original, model, x) < 1e-5
    assert list(model.state_dict()) == list(original.state_dict())


# Folding and files.


@both_weights
def test_folding_without_norms_gives_a_plain_model(weights: str) -> None:
    model = fold_norms_(build(), weights=weights)

    plain = gp.fold_(copy.deepcopy(model), restore_norm=False)

    assert gp.verify(model, plain, EXAMPLES) < 1e-5
    assert not has_batchnorm(plain)
    assert not has_geoparam_modules(plain)


@both_weights
def test_restored_norms_change_nothing(weights: str) -> None:
    original = build()
    model = fold_norms_(copy.deepcopy(original), weights=weights)

    restored = gp.fold_(model, restore_norm=True)

    assert gp.verify(original, restored, EXAMPLES) < 1e-5
    norm = restored[1]
    assert (norm.weight == 1).all()
    assert (norm.running_mean == 0).all()
    assert_close(norm.running_var, torch.full((8,), 1 - norm.eps))


@both_weights
def test_with_restored_norms_the_originals_file_loads(weights: str) -> None:
    original = build()
    restored = gp.fold_(fold_norms_(copy.deepcopy(original), weights=weights), restore_norm=True)

    restored.load_state_dict(original.state_dict())

    assert gp.verify(original, restored, EXAMPLES) == 0


@both_weights
def test_a_checkpoint_loads_into_a_model_that_is_converted_anew(weights: str) -> None:
    saved = fold_norms_(build(), weights=weights)
    fresh = fold_norms_(build(), weights=weights)

    fresh.load_state_dict(saved.state_dict())

    assert gp.verify(saved, fresh, EXAMPLES) == 0


@pytest.mark.parametrize("norm", ["imn", "fold"])
@pytest.mark.parametrize("strict", [True, False])
@both_weights
def test_the_originals_file_is_refused_also_where_keys_need_not_fit(
    weights: str, strict: bool, norm: str
) -> None:
    original = build()
    model = fold_norms_(copy.deepcopy(original), norm=norm, weights=weights)
    message = "1 is a BatchNorm that a layer .* Load it before convert_"

    with pytest.raises(RuntimeError, match=message):
        model.load_state_dict(original.state_dict(), strict=strict)


# The plan.


def plan_text(model: nn.Module, **options: Any) -> str:
    return str(gp.plan(model, **{"norm": "fold", "example_inputs": EXAMPLES, **options}))


def test_the_plan_says_where_a_frozen_weight_takes_a_scale_that_learned() -> None:
    model = build()
    model[0].weight.requires_grad_(False)
    note = "the scale of 1 goes into the frozen weight and stops learning"

    assert plan_text(model, weights="plain").count(note) == 1


def test_r_takes_a_scale_that_learned_and_goes_on_learning() -> None:
    model = build()
    model[0].weight.requires_grad_(False)

    assert "stops learning" not in plan_text(model)
    assert fold_norms_(model)[0].r.requires_grad


@pytest.mark.parametrize(
    ("weights", "first_line"),
    [
        ("geometric", "4 of 5 layers under GmP"),
        ("plain", "4 of 5 layers with plain weights"),
    ],
)
@pytest.mark.parametrize(
    ("norm", "dependence"), [("fold", "nothing"), ("imn", "input means of 3 layers")]
)
def test_the_plan_says_what_goes_and_what_needs_a_batch(
    norm: str, dependence: str, weights: str, first_line: str
) -> None:
    lines = plan_text(build(), norm=norm, weights=weights).splitlines()

    assert lines[0].startswith(first_line)
    assert lines[1] == "BatchNorms removed: 4"
    assert lines[2] == f"depends on the batch in training: {dependence}"


def test_the_plan_names_norms_that_stay() -> None:
    text = plan_text(build(), filter_fn=lambda module, name: name == "0")

    assert "BatchNorms removed: 1" in text
    assert "depends on the batch in training: 3 norms left (4, 7, 11)" in text


def test_the_plan_says_nothing_of_norms_without_the_option() -> None:
    assert "depends" not in str(gp.plan(build()))


def test_the_plan_counts_means_that_were_there() -> None:
    model = nn.Sequential(gp.InputMeanNorm(3), *build())

    assert "in training: 1 norm left (0)" in plan_text(model)


def test_the_plan_does_not_count_frozen_means() -> None:
    model = nn.Sequential(gp.InputMeanNorm(3), *build())
    gp.freeze_means_(model[0])

    assert "in training: nothing" in plan_text(model)


# Channels that training has switched off.


def build_with_a_channel_off() -> nn.Module:
    """Return a network with a channel that has an offset and a scale of zero."""
    model = build()
    model[4].weight.data[0] = 0
    model[4].bias.data[0] = 1
    return model


both_norms = pytest.mark.parametrize("norm", ["fold", "imn"])


@both_norms
def test_the_plan_gives_plain_weights_to_a_layer_that_r_cannot_hold(norm: str) -> None:
    text = plan_text(build_with_a_channel_off(), norm=norm)

    assert text.startswith("3 of 5 layers under GmP")
    assert "BatchNorms removed: 4" in text
    assert "plain weight: 1 rows with |bias| > 100 |weight|)" in text


@pytest.mark.parametrize(
    ("norm", "layer_type"), [("fold", nn.Conv2d), ("imn", gp.InputMeanConv2d)]
)
def test_a_layer_that_r_cannot_hold_gets_plain_weights(
    norm: str, layer_type: type[nn.Module]
) -> None:
    original = build_with_a_channel_off()

    model = fold_norms_(copy.deepcopy(original), norm=norm)

    assert type(model[3]) is layer_type
    assert isinstance(model[0], gp.GmPConv2d)
    assert not has_batchnorm(model)
    assert gp.verify(original, model, EXAMPLES) < 1e-5


@both_norms
def test_a_layer_that_r_cannot_hold_gets_its_norm_back(norm: str) -> None:
    original = build_with_a_channel_off()
    model = fold_norms_(copy.deepcopy(original), norm=norm)

    restored = gp.fold_(model, restore_norm=True)

    assert list(restored.state_dict()) == list(original.state_dict())
    assert gp.verify(original, restored, EXAMPLES) < 1e-5


def test_by_default_all_norms_come_back_where_one_layer_is_plain() -> None:
    original = build_with_a_channel_off()
    model = fold_norms_(copy.deepcopy(original))

    gp.fold_(model)

    assert gp.verify(original, model, EXAMPLES) < 1e-5
    model.load_state_dict(original.state_dict())


# Errors and warnings.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"example_inputs": EXAMPLES, "init": "glorot"}, "norm='fold' keeps the function"),
        ({}, "norm='fold' needs example_inputs"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gp.convert_(build(), norm="fold", **options)


def test_a_model_that_was_never_trained_is_noticed() -> None:
    with pytest.warns(UserWarning, match="norm='fold' keeps .* never seen a batch"):
        fold_norms_(mobile_block())


def test_no_training_is_not_noticed_if_the_options_say_it() -> None:
    """A warning would be an error."""
    fold_norms_(mobile_block(), pretrained=True)


class ReadsWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = build()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) + 10 * self.body[0].weight.mean()


@both_weights
def test_an_error_leaves_modules_and_values_alone(weights: str) -> None:
    model = ReadsWeight()
    before = copy_state(model)

    with pytest.raises(ValueError, match="differs by"):
        fold_norms_(model, weights=weights)

    assert_same_state(model, before)


# Training on folded weights.


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def test_layers_and_the_optimizer_take_the_same_steps_on_folded_weights() -> None:
    original = build().double()
    x = EXAMPLES.double()
    before = original.eval()(x)

    plain = fold_norms_(copy.deepcopy(original), weights="plain", example_inputs=x)
    optimizer = gp.GeometricOptimizer(plain, torch.optim.SGD, lr=0.02, match=False, scale="free")
    train(plain, optimizer, x)

    layers = fold_norms_(copy.deepcopy(original), coordinates="intrinsic", example_inputs=x)
    optimizer = torch.optim.SGD(gp.param_groups(layers, lr=0.02, kind="sgd", match=None))
    optimizer.register_step_post_hook(gp.retract(layers))
    train(layers, optimizer, x)

    assert_close(layers(x), plain(x), rtol=1e-9, atol=1e-9)
    assert not torch.allclose(plain(x), before, atol=1e-3)
