"""Small images: what a folder of npz files holds, errors in words, and what batches hold."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_images
import torch
import torch.nn.functional as F
from tiny_images import join
from torch import Tensor

from geoparam_lab.data.packed_images import PackedImages


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_images.write_npz(tmp_path / "npz", train=24, val=8, size=8, files=3)


def read_array(path: Path, name: str) -> np.ndarray:
    with np.load(path) as arrays:
        return arrays[name]


def rewrite(path: Path, **changes: Any) -> None:
    """Write a file again with some of its arrays replaced, or left out where None."""
    with np.load(path) as content:
        arrays = {**content, **changes}
    kept = {name: array for name, array in arrays.items() if array is not None}
    np.savez(path, **kept)


def test_a_folder_says_what_it_holds(folder: Path) -> None:
    source = PackedImages.load(folder, size=8)

    assert source.classes == 4
    assert source.size == 8
    expected = {"classes": 4, "train": 24, "val": 8, "size": 8}
    assert expected.items() <= source.fingerprint.items()


def test_ten_files_are_read_by_number(tmp_path: Path) -> None:
    folder = tiny_images.write_npz(tmp_path, train=24, val=8, size=8, files=10)
    paths = [tiny_images.train_file(folder, number) for number in range(1, 11)]
    labels = np.concatenate([read_array(path, "labels") for path in paths])

    source = PackedImages.load(folder, size=8)

    np.testing.assert_array_equal(source._train.labels + 1, labels)


def test_validation_may_lack_a_class(folder: Path) -> None:
    rewrite(folder / tiny_images.VAL, labels=np.array([1, 2, 3, 3, 1, 2, 3, 3]))

    assert PackedImages.load(folder, size=8).classes == 4


@pytest.fixture
def without_class_2(folder: Path) -> Path:
    """A folder whose training files have no image of class 2."""
    for number in (1, 2, 3):
        path = tiny_images.train_file(folder, number)
        labels = read_array(path, "labels")
        rewrite(path, labels=np.where(labels == 2, 3, labels))
    return folder


def test_training_must_not_lack_a_class_of_validation(without_class_2: Path) -> None:
    with pytest.raises(ValueError, match="that the training files do not have: 2"):
        PackedImages.load(without_class_2, size=8)


def test_a_class_that_no_file_has_is_not_counted(without_class_2: Path) -> None:
    rewrite(without_class_2 / tiny_images.VAL, labels=np.array([1, 3, 4, 4, 1, 3, 4, 4]))

    source = PackedImages.load(without_class_2, size=8)

    assert source._val.labels.tolist() == [0, 1, 2, 2, 0, 1, 2, 2]


def test_the_fingerprint_follows_from_the_files(folder: Path) -> None:
    first = PackedImages.load(folder, size=8)
    second = PackedImages.load(folder, size=8)

    assert first.fingerprint == second.fingerprint


@pytest.mark.parametrize(
    ("file", "name", "change"),
    [
        ("train_data_batch_2.npz", "data", lambda pixel: pixel ^ 1),
        ("val_data.npz", "labels", lambda label: label % 4 + 1),
    ],
    ids=["a pixel", "a label"],
)
def test_the_fingerprint_knows_every_number(
    folder: Path, file: str, name: str, change: Callable[[Any], Any]
) -> None:
    before = PackedImages.load(folder, size=8).fingerprint
    array = read_array(folder / file, name).copy()
    array.flat[1] = change(array.flat[1])
    rewrite(folder / file, **{name: array})

    assert PackedImages.load(folder, size=8).fingerprint != before


def truncate(content: bytes) -> bytes:
    return content[:-100]


def flip_a_byte(content: bytes) -> bytes:
    """Change a byte that is part of zip's checksum."""
    return content[:600] + bytes([content[600] ^ 255]) + content[601:]


@pytest.mark.parametrize("damage", [truncate, flip_a_byte])
def test_a_damaged_file_is_named(folder: Path, damage: Callable[[bytes], bytes]) -> None:
    path = tiny_images.train_file(folder, 2)
    path.write_bytes(damage(path.read_bytes()))

    with pytest.raises(ValueError, match=f"{path} is truncated or damaged"):
        PackedImages.load(folder, size=8)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("data", lambda data: data[::2], r"shape \(4, 192\) .* where 8 labels .* \(8, 192\)"),
        ("data", lambda data: data[:, :100], r"\(8, 100\) .* images of 8x8 ask for \(8, 192\)"),
        ("data", lambda data: data / 255, "type float64, .* and uint8"),
        ("data", lambda data: None, "has no array .*data"),
        ("labels", lambda labels: labels - 1, "type int64, from 0 on: .* they count from 1"),
        ("labels", lambda labels: labels / 2, "one whole number for each image"),
        ("labels", lambda labels: labels.astype(str), "one whole number for each image"),
        ("labels", lambda labels: (-labels).astype(np.uint64), "type uint64, from -4 on"),
    ],
)
def test_an_error_names_the_file_and_the_harm(
    folder: Path, name: str, change: Callable[[np.ndarray], Any], message: str
) -> None:
    path = tiny_images.train_file(folder, 2)
    rewrite(path, **{name: change(read_array(path, name))})

    with pytest.raises(ValueError, match=message) as error:
        PackedImages.load(folder, size=8)

    assert str(path) in str(error.value)


def test_another_size_is_recognised(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"\(8, 192\) .* of 32x32 ask .*Name the right size"):
        PackedImages.load(folder, size=32)


@pytest.mark.parametrize("file", ["train_data_batch_2.npz", "val_data.npz"])
def test_a_missing_file_is_named(folder: Path, file: str) -> None:
    (folder / file).unlink()

    with pytest.raises(FileNotFoundError, match=f"{file} is missing"):
        PackedImages.load(folder, size=8)


def test_a_gap_in_the_numbers_of_files_is_named(folder: Path) -> None:
    tiny_images.train_file(folder, 10**20).write_bytes(b"")  # its number is not read as a count

    with pytest.raises(FileNotFoundError, match="train_data_batch_4.npz is missing"):
        PackedImages.load(folder, size=8)


def test_a_missing_folder_is_named(folder: Path) -> None:
    shutil.rmtree(folder)

    with pytest.raises(FileNotFoundError, match="the data folder is not there: .*npz"):
        PackedImages.load(folder, size=8)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_images.write_npz(tmp_path_factory.mktemp("npz"), train=40, val=13, size=8)


@pytest.fixture(scope="module")
def source(data: Path) -> PackedImages:
    return PackedImages.load(data, size=8)


def read_contents(*paths: Path) -> tuple[Tensor, Tensor]:
    """Images (N, 3, H, W) and labels from 0, as numpy reads them."""
    images = np.concatenate([read_array(path, "data") for path in paths])
    labels = np.concatenate([read_array(path, "labels") for path in paths])
    return torch.from_numpy(images.reshape(-1, 3, 8, 8)), torch.from_numpy(labels) - 1


@pytest.fixture(scope="module")
def train_set(data: Path) -> tuple[Tensor, Tensor]:
    return read_contents(tiny_images.train_file(data, 1), tiny_images.train_file(data, 2))


def pixels(images: Tensor, source: PackedImages) -> Tensor:
    """The stored bytes of a batch."""
    mean = torch.tensor(source.mean).view(3, 1, 1)
    scaled = (images + mean) * 255
    assert torch.allclose(scaled, scaled.round(), atol=1e-3)
    return scaled.round().to(torch.uint8)


def train_pixels(source: PackedImages, crop: int = 0) -> Tensor:
    """The images of an epoch of training, as bytes."""
    images, _ = join(list(source.train(8, seed=0, device="cpu", crop=crop).epoch(0)))
    return pixels(images, source)


def as_keys(images: Tensor) -> list[bytes]:
    """The bytes of each image, to look it up."""
    return [image.numpy().tobytes() for image in images]


def test_the_mean_is_that_of_the_training_images(
    source: PackedImages, train_set: tuple[Tensor, Tensor]
) -> None:
    images, _ = train_set

    mean = (images.double() / 255).mean(dim=(0, 2, 3))

    assert source.mean == pytest.approx(mean.tolist())


def test_validation_has_every_image_once_as_it_is(source: PackedImages, data: Path) -> None:
    expected, expected_labels = read_contents(data / tiny_images.VAL)

    batches = list(source.val(5, device="cpu").epoch(0))

    images, labels = join(batches)
    assert torch.equal(pixels(images, source), expected)
    assert torch.equal(labels, expected_labels)
    assert [len(batch_labels) for _, batch_labels in batches] == [5, 5, 3]


def test_training_has_every_image_once_with_its_label(
    source: PackedImages, train_set: tuple[Tensor, Tensor]
) -> None:
    images, labels = train_set
    numbers = dict(zip(as_keys(images), range(40), strict=True))
    numbers |= dict(zip(as_keys(images.flip(3)), range(40), strict=True))

    batches = list(source.train(8, seed=0, device="cpu").epoch(0))

    seen, seen_labels = join(batches)
    order = [numbers[key] for key in as_keys(pixels(seen, source))]
    assert sorted(order) == list(range(40))
    assert order != sorted(order)
    assert torch.equal(seen_labels, labels[order])


def test_training_flips_half_of_the_images(
    source: PackedImages, train_set: tuple[Tensor, Tensor]
) -> None:
    images, _ = train_set
    flipped = set(as_keys(images.flip(3)))

    is_flipped = [key in flipped for key in as_keys(train_pixels(source))]

    assert 10 < sum(is_flipped) < 30


def test_validation_counts_the_incomplete_batch(source: PackedImages) -> None:
    batches = source.val(5, device="cpu")

    assert batches.steps == 3
    assert batches.examples == 13


def test_training_leaves_out_the_incomplete_batch(source: PackedImages) -> None:
    batches = source.train(16, seed=0, device="cpu")

    assert batches.steps == 2
    assert batches.examples == 32
    assert [len(labels) for _, labels in batches.epoch(0)] == [16, 16]


@pytest.mark.parametrize("crop", [1, 7])
def test_crops_are_windows_of_the_image_padded_by_reflection(
    source: PackedImages, train_set: tuple[Tensor, Tensor], crop: int
) -> None:
    images, _ = train_set
    padded = F.pad(images.float(), [crop] * 4, mode="reflect").to(torch.uint8)
    windows = padded.unfold(2, 8, 1).unfold(3, 8, 1)  # N, 3, rows, columns, 8, 8
    windows = windows.movedim(1, 3).flatten(0, 2)
    keys = set(as_keys(windows)) | set(as_keys(windows.flip(3)))

    cropped = train_pixels(source, crop)

    assert keys.issuperset(as_keys(cropped))


@pytest.mark.parametrize("crop", [1, 7])
def test_crops_move_most_images(source: PackedImages, crop: int) -> None:
    cropped, plain = train_pixels(source, crop), train_pixels(source)

    is_moved = (cropped != plain).flatten(1).any(dim=1)

    assert is_moved.float().mean() > 0.5


@pytest.mark.gpu
def test_batches_wait_for_nothing_and_equal_the_cpus(source: PackedImages) -> None:
    expected = list(source.train(8, seed=0, device="cpu", crop=2).epoch(0))
    epoch = source.train(8, seed=0, device="cuda", crop=2).epoch(0)

    torch.cuda.set_sync_debug_mode("error")
    try:
        batches = list(epoch)
    finally:
        torch.cuda.set_sync_debug_mode("default")

    images, labels = join(batches)
    expected_images, expected_labels = join(expected)
    assert torch.allclose(images.cpu(), expected_images, atol=1e-6)
    assert torch.equal(labels.cpu(), expected_labels)
