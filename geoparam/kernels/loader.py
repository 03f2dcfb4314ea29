"""Compile a C file of this folder with the machine's own compiler, once, and load it.

The compiler is $CC or cc, for about a second; no header of Python or torch is needed, so nothing
is built when geoparam is installed. Results are kept in $GEOPARAM_CACHE or ~/.cache/geoparam as

    NAME-KEY-DIGEST.so    KEY of sources, flags and the compiler's own macros, DIGEST of the file

The macros tell the compiler's version and what -march=native stands for, so machines may share a
home. A file is renamed when it is complete, so processes may race; one that does not match its
digest is compiled again. Folder and files are for the user alone, whatever the umask: a folder
that another user owns or may write to is not used but one of this process, with a warning.

Much may go wrong: no compiler, a home that cannot be written to. `load` raises one of `ERRORS`.
"""

import ctypes
import functools
import hashlib
import os
import shlex
import stat
import subprocess
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).parent
ERRORS = (OSError, subprocess.SubprocessError, AttributeError, RuntimeError, ValueError)


def load(name: str, flags: Sequence[str] = ()) -> ctypes.CDLL:
    """Return the library of the C file `name`.c beside this one."""
    source = FOLDER / f"{name}.c"
    try:
        path = _compile(source, [*flags, "-march=native"])
    except subprocess.CalledProcessError:  # some compilers know no -march=native
        path = _compile(source, flags)
    return ctypes.CDLL(str(path))


def _compile(source: Path, flags: Sequence[str]) -> Path:
    """Return the compiled file, from the cache where it is there."""
    command = [*shlex.split(os.environ.get("CC", "cc")), "-O3", *flags]
    macros = _run_command([*command, "-dM", "-E", "-x", "c", os.devnull])
    text = b"".join(path.read_bytes() for path in (source, *sorted(source.parent.glob("*.h"))))
    name = f"{source.stem}-{_compute_digest(text + macros + repr(command).encode())}"
    folder = _find_cache()
    for path in folder.glob(f"{name}-*.so"):
        if _is_private(path) and path.stem.endswith(_compute_digest(path.read_bytes())):
            return path
    with tempfile.TemporaryDirectory(dir=folder) as inner:  # made with mode 0700
        made = Path(inner, "made.so")
        _run_command([*command, "-shared", "-fPIC", "-o", made, source, "-lm"])
        made.chmod(0o600)
        return made.replace(folder / f"{name}-{_compute_digest(made.read_bytes())}.so")


def _find_cache() -> Path:
    """Return the cache's folder, or one of this process where others could write to that."""
    folder = Path(os.environ.get("GEOPARAM_CACHE") or Path.home() / ".cache" / "geoparam")
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder if _is_private(folder) else Path(_make_own_folder(folder).name)


@functools.cache
def _make_own_folder(instead_of: Path) -> tempfile.TemporaryDirectory:
    warnings.warn(
        f"{instead_of} belongs to another user, or others may write to it: compiled code is not "
        "kept there. Make it yours alone (chmod 700), or set GEOPARAM_CACHE to a folder that is.",
        stacklevel=2,
    )
    return tempfile.TemporaryDirectory(prefix="geoparam-")  # removed when the process ends


def _is_private(path: Path) -> bool:
    """Return whether the user owns a folder or file and other users cannot write to it."""
    if not hasattr(os, "geteuid"):  # Windows: folders of a user are the user's
        return True
    status = path.stat()
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _run_command(command: Sequence[str | Path]) -> bytes:
    return subprocess.run(command, check=True, capture_output=True, timeout=120).stdout


def _compute_digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
