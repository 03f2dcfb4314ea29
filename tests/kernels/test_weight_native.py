"""The C kernel equals float64 arithmetic, and where it cannot be had nobody notices."""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import kernels
import pytest
import torch

from geoparam.kernels import loader, selection, weight
from geoparam.kernels import weight_native as native

FLOATS = [torch.float32, torch.float64]
HALVES = [torch.bfloat16, torch.float16]
COMPILER = shlex.split(os.environ.get("CC", "cc"))[0]

pytestmark = pytest.mark.skipif(shutil.which(COMPILER) is None, reason="needs a C compiler")


def test_is_what_cpus_use() -> None:
    assert native.is_available()
    assert selection.KERNELS != "auto" or selection.weight_kernel(torch.zeros(1)) is native


# --- against float64 ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*FLOATS, *HALVES])
@pytest.mark.parametrize("n", [2, 3, 13, 128, 129, 130, 576, 4608, 25088])
def test_weight(n: int, dtype: torch.dtype) -> None:
    latitude, r, _ = kernels.random_case(5, n, dtype)
    kernels.assert_weight(native, latitude, r)


@pytest.mark.parametrize("natural", [False, True])
@pytest.mark.parametrize("dtype", [*FLOATS, *HALVES])
@pytest.mark.parametrize("n", [2, 3, 13, 27, 128, 129, 130, 200])
def test_gradient(n: int, dtype: torch.dtype, natural: bool) -> None:
    latitude, r, g = kernels.random_case(5, n, dtype)
    kernels.assert_gradient(native, g, latitude, r, natural)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("n", [1100, 4609, 25088])
def test_gradient_of_long_rows(n: int, dtype: torch.dtype) -> None:
    latitude, r, g = kernels.random_case(5, n, dtype)
    a = latitude.double().clone().requires_grad_()
    expected = torch.autograd.grad(kernels.weight(a, r), a, g.double())[0]
    found = native.backward(g, latitude, r, False)[0].double()
    largest = expected.abs().amax(dim=1, keepdim=True)
    assert ((found - expected).abs() / largest).max() < kernels.GRADIENT_BOUND[dtype]


@pytest.mark.parametrize("natural", [False, True])
@pytest.mark.parametrize("count", [1, 2, 6, 30])
@pytest.mark.parametrize("dtype", FLOATS)
def test_poles(count: int, dtype: torch.dtype, natural: bool) -> None:
    latitude, r, g = kernels.random_case(5, 40, dtype)
    latitude = kernels.with_poles(latitude, count)
    kernels.assert_weight(native, latitude, r)
    kernels.assert_gradient(native, g, latitude, r, natural)


@pytest.mark.parametrize("dtype", FLOATS)
def test_behind_a_pole_is_what_the_float_leaves(dtype: torch.dtype) -> None:
    """cos of the float nearest to pi/2 is small but not zero, and known to its last digits."""
    latitude = torch.tensor([[torch.pi / 2, 0.5], [-7 * torch.pi / 2, 0.5]], dtype=dtype)
    found = native.forward(latitude, None, dtype)
    expected = kernels.weight(latitude, torch.ones(2)).to(dtype)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(found, expected, atol=0, rtol=4 * eps)
    assert (found[:, 1:] != 0).all()


@pytest.mark.parametrize("dtype", FLOATS)
def test_zero_latitudes_and_zero_scale(dtype: torch.dtype) -> None:
    latitude, r, g = kernels.random_case(3, 12, dtype)
    latitude[0], r[1], latitude[2, ::2] = 0, 0, 0
    found, _ = native.backward(g, latitude, r, False)
    expected, _ = kernels.brute_force_gradient(g, latitude, r)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)
    assert (found[1] == 0).all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("turned", [2.0, -7.0, 1e3, 1e4, -9.9e5, 1.1e6, 1e9, -1e25])
def test_wound_up_angles(turned: float, dtype: torch.dtype) -> None:
    latitude, r, g = kernels.random_case(5, 30, dtype)
    latitude[:, ::3] += turned
    kernels.assert_weight(native, latitude, r)
    kernels.assert_gradient(native, g, latitude, r)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_nan_stays_nan_and_in_its_row(bad: float) -> None:
    latitude, r, g = kernels.random_case(6, 9, torch.float32)
    latitude[2, 4] = bad
    w, (change, change_r) = (
        native.forward(latitude, r, r.dtype),
        native.backward(g, latitude, r, True),
    )
    assert w[2, 4:].isnan().all() and w[2, :4].isfinite().all()
    assert change[2].isnan().all() and change_r[2].isnan()
    others = torch.arange(6) != 2
    assert all(x[others].isfinite().all() for x in (w, change, change_r))


@pytest.mark.parametrize("latitude_type", [*FLOATS, *HALVES])
@pytest.mark.parametrize("r_type", [*FLOATS, *HALVES, None])
@pytest.mark.parametrize("weight_type", [*FLOATS, *HALVES])
def test_every_mixture_of_types(
    latitude_type: torch.dtype, r_type: torch.dtype | None, weight_type: torch.dtype
) -> None:
    latitude, r, g = kernels.random_case(5, 13, torch.float64)
    latitude, g = latitude.to(latitude_type), g.to(weight_type)
    scale = None if r_type is None else r.to(r_type)
    ones = torch.ones(5) if scale is None else scale
    w, changes = (
        native.forward(latitude, scale, weight_type),
        native.backward(g, latitude, scale, False),
    )
    assert [x.dtype for x in (w, *changes)] == [
        weight_type,
        latitude_type,
        r_type or latitude_type,
    ]
    expected = (kernels.weight(latitude, ones), *kernels.brute_force_gradient(g, latitude, ones))
    for found, precise in zip((w, *changes), expected, strict=True):
        bound = 4 * torch.finfo(found.dtype).eps * precise.abs().max()
        assert (found.double() - precise).abs().max() < bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 1, 2, 4, 7, 65])
@pytest.mark.parametrize("n", [1, 2, 9])
def test_any_number_of_rows_and_columns(rows: int, n: int, dtype: torch.dtype) -> None:
    latitude, r, g = kernels.random_case(rows, n, dtype)
    w, (change, change_r) = (
        native.forward(latitude, r, dtype),
        native.backward(g, latitude, r, False),
    )
    assert w.shape == (rows, n) and change.shape == (rows, n - 1) and change_r.shape == (rows,)
    bound = 0.01 if dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(w.double(), kernels.weight(latitude, r), atol=bound, rtol=bound)


def test_types_are_converted_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    latitude, r, g = kernels.random_case(23, 30, torch.bfloat16)
    whole = native.forward(latitude, r, torch.float32), *native.backward(g, latitude, r, False)
    monkeypatch.setattr(weight, "_SMALLEST_BLOCK", 150)
    blocks = native.forward(latitude, r, torch.float32), *native.backward(g, latitude, r, False)
    for found, expected in zip(blocks, whole, strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("rows", [1, 7, 8, 30])
@pytest.mark.parametrize("dtype", [*FLOATS, torch.bfloat16])
def test_threads_do_not_change_a_bit(
    rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    latitude, r, g = kernels.random_case(rows, 300, dtype)
    monkeypatch.setattr(native, "_ANGLES_PER_THREAD", 1)
    results = []
    for threads in (1, 2, 3, 7, 100):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        w = native.forward(latitude, r, dtype)
        results.append((w, *native.backward(g, latitude, r, True)))
    assert all(all(map(torch.equal, result, results[0])) for result in results)


def test_gradient_that_is_not_contiguous() -> None:
    latitude, r, g = kernels.random_case(6, 9, torch.float32)
    for strided in (g.t().contiguous().t(), g[:1].expand(6, 9)):
        found = native.backward(strided, latitude, r, False)
        expected = native.backward(strided.clone(), latitude, r, False)
        assert all(map(torch.equal, found, expected))


# --- compiling ----------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache, and nothing loaded yet; as before when the test is over."""
    monkeypatch.setenv("GEOPARAM_CACHE", str(tmp_path / "cache"))
    native.is_available.cache_clear()
    native._library.cache_clear()
    yield tmp_path / "cache"
    native.is_available.cache_clear()
    native._library.cache_clear()


def binary() -> Path:
    return loader._compiled(loader.FOLDER / "weight.c", native._FLAGS)


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


@pytest.mark.parametrize("damage", [b"", None])
def test_a_damaged_file_is_compiled_again(cache: Path, damage: bytes | None) -> None:
    path = binary()
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2] if damage is None else damage)
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
    [
        ("quarter & 1", "quarter & 0"),
        ("r * change", "change"),
        ("geoparam_run", "geoparam_walk"),
    ],
)
def test_wrong_code_is_not_used(
    right: str, wrong: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(loader.FOLDER, tmp_path / "kernels")
    source = tmp_path / "kernels" / "weight.c"
    monkeypatch.setattr(loader, "FOLDER", source.parent)
    assert native.is_available()
    source.write_text(source.read_text().replace(right, wrong))
    native.is_available.cache_clear()
    native._library.cache_clear()
    assert not native.is_available()


def test_what_is_included_counts(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another header is another file, or old code would be used with a new one."""
    shutil.copytree(loader.FOLDER, tmp_path / "kernels")
    monkeypatch.setattr(loader, "FOLDER", tmp_path / "kernels")
    before, header = binary(), tmp_path / "kernels" / "threads.h"
    header.write_text(header.read_text() + "int one_more;")
    assert binary() != before
    assert len(list(cache.iterdir())) == 2


# --- who may write what is loaded ---------------------------------------------------------------


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


def test_a_file_that_others_may_write_to_is_compiled_again(cache: Path) -> None:
    made = binary()
    made.chmod(0o666)
    inode = made.stat().st_ino
    assert binary().stat().st_ino != inode


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs root")
def test_a_file_of_another_user_is_compiled_again(cache: Path) -> None:
    made = binary()
    os.chown(made, 65534, -1)
    assert binary().stat().st_uid == 0


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


def test_processes_may_race(tmp_path: Path) -> None:
    processes = [start(tmp_path, GEOPARAM_KERNELS="auto") for _ in range(2)]
    for process in processes:
        out, err = process.communicate(timeout=120)
        assert out.startswith("True") and not err
    assert {path.suffix for path in tmp_path.iterdir()} == {".so"}


def test_without_a_compiler_nothing_is_said(tmp_path: Path) -> None:
    process = start(tmp_path, GEOPARAM_KERNELS="auto", CC="/nowhere/cc")
    out, err = process.communicate(timeout=120)
    assert out == f"False {[[0.0, 0.0, 0.0, 1.0]] * 2}\n" and not err


def test_asked_for_by_name_it_must_work(tmp_path: Path) -> None:
    process = start(tmp_path, GEOPARAM_KERNELS="native", CC="/nowhere/cc")
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1 and "/nowhere/cc" in err
