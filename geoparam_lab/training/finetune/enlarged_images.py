"""Small packed images for a network that was trained on large ones.

Training images are divided once: those that are trained on, those held out to choose a rate, and
the rest. Batches are scaled as torchvision's weights expect them, and enlarged on the device.
"""

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from geoparam_lab.data.image_source import Source
from geoparam_lab.data.packed_images import PackedImages
from geoparam_lab.training.finetune.settings import FinetuneSettings

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, for [0, 1]
PART = 50  # images in a batch of evaluation

Batch = tuple[Tensor, Tensor]


class EnlargedImages:
    """Batches for training, for the choice of a rate, and for the test."""

    def __init__(
        self, source: PackedImages, settings: FinetuneSettings, device: torch.device
    ) -> None:
        self.classes = source.classes
        self.settings, self.device = settings, device
        self.source = source
        self.part = _choose_part(source, settings)
        # The source subtracts its own mean.
        shift = torch.tensor(source.mean) - torch.tensor(MEAN)
        self.shift = shift.view(3, 1, 1).to(device)
        self.std = torch.tensor(STD).view(3, 1, 1).to(device)

    def train(self, batch_size: int, seed: int) -> Iterator[Batch]:
        """Yield batches without end, epoch by epoch, half of the images flipped."""
        batches = self.part.train(batch_size, seed=seed, device=self.device)
        for epoch in itertools.count():
            for images, labels in batches.epoch(epoch):
                yield self._enlarge(images), labels

    def held_out(self) -> Iterator[Batch]:
        """Yield the images that choose a rate."""
        for images, labels in self.part.val(PART, device=self.device).epoch(0):
            yield self._enlarge(images), labels

    def test(self) -> Iterator[Batch]:
        """Yield test images, equally spaced: packed files are often sorted by class."""
        total = self.source.fingerprint["val"]
        count = self.settings.test_images or total
        wanted = torch.linspace(0, total - 1, count).round().long()
        first = 0
        for images, labels in self.source.val(PART, device=self.device).epoch(0):
            is_inside = (wanted >= first) & (wanted < first + len(labels))
            places = (wanted[is_inside] - first).to(self.device)
            first += len(labels)
            if len(places):
                yield self._enlarge(images[places]), labels[places]

    def _enlarge(self, images: Tensor) -> Tensor:
        scaled = (images + self.shift) / self.std
        size = self.settings.size
        large = F.interpolate(scaled, (size, size), mode="bilinear", align_corners=False)
        return large.contiguous(memory_format=torch.channels_last)


def _choose_part(source: Source, settings: FinetuneSettings) -> Source:
    """Return a source that trains on `images` and validates on `held_out` others."""
    total, test = source.fingerprint["train"], source.fingerprint["val"]
    wanted = settings.images + settings.held_out
    if wanted > total:
        raise ValueError(
            f"images and held_out are parts of the {total:,} training images; got "
            f"{settings.images:,} and {settings.held_out:,}. Ask for fewer."
        )
    if settings.test_images is not None and settings.test_images > test:
        raise ValueError(
            f"test_images is at most {test:,}, all there are; got {settings.test_images:,}."
        )
    if settings.batch_size > settings.images:
        raise ValueError(
            f"a batch has at most all images; got batch size {settings.batch_size} and "
            f"{settings.images:,} images."
        )
    if wanted < total:
        source = source.hold_out((total - wanted) / total)  # leaves the rest aside
    return source.hold_out(settings.held_out / wanted)
