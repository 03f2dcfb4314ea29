"""Read files that others wrote, within bounds; write without losing what is there.

A file may claim anything: JSON may be nested so deeply that Python's stack ends, an archive of
40 kB may unpack to gigabytes. Functions that read raise ValueError, with a sentence, where a file
holds something else.
"""

import contextlib
import json
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

RATIO = 1100  # deflate makes nothing more than 1,032 times smaller


def list_few(names: Iterable[str], most: int = 12) -> str:
    """Return the first of some names, for an error that stays readable.

    Example:
        >>> list_few("abcd", most=2)
        'a, b and 2 more'
    """
    shortened = [name if len(name) < 200 else f"{name[:200]}..." for name in names]
    text = ", ".join(shortened[:most])
    if len(shortened) > most:
        text += f" and {len(shortened) - most} more"
    return text


def printable(text: str) -> str:
    """Return text for the terminal, with control characters written out: names may hold any.

    Example:
        >>> printable("a\\x1b]0;title\\x07")
        'a\\\\x1b]0;title\\\\x07'
    """
    return "".join(ascii(c)[1:-1] if _is_control(c) else c for c in text)


def _is_control(character: str) -> bool:
    if character in "\n\t":
        return False
    return unicodedata.category(character) in ("Cc", "Cf", "Cs")


def read_json(content: bytes, where: object) -> dict[str, Any]:
    """Return the object that JSON text holds; `where` names the text in errors.

    Example:
        >>> read_json(b'{"a": [1]}', "a.json")
        {'a': [1]}
        >>> read_json(b"3", "a.json")
        Traceback (most recent call last):
        ...
        ValueError: a.json is damaged: expected a JSON object, got int
    """
    try:
        value = json.loads(content.decode("utf-8-sig"))
        if not isinstance(value, dict):
            raise ValueError(f"expected a JSON object, got {type(value).__name__}")
    except (ValueError, RecursionError) as error:  # no JSON, not UTF-8, or nested too deeply
        raise ValueError(f"{where} is damaged: {error}") from error
    return value


@contextlib.contextmanager
def open_zip(file: Path | IO[bytes], largest: int) -> Iterator[zipfile.ZipFile]:
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
    bound = min(largest, ratio * entry.compress_size)
    if entry.file_size > bound:
        raise ValueError(
            f"its entry {entry.filename} claims {entry.file_size:,} bytes, and may have {bound:,}"
        )


def read_npz(path: Path, *names: str) -> dict[str, np.ndarray]:
    """Return the named arrays of an npz file, or all; KeyError or OSError where one is missing.

    numpy raises where a header claims more than memory, or than the file has.
    """
    arrays = {}
    try:
        with zipfile.ZipFile(path) as archive:
            for name in names or [entry.removesuffix(".npy") for entry in archive.namelist()]:
                with archive.open(f"{name}.npy") as file:
                    # np.load would return bytes where there is no array.
                    arrays[name] = np.lib.format.read_array(file, allow_pickle=False)
        return arrays
    except (KeyError, OSError):
        raise
    except Exception as error:  # whatever numpy raises for a damaged file
        raise ValueError(f"{path} is truncated or damaged ({error!s:.200})") from error


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path to write to; it becomes `path` at the end, and is removed after an error.

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
    """Raise if a file exists, unless it begins with the `mark` of our own."""
    if force or not os.path.lexists(path):  # a link that leads nowhere exists, too
        return
    if mark and path.is_file():
        with path.open("rb") as file:
            if mark in file.read(1024):
                return
    raise FileExistsError(f"{path} exists: overwrite it with --force, or write to another file.")
