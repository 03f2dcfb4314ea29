"""Run folders: what they hold, and that kills do not harm them."""

import json
import math
import os
import resource
import signal
import subprocess
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


def create(folder: Path, config: dict[str, Any] = CONFIG, **options: Any) -> Run:
    options = {"key": ("method", "seed"), **options}
    return Run.create(folder, "uci", config, COMMAND, **options)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = create(tmp_path / "run")
    run.close()
    return run


def test_config_says_what_was_run_and_with_what(run: Run) -> None:
    text = (run.folder / "config.json").read_text()
    assert str(run.folder) not in text and str(Path(geoparam.__file__).parents[1]) not in text
    info = json.loads(text)
    assert info["experiment"] == "uci" and info["config"] == CONFIG
    assert info["command"] == "geoparam run uci --out 'my runs'"
    assert info["versions"]["geoparam"] == geoparam.__version__
    assert info["versions"]["torch"] == torch.__version__
    assert info["hardware"]["threads"] == torch.get_num_threads()
    assert set(info["versions"]) == {"geoparam", "torch", "numpy", "python"}
    assert set(info["hardware"]) == {"cpu", "cores", "threads", "gpus"}
    assert info["started"].endswith("+00:00")


def git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "-C", folder, *identity, *arguments], check=True, capture_output=True)


def test_commit_is_that_of_the_packages_checkout_with_its_changes(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("a = 1\n")
    git(tmp_path, "init")
    assert session.find_commit(package) is None  # installed in somebody's repository
    git(tmp_path, "add", "package")
    git(tmp_path, "commit", "-m", "first")
    clean = session.find_commit(package)
    assert clean is not None and len(clean["id"]) == 40 and not clean["dirty"]
    (package / "__init__.py").write_text("a = 2\n")
    assert session.find_commit(package) == {"id": clean["id"], "dirty": True}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e-300, None, True, "a\nb"])
def test_any_value_survives_as_valid_json(run: Run, value: Any) -> None:
    run.append({"method": "sp", "seed": 0, "value": value, "deep": {"list": [value]}})
    refuse = Mock(side_effect=AssertionError("NaN and infinities are not JSON"))
    for line in (run.folder / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=refuse)
    (record,) = Run.open(run.folder).records()
    np.testing.assert_equal(record["value"], value)
    np.testing.assert_equal(record["deep"]["list"], [value])


def test_numbers_of_numpy_and_torch_become_plain(run: Run) -> None:
    run.append({"method": "sp", "seed": np.int64(3), "a": torch.tensor(0.5), "b": np.arange(2)})
    assert run.records() == [{"method": "sp", "seed": 3, "a": 0.5, "b": [0, 1]}]


def test_a_record_must_have_the_key(run: Run) -> None:
    with pytest.raises(ValueError, match="needs method, seed.*seed not in"):
        run.append({"method": "sp"})


@pytest.mark.parametrize("value", [object(), b"bytes"])
def test_what_json_cannot_hold_is_refused_and_nothing_written(run: Run, value: Any) -> None:
    with pytest.raises(TypeError, match="not JSON serializable"):
        run.append({"method": "sp", "seed": 0, "value": value})
    assert run.records() == [] and not (run.folder / "metrics.jsonl").exists()


def test_of_two_records_with_one_key_the_first_counts(run: Run) -> None:
    run.append({"method": "sp", "seed": 1, "test_rmse": 1.0})
    run.append({"method": "sp", "seed": 1.0, "test_rmse": 2.0})
    assert [record["test_rmse"] for record in run.records()] == [1.0]


def test_only_records_with_new_keys_are_appended(run: Run) -> None:
    kept, new = {"method": "sp", "seed": 1, "test_rmse": 1.0}, {"method": "sp", "seed": 2}
    run.append(kept)
    run.append_missing([kept | {"test_rmse": 2.0}, new])
    assert run.records() == [kept, new]
    assert len((run.folder / "metrics.jsonl").read_text().splitlines()) == 2


def test_a_half_written_line_is_ignored_and_overwritten(run: Run) -> None:
    metrics = run.folder / "metrics.jsonl"
    run.append({"method": "sp", "seed": 0})
    run.close()
    with open(metrics, "ab") as file:
        file.write(b'{"method": "sp", "seed": 1, "test_r')
    resumed = create(run.folder, resume=True)
    assert [record["seed"] for record in resumed.records()] == [0]
    resumed.append({"method": "sp", "seed": 1})
    assert [record["seed"] for record in resumed.records()] == [0, 1]
    assert len(metrics.read_text().splitlines()) == 2


def test_a_damaged_line_in_the_middle_is_named(run: Run) -> None:
    (run.folder / "metrics.jsonl").write_text('{"method": "sp", "seed": 0}\n{"meth\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl, line 2 is damaged.*Remove that line"):
        run.records()
    (run.folder / "metrics.jsonl").write_text('{"method": "sp", "seed": [0]}\n')
    with pytest.raises(ValueError, match="line 1 is damaged: it has no seed, or a wrong one"):
        run.records()


def test_an_existing_run_is_not_touched_without_resume(run: Run) -> None:
    before = (run.folder / "config.json").read_bytes()
    with pytest.raises(FileExistsError, match=r"already holds a run \(uci.*--resume.*another"):
        create(run.folder, {"epochs": 6})
    assert (run.folder / "config.json").read_bytes() == before


@pytest.mark.parametrize(
    ("config", "difference"),
    [
        ({**CONFIG, "epochs": 6}, "epochs=5, now 6"),
        ({**CONFIG, "width": 10}, "width=None, now 10"),
        ({**CONFIG, "methods": ["sp"]}, r"methods=\['sp', 'gmp'\], now \['sp'\]"),
    ],
)
def test_a_resumed_run_must_not_differ(run: Run, config: dict[str, Any], difference: str) -> None:
    with pytest.raises(ValueError, match=f"run with {difference}. A resumed run must"):
        create(run.folder, config, resume=True)


def test_a_resumed_run_may_do_more_where_it_says_so(run: Run) -> None:
    more = {**CONFIG, "methods": ["sp", "gmp", "bn"]}
    resumed = create(run.folder, more, resume=True, may_change=("methods",))
    assert resumed.config == more and resumed.info["config"] == CONFIG
    assert [session["config"] for session in Run.open(run.folder).sessions()] == [CONFIG, more]
    assert all("versions" in session for session in resumed.sessions())


def test_an_option_that_an_older_run_did_not_have_was_its_default(run: Run) -> None:
    create(run.folder, {**CONFIG, "width": 3}, resume=True, defaults={"width": 3, "epochs": 9})
    with pytest.raises(ValueError, match="width=3, now 4"):
        create(run.folder, {**CONFIG, "width": 4}, resume=True, defaults={"width": 3})


def test_tuples_and_nan_do_not_count_as_differences(tmp_path: Path) -> None:
    config = {"seeds": (0, 1), "limit": math.nan, "range": range(3)}
    create(tmp_path, config).close()
    create(tmp_path, config, resume=True)


@pytest.mark.parametrize("file", ["config.json", "metrics.jsonl", "sessions.jsonl"])
@pytest.mark.parametrize(
    "content", [b"[1]", b"{}", b'{"\xe9": 1}', b'{"a":' * 100_000 + b"1" + b"}" * 100_000]
)
def test_what_is_no_record_is_named(run: Run, file: str, content: bytes) -> None:
    (run.folder / file).write_bytes(content + b"\n")
    with pytest.raises(ValueError, match=f"{file}.* is damaged: "):
        opened = Run.open(run.folder)
        opened.records()
        opened.sessions()


def test_a_folder_with_files_of_others_is_not_adopted(tmp_path: Path) -> None:
    (tmp_path / "figures").mkdir()
    (tmp_path / "metrics.jsonl").write_text('{"seed": 0}\n')
    with pytest.raises(FileExistsError, match="metrics.jsonl, figures without config.json"):
        create(tmp_path, resume=True)


def test_curves_come_back_as_they_were(run: Run) -> None:
    loss = np.linspace(1, 0, 5)
    run.save_curves("energy-gmp+imn-0.1", loss=loss, units=np.eye(2, dtype=np.float32))
    (name,) = Run.open(run.folder).curve_names()
    curves = run.curves(name)
    np.testing.assert_array_equal(curves["loss"], loss)
    assert curves["units"].dtype == np.float32 and name == "energy-gmp+imn-0.1"


class Interrupted:
    """A figure whose drawing is interrupted, or not."""

    def __init__(self, error: type[BaseException] | None = None) -> None:
        self.error = error

    def savefig(self, path: Path, dpi: int) -> None:
        path.write_text("half")
        if self.error:
            raise self.error


def test_an_interrupted_figure_leaves_the_old_one(run: Run) -> None:
    path = run.figure("fit", Interrupted())
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt):
        run.figure("fit", Interrupted(KeyboardInterrupt))
    assert path.read_text() == "old" and list(path.parent.iterdir()) == [path]


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
    assert len(writer.records()) == 1


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
    assert forked.end(forked.start(create_and_die, tmp_path)) == -signal.SIGKILL
    with create(tmp_path, resume=True) as run:
        run.append({"method": "sp", "seed": 1})
    assert [record["seed"] for record in run.records()] == [0, 1]


def test_a_folder_that_cannot_be_locked_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = NotImplementedError("no flock on this file system")
    monkeypatch.setattr(run_folder.FileLock, "acquire", Mock(side_effect=error))
    with pytest.raises(OSError, match="cannot be locked.*no flock.*Choose a folder"):
        create(tmp_path)


def test_a_record_that_does_not_fit_the_disk_leaves_no_half_line(run: Run) -> None:
    run.append({"method": "sp", "seed": 0})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            run.append({"method": "sp", "seed": 1, "text": "x" * 2000})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    run.append({"method": "sp", "seed": 2})
    assert [record["seed"] for record in run.records()] == [0, 2]


@pytest.mark.parametrize("file", ["config.json", "metrics.jsonl", "sessions.jsonl"])
@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_only_regular_files_are_read(run: Run, file: str, kind: str, tmp_path: Path) -> None:
    path = run.folder / file
    content = path.read_bytes() if path.exists() else b""
    path.unlink(missing_ok=True)
    if kind == "link":
        (tmp_path / "elsewhere").write_bytes(content)
        path.symlink_to(tmp_path / "elsewhere")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    with pytest.raises(ValueError, match=f"{file} is (a link|not a regular file)"):
        opened = Run.open(run.folder)
        opened.records()
        opened.sessions()


def test_records_in_a_file_that_is_too_large_are_refused(run: Run) -> None:
    run.append({"method": "sp", "seed": 0})
    os.truncate(run.folder / "metrics.jsonl", run_folder.LARGEST + 1)
    with pytest.raises(ValueError, match="at most 1,073,741,824 are read"):
        run.records()


def test_curves_are_the_folders_own_and_bounded(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = run.save_curves("a", loss=np.zeros(100_000))
    monkeypatch.setattr(run_folder, "LARGEST", 10_000)
    with pytest.raises(ValueError, match="a.npz cannot be read: .* 800,"):
        run.curves("a")
    path.rename(tmp_path / "elsewhere.npz")
    path.symlink_to(tmp_path / "elsewhere.npz")
    with pytest.raises(ValueError, match="a.npz is a link"):
        run.curves("a")


def test_a_folder_that_does_not_exist_is_told_from_one_without_a_run(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nodir does not exist"):
        Run.open(tmp_path / "nodir")
    with pytest.raises(FileNotFoundError, match="holds no run"):
        Run.open(tmp_path)
