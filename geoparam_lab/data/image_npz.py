"""Read and check small images in the official npz layout of downsampled ImageNet.

A folder has ``train_data_batch_1.npz``, ``train_data_batch_2.npz``, ... and ``val_data.npz``, each
with `data` (N, 3 size^2) in uint8, channel first, and N `labels` that count from 1. Errors name
the file, what is wrong with it, and what to do.
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from geoparam.storage import read_npz

VAL = "val_data.npz"

_TRAIN = re.compile(r"train_data_batch_([1-9]\d*)\.npz")
_ADVICE = (
    "Get it anew from https://image-net.org/download-images.php (downsampled images, npz format), "
    "or write it in that layout"
)


@dataclass(frozen=True)
class Split:
    """Images (N, H, W, 3) in uint8 and labels (N,) in int64, from 0."""

    images: Tensor
    labels: Tensor

    def to(self, device: torch.device) -> "Split":
        return Split(self.images.to(device), self.labels.to(device))

    def select(self, images: Tensor) -> "Split":
        """Return some of the images."""
        return Split(self.images[images], self.labels[images])


def read(folder: Path, size: int) -> tuple[Split, Split, int, str]:
    """Return both splits of a folder, the number of classes, and a checksum of all of it."""
    train_files, val_file = _list_training_files(folder), folder / VAL
    if not val_file.is_file():
        raise FileNotFoundError(f"{val_file} is missing. {_ADVICE}.")
    labels = {path: _read_labels(path) for path in (*train_files, val_file)}
    classes = _count_classes(labels, val_file)
    digest = hashlib.sha256()
    train = _read_split(train_files, labels, size, digest)
    val = _read_split([val_file], labels, size, digest)
    return train, val, classes, digest.hexdigest()[:16]


def _list_training_files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise FileNotFoundError(f"the data folder is not there: {folder}. Correct its name.")
    matches = (_TRAIN.fullmatch(path.name) for path in folder.iterdir())
    numbers = sorted(int(match[1]) for match in matches if match)
    missing = next((n for n, found in enumerate(numbers, start=1) if n != found), None)
    if missing is not None or not numbers:
        name = f"train_data_batch_{missing or 1}.npz"
        raise FileNotFoundError(f"{folder / name} is missing. {_ADVICE}.")
    return [folder / f"train_data_batch_{number}.npz" for number in numbers]


# --- labels -------------------------------------------------------------------------------------


def _read_labels(path: Path) -> np.ndarray:
    """Return a file's labels, from 1."""
    labels = _read_array(path, "labels")
    if labels.ndim != 1 or labels.dtype.kind not in "iu" or len(labels) == 0:
        raise ValueError(
            f"{path} has labels of shape {labels.shape} and type {labels.dtype}: there is one "
            f"whole number for each image. {_ADVICE}."
        )
    if labels.min() < 1:
        raise ValueError(
            f"{path} has the label {labels.min()}: labels count from 1 in this layout. Add 1 to "
            "the labels of all its files if yours count from 0."
        )
    return labels.astype(np.int64)


def _count_classes(labels: dict[Path, np.ndarray], val_file: Path) -> int:
    """Return how many classes both splits have."""
    train = np.unique(np.concatenate([some for path, some in labels.items() if path != val_file]))
    val = np.unique(labels[val_file])
    if train[-1] != val[-1] or not set(val.tolist()) <= set(train.tolist()):
        raise ValueError(
            f"{val_file} has labels up to {val[-1]}, the training files have up to {train[-1]}, "
            "or lack one of its labels: they are not of one data set. Use files that belong "
            "together."
        )
    return int(train[-1])


# --- images -------------------------------------------------------------------------------------


def _read_split(
    paths: Sequence[Path], labels: dict[Path, np.ndarray], size: int, digest: Any
) -> Split:
    """Fill one array file by file: ImageNet at 64x64 is 16 GB, too much to hold twice."""
    every = np.concatenate([labels[path] for path in paths])
    images = torch.empty(len(every), size, size, 3, dtype=torch.uint8)
    start = 0
    for path in paths:
        data = _read_data(path, len(labels[path]), size)
        digest.update(data)
        digest.update(labels[path])
        channels_first = torch.from_numpy(data).view(-1, 3, size, size)
        images[start : start + len(data)] = channels_first.permute(0, 2, 3, 1)
        start += len(data)
    return Split(images, torch.from_numpy(every - 1))


def _read_data(path: Path, count: int, size: int) -> np.ndarray:
    data = np.ascontiguousarray(_read_array(path, "data"))
    if data.dtype != np.uint8 or data.ndim != 2:
        raise ValueError(
            f"{path} has images of shape {data.shape} and type {data.dtype}: they are rows of "
            f"bytes (uint8) in this layout. {_ADVICE}."
        )
    if data.shape[1] != 3 * size**2:
        own = (data.shape[1] / 3) ** 0.5
        advice = f"For these images say size={own:.0f}." if own == int(own) else f"{_ADVICE}."
        raise ValueError(
            f"{path} has {data.shape[1]} bytes for each image where one of {size}x{size} has "
            f"{3 * size**2}. {advice}"
        )
    if len(data) != count:
        raise ValueError(
            f"{path} has {len(data)} images and {count} labels: there is one for each. {_ADVICE}."
        )
    return data


def _read_array(path: Path, name: str) -> np.ndarray:
    """Return an array of a file; errors name the file."""
    try:
        return read_npz(path, name)[name]
    except KeyError as error:
        raise ValueError(f"{path} has no array {name}. {_ADVICE}.") from error
    except ValueError as error:
        raise ValueError(f"{error}. {_ADVICE}.") from error
