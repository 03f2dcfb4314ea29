"""ImageNet at 32x32 or 64x64, and what a data set of images offers to training.

A `Source` has a training and a validation split; `Batches` is one of them as one process of
several sees it. Two rules hold for every source:

- The order of the images and their augmentation depend on the seed, the epoch and the place in
  the epoch alone. So several processes together see the batches that one would see, and a run that
  is resumed within an epoch sees what it would have seen.
- Batch sizes are those of all processes together. Training leaves out the incomplete last batch;
  validation has every image exactly once, so a process's share of a batch may be empty.

`PackedImages` are small images from the official npz layout (`image_npz`). They stay on the GPU as
bytes, channels last, and an epoch's order, flips and crops are drawn at its start. A batch costs
one gather, by rows and columns that include flip and crop, one scaling and one subtraction.
`image_folders` has ImageNet as folders of JPEG files.

Reference:
    Chrabaszcz, Loshchilov & Hutter, *A Downsampled Variant of ImageNet as an Alternative to the
    CIFAR datasets*, 2017.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from geoparam_lab.data import image_npz
from geoparam_lab.data.image_npz import Split

Device = torch.device | str


class Batches(Protocol):
    """One split, as one process sees it."""

    @property
    def steps(self) -> int:
        """Batches in an epoch, the same for every process."""

    @property
    def examples(self) -> int:
        """Images in an epoch, over all processes."""

    def epoch(self, number: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this process's images and labels of an epoch, from batch `start` on.

        Images are float32 (b, 3, H, W), channels last in memory, labels int64, on the device.
        """


class Source(Protocol):
    """A data set of images, for training: `PackedImages` or `ImageFolders`.

    `fingerprint` has name, numbers of images and a checksum, to recognise the same data.
    """

    classes: int
    size: int
    fingerprint: dict[str, Any]

    def train(
        self,
        batch_size: int,
        *,
        seed: int,
        device: Device,
        rank: int = 0,
        world: int = 1,
        crop: int = 0,
    ) -> Batches:
        """Return the training split in random order, augmented."""

    def val(self, batch_size: int, *, device: Device, rank: int = 0, world: int = 1) -> Batches:
        """Return the validation split in its own order, as it is."""

    def hold_out(self, share: float) -> "Source":
        """Return a source that trains without a share of the images, and validates on these.

        It is the same share every time.
        """


# --- order and shares ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Shares:
    """Which places of an epoch go into each batch of process `rank` of `world`.

    `batch_size` is that of all processes together. `drop_last` leaves out the incomplete batch.

    Example:
        >>> one, other = (Shares(10, 4, rank, 2, drop_last=False) for rank in (0, 1))
        >>> one.steps, [one.span(step) for step in range(3)], other.span(2)
        (3, [(0, 2), (4, 6), (8, 9)], (9, 10))
    """

    images: int
    batch_size: int
    rank: int = 0
    world: int = 1
    drop_last: bool = True

    def __post_init__(self) -> None:
        if self.batch_size < 1 or not 0 <= self.rank < self.world:
            raise ValueError(
                "a batch has one image or more, and processes count from 0; got batch size "
                f"{self.batch_size} and process {self.rank} of {self.world}."
            )
        if self.drop_last and self.batch_size % self.world:
            raise ValueError(
                f"the batch size is that of all {self.world} processes together, who share it "
                f"equally in training; got {self.batch_size}. Use a multiple of {self.world}."
            )
        if self.steps == 0:
            raise ValueError(
                f"no batch of {self.batch_size} can be taken from {self.images} images. Use a "
                "smaller batch size."
            )

    @property
    def steps(self) -> int:
        full, left = divmod(self.images, self.batch_size)
        return full if self.drop_last or not left else full + 1

    @property
    def examples(self) -> int:
        return min(self.steps * self.batch_size, self.images)

    def span(self, step: int) -> tuple[int, int]:
        """Return first place and end of this process's share of a batch."""
        first = step * self.batch_size
        count = min(self.batch_size, self.images - first)
        return (
            first + count * self.rank // self.world,
            first + count * (self.rank + 1) // self.world,
        )

    def remaining(self, start: int) -> range:
        """Return the batches from `start` on."""
        if not 0 <= start <= self.steps:
            raise ValueError(f"an epoch has the batches 0 to {self.steps - 1}; got {start}.")
        return range(start, self.steps)


def mix_seed(*key: int) -> int:
    """Return one seed for several numbers that are not negative."""
    return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0])


def divide(images: int, share: float) -> tuple[Tensor, Tensor]:
    """Return the numbers of the images that stay, and of the share that is held out.

    Example:
        >>> divide(8, 0.25)
        (tensor([1, 2, 3, 5, 6, 7]), tensor([0, 4]))
    """
    held = round(share * images)
    if not 0 < held < images:
        raise ValueError(f"a share of {share} of {images} images is none, or all of them.")
    order = torch.randperm(images, generator=torch.Generator().manual_seed(0))
    return order[held:].sort().values, order[:held].sort().values


# --- images on the device -----------------------------------------------------------------------


@dataclass(frozen=True)
class PackedBatches:
    """A split that is on the device; with a seed shuffled and augmented."""

    split: Split
    shares: Shares
    mean: Tensor
    seed: int | None = None
    crop: int = 0

    @property
    def steps(self) -> int:
        return self.shares.steps

    @property
    def examples(self) -> int:
        return self.shares.examples

    def epoch(self, number: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield images and labels; see `Batches`."""
        remaining = self.shares.remaining(start)
        if self.seed is None:
            return map(self._take, remaining)
        drawn = self._draw(torch.Generator().manual_seed(mix_seed(self.seed, number)))
        return (self._augment(step, *drawn) for step in remaining)

    def _take(self, step: int) -> tuple[Tensor, Tensor]:
        places = slice(*self.shares.span(step))
        return self._centre(self.split.images[places]), self.split.labels[places]

    def _draw(self, rng: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Draw order, flips and crops of an epoch: on the CPU, the same for every device."""
        count, device = len(self.split.labels), self.split.labels.device
        order = torch.randperm(count, generator=rng)
        flips = torch.randint(2, (count, 1), generator=rng, dtype=torch.bool)
        shifts = torch.randint(2 * self.crop + 1, (count, 2, 1), generator=rng) - self.crop
        return order.to(device), flips.to(device), shifts.to(device)

    def _augment(
        self, step: int, order: Tensor, flips: Tensor, shifts: Tensor
    ) -> tuple[Tensor, Tensor]:
        places = slice(*self.shares.span(step))
        chosen = order[places]
        size = self.split.images.shape[1]
        along = torch.arange(size, device=chosen.device)
        rows, columns = (_reflect(along + shift, size) for shift in shifts[places].unbind(1))
        columns = torch.where(flips[places], columns.flip(1), columns)
        images = self.split.images[chosen[:, None, None], rows[:, :, None], columns[:, None, :]]
        return self._centre(images), self.split.labels[chosen]

    def _centre(self, images: Tensor) -> Tensor:
        return images.permute(0, 3, 1, 2).div(255).sub_(self.mean)


def _reflect(index: Tensor, size: int) -> Tensor:
    """Reflect an index beyond the border, as F.pad(mode="reflect") does."""
    last = size - 1
    return last - (last - index.abs()).abs()


class PackedImages:
    """Images in the official npz layout, on the device as bytes; a `Source`.

    They are copied to each device once, however many runs share this object.

    Example:
        >>> split = Split(torch.zeros(8, 32, 32, 3, dtype=torch.uint8), torch.arange(8) % 2)
        >>> batches = PackedImages(split, split, classes=2).train(4, seed=0, device="cpu")
        >>> images, labels = next(batches.epoch(0))
        >>> batches.steps, images.shape, labels.shape
        (2, torch.Size([4, 3, 32, 32]), torch.Size([4]))
    """

    def __init__(
        self, train: Split, val: Split, classes: int, fingerprint: dict[str, Any] | None = None
    ) -> None:
        self.classes = classes
        self.size: int = train.images.shape[1]
        self.mean = _mean(train.images)
        self.fingerprint = fingerprint or {}
        self._train, self._val = train, val
        self._resident: dict[torch.device, tuple[Split, Split]] = {}
        self._parts: dict[float, PackedImages] = {}

    @classmethod
    def load(cls, folder: str | Path, size: int = 32) -> "PackedImages":
        """Read and check ``train_data_batch_*.npz`` and ``val_data.npz`` of a folder."""
        train, val, classes, checksum = image_npz.read(Path(folder), size)
        fingerprint = {
            "name": "npz",
            "size": size,
            "classes": classes,
            "train": len(train.labels),
            "val": len(val.labels),
            "checksum": checksum,
        }
        return cls(train, val, classes, fingerprint)

    def train(
        self,
        batch_size: int,
        *,
        seed: int,
        device: Device,
        rank: int = 0,
        world: int = 1,
        crop: int = 0,
    ) -> PackedBatches:
        """Return the training split in random order, half of the images flipped.

        With `crop` they are also shifted by up to so many pixels, and padded by reflection.
        """
        if not 0 <= crop < self.size:
            raise ValueError(f"crop is at least 0 and below the size {self.size}; got {crop}.")
        shares = Shares(len(self._train.labels), batch_size, rank, world)
        split, _ = self._on(device)
        return PackedBatches(split, shares, self._mean_on(device), seed, crop)

    def val(
        self, batch_size: int, *, device: Device, rank: int = 0, world: int = 1
    ) -> PackedBatches:
        """Return the validation split as it is."""
        shares = Shares(len(self._val.labels), batch_size, rank, world, drop_last=False)
        _, split = self._on(device)
        return PackedBatches(split, shares, self._mean_on(device))

    def hold_out(self, share: float) -> "PackedImages":
        """Return a source that trains without a share of the images, and validates on these."""
        if share not in self._parts:
            part = self._parts[share] = copy.copy(self)  # the mean is that of all
            images, labels = self._train.images, self._train.labels
            stay, held = divide(len(labels), share)
            part._train, part._val = (Split(images[n], labels[n]) for n in (stay, held))
            part.fingerprint = self.fingerprint | {"train": len(stay), "val": len(held)}
            part._resident = {}
        return self._parts[share]

    def _on(self, device: Device) -> tuple[Split, Split]:
        device = torch.empty(0, device=device).device  # "cuda" becomes "cuda:0"
        if device not in self._resident:
            self._resident[device] = self._train.to(device), self._val.to(device)
        return self._resident[device]

    def _mean_on(self, device: Device) -> Tensor:
        return torch.tensor(self.mean, dtype=torch.float32, device=device).view(3, 1, 1)


def _mean(images: Tensor) -> tuple[float, float, float]:
    """Return each channel's mean in [0, 1], from exact sums, in parts that stay in the cache."""
    sums = torch.zeros(3, dtype=torch.int64)
    for some in images.split(1024):
        sums += some.sum(dim=(0, 1, 2))
    red, green, blue = sums.tolist()
    white = 255 * images[..., 0].numel()
    return red / white, green / white, blue / white
