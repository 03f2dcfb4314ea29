"""Small images on the device: what batches hold, in which order, and for which process."""

from pathlib import Path

import numpy as np
import pytest
import tiny_images
import torch
import torch.nn.functional as F
from tiny_images import join
from torch import Tensor

from geoparam_lab.data.packed_images import PackedImages


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_images.write_npz(tmp_path_factory.mktemp("npz"), train=40, val=13, size=8)


@pytest.fixture(scope="module")
def source(folder: Path) -> PackedImages:
    return PackedImages.load(folder, size=8)


def contents(*paths: Path) -> tuple[Tensor, Tensor]:
    """Images (N, 3, H, W) and labels from 0, as numpy reads them."""
    files = [np.load(path) for path in paths]
    data = np.concatenate([file["data"] for file in files]).reshape(-1, 3, 8, 8)
    labels = np.concatenate([file["labels"] for file in files])
    return torch.from_numpy(data), torch.from_numpy(labels) - 1


def training_contents(folder: Path) -> tuple[Tensor, Tensor]:
    return contents(*(tiny_images.train_file(folder, number) for number in (1, 2)))


def pixels(images: Tensor, source: PackedImages) -> Tensor:
    """The bytes from which a batch was made."""
    scaled = (images + torch.tensor(source.mean).view(3, 1, 1)) * 255
    assert torch.allclose(scaled, scaled.round(), atol=1e-3)
    return scaled.round().to(torch.uint8)


def test_the_mean_is_that_of_the_training_images(source: PackedImages, folder: Path) -> None:
    images, _ = training_contents(folder)
    assert source.mean == pytest.approx((images.double() / 255).mean(dim=(0, 2, 3)).tolist())


def test_validation_has_every_image_once_as_it_is(source: PackedImages, folder: Path) -> None:
    batches = source.val(5, device="cpu")
    epoch = list(batches.epoch(0))
    images, labels = join(epoch)
    expected, expected_labels = contents(folder / tiny_images.VAL)
    assert pixels(images, source).equal(expected) and labels.equal(expected_labels)
    assert [len(some) for _, some in epoch] == [5, 5, 3]
    assert (batches.steps, batches.examples) == (3, 13)


def test_training_has_every_image_once_and_flips_half(source: PackedImages, folder: Path) -> None:
    images, labels = training_contents(folder)
    known = {image.numpy().tobytes(): (n, False) for n, image in enumerate(images)}
    known |= {image.numpy().tobytes(): (n, True) for n, image in enumerate(images.flip(3))}
    seen, seen_labels = join(list(source.train(8, seed=0, device="cpu").epoch(0)))
    found = [known[image.numpy().tobytes()] for image in pixels(seen, source)]
    numbers = [number for number, _ in found]
    assert sorted(numbers) == list(range(40)) and numbers != sorted(numbers)
    assert seen_labels.equal(labels[numbers])
    assert 10 < sum(flipped for _, flipped in found) < 30


def test_training_leaves_out_the_incomplete_batch(source: PackedImages) -> None:
    batches = source.train(16, seed=0, device="cpu")
    assert (batches.steps, batches.examples) == (2, 32)
    assert [len(labels) for _, labels in batches.epoch(0)] == [16, 16]


@pytest.mark.parametrize("crop", [1, 7])
def test_crops_are_windows_of_the_image_padded_by_reflection(
    source: PackedImages, folder: Path, crop: int
) -> None:
    images, _ = training_contents(folder)
    padded = F.pad(images.float(), [crop] * 4, mode="reflect").to(torch.uint8)
    windows = padded.unfold(2, 8, 1).unfold(3, 8, 1).permute(0, 2, 3, 1, 4, 5).reshape(-1, 3, 8, 8)
    known = {window.numpy().tobytes() for window in torch.cat([windows, windows.flip(3)])}
    epoch = list(source.train(8, seed=0, device="cpu", crop=crop).epoch(0))
    cropped = pixels(join(epoch)[0], source)
    assert all(image.numpy().tobytes() in known for image in cropped)
    plain = pixels(join(list(source.train(8, seed=0, device="cpu").epoch(0)))[0], source)
    moved = (cropped != plain).flatten(1).any(dim=1)
    assert moved.float().mean() > 0.5


@pytest.mark.gpu
def test_batches_wait_for_nothing_and_equal_the_cpus(source: PackedImages) -> None:
    expected = list(source.train(8, seed=0, device="cpu", crop=2).epoch(0))
    epoch = source.train(8, seed=0, device="cuda", crop=2).epoch(0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        batches = list(epoch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for (images, labels), (theirs, their_labels) in zip(batches, expected, strict=True):
        assert torch.allclose(images.cpu(), theirs, atol=1e-6)
        assert labels.cpu().equal(their_labels)
