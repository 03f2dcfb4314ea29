"""Read files that others wrote, within bounds; write without losing what is there.

A file may claim anything: JSON may be nested so deeply that Python's stack ends, an archive of
40 kB may unpack to gigabytes, a header of 100 bytes may ask for terabytes. Each function here
reads one kind of file and raises ValueError, in words, where it holds something else.
"""

import contextlib
import json
import math
import os
import tempfile
import unicodedata
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

__all__ = [
    "list_few",
    "open_zip",
    "printable",
    "read_json",
    "read_npz",
    "refuse_overwrite",
    "replacing",
]

DEEPEST = 64  # levels of nesting in JSON; ours has four
RATIO = 1100  # deflate makes nothing more than 1,032 times smaller
LARGEST = 1 << 33  # bytes of an array: a file of ImageNet at 64x64 has 1.6 GB


def list_few(names: Iterable[str], most: int = 12) -> str:
    """Return the first of some names, for an error that stays readable.

    Example:
        >>> list_few("abcd", most=2)
        'a, b and 2 more'
    """
    every = [name if len(name) < 200 else f"{name[:200]}..." for name in names]
    more = len(every) - most
    return ", ".join(every[:most]) + (f" and {more} more" if more > 0 else "")


def printable(text: str) -> str:
    """Return text for the terminal, with control characters written out: names may hold any.

    Example:
        >>> printable("a\\x1b]0;title\\x07")
        'a\\\\x1b]0;title\\\\x07'
    """
    return "".join(
        c if c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cf", "Cs") else ascii(c)[1:-1]
        for c in text
    )


def read_json(content: bytes, where: object, kind: type = dict) -> Any:
    """Return what JSON text holds, if that is a `kind`; `where` names the text in errors.

    Example:
        >>> read_json(b'{"a": [1]}', "a.json")
        {'a': [1]}
        >>> read_json(b"3", "a.json")
        Traceback (most recent call last):
        ...
        ValueError: a.json is damaged: it holds no dict, but a int
    """
    try:
        value = json.loads(content.decode("utf-8-sig"))
        if not isinstance(value, kind):
            raise ValueError(f"it holds no {kind.__name__}, but a {type(value).__name__}")
        level = [value]
        for _ in range(DEEPEST):
            level = [item for outer in level for item in _list_items(outer)]
        if level:
            raise RecursionError
    except RecursionError as error:
        raise ValueError(f"{where} is damaged: nested more than {DEEPEST} deep") from error
    except ValueError as error:  # no JSON, not UTF-8, or a number of thousands of digits
        raise ValueError(f"{where} is damaged: {error}") from error
    return value


def _list_items(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


@contextlib.contextmanager
def open_zip(file: Path | IO[bytes], largest: int = 1 << 50) -> Iterator[zipfile.ZipFile]:
    """Open an archive none of whose entries claims more than `largest` or than it can hold."""
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
            if len({entry.filename for entry in entries}) < len(entries):
                raise zipfile.BadZipFile("two entries have the same name")
            for entry in entries:
                _check_entry(entry, largest)
            yield archive
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise ValueError(f"it is damaged: {error or type(error).__name__}") from error


def _check_entry(entry: zipfile.ZipInfo, largest: int) -> None:
    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"its entry {entry.filename} is neither stored nor deflated")
    if entry.flag_bits & 1:
        raise ValueError(f"its entry {entry.filename} is encrypted")
    ratio = 1 if entry.compress_type == zipfile.ZIP_STORED else RATIO
    if entry.file_size > min(largest, ratio * entry.compress_size):
        raise ValueError(
            f"its entry {entry.filename} claims {entry.file_size:,} bytes, and may have "
            f"{min(largest, ratio * entry.compress_size):,}"
        )


def read_npz(path: Path, *names: str) -> dict[str, np.ndarray]:
    """Return the named arrays of an npz file, or all; KeyError where a name is not there."""
    try:
        with open_zip(path, LARGEST) as archive:
            names = names or tuple(name.removesuffix(".npy") for name in archive.namelist())
            entries = {name: archive.getinfo(f"{name}.npy") for name in names}
            return {name: _read_array(archive, entry) for name, entry in entries.items()}
    except KeyError:
        raise
    except Exception as error:  # whatever numpy stumbles over in a damaged file
        raise ValueError(f"{path} is truncated or damaged ({error!s:.200})") from error


def _read_array(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> np.ndarray:
    """Return an array whose header claims no more than its entry has."""
    form = np.lib.format
    with archive.open(entry) as file:
        read_header = {(1, 0): form.read_array_header_1_0, (2, 0): form.read_array_header_2_0}
        version = form.read_magic(file)
        if version not in read_header:
            raise ValueError(f"{entry.filename} is of version {version}")
        shape, _, dtype = read_header[version](file)
    if min(shape, default=0) < 0 or math.prod(shape) * max(dtype.itemsize, 1) > entry.file_size:
        raise ValueError(f"{entry.filename} claims the shape {shape} and has too few bytes for it")
    with archive.open(entry) as file:
        return form.read_array(file, allow_pickle=False)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write to, which becomes `path` when the block ends well and is removed if not.

    Example:
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with replacing(Path(folder, "sub", "a.txt")) as unfinished:
        ...         _ = unfinished.write_text("complete")
        ...     Path(folder, "sub", "a.txt").read_text()
        'complete'
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".unfinished-") as folder:
        unfinished = Path(folder, path.name)
        yield unfinished
        unfinished.replace(path)


def refuse_overwrite(path: Path, force: bool = False, mark: bytes = b"") -> None:
    """Raise where a file is there already, unless it begins with the `mark` of our own."""
    if force or not os.path.lexists(path):  # a link that leads nowhere is there, too
        return
    if mark and path.is_file():
        with path.open("rb") as file:
            if mark in file.read(1024):
                return
    raise FileExistsError(f"{path} exists: overwrite it with --force, or write to another file.")
