"""ImageNet at 32x32 or 64x64, on the device: the official npz layout, read, checked and batched.

A folder has ``train_data_batch_1.npz``, ``train_data_batch_2.npz``, ... and ``val_data.npz``, each
with `data` (N, 3 size^2) in uint8, channel first, and N `labels` that count from 1. Errors name
the file, what is wrong with it, and what to do.

The images stay on the GPU as bytes, channels last, and an epoch's order, flips and crops are drawn
at its start. A batch costs one gather, by rows and columns that include flip and crop, one scaling
and one subtraction.

Reference:
    Chrabaszcz, Loshchilov & Hutter, *A Downsampled Variant of ImageNet as an Alternative to the
    CIFAR datasets*, 2017.
"""

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from geoparam_lab.data.files import read_npz
from geoparam_lab.data.image_source import Batches, Device, Shares, Source

VAL = "val_data.npz"

_TRAIN = re.compile(r"train_data_batch_([1-9]\d*)\.npz")
_ADVICE = (
    "Get it anew from https://image-net.org/download-images.php (downsampled images, npz format), "
    "or write it in that layout."
)


@dataclass(frozen=True, eq=False)
class Split:
    """Images (N, H, W, 3) in uint8 and labels (N,) in int64, from 0."""

    images: Tensor
    labels: Tensor

    def to(self, device: torch.device) -> "Split":
        return Split(self.images.to(device), self.labels.to(device))

    def select(self, images: Tensor) -> "Split":
        return Split(self.images[images], self.labels[images])


class PackedImages(Source):
    """Images in the official npz layout, copied to each device once, for all runs.

    Half of the training images are flipped. With `crop` they are also shifted by up to so many
    pixels, and padded by reflection.
    """

    def __init__(
        self, train: Split, val: Split, classes: int, name: str = "npz", checksum: str = ""
    ) -> None:
        super().__init__(train, val, classes, train.images.shape[1], name, checksum)
        white = 255 * train.images[..., 0].numel()
        # Each channel's mean in [0, 1], from exact sums; also that of a part.
        self.mean = [total / white for total in train.images.sum(dim=(0, 1, 2)).tolist()]
        self._resident: dict[tuple[Split, torch.device], Split] = {}

    @classmethod
    def load(cls, folder: str | Path, size: int = 32) -> "PackedImages":
        """Read and check ``train_data_batch_*.npz`` and ``val_data.npz`` of a folder."""
        train_files, val_file = _list_training_files(Path(folder)), Path(folder, VAL)
        if not val_file.is_file():
            raise FileNotFoundError(f"{val_file} is missing. {_ADVICE}")
        digest = hashlib.sha256()
        train, val = (_read_split(files, size, digest) for files in (train_files, [val_file]))
        labels = train.labels.unique()  # in order; there may be gaps
        others = val.labels[~torch.isin(val.labels, labels)].unique() + 1
        if len(others):
            raise ValueError(
                f"{val_file} has labels that the training files do not have: "
                f"{', '.join(map(str, others[:5].tolist()))}. Use files that belong together."
            )
        train, val = (Split(s.images, torch.searchsorted(labels, s.labels)) for s in (train, val))
        return cls(train, val, len(labels), checksum=digest.hexdigest()[:16])

    def _make_batches(
        self, split: Split, shares: Shares, device: Device, seed: int | None = None, crop: int = 0
    ) -> "PackedBatches":
        if not 0 <= crop < self.size:
            raise ValueError(f"crop is at least 0 and below the size {self.size}; got {crop}.")
        mean = torch.tensor(self.mean, dtype=torch.float32, device=device).view(3, 1, 1)
        place = split, mean.device
        if place not in self._resident:
            self._resident[place] = split.to(mean.device)
        return PackedBatches(self._resident[place], shares, mean, seed, crop)


class PackedBatches(Batches):
    """A split that is on the device; with a seed shuffled and augmented."""

    def __init__(
        self, split: Split, shares: Shares, mean: Tensor, seed: int | None, crop: int
    ) -> None:
        super().__init__(shares, seed)
        self.split, self.mean, self.crop = split, mean, crop

    def _load(
        self, number: int, order: Tensor, rng: torch.Generator | None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Draw flips and crops of the epoch: on the CPU, the same for every device."""
        flips = torch.zeros(len(order), 1, dtype=torch.bool)
        shifts = torch.zeros(len(order), 2, 1, dtype=torch.long)
        if rng is not None:
            flips.random_(2, generator=rng)
            shifts.random_(2 * self.crop + 1, generator=rng).sub_(self.crop)
        drawn = [part.to(self.mean.device) for part in (order, flips, shifts)]
        spans = [slice(*self.shares.span(step)) for step in range(self.steps)]
        return (self._take(*(part[span] for part in drawn)) for span in spans)

    def _take(self, numbers: Tensor, flips: Tensor, shifts: Tensor) -> tuple[Tensor, Tensor]:
        size = self.split.images.shape[1]
        along = torch.arange(size, device=numbers.device)
        rows, columns = (_reflect(along + shift, size) for shift in shifts.unbind(1))
        columns = torch.where(flips, columns.flip(1), columns)
        images = self.split.images[numbers[:, None, None], rows[:, :, None], columns[:, None, :]]
        return images.permute(0, 3, 1, 2).div(255).sub_(self.mean), self.split.labels[numbers]


def _reflect(index: Tensor, size: int) -> Tensor:
    """Reflect an index beyond the border, as F.pad(mode="reflect") does."""
    last = size - 1
    return last - (last - index.abs()).abs()


def _list_training_files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise FileNotFoundError(f"the data folder is not there: {folder}. Correct its name.")
    matches = (_TRAIN.fullmatch(path.name) for path in folder.iterdir())
    numbers = sorted(int(match[1]) for match in matches if match)
    missing = next((n for n, number in enumerate(numbers, start=1) if n != number), None)
    if missing is not None or not numbers:
        name = f"train_data_batch_{missing or 1}.npz"
        raise FileNotFoundError(f"{folder / name} is missing. {_ADVICE}")
    return [folder / f"train_data_batch_{number}.npz" for number in numbers]


def _read_split(paths: Sequence[Path], size: int, digest: Any) -> Split:
    """Fill one array file by file: ImageNet at 64x64 is 16 GB, too much to hold twice."""
    labels = [_read_labels(path) for path in paths]
    images = torch.empty(sum(map(len, labels)), size, size, 3, dtype=torch.uint8)
    start = 0
    for path, of_file in zip(paths, labels, strict=True):
        data = np.ascontiguousarray(_read_array(path, "data"))
        expected = (len(of_file), 3 * size**2)
        if data.dtype != np.uint8 or data.shape != expected:
            raise ValueError(
                f"{path} has data of shape {data.shape} and type {data.dtype}, where "
                f"{expected[0]} labels and images of {size}x{size} ask for {expected} and uint8. "
                f"Name the right size, or {_ADVICE[0].lower()}{_ADVICE[1:]}"
            )
        digest.update(data)
        digest.update(of_file)
        channels_first = torch.from_numpy(data).view(-1, 3, size, size)
        images[start : start + len(data)] = channels_first.permute(0, 2, 3, 1)
        start += len(data)
    return Split(images, torch.from_numpy(np.concatenate(labels) - 1))


def _read_labels(path: Path) -> np.ndarray:
    """Return a file's labels, from 1."""
    labels = _read_array(path, "labels")
    whole = labels.astype(np.int64) if labels.dtype.kind in "iu" else np.zeros(0)
    if labels.ndim != 1 or not whole.size or whole.min() < 1:
        least = f", from {whole.min()} on" if whole.size else ""
        raise ValueError(
            f"{path} has labels of shape {labels.shape} and type {labels.dtype}{least}: there is "
            f"one whole number for each image, and they count from 1. {_ADVICE}"
        )
    return whole


def _read_array(path: Path, name: str) -> np.ndarray:
    try:
        return read_npz(path, name)[name]
    except KeyError as error:
        raise ValueError(f"{path} has no array {name}. {_ADVICE}") from error
    except ValueError as error:
        raise ValueError(f"{error}. {_ADVICE}") from error
