"""Tiny image data sets in both layouts, for tests: each class has its own colour, under noise."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

Epoch = list[tuple[Tensor, Tensor]]
VAL = "val_data.npz"


def write_npz(
    folder: Path,
    classes: int = 4,
    train: int = 64,
    val: int = 32,
    size: int = 32,
    files: int = 2,
    seed: int = 0,
) -> Path:
    """Write train_data_batch_1.npz, ... and val_data.npz, labels from 1, and return `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    colours = rng.integers(48, 208, (classes, 3))
    data, labels = _packed(rng, colours, train, size)
    parts = zip(np.array_split(data, files), np.array_split(labels, files), strict=True)
    for number, (some, theirs) in enumerate(parts, start=1):
        mean = data.mean(axis=0)
        np.savez(train_file(folder, number), data=some, labels=theirs.tolist(), mean=mean)
    data, labels = _packed(rng, colours, val, size)
    np.savez(folder / VAL, data=data, labels=labels)
    return folder


def train_file(folder: Path, number: int = 1) -> Path:
    return folder / f"train_data_batch_{number}.npz"


def write_folders(
    folder: Path,
    classes: int = 3,
    per_class: int = 8,
    size: int = 40,
    val_per_class: int = 4,
    seed: int = 0,
) -> Path:
    """Write train/CLASS/IMAGE.JPEG and val/CLASS/IMAGE.JPEG, and return `folder`.

    Images are `size` high and half as wide again.
    """
    rng = np.random.default_rng(seed)
    colours = rng.integers(48, 208, (classes, 3))
    for split, count in {"train": per_class, "val": val_per_class}.items():
        for label, colour in enumerate(colours):
            for number in range(count):
                image = _noisy(rng, colour, (size, size * 3 // 2, 3))
                write_jpeg(folder / split / f"class{label}" / f"{number}.JPEG", image)
    return folder


def write_jpeg(path: Path, image: np.ndarray, mode: str = "RGB") -> None:
    """Write an image (height, width, 3), in another mode of colours where one is named."""
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image).convert(mode).save(path, "JPEG")


def _packed(
    rng: np.random.Generator, colours: np.ndarray, count: int, size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Images (count, 3 size^2), channels first, and labels from 1, each class equally often."""
    labels = rng.permutation(np.arange(count) % len(colours))
    images = _noisy(rng, colours[labels, :, None], (count, 3, size * size))
    return images.reshape(count, -1), labels + 1


def _noisy(rng: np.random.Generator, colour: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    return (colour + rng.integers(-48, 48, shape)).astype(np.uint8)


def join(epoch: Epoch) -> tuple[Tensor, Tensor]:
    """Return all images and labels of an epoch."""
    images, labels = zip(*epoch, strict=True)
    return torch.cat(images), torch.cat(labels)


def is_same(one: Epoch, other: Epoch) -> bool:
    """Return whether two epochs have the same batches, to the bit."""
    if len(one) != len(other):
        return False
    pairs = zip(one, other, strict=True)
    return all(a.equal(b) for first, second in pairs for a, b in zip(first, second, strict=True))
