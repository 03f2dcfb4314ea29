"""Images in folders: what batches hold, in which order, and an error for each harm."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_images
import torch
from tiny_images import Epoch, is_same, join

pytest.importorskip("torchvision")

from geoparam_lab.data import image_folders  # noqa: E402
from geoparam_lab.data.image_folders import MEAN, ImageFolders  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_images.write_folders(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def source(folder: Path) -> ImageFolders:
    return ImageFolders(folder, size=32, workers=0)


@pytest.fixture
def harmed(folder: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return shutil.copytree(folder, tmp_path / "images")


def train(source: ImageFolders, number: int = 0, **options: Any) -> Epoch:
    batches = source.train(8, **{"seed": 0, "device": "cpu", **options})
    return list(batches.epoch(number))


def write_flat(folder: Path, colour: tuple[int, int, int], mode: str = "RGB") -> ImageFolders:
    """One class of one image, in one colour, in both splits."""
    image = np.full((60, 90, 3), colour, dtype=np.uint8)
    for split in ("train", "val"):
        tiny_images.write_jpeg(folder / split / "a" / "0.jpg", image, mode)
    return ImageFolders(folder, size=32, workers=0)


def test_a_source_says_what_it_holds(source: ImageFolders) -> None:
    assert (source.classes, source.size) == (3, 32)
    assert source.fingerprint["train"] == 24 and source.fingerprint["val"] == 12


def test_training_has_every_image_once(source: ImageFolders) -> None:
    batches = source.train(8, seed=0, device="cpu")
    assert (batches.steps, batches.examples) == (3, 24)
    images, labels = join(list(batches.epoch(0)))
    assert images.shape == (24, 3, 32, 32) and labels.bincount().tolist() == [8, 8, 8]
    assert labels.tolist() != sorted(labels.tolist())


def test_validation_has_every_image_once_in_order(source: ImageFolders) -> None:
    batches = source.val(5, device="cpu")
    assert (batches.steps, batches.examples) == (3, 12)
    _, labels = join(list(batches.epoch(0)))
    assert labels.tolist() == [0] * 4 + [1] * 4 + [2] * 4


def test_validation_takes_the_middle(folder: Path, source: ImageFolders) -> None:
    from PIL import Image

    images, _ = next(source.val(12, device="cpu").epoch(0))
    with Image.open(folder / "val" / "class0" / "0.JPEG") as picture:  # 60 wide, 40 high
        resized = picture.resize((53 * 60 // 40, 53), Image.Resampling.BILINEAR)  # 368 * 32 / 224
    left, top = round((resized.width - 32) / 2), round((53 - 32) / 2)
    middle = np.asarray(resized.crop((left, top, left + 32, top + 32))).copy()
    expected = torch.from_numpy(middle).permute(2, 0, 1) / 255 - torch.tensor(MEAN).view(3, 1, 1)
    assert torch.allclose(images[0], expected, atol=1e-6)


def test_training_scales_crops_and_flips(tmp_path: Path) -> None:
    """A ramp's slope says how large the image was made, its sign whether it is flipped."""
    ramp = np.broadcast_to(np.linspace(0, 255, 60)[None, :, None], (60, 60, 3)).astype(np.uint8)
    for split in ("train", "val"):
        for number in range(48 if split == "train" else 1):
            tiny_images.write_jpeg(tmp_path / split / "a" / f"{number}.jpg", ramp)
    images, _ = join(train(ImageFolders(tmp_path, size=56, workers=0)))
    rows = images[:, 0, 28, :]
    slopes = (rows[:, 48] - rows[:, 8]) / 40
    lengths = 1 / slopes.abs()
    assert 62 < lengths.min() and lengths.max() < 123 and lengths.std() > 10  # U[64, 120]
    assert 12 < (slopes < 0).sum() < 36
    middles = (rows[:, 28] + MEAN[0]).sub(0.5).mul(lengths)
    assert middles.std() > 3  # crops stand at various places


def test_colour_noise_has_the_published_covariance() -> None:
    shifts = torch.stack([image_folders._draw_colour_shift() for _ in range(4000)]).double()
    vectors = torch.tensor(image_folders._EIGENVECTORS, dtype=torch.float64)
    assert torch.allclose(vectors.T @ vectors, torch.eye(3, dtype=torch.float64), atol=1e-3)
    deviations = (shifts @ vectors).std(dim=0)
    assert deviations.tolist() == pytest.approx([0.02175, 0.00188, 0.00045], rel=0.1)


def test_training_shifts_the_colours_of_a_whole_image(tmp_path: Path) -> None:
    source = write_flat(tmp_path, (100, 150, 200))
    plain, _ = next(source.val(1, device="cpu").epoch(0))
    shifts = [
        next(source.train(1, seed=0, device="cpu").epoch(number))[0] - plain for number in range(3)
    ]
    for shift in shifts:
        assert torch.allclose(shift, shift[:, :, :1, :1].expand_as(shift), atol=1e-6)
    assert len({round(shift[0, 0, 0, 0].item(), 6) for shift in shifts}) == 3


@pytest.mark.parametrize("mode", ["L", "CMYK"])
def test_other_modes_become_rgb(tmp_path: Path, mode: str) -> None:
    source = write_flat(tmp_path, (120, 120, 120), mode)
    images, _ = next(source.val(1, device="cpu").epoch(0))
    assert torch.allclose(images[0].mean(dim=(1, 2)), 120 / 255 - torch.tensor(MEAN), atol=0.01)


def test_workers_change_nothing(folder: Path, source: ImageFolders) -> None:
    batches = ImageFolders(folder, size=32, workers=2).train(8, seed=0, device="cpu")
    next(batches.epoch(5))  # an epoch that is given up
    assert is_same(list(batches.epoch(0)), train(source))
    assert is_same(list(batches.epoch(1)), train(source, 1))


def test_the_fingerprint_knows_names_and_sizes(harmed: Path, source: ImageFolders) -> None:
    def fingerprint() -> dict[str, Any]:
        return ImageFolders(harmed, size=32, workers=0).fingerprint

    assert fingerprint() == source.fingerprint
    path = harmed / "train" / "class1" / "3.JPEG"
    path.write_bytes(path.read_bytes() + b"\0")
    longer = fingerprint()
    path.rename(path.with_name("33.JPEG"))
    assert len({str(f) for f in (source.fingerprint, longer, fingerprint())}) == 3


def remove_images(folder: Path) -> None:
    for path in (folder / "train" / "class1").iterdir():
        path.rename(path.with_suffix(".txt"))


def flatten(folder: Path) -> None:
    shutil.rmtree(folder / "val")
    (folder / "val").mkdir()


HARMS: dict[str, Callable[[Path], object]] = {
    "no valid file for the classes class1": remove_images,
    "1 classes are in one of them alone, the first of them class1": (
        lambda folder: shutil.rmtree(folder / "val" / "class1")
    ),
    "val is not there": lambda folder: shutil.rmtree(folder / "val"),
    "Couldn't find any class folder in .*val": flatten,
    "train.class1.3.JPEG is empty": (
        lambda folder: (folder / "train" / "class1" / "3.JPEG").write_bytes(b"")
    ),
}


@pytest.mark.parametrize("message", HARMS)
def test_harm_that_a_listing_shows_is_found_first(harmed: Path, message: str) -> None:
    HARMS[message](harmed)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        ImageFolders(harmed, size=32, workers=0)


@pytest.mark.parametrize(("workers", "content"), [(0, None), (1, b"404: not found")])
def test_an_unreadable_image_is_named_when_its_turn_comes(
    harmed: Path, workers: int, content: bytes | None
) -> None:
    path = harmed / "train" / "class1" / "3.JPEG"
    path.write_bytes(content or path.read_bytes()[:400])
    source = ImageFolders(harmed, size=32, workers=workers)
    with pytest.raises(ValueError, match=r"^\S*class1.3\.JPEG cannot be decoded .* Get it anew"):
        train(source)


def test_a_crop_and_a_tiny_size_are_refused(folder: Path, source: ImageFolders) -> None:
    with pytest.raises(ValueError, match="always cropped at random.*got 4"):
        source.train(8, seed=0, device="cpu", crop=4)
    with pytest.raises(ValueError, match="at least 8; got 4"):
        ImageFolders(folder, size=4)
