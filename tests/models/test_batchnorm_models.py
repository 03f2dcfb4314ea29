"""Twenty-four networks with BatchNorm under each choice: equal in evaluation, and folded back.

Random weights, statistics of three batches. A norm stays where it does not follow a layer and
nothing else: DenseNet's after concatenation, RepVGG's beside its convolutions.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pytest
import torch
from batchnorm_choices import (
    batch_norms,
    build_optimizer,
    choices,
    loss_of,
    remove_batchnorm,
    show_batches,
)
from torch import Tensor, nn
from zoo import timm, torchvision

import geoparam as gp

IMAGE = (3, 64, 64)
CLIP = (3, 4, 32, 32)
UNTRAINED = {"weights": None, "weights_backbone": None}


def backbone(name: str) -> Callable[[], nn.Module]:
    return lambda: torchvision(f"detection.{name}", **UNTRAINED)().backbone


@dataclass(frozen=True)
class Case:
    build: Callable[[], nn.Module]
    norms: int
    kept: int = 0  # norms that stay
    shape: tuple[int, ...] = IMAGE
    slow: bool = True


CASES = {
    "resnet18": Case(torchvision("resnet18"), 20),
    "resnet50": Case(torchvision("resnet50"), 53),
    "resnext50": Case(torchvision("resnext50_32x4d"), 53),
    "vgg11_bn": Case(lambda: torchvision("vgg11_bn")().features, 8),
    "mobilenet_v2": Case(torchvision("mobilenet_v2"), 52),
    "mobilenet_v3_small": Case(torchvision("mobilenet_v3_small"), 34, slow=False),
    "efficientnet_b0": Case(torchvision("efficientnet_b0"), 49),
    "regnet_y_400mf": Case(torchvision("regnet_y_400mf"), 53),
    "shufflenet_v2": Case(torchvision("shufflenet_v2_x0_5"), 56, slow=False),
    "mnasnet": Case(torchvision("mnasnet0_5"), 52),
    "densenet121": Case(torchvision("densenet121"), 121, 62),
    "googlenet": Case(torchvision("googlenet", init_weights=False, aux_logits=False), 57),
    "fasterrcnn_resnet50_fpn": Case(backbone("fasterrcnn_resnet50_fpn"), 53),
    "ssdlite": Case(backbone("ssdlite320_mobilenet_v3_large"), 58),
    "deeplabv3": Case(torchvision("segmentation.deeplabv3_mobilenet_v3_large", **UNTRAINED), 53),
    "lraspp": Case(torchvision("segmentation.lraspp_mobilenet_v3_large", **UNTRAINED), 47),
    "r3d_18": Case(torchvision("video.r3d_18"), 20, shape=CLIP),
    "r2plus1d_18": Case(torchvision("video.r2plus1d_18"), 37, shape=CLIP),
    "timm_efficientnet_lite0": Case(timm("efficientnet_lite0"), 49),
    "timm_mobilenetv4": Case(timm("mobilenetv4_conv_small"), 46),
    "timm_ghostnet": Case(timm("ghostnet_100"), 80),
    "timm_res2net": Case(timm("res2net50_26w_4s"), 85),
    "timm_repvgg": Case(timm("repvgg_a0"), 61, 17),
    "timm_regnetx_features": Case(timm("regnetx_002", features_only=True), 44, slow=False),
}


def mark_slow(name: str) -> Any:
    marks = [pytest.mark.slow] if CASES[name].slow else []
    return pytest.param(name, marks=marks)


@lru_cache(maxsize=1)  # the choices of one network run one after the other
def prepare(name: str) -> nn.Module:
    torch.manual_seed(0)
    case = CASES[name]
    return show_batches(case.build(), (4, *case.shape)).eval()


@choices
@pytest.mark.parametrize("name", [mark_slow(name) for name in CASES])
def test_equal_in_evaluation_and_after_folding_back(name: str, choice: str) -> None:
    case = CASES[name]
    original = prepare(name)
    x = torch.randn(2, *case.shape, generator=torch.Generator().manual_seed(1))

    model = remove_batchnorm(copy.deepcopy(original), choice, x)
    assert len(batch_norms(original)) == case.norms
    assert len(batch_norms(model)) == case.kept
    assert gp.verify(original, model, x) < 1e-5

    restored = gp.fold_(model, restore_norm=True)
    assert list(restored.state_dict()) == list(original.state_dict())
    assert gp.verify(original, restored, x) < 1e-5
    assert not any(type(m).__module__.startswith("geoparam") for m in restored.modules())


def take_two_steps(model: nn.Module, choice: str, compute_loss: Callable[[], Tensor]) -> None:
    """Train, and check that losses and parameters are finite."""
    model.train()
    optimizer = build_optimizer(model, choice)
    for _ in range(2):
        optimizer.zero_grad()
        loss = compute_loss()
        loss.backward()
        optimizer.step()
        assert loss.isfinite()
    assert all(p.isfinite().all() for p in model.parameters())


def build_detector() -> Any:
    """Return a small detector; the BatchNorms of its backbone have seen images."""
    torch.manual_seed(0)
    build = torchvision(
        "detection.fasterrcnn_resnet50_fpn",
        min_size=64,
        max_size=96,
        num_classes=5,
        **UNTRAINED,
    )
    detector: Any = build()
    show_batches(detector.backbone, (2, *IMAGE))
    return detector


def draw_images() -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Return two images of different sizes and their targets, one box each."""
    images = [torch.rand(3, 64, 80), torch.rand(3, 72, 64)]
    boxes = torch.tensor([[5.0, 5.0, 40.0, 40.0]])
    targets = [{"boxes": boxes, "labels": torch.tensor([label])} for label in (1, 2)]
    return images, targets


@torch.no_grad()
def count_detections(detector: nn.Module, images: list[Tensor]) -> list[int]:
    return [len(detection["boxes"]) for detection in detector.eval()(images)]


@pytest.mark.slow
@choices
def test_a_detector_trains_with_a_converted_backbone(choice: str) -> None:
    detector = build_detector()
    original = copy.deepcopy(detector.backbone)
    x = torch.randn(2, *IMAGE)

    remove_batchnorm(detector.backbone, choice, x)
    assert not batch_norms(detector)
    assert gp.verify(original, detector.backbone, x) < 1e-5

    images, targets = draw_images()
    take_two_steps(detector, choice, lambda: sum(detector(images, targets).values()))

    detections = count_detections(detector, images)
    gp.fold_(detector, restore_norm=True)
    assert count_detections(detector, images) == detections
    original.load_state_dict(detector.backbone.state_dict())


@pytest.mark.slow
@choices
def test_a_video_network_trains(choice: str) -> None:
    original = prepare("r3d_18")
    clips = torch.randn(2, *CLIP)
    model = remove_batchnorm(copy.deepcopy(original), choice, clips)
    assert not batch_norms(model)

    take_two_steps(model, choice, lambda: loss_of(model(clips)))

    restored = gp.fold_(copy.deepcopy(model), restore_norm=True)
    assert gp.verify(model, restored, clips) < 1e-5
