"""Read files that others wrote, within bounds.

A file may claim anything: JSON may be nested so deeply that Python's stack ends, an archive of
40 kB may unpack to gigabytes. These functions raise ValueError, with a sentence, where a file
holds something else.
"""

import contextlib
import json
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

RATIO = 1100  # deflate makes nothing more than 1,032 times smaller


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
