"""Images in folders: what batches hold, in which order, and an error for each harm."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

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
    """A copy of the images that a test may change."""
    return shutil.copytree(folder, tmp_path / "images")


def read_train(source: ImageFolders, epoch: int = 0, batch_size: int = 8) -> Epoch:
    batches = source.train(batch_size, seed=0, device="cpu")
    return list(batches.epoch(epoch))


def read_val(source: ImageFolders) -> torch.Tensor:
    """Return all validation images."""
    [(images, _)] = source.val(100, device="cpu").epoch(0)
    return images


def write_flat(folder: Path, colour: tuple[int, int, int], mode: str = "RGB") -> ImageFolders:
    """Write one class of one image, in one colour, in both splits."""
    image = np.full((60, 90, 3), colour, dtype=np.uint8)
    for split in ("train", "val"):
        tiny_images.write_jpeg(folder / split / "a" / "0.jpg", image, mode)
    return ImageFolders(folder, size=32, workers=0)


# --- batches ------------------------------------------------------------------------------------


def test_a_source_says_what_it_holds(source: ImageFolders) -> None:
    assert source.classes == 3
    assert source.size == 32
    assert source.fingerprint["train"] == 24
    assert source.fingerprint["val"] == 12


def test_training_has_every_image_once(source: ImageFolders) -> None:
    batches = source.train(8, seed=0, device="cpu")

    images, labels = join(list(batches.epoch(0)))

    assert (batches.steps, batches.examples) == (3, 24)
    assert images.shape == (24, 3, 32, 32)
    assert labels.bincount().tolist() == [8, 8, 8]


def test_training_images_are_shuffled(source: ImageFolders) -> None:
    _, labels = join(read_train(source))

    assert labels.tolist() != sorted(labels.tolist())


def test_validation_has_every_image_once_in_order(source: ImageFolders) -> None:
    batches = source.val(5, device="cpu")

    _, labels = join(list(batches.epoch(0)))

    assert (batches.steps, batches.examples) == (3, 12)
    assert labels.tolist() == [0] * 4 + [1] * 4 + [2] * 4


def test_workers_change_nothing(folder: Path, source: ImageFolders) -> None:
    batches = ImageFolders(folder, size=32, workers=2).train(8, seed=0, device="cpu")

    next(batches.epoch(5))  # an epoch that is given up

    assert is_same(list(batches.epoch(0)), read_train(source))
    assert is_same(list(batches.epoch(1)), read_train(source, epoch=1))


# --- crops and colours --------------------------------------------------------------------------


def test_validation_takes_the_middle(folder: Path, source: ImageFolders) -> None:
    from PIL import Image

    height = 53  # 368 * 32 / 224
    width = height * 60 // 40
    left = round((width - 32) / 2)
    top = round((height - 32) / 2)
    with Image.open(folder / "val" / "class0" / "0.JPEG") as picture:  # 60 wide, 40 high
        resized = picture.resize((width, height), Image.Resampling.BILINEAR)
    middle = np.array(resized.crop((left, top, left + 32, top + 32)))
    pixels = torch.from_numpy(middle).permute(2, 0, 1) / 255
    expected = pixels - torch.tensor(MEAN).view(3, 1, 1)

    images = read_val(source)

    assert torch.allclose(images[0], expected, atol=1e-6)


class Ramps(NamedTuple):
    """What training made of images that rise from 0 at the left to 1 at the right."""

    slopes: torch.Tensor  # per pixel; negative where an image was flipped
    widths: torch.Tensor  # of the images before they were cropped
    offsets: torch.Tensor  # of the crops from the middle of their images, in pixels


@pytest.fixture(scope="module")
def ramps(tmp_path_factory: pytest.TempPathFactory) -> Ramps:
    folder = tmp_path_factory.mktemp("ramps")
    row = np.linspace(0, 255, 60)[None, :, None]
    image = np.broadcast_to(row, (60, 60, 3)).astype(np.uint8)
    tiny_images.write_jpeg(folder / "val" / "a" / "0.jpg", image)
    for number in range(48):
        tiny_images.write_jpeg(folder / "train" / "a" / f"{number}.jpg", image)

    torch.manual_seed(0)
    images, _ = join(read_train(ImageFolders(folder, size=56, workers=0)))

    rows = images[:, 0, 28, :]
    slopes = (rows[:, 48] - rows[:, 8]) / 40
    widths = 1 / slopes.abs()
    middle_values = rows[:, 28] + MEAN[0]
    return Ramps(slopes, widths, (middle_values - 0.5) * widths)


def test_training_scales_images_at_random(ramps: Ramps) -> None:
    assert 62 < ramps.widths.min()  # U[64, 120]
    assert ramps.widths.max() < 123
    assert ramps.widths.std() > 10


def test_training_flips_half_of_the_images(ramps: Ramps) -> None:
    is_flipped = ramps.slopes < 0

    assert 12 < is_flipped.sum() < 36


def test_training_crops_at_various_places(ramps: Ramps) -> None:
    assert ramps.offsets.std() > 3


def test_eigenvectors_of_the_colour_noise_are_orthonormal() -> None:
    vectors = torch.tensor(image_folders._EIGENVECTORS)

    assert torch.allclose(vectors.T @ vectors, torch.eye(3), atol=1e-3)


def test_colour_noise_has_the_published_covariance() -> None:
    vectors = torch.tensor(image_folders._EIGENVECTORS, dtype=torch.float64)

    shifts = torch.stack([image_folders._draw_colour_shift() for _ in range(4000)]).double()

    deviations = (shifts @ vectors).std(dim=0)
    assert deviations.tolist() == pytest.approx([0.02175, 0.00188, 0.00045], rel=0.1)


@pytest.fixture
def colour_shifts(tmp_path: Path) -> list[torch.Tensor]:
    """What three epochs add to a flat image."""
    source = write_flat(tmp_path, (100, 150, 200))
    plain = read_val(source)
    shifts = []
    for epoch in range(3):
        [(shifted, _)] = read_train(source, epoch, batch_size=1)
        shifts.append(shifted - plain)
    return shifts


def test_training_shifts_the_colours_of_a_whole_image(colour_shifts: list[torch.Tensor]) -> None:
    for shift in colour_shifts:
        first_pixel = shift[:, :, :1, :1]
        assert torch.allclose(shift, first_pixel.expand_as(shift), atol=1e-6)


def test_the_colour_shift_differs_in_each_epoch(colour_shifts: list[torch.Tensor]) -> None:
    values = {round(shift[0, 0, 0, 0].item(), 6) for shift in colour_shifts}

    assert len(values) == 3


@pytest.mark.parametrize("mode", ["L", "CMYK"])
def test_other_modes_become_rgb(tmp_path: Path, mode: str) -> None:
    source = write_flat(tmp_path, (120, 120, 120), mode)

    [image] = read_val(source)

    expected = 120 / 255 - torch.tensor(MEAN)
    assert torch.allclose(image.mean(dim=(1, 2)), expected, atol=0.01)


# --- the fingerprint, and harm to files ---------------------------------------------------------


def find_fingerprint(folder: Path) -> dict[str, Any]:
    return ImageFolders(folder, size=32, workers=0).fingerprint


def test_a_copy_has_the_same_fingerprint(harmed: Path, source: ImageFolders) -> None:
    assert find_fingerprint(harmed) == source.fingerprint


def test_the_fingerprint_depends_on_sizes(harmed: Path, source: ImageFolders) -> None:
    path = harmed / "train" / "class1" / "3.JPEG"
    path.write_bytes(path.read_bytes() + b"\0")

    assert find_fingerprint(harmed) != source.fingerprint


def test_the_fingerprint_depends_on_names(harmed: Path, source: ImageFolders) -> None:
    path = harmed / "train" / "class1" / "3.JPEG"
    path.rename(path.with_name("33.JPEG"))

    assert find_fingerprint(harmed) != source.fingerprint


def rename_images(folder: Path) -> None:
    for path in (folder / "train" / "class1").iterdir():
        path.rename(path.with_suffix(".txt"))


def remove_class(folder: Path) -> None:
    shutil.rmtree(folder / "val" / "class1")


def remove_split(folder: Path) -> None:
    shutil.rmtree(folder / "val")


def empty_split(folder: Path) -> None:
    remove_split(folder)
    (folder / "val").mkdir()


def empty_file(folder: Path) -> None:
    (folder / "train" / "class1" / "3.JPEG").write_bytes(b"")


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (rename_images, "no valid file for the classes class1"),
        (remove_class, "1 classes are in one of them alone, the first of them class1"),
        (remove_split, "val is not there"),
        (empty_split, "Couldn't find any class folder in .*val"),
        (empty_file, "train.class1.3.JPEG is empty"),
    ],
)
def test_harm_that_a_listing_shows_is_reported_at_once(
    harm: Callable[[Path], None], message: str, harmed: Path
) -> None:
    harm(harmed)

    with pytest.raises((ValueError, FileNotFoundError), match=message):
        ImageFolders(harmed, size=32, workers=0)


@pytest.mark.parametrize(("workers", "content"), [(0, None), (1, b"404: not found")])
def test_an_unreadable_image_is_named_when_its_turn_comes(
    harmed: Path, workers: int, content: bytes | None
) -> None:
    path = harmed / "train" / "class1" / "3.JPEG"
    truncated = path.read_bytes()[:400]
    path.write_bytes(content or truncated)
    source = ImageFolders(harmed, size=32, workers=workers)

    with pytest.raises(ValueError, match=r"^\S*class1.3\.JPEG cannot be decoded .* Get it anew"):
        read_train(source)


def test_a_crop_is_refused(source: ImageFolders) -> None:
    with pytest.raises(ValueError, match="always cropped at random.*got 4"):
        source.train(8, seed=0, device="cpu", crop=4)


def test_a_tiny_size_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="at least 8; got 4"):
        ImageFolders(folder, size=4)
