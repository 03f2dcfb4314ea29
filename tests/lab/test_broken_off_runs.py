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
from typing import Any, NamedTuple

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
    images.run(
        out,
        data=source(),
        resume=True,
        methods=["bn", "gmp+imn"],
        seeds=1,
        batch_sizes=[16],
        lrs=[0.1],
        epochs=2,
        precision="fp32",
        widths=WIDTHS,
        keep_weights=True,
    )


def run_text(out: Path) -> None:
    data = out.parent / "words.txt"
    data.write_bytes(bytes(text().train))
    options: dict[str, Any] = {
        "methods": ["turn", "adamw"],
        "widths": [16],
        "depths": [1],
        "steps": [6],
        "batch_sizes": [4],
        "lrs": [0.01],
    }
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
    except OSError as error:
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
    """Run a sweep that is killed before the event with the number `last`."""
    events = 0

    def kill_at_last() -> None:
        nonlocal events
        events += 1
        if events == last:
            os.kill(os.getpid(), signal.SIGKILL)

    run_in_child(kind, out, kill_at_last)


class Sweep(NamedTuple):
    """A sweep that nothing disturbed."""

    kind: str
    run: Run
    events: int


@pytest.fixture(scope="module", params=SWEEPS)
def undisturbed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Sweep:
    kind = request.param
    folder = tmp_path_factory.mktemp("undisturbed")
    report = folder / "events"
    child = forked.start(count_events, kind, folder / "run", report)
    assert forked.end(child) == 0
    return Sweep(kind, Run.open(folder / "run"), int(report.read_text()))


def by_name(run: Run) -> dict[str, dict[str, Any]]:
    """Return the records without what depends on the clock."""
    return {record["name"]: without_times(record) for record in run.records()}


def assert_readable(folder: Path, expected: Run) -> None:
    """Assert that all records and curves in a folder are those of the undisturbed run."""
    if not (folder / "config.json").exists():
        return  # the run had not begun
    run = Run.open(folder)
    run.sessions()
    for name, record in by_name(run).items():
        np.testing.assert_equal(record, by_name(expected)[name])
        curves = without_times(run.curves(name))
        np.testing.assert_equal(curves, without_times(expected.curves(name)))


def assert_same_weights(folder: Path, expected: Path) -> None:
    for path in (expected / "weights").glob("*.pt"):
        weights = torch.load(folder / "weights" / path.name)
        for name, value in torch.load(path).items():
            assert torch.equal(weights[name], value), name


def assert_resumes(folder: Path, expected: Sweep) -> None:
    """Assert that a resumed sweep ends as the undisturbed one did."""
    resumed = forked.start(run_in_child, expected.kind, folder)
    assert forked.end(resumed) == 0
    assert_readable(folder, expected.run)
    assert by_name(Run.open(folder)).keys() == by_name(expected.run).keys()
    assert not (folder / "checkpoints").exists()
    assert_same_weights(folder, expected.run.folder)


@pytest.mark.parametrize("moment", range(MOMENTS))
def test_a_kill_before_any_write_loses_nothing(
    undisturbed: Sweep, moment: int, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    last = 1 + moment * undisturbed.events // MOMENTS

    child = forked.start(run_until, undisturbed.kind, folder, last)

    assert forked.end(child) == -signal.SIGKILL
    assert_readable(folder, undisturbed.run)
    assert_resumes(folder, undisturbed)


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
def test_a_full_disk_loses_nothing(undisturbed: Sweep, moment: int, disk: Path) -> None:
    folder = disk / "run"
    resize(disk, 16 + 4 * moment)  # in pages of 4 kB; either sweep needs more

    child = forked.start(run_in_child, undisturbed.kind, folder)

    assert forked.end(child) == DISK_FULL
    assert_readable(folder, undisturbed.run)
    resize(disk, 65_536)
    assert_resumes(folder, undisturbed)
