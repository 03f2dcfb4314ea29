"""What code bases do to BatchNorm: it works after each choice, or a sentence says what to do."""

import copy
import warnings

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

import geoparam as gp

torchvision = pytest.importorskip("torchvision")
timm = pytest.importorskip("timm")

SHAPE = (4, 3, 16, 16)
NODES = ["layer1.0.relu", "layer2.0.relu_1"]
LEAVES = {"leaf_modules": [gp.GmPLayer, gp.InputMeanConv2d]}
WITHOUT_BATCH = ("fold", "fold plain", "frozen")


def build() -> nn.Module:
    """The first two stages of torchvision's ResNet, one block each, and a head."""
    torch.manual_seed(0)
    model = torchvision.models.ResNet(torchvision.models.resnet.BasicBlock, [1, 1, 1, 1])
    model.layer3, model.layer4, model.fc = nn.Identity(), nn.Identity(), nn.Linear(128, 5)
    return show_batches(model, SHAPE)


def images() -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))


def evaluate_norms(model: nn.Module) -> None:
    """The usual loop against BatchNorm's noise."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()


def uses_batch(model: nn.Module) -> bool:
    """Whether an image's output depends on those beside it in training."""
    model = copy.deepcopy(model)
    x = images()
    return not torch.allclose(model(x)[:1], model(x[:2])[:1], atol=1e-4)


@choices
def test_norms_in_evaluation_before_conversion(choice: str) -> None:
    original = build().train()
    evaluate_norms(original)
    model = remove_batchnorm(copy.deepcopy(original), choice, images())
    assert gp.verify(original, model, images()) < 1e-5
    assert model.training and uses_batch(model) == (choice not in WITHOUT_BATCH)
    assert not any(norm.training for norm in batch_norms(gp.fold_(model, restore_norm=True)))


@choices
def test_the_loop_after_conversion_finds_no_norms_and_freeze_means_takes_its_place(
    choice: str,
) -> None:
    model = remove_batchnorm(build(), choice, images()).train()
    evaluate_norms(model)
    assert all(module.training for module in model.modules())
    assert uses_batch(model) == (choice not in WITHOUT_BATCH)
    if CHOICES[choice]["norm"] == "imn":
        assert not uses_batch(gp.freeze_means_(model))


@choices
def test_frozen_batch_norm_is_absorbed_and_stays_constant(choice: str) -> None:
    frozen = torchvision.ops.FrozenBatchNorm2d
    original = build().eval()
    for module in list(original.modules()):
        for name, norm in module.named_children():
            if isinstance(norm, nn.BatchNorm2d):
                constants = frozen(norm.num_features, norm.eps)
                constants.load_state_dict(norm.state_dict())
                setattr(module, name, constants)

    options, x = CHOICES[choice], images()
    plan = gp.plan(original, example_inputs=x, **options)
    assert all(d.norm for d in plan.converted)
    assert "depends on the batch in training: nothing" in str(plan)
    model = gp.convert_(copy.deepcopy(original), example_inputs=x, **options)
    assert gp.verify(original, model, x) < 1e-5
    assert not uses_batch(model.train())
    offsets = [p for n, p in model.named_parameters() if n.endswith(("conv1.lam", "conv1.bias"))]
    assert offsets and not any(p.requires_grad for p in offsets)

    restored = gp.fold_(model, restore_norm=True)
    assert isinstance(restored.bn1, frozen)
    assert list(restored.state_dict()) == list(original.state_dict())
    assert gp.verify(original, restored, x) < 1e-5


def test_timms_frozen_norm_stays_and_does_not_depend_on_the_batch() -> None:
    norm = timm.layers.FrozenBatchNormAct2d(4)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.Conv2d(4, 2, 3), nn.BatchNorm2d(2))
    text = str(gp.plan(model, norm="fold", example_inputs=images()))
    assert "BatchNorms removed: 1" in text and "in training: nothing" in text
    gp.convert_(model, norm="fold", pretrained=True, example_inputs=images())
    assert model[1] is norm


def test_a_list_of_images_is_one_argument() -> None:
    class Detector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = build()

        def forward(self, images: list[Tensor]) -> Tensor:
            return self.backbone(torch.stack(images))

    original, batch = Detector(), list(images())
    model = gp.convert_(copy.deepcopy(original), norm="fold", example_inputs=(batch,))
    assert not batch_norms(model)
    assert gp.verify(original, model, (batch,)) < 1e-5


def test_a_frozen_norm_without_values_is_restored() -> None:
    def make() -> nn.Module:
        norm = torchvision.ops.FrozenBatchNorm2d(4)
        return nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.ReLU(), nn.Conv2d(4, 2, 3))

    x, options = images(), {"norm": "fold", "pretrained": True}
    model = gp.convert_(make(), example_inputs=x, **options)
    empty = gp.convert_(make().to("meta"), example_inputs=x.to("meta"), **options)
    empty.load_state_dict(model.state_dict(), assign=True)
    assert gp.verify(model, gp.fold_(empty), x) < 1e-5


@choices
def test_synchronised_norms_fold_and_imn_says_what_to_do(choice: str) -> None:
    original = nn.SyncBatchNorm.convert_sync_batchnorm(build()).eval()
    x, options = images(), CHOICES[choice]
    if options["norm"] == "imn":
        if "weights" in options:
            message = "nothing to convert.*bn1 stays: convert before convert_sync_batchnorm"
            with pytest.raises(ValueError, match=f"(?s){message}"):
                gp.plan(original, example_inputs=x, **options)
        else:
            text = str(gp.plan(original, example_inputs=x, **options))
            assert "convert before convert_sync_batchnorm, and call synchronise_means_" in text
        return
    model = gp.convert_(copy.deepcopy(original), example_inputs=x, **options)
    assert gp.verify(original, model, x) < 1e-5 and not batch_norms(model)
    restored = gp.fold_(model, restore_norm=True)
    assert isinstance(restored.bn1, nn.SyncBatchNorm)
    assert gp.verify(original, restored, x) < 1e-5


def test_timms_synchronised_norms_fold_with_their_activations() -> None:
    original = show_batches(timm.create_model("mobilenetv3_small_050"), (2, 3, 32, 32))
    original, x = timm.layers.convert_sync_batchnorm(original).eval(), torch.randn(2, 3, 32, 32)
    model = remove_batchnorm(copy.deepcopy(original), "fold plain", x)
    assert not batch_norms(model)
    assert gp.verify(original, model, x) < 1e-5
    restored = gp.fold_(model, restore_norm=True)
    assert type(restored.bn1) is timm.layers.SyncBatchNormAct
    assert gp.verify(original, restored, x) < 1e-5


def read_floats(model: nn.Module) -> dict[str, Tensor]:
    state = model.state_dict()
    return {key: value.clone() for key, value in state.items() if value.is_floating_point()}


AVERAGES = {  # and the weights of the states after two steps, and before them
    "torch": (
        lambda model: AveragedModel(
            model, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True
        ),
        (0, 0.5, 0.5),  # its first update is a copy
    ),
    "timm": (lambda model: timm.utils.ModelEmaV3(model, decay=0.5), (0.25, 0.25, 0.5)),
}


@choices
@pytest.mark.parametrize(("build_average", "shares"), AVERAGES.values(), ids=AVERAGES)
def test_averages_of_weights_and_buffers(build_average, shares, choice: str) -> None:  # noqa: ANN001
    model = remove_batchnorm(build(), choice, images())
    average = build_average(model)
    update = getattr(average, "update_parameters", None) or average.update
    optimizer = build_optimizer(model, choice)
    states = [read_floats(model)]
    for number in range(2):
        optimizer.zero_grad()
        loss_of(model(images() + number)).backward()
        optimizer.step()
        update(model)
        states.append(read_floats(model))

    for key, value in read_floats(average.module).items():
        expected = sum(share * state[key] for share, state in zip(shares, states, strict=True))
        torch.testing.assert_close(value, expected)
    folded = gp.fold_(copy.deepcopy(average.module), restore_norm=True)
    assert gp.verify(average.module, folded, images()) < 1e-5


@choices
def test_accumulated_gradients_are_those_of_the_whole_batch_without_batch_means(
    choice: str,
) -> None:
    whole = remove_batchnorm(build(), choice, images()).double()
    parts, x = copy.deepcopy(whole), images().double()
    loss_of(whole(x)).backward()
    for part in x.split(1):
        (loss_of(parts(part)) / len(x)).backward()
    pairs = zip(whole.parameters(), parts.parameters(), strict=True)
    is_same = all(torch.allclose(a.grad, b.grad, rtol=1e-6, atol=1e-9) for a, b in pairs)
    assert is_same == (choice in WITHOUT_BATCH)


@pytest.mark.parametrize("choice", WITHOUT_BATCH)
def test_gradients_of_each_example_in_one_call(choice: str) -> None:
    """As differential privacy needs them; torch.func refuses BatchNorm in training."""
    model = remove_batchnorm(build(), choice, images()).double().train()
    parameters, x = dict(model.named_parameters()), images().double()

    def loss(values: dict[str, Tensor], example: Tensor) -> Tensor:
        return loss_of(torch.func.functional_call(model, values, (example[None],)))

    grads = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
    loss_of(model(x[1:2])).backward()
    for name, parameter in parameters.items():
        torch.testing.assert_close(grads[name][1], parameter.grad, rtol=1e-7, atol=1e-9)


@choices
def test_stages_that_were_frozen_stay_frozen(choice: str) -> None:
    original = build()
    for name, parameter in original.named_parameters():
        if name.startswith(("conv1", "bn1", "layer1")):
            parameter.requires_grad_(False)
    model = remove_batchnorm(copy.deepcopy(original), choice, images())
    before = {name: p.clone() for name, p in model.named_parameters()}
    optimizer = build_optimizer(model, choice, lr=0.01)
    loss_of(model(images())).backward()
    optimizer.step()
    for name, parameter in model.named_parameters():
        is_frozen = name.startswith(("conv1", "layer1"))
        assert parameter.requires_grad != is_frozen
        assert torch.equal(parameter, before[name]) == is_frozen, name
    flags = {n: p.requires_grad for n, p in original.named_parameters()}
    restored = gp.fold_(model, restore_norm=True)
    assert flags == {n: p.requires_grad for n, p in restored.named_parameters()}


@choices
def test_a_feature_extractor_is_converted(choice: str) -> None:
    create = torchvision.models.feature_extraction.create_feature_extractor
    original = create(build(), [*NODES, "layer1.0.bn1"])
    model = remove_batchnorm(copy.deepcopy(original), choice, images())
    assert gp.verify(original, model, images()) < 1e-5
    assert not batch_norms(model)
    loss_of(model.train()(images())).backward()
    restored = gp.fold_(model, restore_norm=True)
    assert list(restored.state_dict()) == list(original.state_dict())


@choices
def test_a_feature_extractor_of_a_converted_model(choice: str) -> None:
    """Layers with means or coordinates are leaves; folded plain ones need nothing."""
    create = torchvision.models.feature_extraction.create_feature_extractor
    original = build()
    model = remove_batchnorm(copy.deepcopy(original), choice, images())
    options = {} if choice == "fold plain" else {"tracer_kwargs": LEAVES}
    features = create(model, NODES, **options)
    assert gp.verify(create(original, NODES), features, images()) < 1e-5
    loss_of(features.train()(images())).backward()
    assert all(p.grad is not None for p in features.parameters())


@pytest.mark.parametrize("build_original", [build, lambda: timm.create_model("resnet10t")])
def test_folded_plain_weights_are_scripted(build_original) -> None:  # noqa: ANN001
    x = torch.randn(2, 3, 32, 32)
    model = remove_batchnorm(show_batches(build_original(), x.shape), "fold plain", x).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates scripting
        scripted = torch.jit.script(model)
    torch.testing.assert_close(scripted(x), model(x))


@choices
def test_timms_features_lose_the_last_norm_too(choice: str) -> None:
    shape = (2, 3, 32, 32)
    model = timm.create_model("resnet10t", features_only=True, out_indices=(0, 1, 2))
    original, x = show_batches(model, shape), torch.randn(shape)
    model = remove_batchnorm(copy.deepcopy(original), choice, x)
    assert not batch_norms(model)
    assert gp.verify(original, model, x) < 1e-5
    loss_of(model.train()(x)).backward()
    restored = gp.fold_(model, restore_norm=True)
    assert list(restored.state_dict()) == list(original.state_dict())
