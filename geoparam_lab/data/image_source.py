"""A data set of images for training: its batches, in which order, and for which process.

Two rules hold for every source:

- The order of the images and their augmentation depend on the seed, the epoch and the place in
  the epoch alone. So several processes together see the batches that one would see, and a run that
  is resumed sees what it would have seen.
- Batch sizes are those of all processes together. Training leaves out the incomplete last batch;
  validation has every image exactly once, so a process's share of a batch may be empty.
"""

import abc
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

Device = torch.device | str


@dataclass(frozen=True)
class Shares:
    """Which places of an epoch go into each batch of process `rank` of `world`.

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
        if self.steps == 0:
            raise ValueError(
                f"no batch of {self.batch_size} can be taken from {self.images} images. Use a "
                "smaller batch size."
            )

    @property
    def steps(self) -> int:
        full, left = divmod(self.images, self.batch_size)
        return full if self.drop_last or not left else full + 1

    def span(self, step: int) -> tuple[int, int]:
        """Return first place and end of this process's share of a batch."""
        first = step * self.batch_size
        count = min(self.batch_size, self.images - first)
        start, end = (first + count * n // self.world for n in (self.rank, self.rank + 1))
        return start, end


class Batches(abc.ABC):
    """One split, as one process sees it."""

    def __init__(self, shares: Shares, seed: int | None) -> None:
        self.shares, self.steps = shares, shares.steps  # of an epoch, the same for every process
        self.examples = min(self.steps * shares.batch_size, shares.images)  # over all processes
        self.seed = seed  # None for images in their own order, as they are

    def epoch(self, number: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this process's images and labels of an epoch.

        Images are float32 (b, 3, H, W), in the layout of `find_layout`, labels int64, on the
        device.
        """
        rng, order = None, torch.arange(self.shares.images)
        if self.seed is not None:
            rng = torch.Generator().manual_seed(mix_seed(self.seed, number))
            order = torch.randperm(self.shares.images, generator=rng)
        for images, labels in self._load(number, order, rng):
            yield images.contiguous(memory_format=find_layout(images.device)), labels

    @abc.abstractmethod
    def _load(
        self, number: int, order: Tensor, rng: torch.Generator | None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the batches of an epoch, from images in this order; with `rng` augmented."""


class Source(abc.ABC):
    """A data set of images with a training and a validation split.

    Args:
        train: the training split: has `labels` and `select(images)`, which returns a part of it.
        val: the validation split.
        classes: how many there are; labels count from 0.
        size: height and width of the images.
        name: of the layout of its files.
        checksum: of these. Both are in the `fingerprint`, by which the same data are recognised.
    """

    def __init__(
        self, train: Any, val: Any, classes: int, size: int, name: str = "", checksum: str = ""
    ) -> None:
        self.classes, self.size = classes, size
        self._train, self._val = train, val
        self.fingerprint: dict[str, Any] = dict(name=name, size=size, classes=classes)
        self.fingerprint |= dict(train=len(train.labels), val=len(val.labels), checksum=checksum)
        self._parts: dict[float, Source] = {}

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
        shares = Shares(len(self._train.labels), batch_size, rank, world)
        return self._make_batches(self._train, shares, device, seed, crop)

    def val(self, batch_size: int, *, device: Device, rank: int = 0, world: int = 1) -> Batches:
        """Return the validation split in its own order, as it is."""
        shares = Shares(len(self._val.labels), batch_size, rank, world, drop_last=False)
        return self._make_batches(self._val, shares, device)

    def hold_out(self, share: float) -> "Source":
        """Return a source that trains without a share of the images, and validates on these.

        It is the same share every time.
        """
        if share not in self._parts:
            count = len(self._train.labels)
            held = round(share * count)
            if not 0 < held < count:
                raise ValueError(f"a share of {share} of {count} images is none, or all of them.")
            order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
            part = self._parts[share] = copy.copy(self)
            part._parts = {}
            part._train = self._train.select(order[held:].sort().values)
            part._val = self._train.select(order[:held].sort().values)
            part.fingerprint = self.fingerprint | {"train": count - held, "val": held}
        return self._parts[share]

    @abc.abstractmethod
    def _make_batches(
        self, split: Any, shares: Shares, device: Device, seed: int | None = None, crop: int = 0
    ) -> Batches:
        """Return a split's batches; with a seed shuffled and augmented."""


def find_layout(device: torch.device) -> torch.memory_format:
    """Return channels last; on CPUs not, where torch's backward crashes with few channels."""
    return torch.contiguous_format if device.type == "cpu" else torch.channels_last


def mix_seed(*key: int) -> int:
    """Return one seed for several numbers that are not negative."""
    return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0])
