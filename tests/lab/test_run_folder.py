"""Run folders: what they hold, and that kills do not harm them."""

import contextlib
import json
import math
import os
import resource
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import forked
import numpy as np
import pytest
import torch

import geoparam
from geoparam_lab import run_folder, session
from geoparam_lab.run_folder import Run

CONFIG = {"epochs": 5, "methods": ["sp", "gmp"], "lr": 0.1}
COMMAND = "geoparam run uci --out 'my runs'"
FILES = ["config.json", "metrics.jsonl", "sessions.jsonl"]


def create(folder: Path, config: dict[str, Any] = CONFIG, **options: Any) -> Run:
    options = {"key": ("method", "seed"), **options}
    return Run.create(folder, "uci", config, COMMAND, **options)


def read_all(folder: Path) -> None:
    """Read every file of a run."""
    run = Run.open(folder)
    run.records()
    run.sessions()


def metrics_lines(run: Run) -> list[str]:
    return (run.folder / "metrics.jsonl").read_text().splitlines()


def seeds(run: Run) -> list[int]:
    return [record["seed"] for record in run.records()]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = create(tmp_path / "run")
    run.close()
    return run


def test_config_says_what_was_run(run: Run) -> None:
    info = json.loads((run.folder / "config.json").read_text())

    assert info["experiment"] == "uci"
    assert info["config"] == CONFIG
    assert info["command"] == COMMAND
    assert info["started"].endswith("+00:00")


def test_config_says_with_what_versions_and_hardware(run: Run) -> None:
    info = json.loads((run.folder / "config.json").read_text())

    assert set(info["versions"]) == {"geoparam", "torch", "numpy", "python"}
    assert info["versions"]["geoparam"] == geoparam.__version__
    assert info["versions"]["torch"] == torch.__version__
    assert set(info["hardware"]) == {"cpu", "cores", "threads", "gpus"}
    assert info["hardware"]["threads"] == torch.get_num_threads()


def test_config_names_no_folder_of_this_machine(run: Run) -> None:
    text = (run.folder / "config.json").read_text()

    checkout = Path(geoparam.__file__).parents[1]
    assert str(run.folder) not in text
    assert str(checkout) not in text


def git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    command = ["git", "-C", str(folder), *identity, *arguments]
    subprocess.run(command, check=True, capture_output=True)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package in a new git repository, not yet added."""
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("a = 1\n")
    git(tmp_path, "init")
    return package


def test_a_package_installed_in_another_repository_has_no_commit(package: Path) -> None:
    assert session.find_commit(package) is None


def test_commit_is_that_of_the_packages_checkout_with_its_changes(package: Path) -> None:
    git(package, "add", ".")
    git(package, "commit", "-m", "first")

    clean = session.find_commit(package)
    (package / "__init__.py").write_text("a = 2\n")
    changed = session.find_commit(package)

    assert clean is not None
    assert len(clean["id"]) == 40
    assert not clean["dirty"]
    assert changed == {"id": clean["id"], "dirty": True}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e-300, None, True, "a\nb"])
def test_any_value_reads_back(run: Run, value: Any) -> None:
    run.append({"method": "sp", "seed": 0, "value": value, "deep": {"list": [value]}})

    [record] = Run.open(run.folder).records()

    np.testing.assert_equal(record["value"], value)
    np.testing.assert_equal(record["deep"]["list"], [value])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_and_infinities_are_written_as_valid_json(run: Run, value: float) -> None:
    run.append({"method": "sp", "seed": 0, "value": value, "deep": {"list": [value]}})

    refuse = Mock(side_effect=AssertionError("NaN and infinities are not JSON"))
    for line in metrics_lines(run):
        json.loads(line, parse_constant=refuse)


def test_numbers_of_numpy_and_torch_become_plain(run: Run) -> None:
    run.append({"method": "sp", "seed": np.int64(3), "a": torch.tensor(0.5), "b": np.arange(2)})

    assert run.records() == [{"method": "sp", "seed": 3, "a": 0.5, "b": [0, 1]}]


def test_a_record_must_have_the_key(run: Run) -> None:
    with pytest.raises(ValueError, match="needs method, seed.*seed not in"):
        run.append({"method": "sp"})


@pytest.mark.parametrize("value", [object(), b"bytes"])
def test_a_value_that_json_cannot_hold_is_refused_and_nothing_written(
    run: Run, value: Any
) -> None:
    with pytest.raises(TypeError, match="not JSON serializable"):
        run.append({"method": "sp", "seed": 0, "value": value})

    assert run.records() == []
    assert not (run.folder / "metrics.jsonl").exists()


def test_of_two_records_with_one_key_the_first_counts(run: Run) -> None:
    run.append({"method": "sp", "seed": 1, "test_rmse": 1.0})
    run.append({"method": "sp", "seed": 1.0, "test_rmse": 2.0})

    assert [record["test_rmse"] for record in run.records()] == [1.0]


def test_only_records_with_new_keys_are_appended(run: Run) -> None:
    first = {"method": "sp", "seed": 1, "test_rmse": 1.0}
    run.append(first)

    same_key = first | {"test_rmse": 2.0}
    new_key = {"method": "sp", "seed": 2}
    run.append_missing([same_key, new_key])

    assert run.records() == [first, new_key]
    assert len(metrics_lines(run)) == 2


def test_a_half_written_line_is_ignored_and_overwritten(run: Run) -> None:
    run.append({"method": "sp", "seed": 0})
    run.close()
    with open(run.folder / "metrics.jsonl", "ab") as file:
        file.write(b'{"method": "sp", "seed": 1, "test_r')

    resumed = create(run.folder, resume=True)
    assert seeds(resumed) == [0]

    resumed.append({"method": "sp", "seed": 1})
    assert seeds(resumed) == [0, 1]
    assert len(metrics_lines(run)) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '{"method": "sp", "seed": 0}\n{"meth\n',
            r"metrics.jsonl, line 2 is damaged.*Remove that line",
        ),
        (
            '{"method": "sp", "seed": [0]}\n',
            "line 1 is damaged: it has no seed, or a wrong one",
        ),
    ],
    ids=["cut", "wrong key"],
)
def test_a_damaged_line_is_named(run: Run, text: str, message: str) -> None:
    (run.folder / "metrics.jsonl").write_text(text)

    with pytest.raises(ValueError, match=message):
        run.records()


def test_an_existing_run_is_not_touched_without_resume(run: Run) -> None:
    before = (run.folder / "config.json").read_bytes()

    with pytest.raises(FileExistsError, match=r"already holds a run \(uci.*--resume.*another"):
        create(run.folder, {"epochs": 6})

    assert (run.folder / "config.json").read_bytes() == before


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"epochs": 6}, "epochs=5, now 6"),
        ({"width": 10}, "width=None, now 10"),
        ({"methods": ["sp"]}, r"methods=\['sp', 'gmp'\], now \['sp'\]"),
    ],
)
def test_a_resumed_run_must_not_differ(run: Run, change: dict[str, Any], difference: str) -> None:
    with pytest.raises(ValueError, match=f"run with {difference}. A resumed run must"):
        create(run.folder, CONFIG | change, resume=True)


def test_a_resumed_run_may_change_options_that_allow_it(run: Run) -> None:
    larger = CONFIG | {"methods": ["sp", "gmp", "bn"]}

    resumed = create(run.folder, larger, resume=True, may_change=("methods",))

    assert resumed.config == larger
    assert resumed.info["config"] == CONFIG
    configs = [session["config"] for session in Run.open(run.folder).sessions()]
    assert configs == [CONFIG, larger]


def test_every_session_names_its_versions(run: Run) -> None:
    resumed = create(run.folder, resume=True)

    first, second = resumed.sessions()

    assert "versions" in first
    assert "versions" in second


def test_an_option_that_an_older_run_did_not_have_was_its_default(run: Run) -> None:
    create(run.folder, CONFIG | {"width": 3}, resume=True, defaults={"width": 3, "epochs": 9})


def test_a_new_option_must_not_differ_from_its_default(run: Run) -> None:
    with pytest.raises(ValueError, match="width=3, now 4"):
        create(run.folder, CONFIG | {"width": 4}, resume=True, defaults={"width": 3})


def test_tuples_and_nan_do_not_count_as_differences(tmp_path: Path) -> None:
    config = {"seeds": (0, 1), "limit": math.nan, "range": range(3)}
    create(tmp_path, config).close()

    create(tmp_path, config, resume=True)


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize(
    "content",
    [b"[1]", b"{}", b'{"\xe9": 1}', b'{"a":' * 100_000 + b"1" + b"}" * 100_000],
    ids=["list", "empty", "not utf-8", "too deep"],
)
def test_a_file_with_a_line_that_is_no_record_is_named(
    run: Run, file: str, content: bytes
) -> None:
    (run.folder / file).write_bytes(content + b"\n")

    with pytest.raises(ValueError, match=f"{file}.* is damaged: "):
        read_all(run.folder)


def test_a_folder_with_files_of_others_is_not_adopted(tmp_path: Path) -> None:
    (tmp_path / "figures").mkdir()
    (tmp_path / "metrics.jsonl").write_text('{"seed": 0}\n')

    with pytest.raises(FileExistsError, match="metrics.jsonl, figures without config.json"):
        create(tmp_path, resume=True)


def test_curves_come_back_as_they_were(run: Run) -> None:
    loss = np.linspace(1, 0, 5)
    run.save_curves("energy-gmp+imn-0.1", loss=loss, units=np.eye(2, dtype=np.float32))

    [name] = Run.open(run.folder).curve_names()
    curves = run.curves(name)

    assert name == "energy-gmp+imn-0.1"
    np.testing.assert_array_equal(curves["loss"], loss)
    assert curves["units"].dtype == np.float32


class FakeFigure:
    def savefig(self, path: Path, dpi: int) -> None:
        path.write_text("half")


class InterruptedFigure(FakeFigure):
    """A figure whose drawing is interrupted."""

    def savefig(self, path: Path, dpi: int) -> None:
        super().savefig(path, dpi)
        raise KeyboardInterrupt


def test_an_interrupted_figure_leaves_the_old_one(run: Run) -> None:
    path = run.figure("fit", FakeFigure())
    path.write_text("old")

    with pytest.raises(KeyboardInterrupt):
        run.figure("fit", InterruptedFigure())

    assert path.read_text() == "old"
    assert list(path.parent.iterdir()) == [path]


@pytest.fixture
def no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder, "LOCK_SECONDS", 0)


@pytest.mark.usefixtures("no_wait")
def test_a_run_that_is_written_to_cannot_be_resumed(tmp_path: Path) -> None:
    with create(tmp_path) as writer:
        with pytest.raises(OSError, match="in use: another process, on this machine or on one"):
            create(tmp_path, resume=True)
        writer.append({"method": "sp", "seed": 0})

    create(tmp_path, resume=True)
    assert seeds(writer) == [0]


@pytest.mark.usefixtures("no_wait")
def test_an_opened_run_holds_the_folder_from_its_first_record_on(run: Run) -> None:
    writer = Run.open(run.folder)
    create(run.folder, resume=True).close()

    writer.append({"method": "sp", "seed": 0})

    with pytest.raises(OSError, match="in use"):
        create(run.folder, resume=True)


@pytest.mark.usefixtures("no_wait")
def test_a_refused_resume_leaves_the_folder_free(run: Run) -> None:
    with pytest.raises(ValueError, match="epochs=5, now 6"):
        create(run.folder, CONFIG | {"epochs": 6}, resume=True)

    create(run.folder, resume=True)


def create_and_die(folder: Path) -> None:
    run = create(folder)
    run.append({"method": "sp", "seed": 0})
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.usefixtures("no_wait")
def test_the_lock_of_a_killed_process_does_not_block(tmp_path: Path) -> None:
    status = forked.end(forked.start(create_and_die, tmp_path))
    assert status == -signal.SIGKILL

    with create(tmp_path, resume=True) as run:
        run.append({"method": "sp", "seed": 1})

    assert seeds(run) == [0, 1]


def test_a_folder_that_cannot_be_locked_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = NotImplementedError("no flock on this file system")
    monkeypatch.setattr(run_folder.FileLock, "acquire", Mock(side_effect=error))

    with pytest.raises(OSError, match="cannot be locked.*no flock.*Choose a folder"):
        create(tmp_path)


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """No file may grow beyond 1000 bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_record_that_does_not_fit_the_disk_leaves_no_half_line(run: Run) -> None:
    run.append({"method": "sp", "seed": 0})
    with full_disk(), pytest.raises(OSError, match="File too large"):
        run.append({"method": "sp", "seed": 1, "text": "x" * 2000})

    run.append({"method": "sp", "seed": 2})

    assert seeds(run) == [0, 2]


@pytest.fixture(params=["link", "pipe", "folder"])
def replace(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """Replace a file by something of its name that is no regular file."""

    def replace_file(path: Path) -> None:
        elsewhere = tmp_path / "elsewhere"
        elsewhere.write_bytes(path.read_bytes() if path.exists() else b"")
        path.unlink(missing_ok=True)
        if request.param == "link":
            path.symlink_to(elsewhere)
        elif request.param == "pipe":
            os.mkfifo(path)
        else:
            path.mkdir()

    return replace_file


@pytest.mark.parametrize("file", FILES)
def test_only_regular_files_are_read(run: Run, file: str, replace: Any) -> None:
    replace(run.folder / file)

    with pytest.raises(ValueError, match=f"{file} is (a link|not a regular file)"):
        read_all(run.folder)


def test_records_in_a_file_that_is_too_large_are_refused(run: Run) -> None:
    run.append({"method": "sp", "seed": 0})
    os.truncate(run.folder / "metrics.jsonl", run_folder.LARGEST + 1)

    with pytest.raises(ValueError, match="at most 1,073,741,824 are read"):
        run.records()


def test_curves_that_are_too_large_are_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.save_curves("a", loss=np.zeros(100_000))
    monkeypatch.setattr(run_folder, "LARGEST", 10_000)

    with pytest.raises(ValueError, match="a.npz cannot be read: .* 800,"):
        run.curves("a")


def test_curves_outside_of_the_folder_are_refused(run: Run, tmp_path: Path) -> None:
    path = run.save_curves("a", loss=np.zeros(3))
    path.rename(tmp_path / "elsewhere.npz")
    path.symlink_to(tmp_path / "elsewhere.npz")

    with pytest.raises(ValueError, match="a.npz is a link"):
        run.curves("a")


def test_a_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nodir does not exist"):
        Run.open(tmp_path / "nodir")


def test_a_folder_without_a_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="holds no run"):
        Run.open(tmp_path)
