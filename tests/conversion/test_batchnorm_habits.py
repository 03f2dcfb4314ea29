"""What code bases do to BatchNorm: it works after each choice, or a sentence says what to do."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from batchnorm_choices import (
    CHOICES,
    batch_norms,
    build_optimizer,
    choices,
    loss_of,
    remove_batchnorm,
    show_batches,
)
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.testing import assert_close

import geoparam as gp

torchvision = pytest.importorskip("torchvision")
timm = pytest.importorskip("timm")

SHAPE = (4, 3, 16, 16)
WITHOUT_BATCH = ("fold", "fold plain", "frozen")


def build() -> nn.Module:
    """The first two stages of torchvision's ResNet, one block each, and a head."""
    torch.manual_seed(0)
    model = torchvision.models.ResNet(torchvision.models.resnet.BasicBlock, [1, 1, 1, 1])
    model.layer3 = nn.Identity()
    model.layer4 = nn.Identity()
    model.fc = nn.Linear(128, 5)
    return show_batches(model, SHAPE)


def images() -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))


def convert(original: nn.Module, choice: str, *inputs: Any) -> nn.Module:
    """Return a copy of the model without BatchNorm."""
    return remove_batchnorm(copy.deepcopy(original), choice, *inputs)


def evaluate_norms(model: nn.Module) -> None:
    """The usual loop against BatchNorm's noise."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()


def uses_batch(model: nn.Module) -> bool:
    """Whether an image's output depends on those beside it in training."""
    model = copy.deepcopy(model)
    batch = images()
    among_four = model(batch)[:1]
    among_two = model(batch[:2])[:1]
    return not torch.allclose(among_four, among_two, atol=1e-4)


def learns_by_name(model: nn.Module) -> dict[str, bool]:
    return {name: parameter.requires_grad for name, parameter in model.named_parameters()}


# Norms in evaluation.


@choices
def test_norms_in_evaluation_before_conversion_stay_so(choice: str) -> None:
    original = build().train()
    evaluate_norms(original)

    model = convert(original, choice, images())

    assert gp.verify(original, model, images()) < 1e-5
    assert model.training
    restored = gp.fold_(model, restore_norm=True)
    assert not any(norm.training for norm in batch_norms(restored))


@choices
def test_norms_in_evaluation_before_conversion_do_not_change_what_needs_a_batch(
    choice: str,
) -> None:
    original = build().train()
    evaluate_norms(original)

    model = convert(original, choice, images())

    assert uses_batch(model) == (choice not in WITHOUT_BATCH)


@choices
def test_the_loop_after_conversion_finds_no_norms(choice: str) -> None:
    model = convert(build(), choice, images()).train()

    evaluate_norms(model)

    assert all(module.training for module in model.modules())
    assert uses_batch(model) == (choice not in WITHOUT_BATCH)


@pytest.mark.parametrize("choice", ["imn", "imn plain", "frozen"])
def test_freeze_means_takes_the_place_of_the_loop(choice: str) -> None:
    model = convert(build(), choice, images()).train()

    gp.freeze_means_(model)

    assert not uses_batch(model)


# Norms of other libraries.


def build_with_frozen_norms() -> nn.Module:
    """Return the network with torchvision's frozen norms in the places of BatchNorms."""
    model = build().eval()
    for name, norm in list(model.named_modules()):
        if isinstance(norm, nn.BatchNorm2d):
            frozen = torchvision.ops.FrozenBatchNorm2d(norm.num_features, norm.eps)
            frozen.load_state_dict(norm.state_dict())
            model.set_submodule(name, frozen)
    return model


@choices
def test_the_plan_absorbs_frozen_batch_norm(choice: str) -> None:
    plan = gp.plan(build_with_frozen_norms(), example_inputs=images(), **CHOICES[choice])

    assert all(decision.norm for decision in plan.converted)
    assert "depends on the batch in training: nothing" in str(plan)


@choices
def test_absorbed_frozen_batch_norm_stays_constant(choice: str) -> None:
    original = build_with_frozen_norms()
    options = CHOICES[choice]

    model = gp.convert_(copy.deepcopy(original), example_inputs=images(), **options)

    assert gp.verify(original, model, images()) < 1e-5
    assert not uses_batch(model.train())
    offset_learns = [
        learns
        for name, learns in learns_by_name(model).items()
        if name.endswith(("conv1.lam", "conv1.bias"))
    ]
    assert offset_learns
    assert not any(offset_learns)


@choices
def test_frozen_batch_norm_is_restored(choice: str) -> None:
    original = build_with_frozen_norms()
    options = CHOICES[choice]
    model = gp.convert_(copy.deepcopy(original), example_inputs=images(), **options)

    restored = gp.fold_(model, restore_norm=True)

    assert isinstance(restored.bn1, torchvision.ops.FrozenBatchNorm2d)
    assert list(restored.state_dict()) == list(original.state_dict())
    assert gp.verify(original, restored, images()) < 1e-5


def test_timms_frozen_norm_stays_and_does_not_depend_on_the_batch() -> None:
    norm = timm.layers.FrozenBatchNormAct2d(4)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.Conv2d(4, 2, 3), nn.BatchNorm2d(2))

    text = str(gp.plan(model, norm="fold", example_inputs=images()))
    gp.convert_(model, norm="fold", pretrained=True, example_inputs=images())

    assert "BatchNorms removed: 1" in text
    assert "in training: nothing" in text
    assert model[1] is norm


class Detector(nn.Module):
    """A model that takes a list of images, as torchvision's detectors do."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = build()

    def forward(self, images: list[Tensor]) -> Tensor:
        return self.backbone(torch.stack(images))


def test_a_list_of_images_is_one_argument() -> None:
    original = Detector()
    batch = list(images())

    model = gp.convert_(copy.deepcopy(original), norm="fold", example_inputs=(batch,))

    assert not batch_norms(model)
    assert gp.verify(original, model, (batch,)) < 1e-5


def test_a_frozen_norm_without_values_is_restored() -> None:
    norm = torchvision.ops.FrozenBatchNorm2d(4)
    original = nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.ReLU(), nn.Conv2d(4, 2, 3))
    on_meta = copy.deepcopy(original).to("meta")
    options = {"norm": "fold", "pretrained": True}
    model = gp.convert_(original, example_inputs=images(), **options)

    empty = gp.convert_(on_meta, example_inputs=images().to("meta"), **options)
    empty.load_state_dict(model.state_dict(), assign=True)

    assert gp.verify(model, gp.fold_(empty), images()) < 1e-5


def build_with_synchronised_norms() -> nn.Module:
    return nn.SyncBatchNorm.convert_sync_batchnorm(build()).eval()


@pytest.mark.parametrize("choice", ["imn plain", "frozen"])
def test_input_means_of_plain_weights_are_refused_under_synchronised_norms(choice: str) -> None:
    message = "(?s)nothing to convert.*bn1 stays: convert before convert_sync_batchnorm"

    with pytest.raises(ValueError, match=message):
        gp.plan(build_with_synchronised_norms(), example_inputs=images(), **CHOICES[choice])


def test_the_plan_of_input_means_says_what_to_do_with_synchronised_norms() -> None:
    text = str(gp.plan(build_with_synchronised_norms(), norm="imn", example_inputs=images()))

    assert "convert before convert_sync_batchnorm, and call synchronise_means_" in text


@pytest.mark.parametrize("choice", ["fold", "fold plain"])
def test_synchronised_norms_fold_and_are_restored(choice: str) -> None:
    original = build_with_synchronised_norms()

    model = convert(original, choice, images())
    assert not batch_norms(model)
    assert gp.verify(original, model, images()) < 1e-5

    restored = gp.fold_(model, restore_norm=True)
    assert isinstance(restored.bn1, nn.SyncBatchNorm)
    assert gp.verify(original, restored, images()) < 1e-5


def test_timms_synchronised_norms_fold_with_their_activations() -> None:
    x = torch.randn(2, 3, 32, 32)
    original = show_batches(timm.create_model("mobilenetv3_small_050"), (2, 3, 32, 32))
    original = timm.layers.convert_sync_batchnorm(original).eval()

    model = convert(original, "fold plain", x)
    assert not batch_norms(model)
    assert gp.verify(original, model, x) < 1e-5

    restored = gp.fold_(model, restore_norm=True)
    assert type(restored.bn1) is timm.layers.SyncBatchNormAct
    assert gp.verify(original, restored, x) < 1e-5


# Averages, accumulated gradients and gradients of examples.


def copy_floats(model: nn.Module) -> dict[str, Tensor]:
    """Return a copy of the parameters and buffers that are averaged."""
    state = model.state_dict()
    return {name: value.clone() for name, value in state.items() if value.is_floating_point()}


def train_with_average(model: nn.Module, choice: str, update: Callable) -> list[dict[str, Tensor]]:
    """Train for two steps, update an average after each, and return the three states."""
    optimizer = build_optimizer(model, choice)
    states = [copy_floats(model)]
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model(images() + step)).backward()
        optimizer.step()
        update(model)
        states.append(copy_floats(model))
    return states


@choices
def test_torchs_average_of_weights_and_buffers(choice: str) -> None:
    model = convert(build(), choice, images())
    halves = get_ema_multi_avg_fn(0.5)
    average = AveragedModel(model, multi_avg_fn=halves, use_buffers=True)

    _, first, second = train_with_average(model, choice, average.update_parameters)

    for name, value in copy_floats(average.module).items():
        assert_close(value, first[name] / 2 + second[name] / 2)  # its first update is a copy
    folded = gp.fold_(copy.deepcopy(average.module), restore_norm=True)
    assert gp.verify(average.module, folded, images()) < 1e-5


@choices
def test_timms_average_of_weights_and_buffers(choice: str) -> None:
    model = convert(build(), choice, images())
    average = timm.utils.ModelEmaV3(model, decay=0.5)

    initial, first, second = train_with_average(model, choice, average.update)

    for name, value in copy_floats(average.module).items():
        assert_close(value, initial[name] / 4 + first[name] / 4 + second[name] / 2)
    folded = gp.fold_(copy.deepcopy(average.module), restore_norm=True)
    assert gp.verify(average.module, folded, images()) < 1e-5


@choices
def test_accumulated_gradients_are_those_of_the_whole_batch_without_batch_means(
    choice: str,
) -> None:
    model = convert(build(), choice, images()).double()
    accumulating = copy.deepcopy(model)
    batch = images().double()

    loss_of(model(batch)).backward()
    for image in batch.split(1):
        loss = loss_of(accumulating(image)) / len(batch)
        loss.backward()

    is_same = all(
        torch.allclose(parameter.grad, other.grad, rtol=1e-6, atol=1e-9)
        for parameter, other in zip(model.parameters(), accumulating.parameters(), strict=True)
    )
    assert is_same == (choice in WITHOUT_BATCH)


@pytest.mark.parametrize("choice", WITHOUT_BATCH)
def test_gradients_of_each_example_in_one_call(choice: str) -> None:
    """As differential privacy needs them; torch.func refuses BatchNorm in training."""
    model = convert(build(), choice, images()).double().train()
    parameters = dict(model.named_parameters())
    batch = images().double()

    def loss(values: dict[str, Tensor], image: Tensor) -> Tensor:
        return loss_of(torch.func.functional_call(model, values, (image[None],)))

    grads = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, batch)

    loss_of(model(batch[1:2])).backward()
    for name, parameter in parameters.items():
        assert_close(grads[name][1], parameter.grad, rtol=1e-7, atol=1e-9)


# Frozen stages, feature extractors and scripts.


def build_with_frozen_stages() -> nn.Module:
    model = build()
    for stage in (model.conv1, model.bn1, model.layer1):
        stage.requires_grad_(False)
    return model


@choices
def test_stages_that_were_frozen_do_not_train(choice: str) -> None:
    model = convert(build_with_frozen_stages(), choice, images())
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    optimizer = build_optimizer(model, choice, lr=0.01)

    loss_of(model(images())).backward()
    optimizer.step()

    for name, parameter in model.named_parameters():
        is_frozen = name.startswith(("conv1", "layer1"))
        assert parameter.requires_grad != is_frozen, name
        assert torch.equal(parameter, before[name]) == is_frozen, name


@choices
def test_stages_that_were_frozen_are_so_after_folding(choice: str) -> None:
    original = build_with_frozen_stages()
    model = convert(original, choice, images())

    restored = gp.fold_(model, restore_norm=True)

    assert learns_by_name(restored) == learns_by_name(original)


NODES = ["layer1.0.relu", "layer2.0.relu_1"]


def extract_features(model: nn.Module, nodes: list[str], **options: Any) -> nn.Module:
    create = torchvision.models.feature_extraction.create_feature_extractor
    return create(model, nodes, **options)


@choices
def test_a_feature_extractor_is_converted(choice: str) -> None:
    original = extract_features(build(), [*NODES, "layer1.0.bn1"])

    model = convert(original, choice, images())
    assert gp.verify(original, model, images()) < 1e-5
    assert not batch_norms(model)
    loss_of(model.train()(images())).backward()

    restored = gp.fold_(model, restore_norm=True)
    assert list(restored.state_dict()) == list(original.state_dict())


@choices
def test_a_feature_extractor_of_a_converted_model(choice: str) -> None:
    """Layers with means or coordinates are leaves; folded plain ones need nothing."""
    original = build()
    model = convert(original, choice, images())
    options = {}
    if choice != "fold plain":
        leaves = [gp.GmPLayer, gp.InputMeanConv2d]
        options["tracer_kwargs"] = {"leaf_modules": leaves}

    features = extract_features(model, NODES, **options)

    assert gp.verify(extract_features(original, NODES), features, images()) < 1e-5
    loss_of(features.train()(images())).backward()
    for name, parameter in features.named_parameters():
        assert parameter.grad is not None, name


@pytest.mark.parametrize(
    "build_original", [build, lambda: timm.create_model("resnet10t")], ids=["torchvision", "timm"]
)
def test_folded_plain_weights_are_scripted(build_original: Callable) -> None:
    x = torch.randn(2, 3, 32, 32)
    model = convert(show_batches(build_original(), x.shape), "fold plain", x).eval()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates scripting
        scripted = torch.jit.script(model)

    assert_close(scripted(x), model(x))


@choices
def test_timms_features_lose_the_last_norm_too(choice: str) -> None:
    x = torch.randn(2, 3, 32, 32)
    original = timm.create_model("resnet10t", features_only=True, out_indices=(0, 1, 2))
    show_batches(original, x.shape)

    model = convert(original, choice, x)
    assert not batch_norms(model)
    assert gp.verify(original, model, x) < 1e-5
    loss_of(model.train()(x)).backward()

    restored = gp.fold_(model, restore_norm=True)
    assert list(restored.state_dict()) == list(original.state_dict())
