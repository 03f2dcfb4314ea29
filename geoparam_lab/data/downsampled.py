"""ImageNet at 32x32 or 64x64, on the device.

The images, read from the official npz layout (`image_npz`), stay on the GPU as bytes, channels
last, and an epoch's order, flips and crops are drawn at its start. A batch costs one gather, by
rows and columns that include flip and crop, one scaling and one subtraction.

Reference:
    Chrabaszcz, Loshchilov & Hutter, *A Downsampled Variant of ImageNet as an Alternative to the
    CIFAR datasets*, 2017.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from geoparam_lab.data import image_npz
from geoparam_lab.data.image_npz import Split
from geoparam_lab.data.image_source import Batches, Device, Shares, Source, mix_seed


class PackedImages(Source):
    """Images in the official npz layout, copied to each device once, for all runs.

    Half of the training images are flipped. With `crop` they are also shifted by up to so many
    pixels, and padded by reflection.
    """

    def __init__(
        self, train: Split, val: Split, classes: int, fingerprint: dict[str, Any] | None = None
    ) -> None:
        super().__init__(train, val, classes, train.images.shape[1], fingerprint or {})
        self.mean = _mean(train.images)  # also that of a part
        self._resident: dict[tuple[int, torch.device], tuple[Split, Split]] = {}

    @classmethod
    def load(cls, folder: str | Path, size: int = 32) -> "PackedImages":
        """Read and check ``train_data_batch_*.npz`` and ``val_data.npz`` of a folder."""
        train, val, classes, checksum = image_npz.read(Path(folder), size)
        counts = {"train": len(train.labels), "val": len(val.labels)}
        fingerprint = {"name": "npz", "size": size, "classes": classes, **counts}
        return cls(train, val, classes, {**fingerprint, "checksum": checksum})

    def _make_batches(
        self, split: Split, shares: Shares, device: Device, seed: int | None = None, crop: int = 0
    ) -> "PackedBatches":
        if not 0 <= crop < self.size:
            raise ValueError(f"crop is at least 0 and below the size {self.size}; got {crop}.")
        mean = torch.tensor(self.mean, dtype=torch.float32, device=device).view(3, 1, 1)
        place = id(split), mean.device
        if place not in self._resident:  # with the split itself, so that its id stays its own
            self._resident[place] = split, split.to(mean.device)
        return PackedBatches(self._resident[place][1], shares, mean, seed, crop)


class PackedBatches(Batches):
    """A split that is on the device; with a seed shuffled and augmented."""

    def __init__(
        self, split: Split, shares: Shares, mean: Tensor, seed: int | None, crop: int
    ) -> None:
        super().__init__(shares)
        self.split, self.mean, self.seed, self.crop = split, mean, seed, crop

    def epoch(self, number: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        steps = range(start, self.steps)
        if self.seed is None:
            return map(self._take, steps)
        drawn = self._draw(torch.Generator().manual_seed(mix_seed(self.seed, number)))
        return (self._augment(step, *drawn) for step in steps)

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


def _mean(images: Tensor) -> tuple[float, float, float]:
    """Return each channel's mean in [0, 1], from exact sums, in parts that stay in the cache."""
    sums = torch.zeros(3, dtype=torch.int64)
    for some in images.split(1024):
        sums += some.sum(dim=(0, 1, 2))
    red, green, blue = sums.tolist()
    white = 255 * images[..., 0].numel()
    return red / white, green / white, blue / white
