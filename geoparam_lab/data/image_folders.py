"""ImageNet as folders of JPEG files: ``train/CLASS/IMAGE.JPEG`` and ``val/CLASS/IMAGE.JPEG``.

Worker processes decode, resize and crop images and pass them to the device as bytes, where they
are scaled and their mean is subtracted. Augmentation is that of the papers' text, for crops of
224: the shorter side resized to U[256, 480], a random crop, a flip with probability 1/2 and
Krizhevsky's colour noise; validation takes the middle of images whose shorter side is 368. For
other sizes of crop all of these lengths are scaled. The text says nothing of the 368, which is
from the authors' ResNet-34, imagenet2012 at commit d1d3e906. A comment there says that for the
paper images were first cut to squares of 480: that is done neither there nor here. Its colour
noise is one draw for a batch; here, as in Krizhevsky's paper, each image has its own.

Each image's draws come from a generator seeded by (seed, epoch, place in the epoch), so neither
the number of workers nor that of processes changes anything.

Reference:
    Krizhevsky, Sutskever & Hinton, *ImageNet classification with deep convolutional neural
    networks*, 2012, section 4.1: the colour noise.
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from geoparam_lab.data.image_source import Batches, Device, Shares, Source, find_layout, mix_seed
from geoparam_lab.session import count_cores

MEAN = (0.485, 0.456, 0.406)

# Krizhevsky's, of the covariance of ImageNet's colours in [0, 1]; eigenvectors are columns.
_EIGENVALUES = (0.2175, 0.0188, 0.0045)
_EIGENVECTORS = (
    (-0.5675, 0.7192, 0.4009),
    (-0.5808, -0.0045, -0.8140),
    (-0.5836, -0.6948, 0.4203),
)
_NOISE = 0.1
_MOST_WORKERS = 16

Place = tuple[int, int, int]  # epoch, place in the epoch, number of the image
Batch = tuple[Tensor, Tensor, Tensor]  # images in uint8, shifts of their colours, labels


class ImageFolders(Source):
    """Images in one folder for each class, decoded by workers during training.

    Args:
        folder: has ``train`` and ``val``, which have the same classes.
        size: height and width of the crops.
        workers: processes that decode; None for as many as this process has cores, up to 16; 0
            for none.
    """

    def __init__(self, folder: str | Path, size: int = 224, workers: int | None = None) -> None:
        if size < 8:
            raise ValueError(f"size is that of the crops, at least 8; got {size}.")
        self._augment, self._crop_middle = _make_transforms(size)
        if workers is None:  # torchrun says how many processes share the cores
            cores = count_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
            workers = max(1, min(_MOST_WORKERS, cores))
        self.workers = workers
        train, classes = _list_images(Path(folder, "train"))
        val, val_classes = _list_images(Path(folder, "val"))
        if only := sorted(set(classes) ^ set(val_classes)):
            raise ValueError(
                f"{folder}: train and val have a folder for every class, but {len(only)} classes "
                f"are in one of them alone, the first of them {only[0]}."
            )
        checksum = _checksum(Path(folder), train, val)
        super().__init__(train, val, len(classes), size, "folders", checksum)

    def _make_batches(
        self,
        split: "_Listing",
        shares: Shares,
        device: Device,
        seed: int | None = None,
        crop: int = 0,
    ) -> "FolderBatches":
        if crop:
            raise ValueError(
                "crop is for images of 32 or 64; those from folders are always cropped at random, "
                f"from a larger image. Leave it at 0; got {crop}."
            )
        transform = self._crop_middle if seed is None else self._augment
        images = _Images(split, transform, self.size, seed)
        return FolderBatches(images, shares, torch.device(device), self.workers)


class FolderBatches(Batches):
    """A split of `ImageFolders`, one epoch at a time."""

    def __init__(
        self, images: "_Images", shares: Shares, device: torch.device, workers: int
    ) -> None:
        super().__init__(shares, images.seed)
        self.images, self.device, self.workers = images, device, workers
        self._mean = torch.tensor(MEAN, device=device)

    def _load(
        self, number: int, order: Tensor, rng: torch.Generator | None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        images, spans = order.tolist(), map(self.shares.span, range(self.steps))
        places = ([(number, place, images[place]) for place in range(*span)] for span in spans)
        loader = DataLoader(
            self.images,
            batch_size=None,  # the dataset makes whole batches
            sampler=places,
            num_workers=self.workers,
            pin_memory=self.device.type == "cuda",
            generator=torch.Generator(),  # else it draws from torch's own
        )
        return map(self._finish, loader)

    def _finish(self, batch: Batch | ValueError) -> tuple[Tensor, Tensor]:
        """Scale and centre the images of a batch, on the device."""
        if isinstance(batch, ValueError):
            raise batch
        images, shifts, labels = (part.to(self.device, non_blocking=True) for part in batch)
        images = images.contiguous(memory_format=find_layout(images.device)).div(255)
        images += (shifts - self._mean)[:, :, None, None]
        return images, labels


@dataclass(frozen=True)
class _Images(Dataset[Batch | ValueError]):
    """The images at some places of an epoch; with a seed augmented, by the place's own draws."""

    listing: "_Listing"
    transform: Callable[[Any], Tensor]
    size: int
    seed: int | None = None

    def __getitem__(self, places: Sequence[Place]) -> Batch | ValueError:
        try:
            return self._load(places)
        except ValueError as error:
            return error  # one that a worker raises comes with its traceback

    def _load(self, places: Sequence[Place]) -> Batch:
        images = torch.empty(len(places), 3, self.size, self.size, dtype=torch.uint8)
        shifts = torch.zeros(len(places), 3)
        for index, (epoch, place, number) in enumerate(places):
            picture = _decode(os.fsdecode(self.listing.paths[number]))
            if self.seed is None:
                images[index] = self.transform(picture)
                continue
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(mix_seed(self.seed, epoch, place))
                images[index] = self.transform(picture)
                shifts[index] = _draw_colour_shift()
        labels = self.listing.labels[[image for *_, image in places]]
        return images, shifts, torch.from_numpy(labels)


def _decode(path: str) -> Any:
    from PIL import Image

    try:
        with Image.open(path) as picture:
            return picture.convert("RGB")
    except Exception as error:  # Pillow raises anything for a damaged file
        advice = "Get it anew, or remove it from its folder."
        raise ValueError(f"{path} cannot be decoded ({error}). {advice}") from error


def _draw_colour_shift() -> Tensor:
    """Draw the shift of a picture's colours along their principal components."""
    scales = torch.randn(3) * _NOISE * torch.tensor(_EIGENVALUES)
    return torch.tensor(_EIGENVECTORS) @ scales


def _make_transforms(size: int) -> tuple[Callable[[Any], Tensor], Callable[[Any], Tensor]]:
    """Return the transforms of a training and of a validation image."""
    from torchvision.transforms import v2

    shortest, longest, middle = (round(length * size / 224) for length in (256, 480, 368))
    any_size, to_tensor = v2.RandomShortestSize(range(shortest, longest + 1)), v2.PILToTensor()
    return (
        v2.Compose([any_size, v2.RandomCrop(size), v2.RandomHorizontalFlip(), to_tensor]),
        v2.Compose([v2.Resize(middle), v2.CenterCrop(size), to_tensor]),
    )


@dataclass(frozen=True)
class _Listing:
    """Paths and labels of a split; arrays, since a list of a million strings grows in workers."""

    paths: np.ndarray
    labels: np.ndarray

    def select(self, images: Tensor) -> "_Listing":
        return _Listing(self.paths[images.numpy()], self.labels[images.numpy()])


def _list_images(folder: Path) -> tuple[_Listing, list[str]]:
    """Return a split's images and classes; torchvision raises where a class has no image."""
    from torchvision.datasets import ImageFolder

    if not folder.is_dir():
        raise FileNotFoundError(
            f"{folder} is not there: the data folder has the folders train and val, with a folder "
            "of images for each class."
        )
    listed = ImageFolder(str(folder))
    paths = np.array([os.fsencode(path) for path, _ in listed.samples])
    labels = np.array(listed.targets, dtype=np.int64)
    return _Listing(paths, labels), listed.classes


def _checksum(folder: Path, *splits: _Listing) -> str:
    """Return a digest of the files' names and sizes: their contents would take an hour to read."""
    digest = hashlib.sha256()
    for split in splits:
        for path in map(os.fsdecode, split.paths):
            size = os.path.getsize(path)
            if size == 0:
                raise ValueError(f"{path} is empty. Get it anew, or remove it.")
            name = path.removeprefix(str(folder))
            digest.update(f"{name} {size}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()[:16]
