"""convert_(norm="fold"): BatchNorm goes into the layer before it, and nothing needs a batch."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from zoo import pretend_pretrained

import geoparam as gp

WEIGHTS = ("geometric", "plain")
weights_choice = pytest.mark.parametrize("weights", WEIGHTS)
EXAMPLES = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def mobile_block() -> nn.Module:
    """A stem, MobileNetV2's depthwise block with ReLU6, and a head with BatchNorm1d."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU6(),
        nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False), nn.BatchNorm2d(8), nn.ReLU6(),
        nn.Conv2d(8, 6, 1), nn.BatchNorm2d(6),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 2),
    )  # fmt: skip


def build() -> nn.Module:
    return pretend_pretrained(mobile_block())


def has_batch_norm(model: nn.Module) -> bool:
    return any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules())


@weights_choice
def test_evaluation_is_the_same_and_training_equals_it(weights: str) -> None:
    original, x = build().double(), EXAMPLES.double()
    model = gp.convert_(copy.deepcopy(original), norm="fold", weights=weights, example_inputs=x)
    assert gp.verify(original, model, x) < 1e-12
    assert not has_batch_norm(model)
    trained = model.train()(x)
    torch.testing.assert_close(trained, original.eval()(x), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(model(x[:1]), trained[:1], rtol=1e-10, atol=1e-10)


def test_r_takes_over_gamma_and_sigma_and_the_direction_stays() -> None:
    original = build()
    model = gp.convert_(copy.deepcopy(original), norm="fold", example_inputs=EXAMPLES)
    assert model[0].input_norm is None and model[3].input_norm is None
    for number in (0, 3, 6, 10):
        plain, norm, layer = original[number], original[number + 1], model[number]
        lengths = plain.weight.flatten(1).norm(dim=1)
        r = norm.weight * lengths / (norm.running_var + norm.eps).sqrt()
        torch.testing.assert_close(layer.r, r)
        direction = plain.weight.flatten(1) / lengths[:, None]
        torch.testing.assert_close(layer.direction.flatten(1), direction)


def test_plain_weights_are_the_same_parameters_with_the_folded_values() -> None:
    model = build()
    parameters = {number: model[number].weight for number in (0, 3, 6, 10, 13)}
    head = model[13].weight.clone()
    gp.convert_(model, norm="fold", weights="plain", example_inputs=EXAMPLES)
    for number, parameter in parameters.items():
        assert model[number].weight is parameter
        assert type(model[number]) in (nn.Conv2d, nn.Linear) and model[number].bias is not None
    assert torch.equal(model[13].weight, head)


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), (5, 3)),
    "conv1d": (lambda: nn.Sequential(nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4)), (5, 3, 6)),
    "conv3d": (lambda: nn.Sequential(nn.Conv3d(3, 4, 2), nn.BatchNorm3d(4)), (2, 3, 4, 4, 4)),
    "groups": (lambda: nn.Sequential(nn.Conv1d(4, 6, 3, groups=2), nn.BatchNorm1d(6)), (2, 4, 5)),
    "no bias": (lambda: nn.Sequential(nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4)), (5, 3)),
}  # fmt: skip


@weights_choice
@pytest.mark.parametrize(("make", "shape"), LAYERS.values(), ids=LAYERS)
def test_a_norm_that_ends_a_model_is_taken_out_as_well(make, shape, weights) -> None:  # noqa: ANN001
    original, x = pretend_pretrained(make()), torch.randn(shape)
    model = gp.convert_(copy.deepcopy(original), norm="fold", weights=weights, example_inputs=x)
    assert not has_batch_norm(model)
    assert gp.verify(original, model, x) < 1e-5
    folded = gp.fold_(copy.deepcopy(model), restore_norm=True)
    assert gp.verify(original, folded, x) < 1e-5
    assert list(folded.state_dict()) == list(original.state_dict())


@weights_choice
def test_folding_removes_the_rest_or_puts_the_norm_back(weights: str) -> None:
    original = build()
    model = gp.convert_(
        copy.deepcopy(original), norm="fold", weights=weights, example_inputs=EXAMPLES
    )
    without = gp.fold_(copy.deepcopy(model), restore_norm=False)
    assert not has_batch_norm(without) and gp.verify(model, without, EXAMPLES) < 1e-5
    assert not any(type(m).__module__.startswith("geoparam") for m in without.modules())

    restored = gp.fold_(model, restore_norm=True)
    assert gp.verify(original, restored, EXAMPLES) < 1e-5
    norm = restored[1]
    assert (norm.weight == 1).all() and (norm.running_mean == 0).all()
    torch.testing.assert_close(norm.running_var, torch.full((8,), 1 - norm.eps))
    restored.load_state_dict(original.state_dict())  # the original's file loads
    assert gp.verify(original, restored, EXAMPLES) == 0


@weights_choice
def test_a_checkpoint_loads_into_a_model_that_is_converted_anew(weights: str) -> None:
    options: dict[str, Any] = {"norm": "fold", "weights": weights, "example_inputs": EXAMPLES}
    trained, fresh = gp.convert_(build(), **options), gp.convert_(build(), **options)
    fresh.load_state_dict(trained.state_dict())
    assert gp.verify(trained, fresh, EXAMPLES) == 0


@pytest.mark.parametrize("norm", ["imn", "fold"])
@pytest.mark.parametrize("strict", [True, False])
@weights_choice
def test_the_originals_file_is_refused_also_where_keys_need_not_fit(
    weights: str, strict: bool, norm: str
) -> None:
    original, options = build(), {"norm": norm, "weights": weights}
    model = gp.convert_(copy.deepcopy(original), example_inputs=EXAMPLES, **options)
    with pytest.raises(
        RuntimeError, match="1 is a BatchNorm that a layer .* Load it before convert_"
    ):
        model.load_state_dict(original.state_dict(), strict=strict)


def test_the_plan_says_where_a_frozen_weight_takes_a_scale_that_learned() -> None:
    model = build()
    model[0].weight.requires_grad_(False)
    options: dict[str, Any] = {"norm": "fold", "example_inputs": EXAMPLES}
    note = "the scale of 1 goes into the frozen weight and stops learning"
    assert str(gp.plan(model, weights="plain", **options)).count(note) == 1
    assert note not in str(gp.plan(model, **options))
    assert gp.convert_(model, **options)[0].r.requires_grad


PLANS = [
    ("fold", "geometric", "4 of 5 layers under GmP", "nothing"),
    ("fold", "plain", "4 of 5 layers with plain weights", "nothing"),
    ("imn", "geometric", "4 of 5 layers under GmP", "input means of 3 layers"),
    ("imn", "plain", "4 of 5 layers with plain weights", "input means of 3 layers"),
]


@pytest.mark.parametrize(("norm", "weights", "layers", "depends"), PLANS)
def test_the_plan_says_what_goes_and_what_needs_a_batch(
    norm: str, weights: str, layers: str, depends: str
) -> None:
    plan = gp.plan(build(), norm=norm, weights=weights, example_inputs=EXAMPLES)
    lines = str(plan).splitlines()
    assert lines[0].startswith(layers)
    assert lines[1:3] == [
        "BatchNorms removed: 4",
        f"depends on the batch in training: {depends}",
    ]


def test_the_plan_names_norms_that_stay() -> None:
    def leave(module: nn.Module, name: str) -> bool:
        return name == "0"

    text = str(gp.plan(build(), leave, norm="fold", example_inputs=EXAMPLES))
    assert "BatchNorms removed: 1" in text
    assert "depends on the batch in training: 3 norms left (4, 7, 11)" in text
    assert "depends" not in str(gp.plan(build()))


def test_the_plan_counts_means_that_were_there_unless_they_are_frozen() -> None:
    model = nn.Sequential(gp.InputMeanNorm(3), *build())
    text = str(gp.plan(model, norm="fold", example_inputs=EXAMPLES))
    assert "in training: 1 norm left (0)" in text
    gp.freeze_means_(model[0])
    assert "in training: nothing" in str(gp.plan(model, norm="fold", example_inputs=EXAMPLES))


@pytest.mark.parametrize(("norm", "kind"), [("fold", nn.Conv2d), ("imn", gp.InputMeanConv2d)])
def test_a_layer_that_r_cannot_hold_gets_plain_weights(norm: Any, kind: type[nn.Module]) -> None:
    original = build()
    with torch.no_grad():
        original[4].weight[0], original[4].bias[0] = 0, 1  # a channel that training switched off
    model = copy.deepcopy(original)
    text = str(gp.plan(model, norm=norm, example_inputs=EXAMPLES))
    assert text.startswith("3 of 5 layers under GmP") and "BatchNorms removed: 4" in text
    assert "plain weight: 1 rows with |bias| > 100 |weight|)" in text
    gp.convert_(model, norm=norm, example_inputs=EXAMPLES)
    assert type(model[3]) is kind and not has_batch_norm(model)
    assert gp.verify(original, model, EXAMPLES) < 1e-5
    restored = gp.fold_(model, restore_norm=True)
    assert list(restored.state_dict()) == list(original.state_dict())
    assert gp.verify(original, restored, EXAMPLES) < 1e-5


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
        gp.convert_(mobile_block(), norm="fold", example_inputs=EXAMPLES)
    gp.convert_(mobile_block(), norm="fold", pretrained=True, example_inputs=EXAMPLES)


@weights_choice
def test_an_error_leaves_modules_and_values_alone(weights: str) -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = build()

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x) + 10 * self.body[0].weight.mean()

    model = Reads()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="differs by"):
        gp.convert_(model, norm="fold", weights=weights, example_inputs=EXAMPLES)
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[key], before[key]) for key in before)


def test_layers_and_the_optimizer_take_the_same_steps_on_folded_weights() -> None:
    x, outputs = EXAMPLES.double(), []
    original = build().double()
    for weights in WEIGHTS:
        model = copy.deepcopy(original)
        options: dict[str, Any] = {"norm": "fold", "weights": weights, "example_inputs": x}
        if weights == "geometric":
            options["coordinates"] = "intrinsic"
        gp.convert_(model, **options)
        if weights == "plain":
            optimizer: Any = gp.GeometricOptimizer(
                model, torch.optim.SGD, lr=0.02, match=False, scale="free"
            )
        else:
            optimizer = torch.optim.SGD(gp.param_groups(model, lr=0.02, kind="sgd", match=None))
            optimizer.register_step_post_hook(gp.retract(model))
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        outputs.append(model(x).detach())
    torch.testing.assert_close(*outputs, rtol=1e-9, atol=1e-9)
    assert not torch.allclose(outputs[0], original.eval()(x), atol=1e-3)


def test_norms_come_back_all_or_none_where_a_channel_is_switched_off() -> None:
    """Its layer gets plain weights, which r could not hold."""
    original = build()
    with torch.no_grad():
        original[4].weight[0], original[4].bias[0] = 0.0, 0.5
    model = gp.convert_(copy.deepcopy(original), norm="fold", example_inputs=EXAMPLES)
    kinds = {type(module) for module in model.modules()}
    assert gp.GmPConv2d in kinds and type(model[3]) is not gp.GmPConv2d
    gp.fold_(model)
    assert model.state_dict().keys() == original.state_dict().keys()
    assert gp.verify(original, model, EXAMPLES) < 1e-5
    model.load_state_dict(original.state_dict())
