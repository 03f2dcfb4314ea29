"""Small runs on images in memory, broken off where a test wants it, and compared to the bit."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from geoparam_lab.data.packed_images import PackedImages, Split
from geoparam_lab.training import run_checkpoints
from geoparam_lab.training.images.settings import Settings
from geoparam_lab.training.network_training import Outcome

WIDTHS = (4, 4, 6, 6, 8, 8)
CLASSES, TRAIN, BATCH = 6, 48, 16
STEPS = TRAIN // BATCH


class Killed(BaseException):
    """Stands for a kill; `except Exception` does not catch it."""


def source(train: int = TRAIN, seed: int = 0) -> PackedImages:
    """Return images of 8 by 8, each class somewhat brighter than the one before."""
    random = torch.Generator().manual_seed(seed)

    def split(count: int) -> Split:
        labels = torch.arange(count) % CLASSES
        noise = torch.randint(96, (count, 8, 8, 3), generator=random)
        return Split((noise + 25 * labels.view(-1, 1, 1, 1)).to(torch.uint8), labels)

    return PackedImages(split(train), split(22), CLASSES, "noise", str(seed))


def settings(method: str = "gmp+imn", **changes: Any) -> Settings:
    """Return the settings of a run of nine steps."""
    given: dict[str, Any] = {"lr": 0.1, "batch_size": BATCH, "seed": 3, "epochs": 3}
    given |= {"precision": "fp32", "widths": WIDTHS, **changes}
    return Settings("vgg6", method, **given)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights that a run reports."""
    return torch.load(folder / run_checkpoints.WEIGHTS, weights_only=True)


def assert_same_run(outcome: Outcome, expected: Outcome, folder: Path, other: Path) -> None:
    """Assert that two runs ended alike, to the bit: results, curves, weights and moments."""
    record, theirs = (without_times(each.record) for each in (outcome, expected))
    np.testing.assert_equal(record, theirs)
    np.testing.assert_equal(without_times(outcome.curves), without_times(expected.curves))
    state, expected_state = (run_checkpoints.read(each) for each in (folder, other))
    assert state is not None and expected_state is not None
    for what in ("model", "optimizer", "random"):
        _assert_equal(state[what], expected_state[what], what)


def without_times(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record or curves without what depends on the clock."""
    return {name: value for name, value in values.items() if "second" not in name}


def _assert_equal(a: Any, b: Any, name: str) -> None:
    if isinstance(a, dict):
        assert list(a) == list(b), name
        for key in a:
            _assert_equal(a[key], b[key], f"{name}.{key}")
    elif isinstance(a, list):
        assert len(a) == len(b), name
        for index, (one, other) in enumerate(zip(a, b, strict=True)):
            _assert_equal(one, other, f"{name}.{index}")
    elif isinstance(a, torch.Tensor):
        assert torch.equal(a, b), name
    else:
        assert a == b, name


def kill_at(call: int, function: Callable[..., Any], kill: Callable[[], Any]) -> Any:
    """Return the function, which kills before its call of this number."""
    calls = 0

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            kill()
        return function(*args, **options)

    return counted


def die() -> None:
    raise Killed


def save_half(call: int, kill: Callable[[], Any]) -> Callable[[Any, Path], None]:
    """Return a torch.save that kills in the middle of writing its file of this number."""
    save, calls = torch.save, 0

    def broken(state: Any, path: Path) -> None:
        nonlocal calls
        calls += 1
        save(state, path)
        if calls == call:
            content = path.read_bytes()
            path.write_bytes(content[: len(content) // 2])
            kill()

    return broken
