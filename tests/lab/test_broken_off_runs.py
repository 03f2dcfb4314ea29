"""Sweeps over text and images that a kill or a full disk breaks off at any write, and resumed.

An audit hook sees every file that is opened, renamed or removed under the run's folder. A child
process is killed before the n-th of these events, for 25 values of n and each kind of sweep. Then
the same sweep runs on a tmpfs that is full after so many bytes, for 25 sizes. What is on the disk
must be readable, and the resumed run must end with the records and curves of an undisturbed one.
"""

import functools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import forked
import numpy as np
import pytest
import torch
from image_runs import WIDTHS, source, without_times
from text_runs import SMALL, text

from geoparam_lab.experiments import image_figures, images, text_figures
from geoparam_lab.experiments import text as texts
from geoparam_lab.run_folder import Run
from geoparam_lab.training.text import loop

pytest.importorskip("accelerate")
pytestmark = pytest.mark.slow

MOMENTS = 25
EVENTS = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate")
DISK_FULL = 3  # the exit status of a child whose disk is full


def run_images(out: Path) -> None:
    options: Any = {"methods": ["bn", "gmp+imn"], "seeds": 1, "batch_sizes": [16], "lrs": [0.1]}
    options |= {"epochs": 2, "precision": "fp32", "widths": WIDTHS, "keep_weights": True}
    images.run(out, data=source(), resume=True, **options)


def run_text(out: Path) -> None:
    data = out.parent / "words.txt"
    data.write_bytes(bytes(text().train))
    options: Any = {"methods": ["turn", "adamw"], "widths": [16], "depths": [1], "steps": [6]}
    options |= {"batch_sizes": [4], "lrs": [0.01]}
    texts.run(out, data=data, resume=True, **options, **SMALL)


SWEEPS: dict[str, Callable[[Path], None]] = {"images": run_images, "text": run_text}


def run_in_child(kind: str, out: Path, call: Callable[[], None] | None = None) -> None:
    """Run a sweep without its figures; `call` is called before every event in its folder."""
    torch.set_num_threads(1)
    loop.CHECKPOINT_EVERY = 0.0
    image_figures.draw = text_figures.draw = lambda _: None
    if call is not None:
        sys.addaudithook(functools.partial(_watch, str(out), call))
    try:
        SWEEPS[kind](out)
    except (OSError, RuntimeError) as error:  # torch.save has a RuntimeError for a full disk
        print(error, file=sys.stderr)
        sys.exit(DISK_FULL)


def _watch(folder: str, call: Callable[[], None], event: str, arguments: tuple[Any, ...]) -> None:
    if event in EVENTS and str(arguments[0]).startswith(folder):
        call()


def count_events(kind: str, out: Path, report: Path) -> None:
    """Run a sweep to its end, and write down how many events there were."""
    events: list[None] = []
    run_in_child(kind, out, lambda: events.append(None))
    report.write_text(f"{len(events)}")


def run_until(kind: str, out: Path, last: int) -> None:
    """Run a sweep in which the event number `last` is a kill."""
    left = iter(range(last - 1, -1, -1))
    run_in_child(kind, out, lambda: os.kill(os.getpid(), signal.SIGKILL) if not next(left) else 0)


@pytest.fixture(scope="module", params=SWEEPS)
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The kind of a sweep, its undisturbed run, and how many events that had."""
    folder = tmp_path_factory.mktemp("whole")
    child = forked.start(count_events, request.param, folder / "run", folder / "events")
    assert forked.end(child) == 0
    return request.param, Run.open(folder / "run"), int((folder / "events").read_text())


def by_name(run: Run) -> dict[str, dict[str, Any]]:
    return {record["name"]: without_times(record) for record in run.records()}


def assert_readable(folder: Path, expected: Run) -> None:
    """Assert that whatever is recorded in a folder is what the undisturbed run has."""
    if not (folder / "config.json").exists():
        return
    run = Run.open(folder)
    run.sessions()
    for name, record in by_name(run).items():
        np.testing.assert_equal(record, by_name(expected)[name])
        curves = without_times(run.curves(name))
        np.testing.assert_equal(curves, without_times(expected.curves(name)))


def assert_resumes(kind: str, folder: Path, expected: Run) -> None:
    assert forked.end(forked.start(run_in_child, kind, folder)) == 0
    assert_readable(folder, expected)
    assert by_name(Run.open(folder)).keys() == by_name(expected).keys()
    assert not (folder / "checkpoints").exists()
    for path in (expected.folder / "weights").glob("*.pt"):
        ours, theirs = (torch.load(f / "weights" / path.name) for f in (folder, expected.folder))
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("moment", range(MOMENTS))
def test_a_kill_before_any_write_loses_nothing(whole: Any, moment: int, tmp_path: Path) -> None:
    kind, expected, events = whole
    child = forked.start(run_until, kind, tmp_path / "run", 1 + moment * events // MOMENTS)
    assert forked.end(child) == -signal.SIGKILL
    assert_readable(tmp_path / "run", expected)
    assert_resumes(kind, tmp_path / "run", expected)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """An empty tmpfs, which only root can mount."""
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "none", tmp_path])
    if mounted.returncode:
        pytest.skip("needs the right to mount a tmpfs")
    yield tmp_path
    subprocess.run(["umount", tmp_path], check=True)


def resize(disk: Path, kilobytes: int) -> None:
    subprocess.run(["mount", "-o", f"remount,size={kilobytes}k", disk], check=True)


@pytest.mark.parametrize("moment", range(MOMENTS))
def test_a_full_disk_loses_nothing(whole: Any, moment: int, disk: Path) -> None:
    kind, expected, _ = whole
    resize(disk, 16 + 4 * moment)  # in pages of 4 kB; either sweep needs more
    assert forked.end(forked.start(run_in_child, kind, disk / "run")) == DISK_FULL
    assert_readable(disk / "run", expected)
    resize(disk, 65_536)
    assert_resumes(kind, disk / "run", expected)
