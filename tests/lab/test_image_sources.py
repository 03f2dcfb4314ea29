"""What holds for images of every source: their order, their shares, and what is kept back."""

from collections.abc import Callable
from typing import Any

import pytest
import tiny_images
import torch
from tiny_images import Epoch, is_same, join

from geoparam_lab.data.image_source import Source
from geoparam_lab.data.packed_images import PackedImages, Split

Load = Callable[[], Source]


@pytest.fixture(scope="module", params=["npz", "folders"])
def load(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Load:
    """A function that reads the images of a source anew."""
    folder = tmp_path_factory.mktemp("images")
    if request.param == "npz":
        tiny_images.write_npz(folder, train=40, val=13, size=8)
        return lambda: PackedImages.load(folder, size=8)
    pytest.importorskip("torchvision")
    from geoparam_lab.data.image_folders import ImageFolders

    tiny_images.write_folders(folder)
    return lambda: ImageFolders(folder, size=32, workers=0)


@pytest.fixture(scope="module")
def source(load: Load) -> Source:
    return load()


def train(source: Source, epoch: int = 0, seed: int = 0, **share: int) -> Epoch:
    """Return the batches of an epoch, of one process where its share is named."""
    crop = 2 if isinstance(source, PackedImages) else 0  # others are always cropped
    batches = source.train(8, seed=seed, device="cpu", crop=crop, **share)
    return list(batches.epoch(epoch))


def validate(source: Source, batch_size: int, **share: int) -> Epoch:
    batches = source.val(batch_size, device="cpu", **share)
    return list(batches.epoch(0))


def put_together(shares: list[Epoch]) -> Epoch:
    """Join each batch of several processes."""
    return [join(list(parts)) for parts in zip(*shares, strict=True)]


def assert_plain_batch(images: torch.Tensor, labels: torch.Tensor) -> None:
    assert images.dtype == torch.float32
    assert images.is_contiguous()
    assert labels.dtype == torch.int64


def test_batches_are_floats_in_the_plain_layout_on_cpus(source: Source) -> None:
    assert_plain_batch(*train(source)[0])
    assert_plain_batch(*validate(source, 4)[0])


def test_order_does_not_depend_on_torchs_random_state(source: Source) -> None:
    batches = train(source)
    torch.manual_seed(17)

    assert is_same(batches, train(source))


def test_an_epoch_leaves_torchs_random_state_as_it_was(source: Source) -> None:
    state = torch.random.get_rng_state()

    train(source)

    assert torch.random.get_rng_state().equal(state)


def test_order_depends_on_seed_and_epoch(source: Source) -> None:
    batches = train(source)

    assert not is_same(batches, train(source, epoch=1))
    assert not is_same(batches, train(source, seed=1))


@pytest.mark.parametrize("world", [2, 4])
def test_processes_together_see_the_batches_of_one(source: Source, world: int) -> None:
    shares = [train(source, epoch=1, rank=rank, world=world) for rank in range(world)]

    assert is_same(train(source, epoch=1), put_together(shares))
    for share in shares:
        assert {len(labels) for _, labels in share} == {8 // world}


@pytest.mark.parametrize(("batch_size", "world"), [(5, 2), (5, 4), (2, 3), (100, 16)])
def test_validation_shares_may_be_unequal_or_empty(
    source: Source, batch_size: int, world: int
) -> None:
    shares = [validate(source, batch_size, rank=rank, world=world) for rank in range(world)]

    assert is_same(validate(source, batch_size), put_together(shares))
    for share in shares:
        for images, _ in share:
            assert images.shape[1:] == (3, source.size, source.size)


# --- images held out ----------------------------------------------------------------------------


def test_a_part_is_made_once(source: Source) -> None:
    assert source.hold_out(0.25) is source.hold_out(0.25)


def test_the_same_images_are_held_out_every_time(source: Source, load: Load) -> None:
    part = source.hold_out(0.25)
    again = load().hold_out(0.25)

    assert is_same(validate(part, 5), validate(again, 5))


def test_a_quarter_is_held_out(source: Source) -> None:
    total = source.fingerprint["train"]
    held_out = round(0.25 * total)

    part = source.hold_out(0.25)

    assert part.fingerprint["val"] == len(part._val.labels) == held_out
    assert part.fingerprint["train"] == len(part._train.labels) == total - held_out


def list_images(split: Any) -> set[bytes]:
    """Return the paths of a split's images, or their pixels where they are in memory."""
    if isinstance(split, Split):
        return {image.numpy().tobytes() for image in split.images}
    return {path.tobytes() for path in split.paths}


def test_images_held_out_are_not_trained_on(source: Source) -> None:
    part = source.hold_out(0.25)

    trained = list_images(part._train)
    held_out = list_images(part._val)

    assert trained.isdisjoint(held_out)
    assert len(trained) + len(held_out) == source.fingerprint["train"]


@pytest.mark.parametrize("share", [0.001, 0.999])
def test_some_images_must_be_held_out_and_some_not(source: Source, share: float) -> None:
    with pytest.raises(ValueError, match="is none, or all of them"):
        source.hold_out(share)
