"""ImageNet as folders of JPEG files: ``train/CLASS/IMAGE.JPEG`` and ``val/CLASS/IMAGE.JPEG``.

Images are decoded, resized and cropped by worker processes and go to the device as bytes, where
they are scaled and their mean is subtracted. Augmentation is that of the papers' code, for crops
of 224: the shorter side resized to U[256, 480], a random crop, a flip with probability 1/2 and
Krizhevsky's colour noise; validation takes the middle of images whose shorter side is 368. For
other sizes of crop all of these lengths are scaled.

Each image's draws come from a generator of its own, for (seed, epoch, place in the epoch), so that
neither the number of workers nor that of processes changes anything, and the sampler names the
places, so that an epoch can be entered anywhere without decoding what comes before.

Reference:
    Krizhevsky, Sutskever & Hinton, *ImageNet classification with deep convolutional neural
    networks*, 2012, section 4.1: the colour noise.
"""

import copy
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from geoparam_lab.data.downsampled import Device, Shares, divide, mixed

MEAN = (0.485, 0.456, 0.406)
EXTENSIONS = (".jpeg", ".jpg", ".png")

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


class ImageFolders:
    """Images in one folder for each class, decoded by workers while training goes on.

    Args:
        folder: has ``train`` and ``val``, which have the same classes.
        size: height and width of the crops.
        workers: processes that decode; None for as many as this process has cores, up to 16; 0
            for none.
        check: decode every image first, and say which cannot be.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from PIL import Image
        >>> with TemporaryDirectory() as folder:
        ...     for split in ("train", "val"):
        ...         Path(folder, split, "cat").mkdir(parents=True)
        ...         Image.new("RGB", (60, 40)).save(Path(folder, split, "cat", "1.jpeg"))
        ...     source = ImageFolders(folder, size=32, workers=0)
        ...     images, labels = next(source.train(1, seed=0, device="cpu").epoch(0))
        >>> images.shape, labels
        (torch.Size([1, 3, 32, 32]), tensor([0]))
    """

    mean = MEAN

    def __init__(
        self,
        folder: str | Path,
        size: int = 224,
        workers: int | None = None,
        check: bool = False,
    ) -> None:
        if size < 8:
            raise ValueError(f"size is that of the crops, at least 8; got {size}.")
        self.size = size
        self._augment, self._crop_middle = _transforms(size)
        self.workers = _workers() if workers is None else workers
        self._train = _listed(Path(folder), "train")
        self._val = _listed(Path(folder), "val")
        _check_classes(self._train, self._val)
        self.classes = len(self._train.classes)
        self.fingerprint: dict[str, Any] = {
            "name": "folders",
            "size": size,
            "classes": self.classes,
            "train": len(self._train),
            "val": len(self._val),
            "checksum": _checksum(self._train, self._val),
        }
        if check:
            self.check()

    def train(
        self,
        batch_size: int,
        *,
        seed: int,
        device: Device,
        rank: int = 0,
        world: int = 1,
        crop: int = 0,
    ) -> "FolderBatches":
        """Return the training split in random order, augmented."""
        if crop:
            raise ValueError(
                "crop is for images of 32 or 64; those from folders are always cropped at random, "
                f"from a larger image. Leave it at 0; got {crop}."
            )
        shares = Shares(len(self._train), batch_size, rank, world)
        images = _Images(self._train, self._augment, self.size, seed)
        return FolderBatches(images, shares, torch.device(device), self.workers)

    def val(
        self, batch_size: int, *, device: Device, rank: int = 0, world: int = 1
    ) -> "FolderBatches":
        """Return the validation split, the middle of each image."""
        shares = Shares(len(self._val), batch_size, rank, world, drop_last=False)
        images = _Images(self._val, self._crop_middle, self.size)
        return FolderBatches(images, shares, torch.device(device), self.workers)

    def hold_out(self, share: float) -> "ImageFolders":
        """Return a source that trains without a share of the images, and validates on these."""
        part = copy.copy(self)
        part._train, part._val = map(self._train.select, divide(len(self._train), share))
        part.fingerprint = self.fingerprint | {"train": len(part._train), "val": len(part._val)}
        return part

    def check(self) -> None:
        """Decode every image; raise ValueError with those that cannot be."""
        damaged: list[str] = []
        for split in (self._train, self._val):
            loader = DataLoader(
                _Damage(split),
                batch_size=64,
                num_workers=self.workers,
                collate_fn=list,
                generator=torch.Generator(),
            )
            damaged += [problem for batch in loader for problem in batch if problem]
        if damaged:
            more = f"\nand {len(damaged) - 10} more" if len(damaged) > 10 else ""
            raise ValueError("\n".join(damaged[:10]) + more)


class FolderBatches:
    """A split of `ImageFolders`, one epoch at a time; see `downsampled.Batches`."""

    def __init__(
        self,
        images: "_Images",
        shares: Shares,
        device: torch.device,
        workers: int,
    ) -> None:
        self.shares, self.device, self.seed = shares, device, images.seed
        self.steps, self.examples = shares.steps, shares.examples
        self._sampler = _Batches()
        self._mean = torch.tensor(MEAN, device=device)
        self._loader = DataLoader(
            images,
            batch_sampler=self._sampler,
            num_workers=workers,
            persistent_workers=workers > 0,
            pin_memory=device.type == "cuda",
            collate_fn=_as_it_is,
            generator=torch.Generator(),  # else it draws from torch's own at each epoch
        )

    def epoch(self, number: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield images and labels; see `Batches`."""
        remaining = self.shares.remaining(start)
        return self._loaded(_places(self.shares, self.seed, number, remaining))

    def _loaded(self, batches: Iterator[list[Place]]) -> Iterator[tuple[Tensor, Tensor]]:
        self._sampler.batches = batches
        for batch in self._loader:
            if isinstance(batch, str):
                raise ValueError(batch)
            images, shifts, labels = (part.to(self.device, non_blocking=True) for part in batch)
            images = images.contiguous(memory_format=torch.channels_last).div(255)
            images += (shifts - self._mean)[:, :, None, None]
            yield images, labels


class _Batches(Sampler[list[Place]]):
    """Names the images of each batch of the epoch that is to be loaded."""

    batches: Iterator[list[Place]] = iter(())

    def __iter__(self) -> Iterator[list[Place]]:
        return self.batches


# No method of what holds the loader: in a cycle of references, workers end only when collected,
# and take five seconds for it.
def _places(shares: Shares, seed: int | None, number: int, steps: range) -> Iterator[list[Place]]:
    """Yield the places of each batch, with the image that is there."""
    order = torch.arange(shares.images)
    if seed is not None:
        rng = torch.Generator().manual_seed(mixed(seed, number))
        order = torch.randperm(shares.images, generator=rng)
    for step in steps:
        first, end = shares.span(step)
        images = order[first:end].tolist()
        yield [(number, *pair) for pair in zip(range(first, end), images, strict=True)]


# --- in the workers -----------------------------------------------------------------------------


class _Images(Dataset[Batch | str]):
    """The images at some places of an epoch; with a seed augmented, by draws of the place alone.

    Where one cannot be decoded, what is returned says so: an error raised in a worker would come
    out under a page of tracebacks.
    """

    def __init__(
        self,
        listing: "_Listing",
        transform: Callable[[Any], Tensor],
        size: int,
        seed: int | None = None,
    ) -> None:
        self.listing, self.transform, self.size, self.seed = listing, transform, size, seed

    def __getitems__(self, places: Sequence[Place]) -> Batch | str:
        images = torch.empty(len(places), 3, self.size, self.size, dtype=torch.uint8)
        shifts = torch.zeros(len(places), 3)
        for index, place in enumerate(places):
            try:
                picture = _decoded(self.listing.path(place[-1]))
            except ValueError as error:
                return str(error)
            self._make(picture, place, images[index], shifts[index])
        labels = self.listing.labels[[image for *_, image in places]]
        return images, shifts, torch.from_numpy(labels)

    def _make(self, picture: Any, place: Place, image: Tensor, shift: Tensor) -> None:
        """Fill in the image of one place and the shift of its colours."""
        if self.seed is None:
            image.copy_(self.transform(picture))
            return
        epoch, position, _ = place
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(mixed(self.seed, epoch, position))
            image.copy_(self.transform(picture))
            shift.copy_(_colour_noise())


def _as_it_is(batch: Any) -> Any:
    return batch  # it comes as one


class _Damage(Dataset[str]):
    """What is wrong with each image; the empty string for nothing."""

    def __init__(self, listing: "_Listing") -> None:
        self.listing = listing

    def __len__(self) -> int:
        return len(self.listing)

    def __getitem__(self, image: int) -> str:
        try:
            _decoded(self.listing.path(image))
        except ValueError as error:
            return str(error)
        return ""


def _decoded(path: str) -> Any:
    """Return the picture in a file, in RGB."""
    from PIL import Image

    try:
        with Image.open(path) as picture:
            return _eight_bits(picture).convert("RGB")
    except Exception as error:  # Pillow raises whatever its decoders stumble over
        raise ValueError(
            f"{path} cannot be decoded ({error}). Get it anew, or remove it from its folder."
        ) from error


def _eight_bits(picture: Any) -> Any:
    """Return greys of 16 bits as bytes: Pillow's convert would make all above 255 white."""
    from PIL import Image

    if not picture.mode.startswith("I"):
        return picture
    return Image.fromarray((np.asarray(picture) >> 8).astype(np.uint8))


def _colour_noise() -> Tensor:
    """Return the shift of a picture's colours along their principal components."""
    scales = torch.randn(3) * _NOISE * torch.tensor(_EIGENVALUES)
    return torch.tensor(_EIGENVECTORS) @ scales


def _transforms(size: int) -> tuple[Callable[[Any], Tensor], Callable[[Any], Tensor]]:
    """Return what makes a training image, and a validation image, of a picture."""
    try:
        from torchvision.transforms import v2
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "images in folders are read with torchvision: pip install 'geoparam[vision]'",
            name="torchvision",
        ) from error
    shortest, longest, middle = (round(length * size / 224) for length in (256, 480, 368))
    augment = [
        v2.RandomShortestSize(range(shortest, longest + 1)),
        v2.RandomCrop(size),
        v2.RandomHorizontalFlip(),
    ]
    crop_middle = [v2.Resize(middle), v2.CenterCrop(size)]
    return (
        v2.Compose([*augment, v2.PILToTensor()]),
        v2.Compose([*crop_middle, v2.PILToTensor()]),
    )


def _workers() -> int:
    """Return this process's part of the cores; torchrun says how many processes share them."""
    allowed = getattr(os, "sched_getaffinity", None)
    cores = len(allowed(0)) if allowed else os.cpu_count() or 1
    return max(1, min(_MOST_WORKERS, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))


# --- files --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Listing:
    """The images of one split; in arrays, since a list of a million strings grows in workers."""

    root: Path
    classes: tuple[str, ...]
    names: np.ndarray
    sizes: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.names)

    def select(self, images: Tensor) -> "_Listing":
        """Return the listing of some images."""
        arrays = (array[images.numpy()] for array in (self.names, self.sizes, self.labels))
        return _Listing(self.root, self.classes, *arrays)

    def path(self, image: int) -> str:
        name = os.fsdecode(self.names[image])
        return str(self.root / self.classes[self.labels[image]] / name)


def _listed(folder: Path, split: str) -> _Listing:
    """List a split's images by class and name; raise where there is none or one is empty."""
    root = folder / split
    if not root.is_dir():
        raise FileNotFoundError(
            f"{root} is not there: the data folder has the folders train and val, with a folder "
            "of images for each class."
        )
    with os.scandir(root) as entries:
        classes = tuple(sorted(entry.name for entry in entries if entry.is_dir()))
    if not classes:
        raise ValueError(
            f"{root} has no folders: there is one for each class. Sort its images into them."
        )
    files = [_class_files(root / name) for name in classes]
    names = [os.fsencode(name) for some in files for name, _ in some]
    sizes = [size for some in files for _, size in some]
    labels = np.repeat(np.arange(len(classes), dtype=np.int64), [len(some) for some in files])
    return _Listing(root, classes, np.array(names), np.array(sizes), labels)


def _class_files(folder: Path) -> list[tuple[str, int]]:
    """Return the names of a class's images and their sizes in bytes."""
    with os.scandir(folder) as entries:
        found = sorted(
            (entry.name, entry.stat().st_size)
            for entry in entries
            if entry.name.lower().endswith(EXTENSIONS)
        )
    if not found:
        raise ValueError(
            f"{folder} has no images ({', '.join(EXTENSIONS)}). Put the class's images there, or "
            "remove the folder from train and val."
        )
    for name, size in found:
        if size == 0:
            raise ValueError(f"{folder / name} is empty. Get it anew, or remove it.")
    return found


def _check_classes(train: _Listing, val: _Listing) -> None:
    for one, other in ((train, val), (val, train)):
        if only := sorted(set(one.classes) - set(other.classes)):
            raise ValueError(
                f"{one.root} has {len(only)} classes that {other.root} has not, the first of them "
                f"{only[0]}. Both have a folder for every class."
            )


def _checksum(*splits: _Listing) -> str:
    """Return a digest of the files' names and sizes: their contents would take an hour to read."""
    digest = hashlib.sha256()
    for split in splits:
        for part in (np.array(split.classes), split.names, split.sizes, split.labels):
            digest.update(part.tobytes())
    return digest.hexdigest()[:16]
