"""What holds for images of every source: their order, their shares, and what is kept back."""

from collections.abc import Callable

import pytest
import tiny_images
import torch
from tiny_images import Epoch, is_same, join

from geoparam_lab.data.image_source import Source
from geoparam_lab.data.packed_images import PackedImages

Load = Callable[[], Source]


@pytest.fixture(scope="module", params=["npz", "folders"])
def load(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Load:
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


def train(source: Source, number: int = 0, seed: int = 0, **share: int) -> Epoch:
    crop = 2 if isinstance(source, PackedImages) else 0  # others are always cropped
    return list(source.train(8, seed=seed, device="cpu", crop=crop, **share).epoch(number))


def val(source: Source, batch_size: int, **share: int) -> Epoch:
    return list(source.val(batch_size, device="cpu", **share).epoch(0))


def put_together(shares: list[Epoch]) -> Epoch:
    return [join(list(parts)) for parts in zip(*shares, strict=True)]


def test_batches_are_floats_in_the_plain_layout_on_cpus(source: Source) -> None:
    for images, labels in (train(source)[0], val(source, 4)[0]):
        assert images.dtype == torch.float32 and labels.dtype == torch.int64
        assert images.is_contiguous()


def test_order_depends_on_seed_and_epoch_alone(source: Source) -> None:
    first = train(source)
    torch.manual_seed(17)
    before = torch.random.get_rng_state()
    assert is_same(first, train(source)) and torch.random.get_rng_state().equal(before)
    assert not is_same(first, train(source, 1)) and not is_same(first, train(source, seed=1))


@pytest.mark.parametrize("world", [2, 4])
def test_processes_together_see_the_batches_of_one(source: Source, world: int) -> None:
    shares = [train(source, 1, rank=rank, world=world) for rank in range(world)]
    assert all(len(labels) == 8 // world for share in shares for _, labels in share)
    assert is_same(train(source, 1), put_together(shares))


@pytest.mark.parametrize(("batch_size", "world"), [(5, 2), (5, 4), (2, 3), (100, 16)])
def test_validation_shares_may_be_unequal_or_empty(
    source: Source, batch_size: int, world: int
) -> None:
    shares = [val(source, batch_size, rank=rank, world=world) for rank in range(world)]
    assert is_same(val(source, batch_size), put_together(shares))
    shape = (3, source.size, source.size)
    assert all(images.shape[1:] == shape for share in shares for images, _ in share)


def test_what_is_held_out_is_the_same_every_time_and_not_trained_on(
    source: Source, load: Load
) -> None:
    part = source.hold_out(0.25)
    assert part is source.hold_out(0.25)
    counts = [part.fingerprint[name] for name in ("train", "val")]
    assert sum(counts) == source.fingerprint["train"] and counts[1] == round(0.25 * sum(counts))
    assert [len(split.labels) for split in (part._train, part._val)] == counts
    assert is_same(val(part, 5), val(load().hold_out(0.25), 5))
    names = [getattr(split, "paths", None) for split in (part._train, part._val)]
    if names[0] is None:
        names = [split.images.flatten(1).numpy() for split in (part._train, part._val)]
    held, trained = ({each.tobytes() for each in some} for some in names)
    assert len(held | trained) == source.fingerprint["train"] and not held & trained
    for share in (0.001, 0.999):
        with pytest.raises(ValueError, match="is none, or all of them"):
            source.hold_out(share)
