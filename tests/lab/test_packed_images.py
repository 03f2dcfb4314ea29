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


def rewrite(path: Path, **arrays: Any) -> None:
    """Write a file again with some of its arrays replaced, or left out where None."""
    with np.load(path) as content:
        kept = {**content, **arrays}
    np.savez(path, **{name: array for name, array in kept.items() if array is not None})


def array(path: Path, name: str) -> np.ndarray:
    with np.load(path) as content:
        return content[name]


def test_a_folder_says_what_it_holds(folder: Path) -> None:
    source = PackedImages.load(folder, size=8)
    found = {name: source.fingerprint[name] for name in ("classes", "train", "val", "size")}
    assert found == {"classes": 4, "train": 24, "val": 8, "size": 8}
    assert (source.classes, source.size) == (4, 8)


def test_ten_files_are_read_by_number(tmp_path: Path) -> None:
    folder = tiny_images.write_npz(tmp_path, train=24, val=8, size=8, files=10)
    labels = [array(tiny_images.train_file(folder, n), "labels") for n in range(1, 11)]
    source = PackedImages.load(folder, size=8)
    assert (source._train.labels.numpy() + 1).tolist() == np.concatenate(labels).tolist()


def test_a_class_may_be_missing_unless_it_is_one_of_validation(folder: Path) -> None:
    rewrite(folder / tiny_images.VAL, labels=np.array([1, 2, 3, 3] * 2))
    assert PackedImages.load(folder, size=8).classes == 4
    for number in (1, 2, 3):
        path = tiny_images.train_file(folder, number)
        labels = array(path, "labels")
        rewrite(path, labels=np.where(labels == 2, 3, labels))
    with pytest.raises(ValueError, match="that the training files do not have: 2"):
        PackedImages.load(folder, size=8)
    rewrite(folder / tiny_images.VAL, labels=np.array([1, 3, 4, 4, 1, 3, 4, 4]))
    assert PackedImages.load(folder, size=8)._val.labels.tolist() == [0, 1, 2, 2] * 2


@pytest.mark.parametrize(
    ("file", "name"), [("train_data_batch_2.npz", "data"), ("val_data.npz", "labels")]
)
def test_the_fingerprint_knows_every_number(folder: Path, file: str, name: str) -> None:
    before = PackedImages.load(folder, size=8).fingerprint
    assert PackedImages.load(folder, size=8).fingerprint == before
    changed = array(folder / file, name).copy()
    changed.flat[1] = changed.flat[1] % 4 + 1 if name == "labels" else changed.flat[1] ^ 1
    rewrite(folder / file, **{name: changed})
    assert PackedImages.load(folder, size=8).fingerprint != before


def flip(content: bytes) -> bytes:
    return content[:600] + bytes([content[600] ^ 255]) + content[601:]  # zip has a checksum of it


@pytest.mark.parametrize("damage", [lambda content: content[:-100], flip])
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
    rewrite(path, **{name: change(array(path, name))})
    with pytest.raises(ValueError, match=message) as error:
        PackedImages.load(folder, size=8)
    assert str(path) in str(error.value)


def test_another_size_is_recognised(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"\(8, 192\) .* of 32x32 ask .*Name the right size"):
        PackedImages.load(folder, size=32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: tiny_images.train_file(folder, 2).unlink(), "batch_2.npz is missing"),
        (lambda folder: (folder / tiny_images.VAL).unlink(), "val_data.npz is missing"),
        (
            lambda folder: tiny_images.train_file(folder, 10**20).write_bytes(b""),
            "train_data_batch_4.npz is missing",  # a number beyond all others is a gap
        ),
        (shutil.rmtree, "the data folder is not there: .*npz"),
    ],
)
def test_what_is_missing_is_named(
    folder: Path, change: Callable[[Path], Any], message: str
) -> None:
    change(folder)
    with pytest.raises(FileNotFoundError, match=message):
        PackedImages.load(folder, size=8)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_images.write_npz(tmp_path_factory.mktemp("npz"), train=40, val=13, size=8)


@pytest.fixture(scope="module")
def source(data: Path) -> PackedImages:
    return PackedImages.load(data, size=8)


def contents(*paths: Path) -> tuple[Tensor, Tensor]:
    """Images (N, 3, H, W) and labels from 0, as numpy reads them."""
    files = [np.load(path) for path in paths]
    data = np.concatenate([file["data"] for file in files]).reshape(-1, 3, 8, 8)
    labels = np.concatenate([file["labels"] for file in files])
    return torch.from_numpy(data), torch.from_numpy(labels) - 1


def training_contents(data: Path) -> tuple[Tensor, Tensor]:
    return contents(*(tiny_images.train_file(data, number) for number in (1, 2)))


def pixels(images: Tensor, source: PackedImages) -> Tensor:
    """The bytes from which a batch was made."""
    scaled = (images + torch.tensor(source.mean).view(3, 1, 1)) * 255
    assert torch.allclose(scaled, scaled.round(), atol=1e-3)
    return scaled.round().to(torch.uint8)


def test_the_mean_is_that_of_the_training_images(source: PackedImages, data: Path) -> None:
    images, _ = training_contents(data)
    assert source.mean == pytest.approx((images.double() / 255).mean(dim=(0, 2, 3)).tolist())


def test_validation_has_every_image_once_as_it_is(source: PackedImages, data: Path) -> None:
    batches = source.val(5, device="cpu")
    epoch = list(batches.epoch(0))
    images, labels = join(epoch)
    expected, expected_labels = contents(data / tiny_images.VAL)
    assert pixels(images, source).equal(expected) and labels.equal(expected_labels)
    assert [len(some) for _, some in epoch] == [5, 5, 3]
    assert (batches.steps, batches.examples) == (3, 13)


def test_training_has_every_image_once_and_flips_half(source: PackedImages, data: Path) -> None:
    images, labels = training_contents(data)
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
    source: PackedImages, data: Path, crop: int
) -> None:
    images, _ = training_contents(data)
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
