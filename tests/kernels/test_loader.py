"""C is compiled once, kept for the user alone, and where it cannot be had plain torch serves."""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kernels
import pytest
import torch

from geoparam.kernels import loader, selection, weight
from geoparam.kernels import weight_native as native

COMPILER = shlex.split(os.environ.get("CC", "cc"))[0]

pytestmark = pytest.mark.skipif(shutil.which(COMPILER) is None, reason="needs a C compiler")


def test_is_what_cpus_use() -> None:
    assert native.is_available()
    assert selection.KERNELS != "auto" or selection.weight_kernel(torch.zeros(1)) is native


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache, and nothing loaded yet; as before when the test is over."""
    monkeypatch.setenv("GEOPARAM_CACHE", str(tmp_path / "cache"))
    native.is_available.cache_clear()
    native._library.cache_clear()
    yield tmp_path / "cache"
    native.is_available.cache_clear()
    native._library.cache_clear()


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the sources, which is compiled instead."""
    monkeypatch.setattr(loader, "FOLDER", shutil.copytree(loader.FOLDER, tmp_path / "kernels"))
    return loader.FOLDER


def binary() -> Path:
    return loader._compile(loader.FOLDER / "weight.c", native._FLAGS)


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_compiles_once(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = 'case " $* " in *" -shared "*) echo >> "$0.log";; esac; exec cc "$@"'
    monkeypatch.setenv("CC", script(tmp_path / "counting", count))
    assert binary() == binary()
    assert (tmp_path / "counting.log").read_text() == "\n"
    assert len(list(cache.iterdir())) == 1


@pytest.mark.parametrize("share", [0, 0.5])
def test_a_damaged_file_is_compiled_again(cache: Path, share: float) -> None:
    path = binary()
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    assert native.is_available()
    assert len(binary().read_bytes()) == len(whole)


def test_without_march_native(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse = 'case " $* " in *" -march=native "*) exit 1;; esac; exec cc "$@"'
    monkeypatch.setenv("CC", script(tmp_path / "old", refuse))
    latitude, r, g = kernels.random_case(5, 200, torch.float32)
    assert native.is_available()
    kernels.assert_weight(native, latitude, r)
    kernels.assert_gradient(native, g, latitude, r)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("CC", "/nowhere/cc"),
        ("CC", "false"),
        ("CC", "true"),  # it succeeds and writes nothing
        ("CC", "cc 'unclosed"),
        ("GEOPARAM_CACHE", "/dev/null/cache"),
    ],
)
def test_falls_back_to_plain_torch(
    variable: str, value: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    monkeypatch.setattr(selection, "KERNELS", "auto")
    assert not native.is_available()
    assert selection.weight_kernel(torch.zeros(1)) is weight


@pytest.mark.parametrize(
    ("right", "wrong"),
    [("quarter & 1", "quarter & 0"), ("r * change", "change"), ("geoparam_run", "geoparam_walk")],
)
def test_wrong_code_is_not_used(right: str, wrong: str, cache: Path, sources: Path) -> None:
    source = sources / "weight.c"
    assert native.is_available()
    source.write_text(source.read_text().replace(right, wrong))
    native.is_available.cache_clear()
    native._library.cache_clear()
    assert not native.is_available()


def test_what_is_included_counts(cache: Path, sources: Path) -> None:
    """Another header is another file, or old code would be used with a new one."""
    before, header = binary(), sources / "threads.h"
    header.write_text(header.read_text() + "int one_more;")
    assert binary() != before
    assert len(list(cache.iterdir())) == 2


def test_the_cache_is_the_users_alone_whatever_the_umask(cache: Path) -> None:
    before = os.umask(0)
    try:
        made = binary()
    finally:
        os.umask(before)
    assert made.parent == cache
    assert [path.stat().st_mode & 0o777 for path in (cache, made)] == [0o700, 0o600]


@pytest.mark.parametrize("folder", [0o777, 0o770])
def test_a_folder_that_others_may_write_to_is_not_used(cache: Path, folder: int) -> None:
    cache.mkdir()
    cache.chmod(folder)
    with pytest.warns(UserWarning, match="others may write to it"):
        made = binary()
    assert made.parent != cache and not any(cache.iterdir())
    assert native.is_available()


@pytest.mark.parametrize("give_away", [lambda p: p.chmod(0o666), lambda p: os.chown(p, 65534, -1)])
def test_a_file_that_others_may_write_to_is_compiled_again(cache: Path, give_away: Any) -> None:
    made = binary()
    try:
        give_away(made)
    except PermissionError:
        pytest.skip("only root may give files away")
    inode = made.stat().st_ino
    assert binary().stat().st_ino != inode


def start(cache: Path, **environment: str) -> subprocess.Popen:
    code = (
        "import torch; from geoparam.functional import weight;"
        "from geoparam.kernels import weight_native;"
        "w = weight(torch.zeros(2, 3, requires_grad=True), torch.ones(2)); w.sum().backward();"
        "print(weight_native.is_available(), w.tolist())"
    )
    environment = {**os.environ, "GEOPARAM_CACHE": str(cache), **environment}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", code], env=environment, **pipes)


@pytest.mark.slow
def test_processes_may_race(tmp_path: Path) -> None:
    processes = [start(tmp_path, GEOPARAM_KERNELS="auto") for _ in range(2)]
    for process in processes:
        out, err = process.communicate(timeout=120)
        assert out.startswith("True") and not err
    assert {path.suffix for path in tmp_path.iterdir()} == {".so"}


def test_without_a_compiler_only_who_asked_for_it_hears_of_it(tmp_path: Path) -> None:
    kinds = "auto", "native"
    auto, native = (start(tmp_path, GEOPARAM_KERNELS=kind, CC="/nowhere/cc") for kind in kinds)
    expected = f"False {[[0.0, 0.0, 0.0, 1.0]] * 2}\n", ""
    assert auto.communicate(timeout=120) == expected
    assert "/nowhere/cc" in native.communicate(timeout=120)[1] and native.returncode == 1
